"""Objects and tasks that belong to one event loop."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class PerLoop(Generic[T]):
    """One object for each event loop, made by *make* on first use.

    If a loop is found closed, its object is removed, and *dropped* is called with it, because no task on that loop can end it.
    """

    def __init__(self, make: Callable[[], T], dropped: Callable[[T], object] = lambda thing: None) -> None:
        self._make = make
        self._dropped = dropped
        self.things: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, T] = weakref.WeakKeyDictionary()
        self._latest: tuple[Callable[[], object], T | None] = (lambda: None, None)

    def get(self, loop: asyncio.AbstractEventLoop | None = None) -> T:
        """Return the object of *loop*, by default the running one; make it if there is none."""
        loop = loop or asyncio.get_running_loop()
        known, thing = self._latest  # nearly always there is one loop, and the dictionary is slower
        if thing is None or known() is not loop:
            thing = self.things.get(loop)
            if thing is None:
                self.drop_closed()
                thing = self.things[loop] = self._make()
            self._latest = (weakref.ref(loop), thing)
        return thing

    def find(self) -> T | None:
        """Return the object of the running loop, or None."""
        return self.things.get(asyncio.get_running_loop())

    def pop(self) -> T | None:
        """Remove the object of the running loop, and return it or None."""
        self._latest = (lambda: None, None)
        return self.things.pop(asyncio.get_running_loop(), None)

    def drop_closed(self) -> None:
        """Remove the objects of closed loops.  A pending task or future in one of them would keep its loop alive for ever."""
        if self._latest[0]() is None:  # the loop was collected: let go of its object too
            self._latest = (lambda: None, None)
        for known in self.things.keyrefs():
            loop = known()
            if loop is not None and loop.is_closed():
                self._latest = (lambda: None, None)
                thing = self.things.pop(loop, None)  # None if another thread has removed it
                if thing is not None:
                    self._dropped(thing)


_tasks: PerLoop[set[asyncio.Task[Any]]] = PerLoop(set)


def keep_task(coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start a task on the running loop and keep it until it is done, because a loop holds its tasks only weakly."""
    task, kept = asyncio.get_running_loop().create_task(coroutine), _tasks.get()
    kept.add(task)
    task.add_done_callback(kept.discard)
    return task


async def finish_despite_cancel(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run *coroutine* to its end in a task of its own.  If the caller is cancelled, CancelledError is raised after that.

    If `asyncio.run` ends meanwhile, it cancels that task too.
    """
    return await to_the_end(keep_task(coroutine))


async def to_the_end(work: asyncio.Future[T]) -> T:
    """Return the result of *work*.  If the caller is cancelled, wait for *work* first, then raise the cancellation."""
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled from None if work.cancelled() else work.exception()
    return work.result()
