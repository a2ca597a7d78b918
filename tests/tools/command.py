"""Runs the `oncemore` command in a process of its own."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

from tests.support import processes


class Finished(NamedTuple):
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def oncemore(*words: object, said: str = "", folder: Path | None = None, **environment: str) -> Finished:
    """Run `oncemore` with *words*, and *said* as its input; fail if it prints a traceback."""
    ran = processes.run_to_end(
        [sys.executable, "-m", "oncemore.tools.cli", *map(str, words)],
        said=said,
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name != "ONCEMORE_STORE"} | environment,
    )
    assert "Traceback" not in ran.stderr, ran.stderr
    return Finished(ran.returncode, ran.stdout, ran.stderr)
