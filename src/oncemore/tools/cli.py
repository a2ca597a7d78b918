"""The `oncemore` command: each subcommand is a module with a `main(argv)`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.metadata import version

from ..core.faults import did_you_mean

COMMANDS = {
    "complete": ("oncemore.tools.complete", "finish the operations in steps that were left unfinished"),
    "simulate": ("oncemore.tools.simulate", "compare retry policies under a brownout, in virtual time"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of a subcommand: 0 where all is well, 2 where the call's words are off."""
    name, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name == "--version":
        print(version("oncemore"))
        return 0
    if name not in COMMANDS:
        print(f"oncemore: there is no command {name!r}{did_you_mean(name, COMMANDS)}\n\n{usage()}", file=sys.stderr)
        return 2
    code: int = importlib.import_module(COMMANDS[name][0]).main(rest)
    return code


def usage() -> str:
    lines = "\n".join(f"  {name:12} {what}" for name, (_, what) in COMMANDS.items())
    return f"usage: oncemore COMMAND ...\n\n{lines}\n\n'oncemore COMMAND --help' tells more."


if __name__ == "__main__":
    raise SystemExit(main())
