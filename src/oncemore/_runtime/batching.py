"""Batches of store calls: calls that arrive while one batch is under way form the next one.

One fsync or one round trip then serves many callers.  A single call runs immediately; batching never adds latency.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from contextvars import Context
from itertools import islice
from typing import Any, Generic, TypeVar

from ..errors import StoreError
from .forks import reset_in_child
from .loops import PerLoop
from .plan import Plan, arun, run

Item = TypeVar("Item")

log = logging.getLogger("oncemore")

Queued = tuple[Item, "asyncio.Future[Any]"]  # an item on an event loop, and the future of its result

# A batch waits for callers that were just answered.  It stops after this many turns of the loop without a new call, or after
# this many seconds.
LINGER_TURNS, LINGER_SECONDS = 3, 0.005

# The seconds that an ending event loop waits for a store that does not answer.  Process managers hardly wait longer.
LONGEST_SHUTDOWN = 30.0


class Batcher(Generic[Item]):
    """Runs concurrent store calls in batches, on threads and on each event loop.

    Args:
        run_batch: Returns one result per item, in order.  An exception instance is the error of that item alone.  If
            `run_batch` raises, the batch may have been applied.  After an interruption, it may get the same items again.
        limit: The most items in a batch.
        linger: On an event loop, wait a moment for callers that were just answered, because most of them call again
            immediately, and a larger batch costs each of them less.
        undo: Undoes items whose callers have gone or whose results were lost.  Must accept items that were never carried out.
        can_undo: Tells whether an item can be undone; by default, all can if there is an `undo`.  Every other item is always
            carried out, also if its caller has gone or `asyncio.run` is ending.
    """

    def __init__(
        self,
        run_batch: Callable[[list[Item]], Plan[Sequence[Any]]],
        *,
        limit: int = 256,
        linger: bool = True,
        undo: Callable[[list[Item]], Plan[None]] | None = None,
        can_undo: Callable[[Item], bool] | None = None,
    ) -> None:
        self.run_batch = run_batch
        self.limit = limit
        self.linger = linger
        self.undo: Callable[[list[Item]], Plan[Any]] = undo or run_batch  # not used without an undo
        self.can_undo = can_undo or (lambda item: undo is not None)
        self._reset()
        reset_in_child(self)

    def _reset(self) -> None:
        self._threads = ThreadBatcher(self)
        self._loops = PerLoop(lambda: LoopBatcher(self), dropped=self._adopt)
        self.orphans: list[Item] = []  # items whose results reached no caller; the next batch repairs them

    def submit(self, item: Item) -> Any:
        """Return the result of *item*, on this thread."""
        if self._loops.things:
            self._loops.drop_closed()
        return self._threads.submit(item)

    def asubmit(self, item: Item) -> Awaitable[Any]:
        """Return the result of *item*, on the running event loop."""
        loop = asyncio.get_running_loop()
        future = self._loops.get(loop).submit(item, loop)
        return self._result_or_undo(item, future) if self.can_undo(item) else future

    async def _result_or_undo(self, item: Item, future: asyncio.Future[Any]) -> Any:
        try:
            return await future
        except asyncio.CancelledError:
            # Cancelled just when the result had arrived.  A cancelled future is handled by the loop's batcher.
            if has_result(future):
                await self._undo(item)
            raise

    async def _undo(self, item: Item) -> None:
        """Undo an item whose caller was cancelled, before the caller's task ends: an ending loop waits for that task alone."""
        self.orphans.append(item)
        with suppress(asyncio.CancelledError):
            await arun(self.repair())
        if item in self.orphans:  # the caller was cancelled once more
            await arun(self.repair())

    async def drain(self) -> None:
        """Wait until no batch is under way on the running event loop."""
        loop_batcher = self._loops.find()
        if loop_batcher is not None:
            await loop_batcher.drain()

    def execute(self, items: list[Item]) -> Plan[Sequence[Any]]:
        """Return the plan of one batch, which gives one result per item."""
        return self.run_batch(items) if items and not self.orphans else self._execute_after_repair(items)

    def _execute_after_repair(self, items: list[Item]) -> Plan[Sequence[Any]]:
        yield from self.repair()
        return (yield from self.run_batch(items)) if items else ()

    def repair(self) -> Plan[None]:
        """Undo the orphans that can be undone, and carry out the others again.

        They stay orphans until that is done: if this plan is interrupted, the next batch repairs them.  Another thread or
        loop may repair the same ones meanwhile.
        """
        orphans = [*self.orphans]
        undoable = [item for item in orphans if self.can_undo(item)]
        others = [item for item in orphans if not self.can_undo(item)]
        try:
            if others:
                yield from self.run_batch(others)
            if undoable:
                yield from self.undo(undoable)
        except Exception:
            log.exception(
                "%d interrupted store calls could be neither finished nor undone; leases lapse, and outcomes may be unknown",
                len(orphans),
            )
        for item in orphans:
            with suppress(ValueError):
                self.orphans.remove(item)

    def _adopt(self, loop_batcher: LoopBatcher[Item]) -> None:
        """Have the next batch repair the items of a loop that was closed in the middle of a batch."""
        self.orphans += [item for item, future in loop_batcher.batch if not has_result(future)]
        # Waiting items were never sent, so there is nothing to undo.
        self.orphans += [item for item, _ in loop_batcher.waiting if not self.can_undo(item)]


