"""A forked child starts afresh: its parent's threads, loops and held locks are not there."""

from __future__ import annotations

import os
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
