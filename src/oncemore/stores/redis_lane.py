"""A lane that needs no task on an event loop: the answer's arrival itself carries the flight on.

A task costs a lone caller two more turns of the loop, which is as long as the server needs for the whole verb.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context
from functools import partial
from typing import Any

from ..core.lane import Lane, interrupted, tell
from ..core.plan import Effect, Plan
from .redis_wire import Exchange

Entry = tuple[Any, asyncio.Future[Any]]


class ExpressLane(Lane[Any]):
    """As every lane among threads; on an event loop, as told above."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._queues: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Queue] = weakref.WeakKeyDictionary()
        self._newest: tuple[Callable[[], object], Queue] = (lambda: None, Queue(self))

    def enqueue(self, item: Any) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        known, queue = self._newest  # nearly always there is one loop, and a look into the dictionary takes longer
        if known() is not loop:
            queue = self._queues.get(loop) or self._queue(loop)
            self._newest = (weakref.ref(loop), queue)
        return queue.enqueue(loop, item)

    def _queue(self, loop: asyncio.AbstractEventLoop) -> Queue:
        for other in tuple(self._queues):
            if other.is_closed():  # in mid-flight: those who wait there would keep it alive
                del self._queues[other]
        return self._queues.setdefault(loop, Queue(self))

    async def drain(self) -> None:
        queue = self._queues.get(asyncio.get_running_loop())
        while queue is not None and queue.flying:
            queue.landed = asyncio.get_running_loop().create_future()
            await queue.landed


class Queue:
    """A lane's queue on one event loop; one group is in flight at a time."""

    def __init__(self, lane: ExpressLane) -> None:
        self.lane = lane
        self.waiting: deque[Entry] = deque()
        self.flying = False
        self.landed: asyncio.Future[None] | None = None

    def enqueue(self, loop: asyncio.AbstractEventLoop, item: Any) -> asyncio.Future[Any]:
        future = loop.create_future()
        self.waiting.append((item, future))
        if not self.flying:
            self.flying = True
            # Not at once: those who come in this same turn of the loop fly along.  And in a context of its own: what
            # the first caller's says (its trace, its user) is not true of the others.
            loop.call_soon(self._take_off, context=Context())
        return future

    def _take_off(self) -> None:
        waiting, group = self.waiting, list[Entry]()
        while waiting and len(group) < self.lane.most:
            entry = waiting.popleft()
            if not entry[1].done():  # or it was cancelled before it was sent
                group.append(entry)
        if group:
            Drive(self.lane.flight([item for item, _ in group]), partial(self._land, group)).go_on()
        else:
            self._stop()

    def _stop(self) -> None:
        self.flying = False
        if self.landed is not None:
            tell(self.landed, None)

    def _land(self, group: list[Entry], answers: Sequence[Any] | None) -> None:
        answers = answers or [interrupted() for _ in group]
        left = [
            (item, answer) for (item, future), answer in zip(group, answers, strict=True) if not tell(future, answer)
        ]
        if left:
            Drive(self._abandon(left), lambda _: self._take_off()).go_on()
        elif self.waiting:
            self._take_off()
        else:
            self._stop()

    def _abandon(self, left: list[tuple[Any, Any]]) -> Plan[None]:
        for item, answer in left:
            yield from self.lane.abandon(item, answer)


class Drive:
    """Carries out a plan by callbacks, and tells *done* its result, or None where it was interrupted."""

    def __init__(self, plan: Plan[Any], done: Callable[[Any], None]) -> None:
        self.plan = plan
        self.done = done

    def go_on(self, result: Any = None) -> None:
        self._step(self.plan.send, result)

    def _step(self, resume: Callable[[Any], Effect[Any]], value: Any) -> None:
        try:
            effect = resume(value)
        except StopIteration as end:
            self.done(end.value)
        except BaseException as error:
            self.done(None)
            if not isinstance(error, asyncio.CancelledError):
                raise
        else:
            if not (isinstance(effect, Exchange) and effect.begin(self.go_on)):
                self.awaited = asyncio.ensure_future(effect.arun())
                self.awaited.add_done_callback(self._awoke)

    def _awoke(self, future: asyncio.Future[Any]) -> None:
        error = asyncio.CancelledError() if future.cancelled() else future.exception()
        if error is None:
            self.go_on(future.result())
        else:
            self._step(self.plan.throw, error)
