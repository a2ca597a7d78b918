"""Forks: the child resets inherited threads, locks and connections, and some files must not be open during the fork."""

from __future__ import annotations

import os
import threading
from typing import Any, Protocol
from weakref import WeakSet

from ..errors import ConfigurationError


class Resettable(Protocol):
    """An object with threads, locks or connections, which do not work in a forked child."""

    def _reset(self) -> None: ...


_resettable: WeakSet[Resettable] = WeakSet()

# Keeps inherited objects alive: if the child collected a connection, the parent's would be closed too.
_inherited: list[dict[str, Any]] = []


def reset_in_child(thing: Resettable) -> None:
    """Call `thing._reset()` in every child that this process forks."""
    _resettable.add(thing)


class ForkSensitive(Protocol):
    """An object with a file, *path*, that must not be open in this process while it forks."""

    path: str

    # Close the file and keep it closed until `_end_fork`.  Return False if it is in use.  If this raises, it has undone itself.
    def _close_for_fork(self) -> bool: ...
    def _end_fork(self) -> None: ...  # called in the parent, after the fork


_sensitive: WeakSet[ForkSensitive] = WeakSet()
_closed: list[ForkSensitive] = []  # during a fork: the objects that were closed
_in_use: set[str] = set()  # during a fork: the paths of the objects that could not be closed
_refused: set[str] = set()  # paths that were in use when this process, or an ancestor of it, was forked
_forking = threading.Lock()


def close_before_fork(thing: ForkSensitive) -> None:
    """Have *thing* closed before every fork if it is idle.  If it is in use, the child must not open its file.

    A child does not inherit the locks on a file, but it inherits SQLite's memory of them.  If it opens the same file, it
    relies on locks that only its parent holds, and rows that it commits are lost without an error.
    """
    _sensitive.add(thing)


def check_usable(path: str) -> None:
    """Raise ConfigurationError if the file was in use when this process was forked."""
    if path in _refused:
        raise ConfigurationError(
            f"{path}: it was in use when this process was forked, and SQLite would lose what is written here. "
            "Fork before serving: start worker processes before the first request, or with the spawn method"
        )


def _before() -> None:
    _forking.acquire()
    things = tuple(_sensitive)
    in_use = set()
    _in_use.update(thing.path for thing in things)  # all of them, in case an interrupt stops the loop
    for thing in things:
        if thing._close_for_fork():
            _closed.append(thing)
        else:
            in_use.add(thing.path)
    _in_use.intersection_update(in_use)


def _after_in_parent() -> None:
    try:
        while _closed:
            _closed.pop()._end_fork()
    finally:
        _in_use.clear()
        _forking.release()


def _after_in_child() -> None:
    global _forking
    _forking = threading.Lock()
    _closed.clear()
    _refused.update(_in_use)
    _in_use.clear()
    # An object without `_reset` still belongs to the parent, so the child must not close it.
    ours: set[object] = {*_resettable}
    for file in tuple(_sensitive):
        if file not in ours:
            _sensitive.discard(file)
    for thing in tuple(_resettable):
        _inherited.append(dict(vars(thing)))
        thing._reset()


os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
