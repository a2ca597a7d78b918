"""The `oncemore` command: runs a subcommand, and reports every expected error as one sentence and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from ..errors import ConfigurationError, OncemoreError, StoreError

# Scripts rely on these numbers.  docs/reference/cli.md has the same table.
DONE, REFUSED, WRONG, STORE_FAILED, INTERRUPTED, OUTPUT_FAILED = 0, 1, 2, 3, 130, 141
EXIT_CODES = {
    DONE: "done",
    REFUSED: "refused, and nothing was changed: no such record, its outcome is known, it is running, or you said no",
    WRONG: "the command line, a contract or a store's URL is wrong, or a driver is not installed",
    STORE_FAILED: "the store failed or could not be reached; the same command may work later",
    INTERRUPTED: "interrupted (Ctrl-C)",
    OUTPUT_FAILED: "the output could not be written: the reader of the pipe has ended, as `head` does, or the disk is full",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line *argv*, by default the process's own, and return its exit code."""
    replace_closed_streams()
    try:
        from . import commands
        from .commands.output import Output
    except ModuleNotFoundError as error:
        if error.name not in ("click", "rich"):
            raise
        print("oncemore: the command line needs click and rich: pip install 'oncemore[cli]'", file=sys.stderr)
        return WRONG
    output = Output()
    try:
        code = commands.run(argv, output)
        sys.stdout.flush()
    except OncemoreError as error:
        output.show_error(error)
        return exit_code(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more when it ends
        if not isinstance(error, BrokenPipeError):
            print(f"oncemore: the output could not be written: {error.strerror}", file=sys.stderr)
        return OUTPUT_FAILED
    return code


def replace_closed_streams() -> None:
    """Open /dev/null for each standard stream that the caller has closed, as some schedulers do.

    Otherwise the store's file could get the free descriptor, and error messages would be written into it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def exit_code(error: OncemoreError) -> int:
    """Return the exit code for this class of error."""
    if isinstance(error, ConfigurationError):
        return WRONG
    return STORE_FAILED if isinstance(error, StoreError) else REFUSED


if __name__ == "__main__":
    raise SystemExit(main())
