"""Groups what concurrent callers ask of a store: whatever came in while the last group was in flight is the next group.

A lone caller never waits for company.  Among threads, one of the waiting callers flies the group for all; on an event
loop none of them does, so that a caller's cancellation never stops a flight that carries others.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from functools import partial
from itertools import islice
from typing import Any, Generic, TypeVar

from ..errors import StoreError
from .drive import Drive
from .forks import reset_in_child
from .plan import Plan, arun, run
from .shutdown import at_shutdown

Item = TypeVar("Item")

log = logging.getLogger("oncemore")

# How many turns of an event loop that bring nobody, and how many seconds in all, a group waits for those who just landed.
PATIENCE, LONGEST_BOARDING = 3, 0.005

# How long a loop that is shut down waits for a store that does not answer: whoever ends a process hardly waits longer.
LONGEST_STAY, NEVER = 30.0, float("inf")

Entry = tuple[Item, "asyncio.Future[Any]"]

Fly = Callable[[list[Item]], Plan[Sequence[Any]]]  # one result per item, in order; an exception is that item's own


class Ask(Generic[Item]):
    """The effect of putting one *item* into a lane and getting its own answer back.

    Where the lane has a way to give answers back, a caller that is cancelled has asked for nothing: a claim.
    """

    __slots__ = ("item", "lane")

    def __init__(self, lane: Lane[Item], item: Item) -> None:
        self.lane = lane
        self.item = item

    def run(self) -> Any:
        return self.lane.submit(self.item)

    def arun(self) -> Awaitable[Any]:
        future = self.lane.enqueue(self.item)
        return future if self.lane.abandoned is None else self._told(future)

    async def _told(self, future: asyncio.Future[Any]) -> Any:
        """The answer; one that meets its caller's cancellation on the last step is abandoned like any other."""
        try:
            return await future
        except asyncio.CancelledError:
            if future.cancelled():
                self.lane.withdraw(future)
            elif future.exception() is None:
                await arun(self.lane.abandon(self.item, future.result()))
            raise


class Tell(Ask[Item]):
    """An Ask of what has to be done, whether or not its caller waits for it: a settle, a release."""

    __slots__ = ()

    def arun(self) -> Awaitable[Any]:
        return self.lane.enqueue(self.item)


