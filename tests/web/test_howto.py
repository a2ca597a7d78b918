"""The examples on the how-to pages run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

HOWTO = Path(__file__).parents[2] / "docs" / "howto"
EXAMPLES = [
    pytest.param(example, id=f"{name}-{number}")
    for name in ("fastapi", "lambda", "encryption", "steps", "unknown-outcomes")
    for number, example in enumerate(re.findall(r"```python\n(.*?)```", (HOWTO / f"{name}.md").read_text(), re.DOTALL))
]


@pytest.mark.parametrize("example", EXAMPLES)
def test_it_runs(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "example", "exec"), {"__name__": "example"})
