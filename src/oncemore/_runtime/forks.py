"""A forked child starts afresh: its parent's threads, loops and held locks are not there, and some files must be closed."""

from __future__ import annotations

import os
import threading
from typing import Any, Protocol
from weakref import WeakSet


class Afresh(Protocol):
    """What can begin anew."""

    def _reset(self) -> None: ...


LIVING: WeakSet[Afresh] = WeakSet()

# Kept, for what is collected is also ended: a task of the parent's would here close the connection that it works on.
INHERITED: list[dict[str, Any]] = []


def reset_in_child(thing: Afresh) -> None:
    """Have *thing* reset in every child that this process forks."""
    LIVING.add(thing)


def _start_afresh() -> None:
    for thing in tuple(LIVING):
        INHERITED.append(dict(vars(thing)))
        thing._reset()


os.register_at_fork(after_in_child=_start_afresh)


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