class Lane(Generic[Item]):
    """A queue whose items *fly* together.

    *abandoned* is told of each answer whose caller has gone away.  *boards*: on an event loop, those who have just landed
    are waited for, for a moment, where a larger group costs less.  *stays*: a loop that is shut down, and has cancelled
    flights and callers alike, first lets the lane do what it was asked for.
    """

    def __init__(
        self,
        fly: Fly[Item],
        *,
        most: int = 256,
        abandoned: Callable[[Item, Any], Plan[None]] | None = None,
        boards: bool = True,
        stays: bool = True,
    ) -> None:
        self.fly = fly
        self.most = most
        self.abandoned = abandoned
        self.boards = boards
        self.stays = stays
        self._reset()
        reset_in_child(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[Seat[Item]] = deque()
        self._leader: Seat[Item] | None = None
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopLane[Item]] = weakref.WeakKeyDictionary()
        self._latest: tuple[Callable[[], object], LoopLane[Item]] = (lambda: None, LoopLane(self))

    # Threads: the caller at the front of the queue flies the group, then hands the lead to the next one waiting.
    # An interruption (a signal, mostly) may come between any two steps, so each step leaves what _leave can mend.

    def submit(self, item: Item) -> Any:
        """The answer to *item*, from this thread."""
        if self._loops:
            self._let_go()
        seat = Seat(item)
        try:
            with self._lock:
                self._waiting.append(seat)
                self._leader = self._leader or seat
            while self._leader is not seat and not seat.answered:
                seat.gate.acquire()
            if not seat.answered:
                self._lead(seat)
        except BaseException:
            self._leave(seat)
            raise
        return seat.answer()

    def _lead(self, seat: Seat[Item]) -> None:
        with self._lock:
            seat.group = tuple(islice(self._waiting, self.most))
            for _ in seat.group:
                self._waiting.popleft()
        answers = run(self.flight([each.item for each in seat.group]))
        with self._lock:
            left = [(each.item, answer) for each, answer in zip(seat.group, answers, strict=True) if each.left]
            for each, answer in zip(seat.group, answers, strict=True):
                each.settle(answer)
            self._pass_lead(seat)
            seat.group = ()  # it is in there itself, and a cycle is a burden
        for item, answer in left:
            run(self.abandon(item, answer))

    def _pass_lead(self, seat: Seat[Item]) -> None:
        """Where *seat* has the lead, the first one waiting has it now."""
        if self._leader is seat:
            self._leader = self._waiting[0] if self._waiting else None
        if self._leader is not None:
            self._leader.wake()

    def _leave(self, seat: Seat[Item]) -> None:
        """An interrupted caller goes: its group has no answers to wait for, and the next one leads."""
        with self._lock:
            taken = seat.answered
            seat.left = True
            for each in seat.group or (seat,):
                if each in self._waiting:
                    self._waiting.remove(each)
                each.settle(interrupted())
            self._pass_lead(seat)
        if taken:
            run(self.abandon(seat.item, seat.result))

    # An event loop: futures for the callers.

    def enqueue(self, item: Item) -> asyncio.Future[Any]:
        """A future for the answer to *item*, on the running loop."""
        loop = asyncio.get_running_loop()
        known, lane = self._latest  # nearly always there is one loop, and a look into the dictionary takes longer
        if known() is not loop:
            lane = self._loops.get(loop) or self._on_loop(loop)
            self._latest = (weakref.ref(loop), lane)
        return lane.enqueue(loop, item)

    def _on_loop(self, loop: asyncio.AbstractEventLoop) -> LoopLane[Item]:
        self._let_go()
        lane = self._loops[loop] = LoopLane(self)
        lane.staying = at_shutdown(self._stay) if self.stays else None
        return lane

    def _let_go(self) -> None:
        """Of loops that were closed in mid-flight: nobody carries their plans on, and those who wait there keep them alive."""
        for known in self._loops.keyrefs():
            loop = known()
            lane = self._loops.pop(loop, None) if loop is not None and loop.is_closed() else None
            for drive in lane.drives if lane is not None else ():
                drive.plan.close()

    def withdraw(self, future: asyncio.Future[Any]) -> None:
        """Forget the item that *future* was to answer, if it has not been sent."""
        lane = self._loops.get(future.get_loop())
        waiting = lane.waiting if lane is not None else deque()
        for place, (_, other) in enumerate(waiting):
            if other is future:
                del waiting[place]
                return

    async def drain(self) -> None:
        """Return when nothing is in flight on the running loop."""
        await self._drained(NEVER)

    async def _drained(self, longest: float) -> bool:
        """Whether nothing is in flight within so many seconds."""
        loop = asyncio.get_running_loop()
        lane = self._loops.get(loop)
        ends = loop.time() + longest
        while lane is not None and lane.flying:
            left = ends - loop.time()
            if left <= 0:
                return False
            lane.landed = lane.landed or loop.create_future()
            await asyncio.wait([lane.landed], timeout=None if left == NEVER else left)
        return True

    async def _stay(self) -> None:
        if not await self._drained(LONGEST_STAY):
            log.error("The store does not answer, and the event loop ends without it; outcomes may be lost")

    # Both

    def flight(self, items: list[Item]) -> Plan[Sequence[Any]]:
        """One answer for each of *items*; where the flight fails, that is everyone's."""
        try:
            answers = yield from self.fly(items)
            if len(answers) != len(items):
                raise StoreError(f"The store gave {len(answers)} answers to {len(items)} questions")
        except Exception as error:
            return [as_own(error) for _ in items]
        return answers

    def abandon(self, item: Item, answer: Any) -> Plan[None]:
        """Give back what nobody takes any more; where that fails, a lease lapses by itself."""
        if self.abandoned is None or isinstance(answer, BaseException):
            return
        try:
            yield from self.abandoned(item, answer)
        except Exception:
            log.exception("An answer whose caller had gone could not be given back")


class Seat(Generic[Item]):
    """A thread's place in a group."""

    __slots__ = ("answered", "gate", "group", "item", "left", "result")

    def __init__(self, item: Item) -> None:
        self.item = item
        self.group: tuple[Seat[Item], ...] = ()  # those it flies, where it leads
        self.result: Any = None
        self.answered = False
        self.left = False
        self.gate = threading.Lock()  # an Event made of one lock: it costs a tenth, and every caller needs one
        self.gate.acquire()

    def wake(self) -> None:
        if self.gate.locked():
            self.gate.release()

    def settle(self, answer: Any) -> None:
        if not self.answered:
            self.result, self.answered = answer, True
        self.wake()

    def answer(self) -> Any:
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