class Submit(Generic[Item]):
    """Effect: run *item* in a batch of *batcher*, and return its result or raise its error."""

    __slots__ = ("batcher", "item")

    def __init__(self, batcher: Batcher[Item], item: Item) -> None:
        self.batcher = batcher
        self.item = item

    def run(self) -> Any:
        return self.batcher.submit(self.item)

    def arun(self) -> Awaitable[Any]:
        return self.batcher.asubmit(self.item)


class Ticket(Generic[Item]):
    """One thread's item, and its result as soon as there is one."""

    __slots__ = ("batch", "done", "gate", "gone", "item", "result")

    def __init__(self, item: Item) -> None:
        self.item = item
        self.batch: tuple[Ticket[Item], ...] = ()  # the batch that this ticket leads
        self.result: Any = None
        self.done = False
        self.gone = False  # whether its thread was interrupted
        self.gate = threading.Lock()  # released to wake the thread; an Event would cost ten times as much
        self.gate.acquire()

    def wake(self) -> None:
        if self.gate.locked():
            self.gate.release()

    def finish(self, result: Any) -> None:
        if not self.done:
            self.result, self.done = result, True
        self.wake()

    def result_or_raise(self) -> Any:
        if self.result is LOST:
            raise interrupted()
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


LOST = object()  # the result of an item if its batch was interrupted


class ThreadBatcher(Generic[Item]):
    """Runs the calls of threads in batches.  The first caller in the queue leads: it runs the batch for all of them.

    An interrupt (mostly Ctrl-C) may come between any two lines; `_leave` repairs every state that it can leave behind.
    Threads wait on locks, not on a Condition, because its methods are Python code: an interrupt at the end of its
    `__enter__` would leave the lock held for ever.
    """

    def __init__(self, batcher: Batcher[Item]) -> None:
        self.batcher = batcher
        self.lock = threading.Lock()
        self.waiting: deque[Ticket[Item]] = deque()
        self.leader: Ticket[Item] | None = None

    def submit(self, item: Item) -> Any:
        """Return the result of *item* after its batch has run.  After an interrupt, the item is carried out or undone."""
        ticket = Ticket(item)
        try:
            with self.lock:
                self.waiting.append(ticket)
                self.leader = self.leader or ticket
            while self.leader is not ticket and not ticket.done:
                ticket.gate.acquire()
            if not ticket.done:
                self._lead(ticket)
        except BaseException:
            try:
                self._leave(ticket)
            finally:  # a second time, because another Ctrl-C may have interrupted the first
                lost = self._leave(ticket)
            ticket.batch = ()
            self.batcher.orphans += lost
            run(self.batcher.repair())
            raise
        return ticket.result_or_raise()

    def _lead(self, leader: Ticket[Item]) -> None:
        """Run a batch from the front of the queue, hand out the results, and let the next caller lead."""
        batcher = self.batcher
        with self.lock:
            leader.batch = batch = tuple(islice(self.waiting, batcher.limit))
            for _ in batch:
                self.waiting.popleft()
        try:
            results, failed = run(batcher.execute([ticket.item for ticket in batch])), False
            check_count(results, batch)
        except Exception as error:
            results, failed = [own_error(error) for _ in batch], True
        with self.lock:
            for ticket, result in zip(batch, results, strict=True):
                if is_lost(result, failed=failed, gone=ticket.gone) and batcher.can_undo(ticket.item):
                    batcher.orphans.append(ticket.item)
                ticket.finish(result)
            self._pass_lead(leader)
            leader.batch = ()  # the batch contains the leader: break the cycle, so that the garbage collector need not
        if batcher.orphans:
            run(batcher.repair())

    def _pass_lead(self, leader: Ticket[Item]) -> None:
        if self.leader is leader:
            self.leader = self.waiting[0] if self.waiting else None
        if self.leader is not None:
            self.leader.wake()

    def _leave(self, ticket: Ticket[Item]) -> list[Item]:
        """Remove an interrupted caller, and the batch that it leads, from the queue; return the items to be repaired.

        A second call returns the same items.
        """
        with self.lock:
            ticket.gone = True
            undoes = self.batcher.can_undo(ticket.item)
            if ticket in self.waiting and not ticket.batch and not undoes:  # else there is no need to send it
                ticket.batch = (ticket,)
            for each in ticket.batch or (ticket,):
                if each in self.waiting:
                    self.waiting.remove(each)
                each.finish(LOST)
            self._pass_lead(ticket)
            lost = [each.item for each in ticket.batch if each.result is LOST]
            if undoes and ticket.result is not LOST and not isinstance(ticket.result, BaseException):
                lost.append(ticket.item)
            return lost


