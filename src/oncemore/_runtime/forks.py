"""Forks: the child resets this process's threads, locks and connections, and some files must not be open meanwhile."""

from __future__ import annotations

import os
import threading
from typing import Any, Protocol
from weakref import WeakSet

from ..errors import ConfigurationError


class Resettable(Protocol):
    """A thing with threads, locks or connections, which do not work in a forked child."""

    def _reset(self) -> None: ...


_resettable: WeakSet[Resettable] = WeakSet()

# The parent's state, kept for ever: a task or connection that the child's garbage collector ends would end the parent's.
_inherited: list[dict[str, Any]] = []


def reset_in_child(thing: Resettable) -> None:
    """Call `thing._reset()` in every child that this process forks."""
    _resettable.add(thing)


class ForkSensitive(Protocol):
    """A thing with a file, *path*, that must not be open in this process while it forks."""

    path: str

    # Close the file, and keep it closed until the fork is over; False if it is in use.  If this raises, it undoes itself.
    def _close_for_fork(self) -> bool: ...
    def _end_fork(self) -> None: ...  # the fork is over; called in the parent alone


_sensitive: WeakSet[ForkSensitive] = WeakSet()
_closed: list[ForkSensitive] = []  # during a fork
_in_use: set[str] = set()  # during a fork: paths of things that could not be closed
_refused: set[str] = set()  # paths that were in use when this process, or an ancestor of it, was forked
_forking = threading.Lock()


def close_before_fork(thing: ForkSensitive) -> None:
    """Have *thing* closed before every fork if it is idle.  If it is in use, the child must not open its file.

    Locks on a file are not inherited, but SQLite's memory of them is.  A child that opens the same file then believes in
    locks that only its parent holds, and rows that it commits are lost without an error.
    """
    _sensitive.add(thing)


def check_usable(path: str) -> None:
    """Refuse a file that was in use when this process was forked."""
    if path in _refused:
        raise ConfigurationError(
            f"{path}: it was in use when this process was forked, and SQLite would lose what is written here. "
            "Fork before serving: start worker processes before the first request, or with the spawn method"
        )


def _before() -> None:
    _forking.acquire()
    things = tuple(_sensitive)
    in_use = set()
    _in_use.update(thing.path for thing in things)  # all of them, if an interrupt comes meanwhile
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
    # Things that are replaced rather than reset stay as they were in the parent, and are not this process's to close.
    ours: set[object] = {*_resettable}
    for file in tuple(_sensitive):
        if file not in ours:
            _sensitive.discard(file)
    for thing in tuple(_resettable):
        _inherited.append(dict(vars(thing)))
        thing._reset()


os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