class LoopLane(Generic[Item]):
    """A lane's queue on one event loop; one group is in flight at a time."""

    def __init__(self, lane: Lane[Item]) -> None:
        self.lane = lane
        self.waiting: deque[Entry[Item]] = deque()
        self.flying = False
        self.drives: list[Drive] = []
        self.landed: asyncio.Future[None] | None = None  # who waits for the last flight is told by this
        self.staying: object = None  # has the loop wait for us when it is shut down

    def enqueue(self, loop: asyncio.AbstractEventLoop, item: Item) -> asyncio.Future[Any]:
        future = loop.create_future()
        self.waiting.append((item, future))
        if not self.flying:
            self.flying = True
            # Not at once: those who come in this same turn of the loop fly along.  And in a context of its own: what
            # the first caller's says (its trace, its user) is not true of the others.
            loop.call_soon(self._take_off, context=Context())
        return future

    def _take_off(self) -> None:
        if not self.lane.stays:  # then what nobody waits for any more is not begun
            self.waiting = deque(entry for entry in self.waiting if not entry[1].done())
        waiting = self.waiting
        group = [waiting.popleft() for _ in range(min(len(waiting), self.lane.most))]
        if group:
            self._fly(group, again=True)
        else:
            self._stop()

    def _fly(self, group: list[Entry[Item]], *, again: bool) -> None:
        self._drive([self.lane.flight([item for item, _ in group])], partial(self._land, group, again))

    def _land(self, group: list[Entry[Item]], again: bool, answers: Sequence[Any] | None) -> None:
        # Whoever is gone cannot ask again, and the loop that has cancelled them all has cancelled the flight with them.
        again = again and answers is None and self.lane.stays
        gone = [entry for entry in group if entry[1].done()] if again else []
        answers = answers or [interrupted() for _ in group]
        if gone:
            for (_, future), answer in zip(group, answers, strict=True):
                tell(future, answer)
            self._fly(gone, again=False)
            return
        left = [
            (item, answer) for (item, future), answer in zip(group, answers, strict=True) if not tell(future, answer)
        ]
        if left:
            self._abandon(left, partial(self._next, len(group)))
        else:
            self._next(len(group))

    def _abandon(self, left: list[tuple[Item, Any]], then: Callable[[], None]) -> None:
        """Give all of it back at once, so that it travels together; *then* comes after the last."""
        open = len(left)

        def given_back(_: None) -> None:
            nonlocal open
            open -= 1
            if not open:
                then()

        self._drive([self.lane.abandon(item, answer) for item, answer in left], given_back)

    def _drive(self, plans: list[Plan[Any]], done: Callable[[Any], None]) -> None:
        self.drives = drives = [Drive(plan, done) for plan in plans]  # kept here, since a loop does not keep its tasks
        for drive in drives:
            drive.go_on()

    def _next(self, landed: int) -> None:
        there = len(self.waiting)
        if self.lane.boards and (there or landed > 1):
            loop = asyncio.get_running_loop()
            until = loop.time() + LONGEST_BOARDING
            loop.call_soon(self._board, loop, landed, there, PATIENCE, until, context=Context())
        else:
            self._take_off()

    def _board(self, loop: asyncio.AbstractEventLoop, landed: int, before: int, patience: int, until: float) -> None:
        """Give those who have just *landed* the chance to fly again: most come back at once, for a claim is settled.

        A larger group costs everyone less.  But nobody is waited for who does not come: it goes on only as long as the
        turns of the loop keep bringing someone.
        """
        there = len(self.waiting)
        patience = PATIENCE if there > before else patience - 1
        if there < landed and patience and loop.time() < until:
            loop.call_soon(self._board, loop, landed, there, patience, until)
        else:
            self._take_off()

    def _stop(self) -> None:
        self.flying, self.drives = False, []
        if self.landed is not None:
            tell(self.landed, None)
            self.landed = None


def tell(future: asyncio.Future[Any], answer: Any) -> bool:
    """Give *answer* to whoever awaits *future*; False where nobody does any more."""
    if future.done():
        return False
    if isinstance(answer, BaseException):
        future.set_exception(answer)
    else:
        future.set_result(answer)
    return True


def interrupted() -> StoreError:
    """What those get whose flight was stopped from outside."""
    return StoreError("The flight was interrupted; what it asked for may or may not have happened")


def as_own(error: Exception) -> Exception:
    """A copy of *error*, caused by it, so that callers who share a failure do not share a traceback."""
    try:
        own = copy.copy(error)
    except Exception:  # not every exception can be made from its own args
        own = StoreError(f"The flight failed: {error!r}")
    own.__cause__ = error
    return own