class LoopBatcher(Generic[Item]):
    """Runs the calls on one event loop in batches, in a task that ends when the queue is empty.

    At its end, `asyncio.run` cancels all tasks, including this one, and waits for them.  A settle must not be lost because
    the program ends, so a cancelled task goes on until its queue is empty, or the store has not answered for 30 seconds.
    """

    def __init__(self, batcher: Batcher[Item]) -> None:
        self.batcher = batcher
        self.waiting: deque[Queued[Item]] = deque()
        self.batch: list[Queued[Item]] = []  # the calls under way
        self.running = False
        self.gave_up = False
        self.task: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.last_size, self.last_end = 0, 0.0

    def submit(self, item: Item, loop: asyncio.AbstractEventLoop) -> asyncio.Future[Any]:
        """Return a future of the result of *item*, on *loop*, which is the running one."""
        future = loop.create_future()
        self.waiting.append((item, future))
        if not self.running:
            self._start()
        return future

    async def drain(self) -> None:
        while self.running and self.task is not None:
            await asyncio.wait([self.task])

    def _start(self) -> None:
        try:
            self.running, self.gave_up = True, False
            runner = self._run()
            # Run it up to its first await here, because a task that is cancelled before its first step never runs at all.
            runner.send(None)
            # In an empty context, because the first caller's context (its trace, its user) is wrong for the others.
            self.task = Context().run(asyncio.get_running_loop().create_task, runner)
        except BaseException:  # Ctrl-C: the next call starts a task, unless `_run` has started one
            self.running = self.task is not None
            raise

    async def _run(self) -> None:
        try:
            await self._linger()
            while self._has_work():
                await self._run_batch()
                if self.waiting and self.batcher.linger:
                    await self._linger()
            self._stop()
        except GeneratorExit:  # the loop was closed in the middle of a batch
            raise
        except BaseException:  # it gave up, or Ctrl-C: that goes on to the loop, and another task serves the queue
            self._take_back()
            self._stop()
            if self._has_work():
                self._start()
            raise

    def _has_work(self) -> bool:
        return not self.gave_up and bool(self.waiting or self.batcher.orphans)

    def _stop(self) -> None:
        """Drop the task and the timer, which would keep the loop alive.  If the task gave up, fail all waiting calls."""
        while self.gave_up and self.waiting:
            set_result(self.waiting.popleft()[1], LOST)
        self.running, self.task = False, None
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    async def _linger(self) -> None:
        """Let one turn of the loop pass, and further turns while callers that were just answered call again."""
        loop = asyncio.get_running_loop()
        until = self.last_end + LINGER_SECONDS
        turns, before = LINGER_TURNS, 0
        try:
            await asyncio.sleep(0)
            while self.batcher.linger and len(self.waiting) < self.last_size and turns and loop.time() < until:
                turns = LINGER_TURNS if len(self.waiting) > before else turns - 1
                before = len(self.waiting)
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self._limit_time()

    async def _run_batch(self) -> None:
        """Run a batch from the front of the queue, and hand out the results."""
        batcher, task = self.batcher, asyncio.current_task()
        assert task is not None, "batches run in the batcher's task"
        batch, cancels, failed = self._take_batch(), task.cancelling(), False
        try:
            results = await arun(batcher.execute([item for item, _ in batch]))
            check_count(results, batch)
        except asyncio.CancelledError:
            if self.gave_up:
                raise
            if task.cancelling() > cancels:  # the loop is ending
                self._take_back()
                self._limit_time()
                return
            failed, results = True, [LOST for _ in batch]  # the cancellation came from within the plan
        except Exception as error:
            failed, results = True, [own_error(error) for _ in batch]
        for (item, future), result in zip(batch, results, strict=True):
            if is_lost(result, failed=failed, gone=future.cancelled()) and batcher.can_undo(item):
                batcher.orphans.append(item)
            set_result(future, result)
        self.batch, self.last_size, self.last_end = [], len(batch), asyncio.get_running_loop().time()
        if cancels:  # the store answers, so it may have more time
            self._limit_time()

    def _take_batch(self) -> list[Queued[Item]]:
        batch: list[Queued[Item]] = []
        self.batch = batch
        while self.waiting and len(batch) < self.batcher.limit:
            call = self.waiting[0]
            if not call[1].cancelled() or not self.batcher.can_undo(call[0]):  # else nobody needs it to be sent
                batch.append(call)
            self.waiting.popleft()  # after the append: an interrupt must leave each call in the queue, the batch, or both
        return batch

    def _take_back(self) -> None:
        """End an interrupted batch.  Items that can be undone are undone; the others go back to the front of the queue."""
        if self.batch and self.waiting and self.batch[-1] is self.waiting[0]:  # interrupted in `_take_batch`
            self.batch.pop()
        for item, future in [call for call in reversed(self.batch) if not has_result(call[1])]:
            if self.batcher.can_undo(item):
                self.batcher.orphans.append(item)
                set_result(future, LOST)
            else:
                self.waiting.appendleft((item, future))
        self.batch = []

    def _limit_time(self) -> None:
        """Give up if the store has not answered LONGEST_SHUTDOWN seconds from now."""
        if self.timer is not None:
            self.timer.cancel()
        self.timer = asyncio.get_running_loop().call_later(LONGEST_SHUTDOWN, self._give_up)

    def _give_up(self) -> None:
        log.error(
            "The store has not answered for %g s, so the event loop ends without it: outcomes may be lost, and are then unknown",
            LONGEST_SHUTDOWN,
        )
        self.gave_up = True
        assert self.task is not None, "the timer ends with the task"
        self.task.cancel()


