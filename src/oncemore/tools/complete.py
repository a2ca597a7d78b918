"""Finds a completer by its name, and has it tell of what it finishes."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Callable
from pathlib import Path

from .._ledger.completer import Completer, End, Tally
from .._ledger.model import Record
from ..errors import ConfigurationError

Report = Callable[[str], object]


def rounds(completer: Completer, once: bool, report: Report) -> Tally:
    """What came of a round, or of the last of many; each operation is told to *report*.

    Rounds are awaited, so that apps and functions of both kinds can be finished.
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
        return asyncio.run(completer.arun_once())
    finally:
        completer.progress = progress


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
    except Exception as error:
        raise ConfigurationError(f"{place!r} cannot be loaded: {error!r}") from error
    if not isinstance(found, Completer):
        raise ConfigurationError(f"{place!r} is a {type(found).__name__}, not a Completer")
    return found
