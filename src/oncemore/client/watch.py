"""Hard deadlines for what is awaited: one timer for all attempts of an event loop, not one for each.

Nearly every attempt is answered long before its deadline, so a timer of its own is mostly made to be cancelled; that costs
more than all the rest of an attempt.  Here an attempt is written on a list and struck off it, and the one timer, set for the
earliest end that it was told of, looks only when that has come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")

NEVER = float("inf")

# Of thousands of attempts that hang, each with an end of its own, so many seconds' worth are cut together.
GRAIN = 0.005


class Watched:
    """An attempt: who makes it, when it must end, and whether it was cut for that."""

    __slots__ = ("cut", "ends", "task")

    def __init__(self, task: asyncio.Task[Any], ends: float) -> None:
        self.task = task
        self.ends = ends
        self.cut = False


class Watch:
    """The attempts that are under way on one event loop."""

    __slots__ = ("_looks_at", "watched")

    def __init__(self) -> None:
        self.watched: set[Watched] = set()
        self._looks_at = NEVER

    def begin(self, task: asyncio.Task[Any], loop: asyncio.AbstractEventLoop, limit: float) -> Watched:
        """Cut *task* in *limit* seconds, unless it is struck off *watched* before."""
        attempt = Watched(task, loop.time() + limit)
        self.watched.add(attempt)
        if attempt.ends < self._looks_at:
            self._look_at(attempt.ends, loop)
        return attempt

    def _look_at(self, when: float, loop: asyncio.AbstractEventLoop) -> None:
        self._looks_at = when
        loop.call_at(when, self._look, when, loop)  # the handle is not kept: it would keep the loop alive

    def _look(self, when: float, loop: asyncio.AbstractEventLoop) -> None:
        """Cut what has come to its end, and look again when the next one does."""
        if when != self._looks_at:
            return  # an earlier end has come up since, and whoever looked for that knows of this one too
        now, next_end = loop.time(), NEVER
        for attempt in self.watched:
            if attempt.cut:
                continue
            if attempt.ends <= now:
                attempt.cut = True
                attempt.task.cancel()
            elif attempt.ends < next_end:
                next_end = attempt.ends
        self._looks_at = NEVER
        if next_end < NEVER:
            self._look_at(max(next_end, now + GRAIN), loop)


_watches: WeakKeyDictionary[asyncio.AbstractEventLoop, Watch] = WeakKeyDictionary()


async def within(awaited: Awaitable[T], limit: float, late: type[Exception]) -> T:
    """What is *awaited*; after *limit* seconds it is cut, and *late* raised.

    A cancellation from elsewhere is told apart as `asyncio.timeout` does it: by counting who asked.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.current_task(loop)
    if task is None:
        raise RuntimeError("an attempt can be made only within a task")
    asked = task.cancelling()
    watch = _watches.get(loop) or _watches.setdefault(loop, Watch())
    attempt = watch.begin(task, loop, limit)
    cancelled = None
    try:
        return await awaited
    except asyncio.CancelledError as error:
        cancelled = error
        raise
    finally:
        watch.watched.discard(attempt)
        if attempt.cut and task.uncancel() <= asked and cancelled is not None:
            raise late(f"no answer within {limit:.3g} s") from cancelled
