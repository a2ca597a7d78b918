"""What a fork does to this process's things: the child resets them, and some files must not be open meanwhile."""

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
    """A thing whose file, *path*, must not be open in this process while it forks."""

    path: str

    # Close the file, and keep it closed until the fork is over; False if it is in use.  If this raises, it undoes itself.
    def _close_for_fork(self) -> bool: ...
    def _end_fork(self) -> None: ...  # the fork is over; called in the parent alone


_sensitive: WeakSet[ForkSensitive] = WeakSet()
_closed: list[ForkSensitive] = []  # during a fork
_in_use: set[str] = set()  # during a fork; afterwards, in the child: paths that were open when it was forked
_forking = threading.Lock()


def close_before_fork(thing: ForkSensitive) -> None:
    """Have *thing* closed before every fork if it is idle.  If it is in use, the child must not open its file.

    Locks on a file are not inherited, but SQLite's memory of them is.  A child that opens the same file then believes in
    locks that only its parent holds, and rows that it commits are lost without an error.
    """
    _sensitive.add(thing)


def check_usable(path: str) -> None:
    """Refuse a file that was in use when this process was forked."""
    if path in _in_use:
        raise ConfigurationError(
            f"{path}: it was in use when process {os.getppid()} forked this one, and SQLite would lose what is written here. "
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
    for thing in tuple(_resettable):
        _inherited.append(dict(vars(thing)))
        thing._reset()


os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)


class Resting(Protocol):
    """What must be at rest while its process forks."""

    def _rest(self) -> bool: ...  # nobody uses it from now on; False where that cannot be
    def _put_away(self) -> None: ...  # close what must not be open then
    def _go_on(self) -> None: ...  # the fork is over; not called in the child


class Rest:
    """Brings its *things* to rest before each fork.  Of two, the one that was made later does so first."""

    def __init__(self) -> None:
        self.things: WeakSet[Resting] = WeakSet()
        self._resting: list[Resting] = []
        self._forking = threading.Lock()
        os.register_at_fork(before=self._begin, after_in_parent=self._end, after_in_child=self._forget)

    def _begin(self) -> None:
        self._forking.acquire()
        for thing in tuple(self.things):
            if thing._rest():
                self._resting.append(thing)  # first, that it may go on where an interrupt comes while it is closed
                thing._put_away()

    def _end(self) -> None:
        while self._resting:
            self._resting.pop()._go_on()
        self._forking.release()

    def _forget(self) -> None:
        self._forking, self._resting = threading.Lock(), []
