"""`oncemore complete module:completer`: finishes the operations that were left unfinished, once or for as long as it runs."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ..core.completer import Completer, End
from ..core.model import Record
from ..errors import ConfigurationError, OncemoreError

Report = Callable[[str], object]


def complete(completer: Completer, once: bool, report: Report) -> int:
    """The exit code: 0 where a single round has left nothing that failed or is held, 1 otherwise.

    Each operation is told to *report*.  Rounds are awaited, so that apps and functions of both kinds can be finished.
    """
    progress = completer.progress

    def tell(record: Record, end: End) -> None:
        report(f"{end:10} {record.name} {record.key} (attempt {record.attempts + 1})")
        if progress is not None:
            progress(record, end)

    completer.progress = tell
    try:
        if not once:
            asyncio.run(completer.arun())
        tally = asyncio.run(completer.arun_once())
    finally:
        completer.progress = progress
    report(
        f"{tally.total} unfinished: {tally.completed} completed, {tally.failing} to be tried again, {tally.held} held, "
        f"{tally.unreadable} without a request"
    )
    return 1 if tally.failing or tally.held else 0


def load(place: str) -> Completer:
    """The completer that `module:name` names; modules are also looked for where the command is called."""
    module, colon, name = place.partition(":")
    if not colon:
        raise ConfigurationError(f"{place!r} does not name a completer: write module:name")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"{place!r} cannot be found: {error}") from error
    if not isinstance(found, Completer):
        raise ConfigurationError(f"{place!r} is a {type(found).__name__}, not a Completer")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="oncemore complete", description=__doc__)
    parser.add_argument("completer", help="where the Completer is: module:name")
    parser.add_argument("--once", action="store_true", help="one round, rather than until interrupted")
    words = parser.parse_args(argv)
    try:
        return complete(load(words.completer), words.once, print)
    except OncemoreError as error:
        print(f"oncemore complete: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0
