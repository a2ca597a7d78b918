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
from .redis_wire import Address, Exchange

Entry = tuple[Any, asyncio.Future[Any]]


class ExpressLane(Lane[Any]):
    """As every lane among threads; on an event loop, as told above."""

    def _reset(self) -> None:
        super()._reset()
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
        for known in self._queues.keyrefs():
            other = known()
            if other is not None and other.is_closed():  # in mid-flight: those who wait there would keep it alive
                self._queues.pop(other, None)
        return self._queues.setdefault(loop, Queue(self))

    async def drain(self) -> None:
        loop = asyncio.get_running_loop()
        queue = self._queues.get(loop)
        while queue is not None and queue.flying:
            queue.landed = queue.landed or loop.create_future()
            await asyncio.wait([queue.landed])


class NodeLanes(ExpressLane):
    """A lane for each node of a cluster, made as needed: a node that is slow holds up nobody who asks another."""

    def __init__(self, make: Callable[[], ExpressLane], place: Callable[[str], Address]) -> None:
        first = make()
        super().__init__(first.fly, most=first.most, abandoned=first.abandoned)
        self._make = make
        self._place = place
        self._lanes: dict[Address, ExpressLane] = {}

    def _lane(self, item: Any) -> ExpressLane:
        address = self._place(item.key)
        return self._lanes.get(address) or self._lanes.setdefault(address, self._make())

    def submit(self, item: Any) -> Any:
        return self._lane(item).submit(item)

    def enqueue(self, item: Any) -> asyncio.Future[Any]:
        return self._lane(item).enqueue(item)

    async def drain(self) -> None:
        for lane in tuple(self._lanes.values()):
            await lane.drain()


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
            self.landed.set_result(None)
            self.landed = None

    def _land(self, group: list[Entry], answers: Sequence[Any] | None) -> None:
        answers = answers or [interrupted() for _ in group]
        left = [
            (item, answer) for (item, future), answer in zip(group, answers, strict=True) if not tell(future, answer)
        ]
        if left:
            self._abandon(left)
        elif self.waiting:
            self._take_off()
        else:
            self._stop()

    def _abandon(self, left: list[tuple[Any, Any]]) -> None:
        """Give all of it back at once, so that it travels together; the next group takes off after the last."""
        open = len(left)

        def given_back(_: Any) -> None:
            nonlocal open
            open -= 1
            if not open:
                self._take_off()

        for item, answer in left:
            Drive(self.lane.abandon(item, answer), given_back).go_on()


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