def check_count(results: Sequence[Any], calls: Sequence[Any]) -> None:
    """Raise StoreError unless there is one result for each call: otherwise a caller might get another one's result."""
    if len(results) != len(calls):
        raise StoreError(f"The store returned {len(results)} results for {len(calls)} items")


def is_lost(result: Any, *, failed: bool, gone: bool) -> bool:
    """Whether the item may have taken effect without its caller learning of it: the batch failed, or the caller has gone."""
    return failed or (gone and not isinstance(result, BaseException))


def set_result(future: asyncio.Future[Any], result: Any) -> None:
    """Give *result* to the task that awaits *future*, or raise it there.  Does nothing if the future is done or cancelled."""
    if not future.done():
        if result is LOST:
            future.set_exception(interrupted())
        elif isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)


def has_result(future: asyncio.Future[Any]) -> bool:
    """Whether the caller has a result and acts on it, so its item may be neither undone nor sent again."""
    return future.done() and not future.cancelled() and future.exception() is None


def interrupted() -> StoreError:
    """Return the error of a call in a batch that was interrupted."""
    return StoreError("The batch was interrupted; its calls may or may not have been carried out: try again")


def own_error(error: Exception) -> Exception:
    """Return a copy of *error*, with *error* as its cause, so that callers that share a failure do not share a traceback."""
    try:
        own = copy.copy(error)
    except Exception:  # some exceptions cannot be made from their own args
        own = StoreError(f"The batch failed: {error!r}")
    own.__cause__ = error
    return own
