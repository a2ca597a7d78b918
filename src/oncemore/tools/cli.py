"""The `oncemore` command: runs a subcommand, and turns whatever goes wrong into a sentence and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from ..errors import ConfigurationError, OncemoreError, StoreError

# What a script can rely on; the page docs/reference/cli.md has the same table.
DONE, REFUSED, WRONG, STORE_FAILED, INTERRUPTED, NOBODY_READS = 0, 1, 2, 3, 130, 141
EXIT_CODES = {
    DONE: "done",
    REFUSED: "refused, and nothing was changed: no such record, not in doubt, still running, or you said no at the prompt",
    WRONG: "what was written is wrong: the command line, a contract, a store's URL, a driver that is not installed",
    STORE_FAILED: "the store failed or could not be reached; the same command may work later",
    INTERRUPTED: "interrupted (Ctrl-C)",
    NOBODY_READS: "the output could not be written: its reader has gone, as `head` does, or the disk is full",
}


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of the command line *argv*."""
    reopen()
    try:
        from .commands import program
        from .commands.screen import Screen
    except ModuleNotFoundError as error:
        if error.name not in ("click", "rich"):
            raise
        print("oncemore: the command line needs click and rich: pip install 'oncemore[cli]'", file=sys.stderr)
        return WRONG
    screen = Screen()
    try:
        code = program.run(argv, screen)
        sys.stdout.flush()
    except OncemoreError as error:
        screen.failed(error)
        return exit_code(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains when it ends
        if not isinstance(error, BrokenPipeError):
            print(f"oncemore: the output could not be written: {error.strerror}", file=sys.stderr)
        return NOBODY_READS
    return code


def reopen() -> None:
    """Have nothing to read, and nobody to read us, where our caller has closed what it gave us.

    Else the ledger's own file would have the free number, and be written to by whatever complains.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def exit_code(error: OncemoreError) -> int:
    """The exit code that tells what kind of error it was."""
    if isinstance(error, ConfigurationError):
        return WRONG
    return STORE_FAILED if isinstance(error, StoreError) else REFUSED


if __name__ == "__main__":
    raise SystemExit(main())
