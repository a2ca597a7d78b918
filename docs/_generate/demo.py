"""Runs the demo and draws its output as docs/demo.svg: `python docs/_generate/demo.py`, in a checkout with `make demo`'s packages."""

from __future__ import annotations

import os
import re
import runpy
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "demo.svg"


def main() -> None:
    """Record what the demo prints, without spinners and without the ledger at its end."""
    sys.path.insert(0, str(ROOT))
    os.environ |= {"ONCE": "1", "FORCE_COLOR": "1"}
    from examples.show import display

    recorded = Console(width=100, record=True, force_terminal=True, highlight=False, emoji=False, markup=False)
    recorded.print("$ make demo")

    class Recording(display.Display):
        def __init__(self) -> None:
            self.out = recorded

        def doing(self, what: str) -> AbstractContextManager[None]:
            """Show no spinner."""
            return nullcontext()

        def _print(self, table: Table) -> None:
            self.out.print(table)

        def ledger(self, *_: object) -> None:
            """Leave the ledger out of the picture."""

    display.Display = Recording  # type: ignore[misc]
    sys.argv = ["demo.py"]
    try:
        runpy.run_path(str(ROOT / "examples" / "demo.py"), run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            raise
    # No font is fetched from another host: the reader's own monospaced font is used.
    drawn = recorded.export_svg(title="oncemore", unique_id="demo")
    PICTURE.write_text(re.sub(r"\s*@font-face \{.*?\}\n", "\n", drawn, flags=re.DOTALL))


if __name__ == "__main__":
    main()
