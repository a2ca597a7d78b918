"""Batches of store calls: on threads and on event loops, with interrupts, cancellations and loops that end."""

from __future__ import annotations

import asyncio
import gc
import linecache
import logging
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from contextvars import ContextVar
from random import Random
from types import FrameType
from typing import Any

import pytest
import uvloop

from oncemore._runtime import batching
from oncemore._runtime.batching import Batcher, LoopBatcher, Submit, Ticket, own_error
from oncemore._runtime.plan import Call, Plan, arun, run
from oncemore.errors import StoreError, StoreUnavailable

PATIENCE = 20.0  # far beyond the duration of any step: a wait that long has failed


def answer(item: Any) -> str:
    return f"<{item}>"


def fail(error: BaseException) -> Any:
    raise error


def until(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < ends, "the condition never came true"
        time.sleep(0.001)


class FakeStore:
    """Notes each batch, and keeps it under way until it is let through; *undone* notes the items of each undo."""

    def __init__(self, results: Callable[[list[Any]], Sequence[Any]] = lambda items: [*map(answer, items)]) -> None:
        self.results = results
        self.batches: list[list[Any]] = []
        self.undone: list[list[Any]] = []
        self.under_way = 0
        self.passes = threading.Semaphore(0)

    def let_through(self, batches: int = 100_000) -> None:
        self.passes.release(batches)

    def run_batch(self, items: list[Any]) -> Plan[Sequence[Any]]:
        self.under_way += 1
        self.batches.append(items)
        try:
            assert self.under_way == 1, "two batches at once"
            yield Pass(self.passes)
            return self.results(items)
        finally:
            self.under_way -= 1

    def undo(self, items: list[Any]) -> Plan[None]:
        yield Pass(self.passes)
        self.undone.append(items)


class Pass:
    """Effect: wait until the semaphore lets through."""

    def __init__(self, semaphore: threading.Semaphore) -> None:
        self.semaphore = semaphore

    def run(self) -> None:
        assert self.semaphore.acquire(timeout=PATIENCE)

    async def arun(self) -> None:
        async with asyncio.timeout(PATIENCE):
            while not self.semaphore.acquire(blocking=False):
                await asyncio.sleep(0.001)


# The contract of both batchers


class Callers:
    """Calls a batcher from many places at once: threads, or tasks of an event loop in a thread of its own."""

    def __init__(self, batcher: Batcher[Any]) -> None:
        self.batcher = batcher

    def call(self, item: Any) -> Future[Any]:
        raise NotImplementedError

    def queued(self) -> int:
        raise NotImplementedError

    def call_in_order(self, *items: Any) -> list[Future[Any]]:
        """Call with each item, in this order, while a batch is under way."""
        calls = []
        for count, item in enumerate(items, self.queued() + 1):
            calls.append(self.call(item))
            until(lambda count=count: self.queued() == count)  # type: ignore[misc]
        return calls

    def close(self) -> None:
        raise NotImplementedError


class ThreadCallers(Callers):
    def __init__(self, batcher: Batcher[Any]) -> None:
        super().__init__(batcher)
        self.pool = ThreadPoolExecutor(32)

    def call(self, item: Any) -> Future[Any]:
        return self.pool.submit(Submit(self.batcher, item).run)

    def queued(self) -> int:
        return len(self.batcher._threads.waiting)

    def close(self) -> None:
        self.pool.shutdown()


class LoopCallers(Callers):
    def __init__(self, batcher: Batcher[Any]) -> None:
        super().__init__(batcher)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()

    def call(self, item: Any) -> Future[Any]:
        async def submit() -> Any:
            return await Submit(self.batcher, item).arun()

        return asyncio.run_coroutine_threadsafe(submit(), self.loop)

    def queued(self) -> int:
        async def count() -> int:
            return len(self.batcher._loops.get().waiting)

        return asyncio.run_coroutine_threadsafe(count(), self.loop).result(PATIENCE)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@pytest.fixture(params=[ThreadCallers, LoopCallers])
def callers_of(request: pytest.FixtureRequest) -> Iterator[Callable[[Batcher[Any]], Callers]]:
    made: list[Callers] = []

    def make(batcher: Batcher[Any]) -> Callers:
        made.append(request.param(batcher))
        return made[-1]

    yield make
    for callers in made:
        callers.close()


CallersOf = Callable[[Batcher[Any]], Callers]


def start(callers: Callers, store: FakeStore, item: Any) -> Future[Any]:
    """A batch of one item that is under way."""
    count = len(store.batches)
    call = callers.call(item)
    until(lambda: len(store.batches) > count)
    return call


def results(calls: Sequence[Future[Any]]) -> list[Any]:
    return [call.result(PATIENCE) for call in calls]


def test_single_calls_run_immediately_and_alone(callers_of: CallersOf) -> None:
    store = FakeStore()
    store.let_through()
    callers = callers_of(Batcher(store.run_batch))
    assert [callers.call(item).result(PATIENCE) for item in (1, 2)] == ["<1>", "<2>"]
    assert store.batches == [[1], [2]]


def test_calls_during_a_batch_form_the_next_in_order(callers_of: CallersOf) -> None:
    store = FakeStore()
    callers = callers_of(Batcher(store.run_batch, limit=3))
    first = start(callers, store, 0)
    others = callers.call_in_order(*range(1, 9))
    store.let_through()
    assert results([first, *others]) == [f"<{item}>" for item in range(9)]
    assert store.batches == [[0], [1, 2, 3], [4, 5, 6], [7, 8]]


def test_error_of_one_item_is_its_own(callers_of: CallersOf) -> None:
    store = FakeStore(lambda items: [ValueError(item) if item == 2 else item for item in items])
    callers = callers_of(Batcher(store.run_batch))
    first = start(callers, store, 0)
    one, two, three = callers.call_in_order(1, 2, 3)
    store.let_through()
    assert results([first, one, three]) == [0, 1, 3]
    with pytest.raises(ValueError, match="2"):
        two.result(PATIENCE)


class Fussy(Exception):
    """Cannot be made from its own args, so it cannot be copied."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")


@pytest.mark.parametrize(
    ("error", "given"),
    [
        (StoreUnavailable("gone", retry_after=3), StoreUnavailable),
        (ZeroDivisionError("a bug"), ZeroDivisionError),
        (Fussy(code=7), StoreError),
    ],
    ids=repr,
)
def test_failed_batch_fails_each_call_with_its_own_error(
    callers_of: CallersOf, error: Exception, given: type[Exception]
) -> None:
    store = FakeStore(lambda items: fail(error) if items != [0] else items)
    callers = callers_of(Batcher(store.run_batch))
    start(callers, store, 0)
    calls = callers.call_in_order(1, 2)
    store.let_through()
    mine, yours = (call.exception(PATIENCE) for call in calls)
    assert type(mine) is type(yours) is given
    assert mine is not yours
    assert mine is not error
    assert mine.__cause__ is yours.__cause__ is error
    assert getattr(mine, "retry_after", None) == getattr(error, "retry_after", None)
    assert str(error.args[0]) in str(mine)
    assert store.undone == []


def test_own_error_keeps_its_attributes() -> None:
    error = StoreUnavailable("gone", retry_after=2.5)
    own = own_error(error)
    assert (own.detail, own.retry_after, own.args) == ("gone", 2.5, ("gone",))  # type: ignore[attr-defined]


def test_too_few_results_fail_the_batch_and_block_nobody(callers_of: CallersOf) -> None:
    store = FakeStore(lambda items: items[:-1])
    store.let_through()
    callers = callers_of(Batcher(store.run_batch))
    for _ in range(2):
        with pytest.raises(StoreError, match="0 results for 1 items"):
            callers.call(1).result(PATIENCE)


def test_failed_batch_is_undone(callers_of: CallersOf) -> None:
    """It may have been applied, and the answer was lost."""
    store = FakeStore(lambda items: fail(StoreUnavailable("gone")) if items != [0] else items)
    callers = callers_of(Batcher(store.run_batch, undo=store.undo))
    start(callers, store, 0)
    calls = callers.call_in_order(1, 2)
    store.let_through()
    assert [type(call.exception(PATIENCE)) for call in calls] == [StoreUnavailable] * 2
    until(lambda: store.undone == [[1, 2]])


def test_failure_to_undo_is_logged_and_blocks_nobody(callers_of: CallersOf, caplog: pytest.LogCaptureFixture) -> None:
    store = FakeStore(lambda items: fail(StoreUnavailable("gone")) if items == [1] else items)
    store.let_through()
    callers = callers_of(Batcher(store.run_batch, undo=lambda items: fail(StoreUnavailable("gone"))))
    with pytest.raises(StoreUnavailable):
        callers.call(1).result(PATIENCE)
    assert callers.call(2).result(PATIENCE) == 2
    until(lambda: "neither finished nor undone" in caplog.text)


def test_each_of_many_callers_gets_its_own_results(callers_of: CallersOf) -> None:
    store = FakeStore()
    store.let_through()
    batcher = Batcher(store.run_batch, limit=5)
    callers = callers_of(batcher)
    rounds, names = 60, range(16)
    for count in range(rounds):
        calls = [callers.call((name, count)) for name in names]
        assert results(calls) == [answer((name, count)) for name in names]
    done = [item for batch in store.batches for item in batch]
    assert len(done) == len(set(done)) == rounds * len(names)
    assert max(map(len, store.batches)) <= 5


# Threads


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(32) as pool:
        yield pool


class Interrupted(BaseException):
    pass


def interrupt_main_thread(*_: Any) -> None:
    raise Interrupted


@contextmanager
def interrupted_after(prepare: Callable[[], None]) -> Iterator[None]:
    """The block must be interrupted; the signal comes when *prepare* returns."""

    def send() -> None:
        prepare()
        time.sleep(0.01)  # let the main thread come to rest
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    former = signal.signal(signal.SIGUSR1, interrupt_main_thread)
    sender = threading.Thread(target=send)
    sender.start()
    try:
        with pytest.raises(Interrupted):
            yield
    finally:
        sender.join()
        signal.signal(signal.SIGUSR1, former)


def test_lone_thread_runs_its_own_batch() -> None:
    run_by: list[threading.Thread] = []

    def run_batch(items: list[int]) -> Plan[list[int]]:
        run_by.append((yield Call(threading.current_thread)))
        return items

    assert Batcher(run_batch).submit(1) == 1
    assert run_by == [threading.current_thread()]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, Interrupted])
@pytest.mark.parametrize("undoes", [False, True])
def test_interrupted_leader_fails_its_batch_and_passes_the_lead(kind: type[BaseException], undoes: bool) -> None:
    def interrupt_second(items: list[int]) -> list[int]:
        return fail(kind()) if len(store.batches) == 2 else items

    store = FakeStore(interrupt_second)
    batcher = Batcher(store.run_batch, limit=2, undo=store.undo if undoes else None)
    callers = ThreadCallers(batcher)
    first = start(callers, store, 0)
    leader, passenger, *others = callers.call_in_order(1, 2, 3, 4)
    store.let_through()
    assert first.result(PATIENCE) == 0
    assert type(leader.exception(PATIENCE)) is kind
    assert type(passenger.exception(PATIENCE)) is StoreError
    assert "may or may not have been carried out" in str(passenger.exception())
    assert results(others) == [3, 4]
    # The items of the interrupted batch are undone; if they cannot be, they are carried out in any case.
    assert store.undone == ([[1, 2]] if undoes else [])
    callers.close()
    assert sorted(item for batch in store.batches for item in batch) == (
        [0, 1, 2, 3, 4] if undoes else [0, 1, 1, 2, 2, 3, 4]
    )


def test_claim_of_thread_interrupted_in_the_queue_is_withdrawn() -> None:
    store = FakeStore()
    batcher = Batcher(store.run_batch, undo=store.undo)
    callers = ThreadCallers(batcher)
    first = start(callers, store, 0)
    with interrupted_after(lambda: until(lambda: callers.queued() == 1)):
        batcher.submit("mine")
    (other,) = callers.call_in_order(1)
    store.let_through()
    assert results([first, other]) == ["<0>", "<1>"]
    assert store.batches == [[0], [1]]
    assert store.undone == []
    callers.close()


def test_settle_of_thread_interrupted_in_the_queue_is_carried_out() -> None:
    """Its effect has happened."""
    store = FakeStore()
    batcher = Batcher(store.run_batch)
    callers = ThreadCallers(batcher)
    first = start(callers, store, 0)

    def strike() -> None:
        until(lambda: callers.queued() == 1)
        threading.Timer(0.1, store.let_through).start()

    with interrupted_after(strike):
        batcher.submit("mine")
    assert first.result(PATIENCE) == "<0>"
    assert store.batches == [[0], ["mine"]]
    callers.close()


@pytest.mark.parametrize(("item", "expected"), [("good", [["good"]]), ("bad", [])])
def test_claim_of_thread_interrupted_during_the_batch_is_undone(item: str, expected: list[Any]) -> None:
    store = FakeStore(lambda items: [ValueError() if item == "bad" else answer(item) for item in items])
    batcher = Batcher(store.run_batch, undo=store.undo)
    callers = ThreadCallers(batcher)
    first = start(callers, store, 0)
    (leader,) = callers.call_in_order(1)

    def run_together() -> None:
        until(lambda: callers.queued() == 2)
        store.let_through(1)
        until(lambda: len(store.batches) == 2)

    with interrupted_after(run_together):
        batcher.submit(item)
    store.let_through()
    assert results([first, leader]) == ["<0>", "<1>"]
    assert store.batches == [[0], [1, item]]
    callers.close()
    assert store.undone == expected


def test_claim_granted_in_the_moment_of_the_interrupt_is_undone() -> None:
    store = FakeStore()
    store.let_through()
    batcher: Batcher[str] = Batcher(store.run_batch, undo=store.undo)
    threads = batcher._threads
    pass_lead = threads._pass_lead

    def interrupt_once(ticket: Any) -> None:
        pass_lead(ticket)
        threads._pass_lead = pass_lead  # type: ignore[method-assign]
        raise Interrupted

    threads._pass_lead = interrupt_once  # type: ignore[method-assign]
    with pytest.raises(Interrupted):
        batcher.submit("mine")
    assert store.undone == [["mine"]]
    assert batcher.submit("next") == "<next>"


def test_leader_interrupted_while_it_wakes_others_blocks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    wake, struck = Ticket.wake, []

    def interrupt_once(ticket: Ticket[Any]) -> None:
        if ticket.item == "passenger" and not struck:
            struck.append(ticket)
            raise Interrupted
        wake(ticket)

    monkeypatch.setattr(Ticket, "wake", interrupt_once)
    store = FakeStore()
    batcher = Batcher(store.run_batch, undo=store.undo)
    callers = ThreadCallers(batcher)
    start(callers, store, 0)
    leader, passenger, last = callers.call_in_order("leader", "passenger", "last")
    store.let_through()
    assert type(leader.exception(PATIENCE)) is Interrupted
    assert passenger.result(PATIENCE) == "<passenger>"
    assert type(last.exception(PATIENCE)) is StoreError
    assert batcher.submit("next") == "<next>"
    callers.close()
    assert sorted(item for items in store.undone for item in items) == ["last", "leader"]


@pytest.mark.parametrize(("undoes", "fails"), [(False, False), (True, False), (True, True)])
def test_interrupt_before_any_line_blocks_nobody(undoes: bool, fails: bool) -> None:
    """The leader of a batch of two is interrupted before each line of the batcher that it comes to, in turn."""
    # A leader comes to 46 lines, and a caller that is led to fewer.
    reached = [line for line in range(1, 120) if interrupt_before_line(line, undoes=undoes, fails=fails)]
    assert len(reached) > 20, "the leader was interrupted in the batcher's own lines"
    assert reached[-1] < 119, "no line was left out"


# Python checks for signals neither before `with` takes a lock nor before it releases it; and what a function returns is
# beyond its reach.
BEYOND = ("with", "return ticket.result")


def interrupt_before_line(number: int, *, undoes: bool, fails: bool) -> bool:
    """Whether there was such a line; the other caller must get a result, and no claim may be left without its caller."""
    held: list[Any] = []  # the claims that the store would consider as granted

    def run_batch(items: list[Any]) -> Plan[list[Any]]:
        yield Call(time.sleep, 0)
        if len(items) == 2 or "passenger" in items:
            together.set()
        held.extend(items)
        if fails and "next" not in items:
            raise StoreUnavailable
        return items

    def undo(items: list[Any]) -> Plan[None]:
        yield Call(time.sleep, 0)
        held[:] = [item for item in held if item not in items]

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        if frame.f_code.co_filename == batching.__file__ and frame.f_code.co_name != "result_or_raise":
            if event == "line" and not linecache.getline(batching.__file__, frame.f_lineno).strip().startswith(BEYOND):
                lines += 1
                if lines == number:
                    raise Interrupted
            return trace
        return None

    together, lines = threading.Event(), 0
    batcher: Batcher[Any] = Batcher(run_batch, undo=undo if undoes else None)
    passenger = ThreadPoolExecutor(1)
    threads = batcher._threads
    threads.lock.acquire()
    call = passenger.submit(batcher.submit, "passenger")
    threads.lock.release()
    former = sys.gettrace()  # that of a coverage measurement
    sys.settrace(trace)
    try:
        with suppress(Interrupted, StoreError):
            batcher.submit("leader")
            held.remove("leader")
    finally:
        sys.settrace(former)
    with suppress(StoreError):
        assert call.result(PATIENCE) == "passenger"
        held.remove("passenger")
    assert batcher.submit("next") == "next"
    passenger.shutdown()
    if undoes and lines >= number:
        assert held == ["next"]
    return lines >= number


def test_storm_of_signals_blocks_nobody() -> None:
    """Signals strike one caller between any two steps; all others get their results, or an error."""

    def run_batch(items: list[Any]) -> Plan[list[str]]:
        yield Call(time.sleep, 0)  # let others come
        return [*map(answer, items)]

    def bystander(name: int) -> int:
        count = 0
        while not stop:
            with suppress(StoreError):  # the interrupted caller was the leader
                assert batcher.submit(name) == answer(name)
                count += 1
        return count

    batcher, stop = Batcher(run_batch, limit=3), False
    pool = ThreadPoolExecutor(4)
    bystanders = [pool.submit(bystander, name) for name in range(4)]
    with signals_at_any_moment() as next_one:
        for _ in range(300):
            with suppress(Interrupted):
                next_one.release()
                while True:
                    with suppress(StoreError):
                        assert batcher.submit("struck") == "<struck>"
    stop = True
    assert all(call.result(PATIENCE) for call in bystanders)
    assert batcher.submit("last") == "<last>"
    pool.shutdown()


@contextmanager
def signals_at_any_moment() -> Iterator[Any]:
    """One signal for each release of the lock, a moment later.  A plain lock: a signal cannot strike in its midst."""
    next_one, over = threading.Lock(), False
    next_one.acquire()
    chance, main = Random(), threading.main_thread().ident or 0

    def send() -> None:
        while next_one.acquire() and not over:
            time.sleep(chance.random() / 2000)
            signal.pthread_kill(main, signal.SIGUSR1)

    former = signal.signal(signal.SIGUSR1, interrupt_main_thread)
    sender = threading.Thread(target=send)
    sender.start()
    try:
        yield next_one
    finally:
        over = True
        next_one.release()
        sender.join()
        signal.signal(signal.SIGUSR1, former)


FORK = """
import os, sys, threading, time
from oncemore._runtime.batching import Batcher
from oncemore._runtime.plan import Call

open_again = threading.Event()

def run_batch(items):
    if items == ["parent"]:
        yield Call(open_again.wait, 20)
    return [os.getpid() for _ in items]

batcher = Batcher(run_batch)
threads, answers = batcher._threads, []
running = threading.Thread(target=lambda: answers.append(batcher.submit("parent")))
running.start()
while threads.leader is None or threads.waiting:
    time.sleep(0.001)
waiting = threading.Thread(target=lambda: answers.append(batcher.submit("waiting")))
waiting.start()
while not threads.waiting:
    time.sleep(0.001)

def hold(lock):
    with lock:
        held.set()
        let_go.wait(20)

held, let_go = threading.Event(), threading.Event()
threading.Thread(target=hold, args=[threads.lock]).start()
held.wait(20)
child = os.fork()  # at the worst moment
let_go.set()
if child == 0:
    sys.exit(0 if batcher.submit("child") == os.getpid() else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
open_again.set()
running.join(20), waiting.join(20)
assert answers == [os.getpid()] * 2, answers
"""


def test_batcher_in_use_at_a_fork_works_in_both_processes() -> None:
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=PATIENCE)


# Event loops


def submit(batcher: Batcher[Any], item: Any) -> asyncio.Task[Any]:
    def plan() -> Plan[Any]:
        return (yield Submit(batcher, item))

    return asyncio.create_task(arun(plan()))


async def started(batcher: Batcher[Any], store: FakeStore, *items: Any) -> list[asyncio.Task[Any]]:
    """Tasks whose items are in a batch that is under way."""
    count = len(store.batches)
    tasks = [submit(batcher, item) for item in items]
    while len(store.batches) == count:
        await asyncio.sleep(0)
    return tasks


async def queued(batcher: Batcher[Any], *items: Any) -> list[asyncio.Task[Any]]:
    """Tasks that wait while another batch is under way."""
    tasks = [submit(batcher, item) for item in items]
    await asyncio.sleep(0)
    return tasks


def at_once(items: list[Any]) -> Plan[list[Any]]:
    return items
    yield


def never(items: list[Any]) -> Plan[list[Any]]:
    yield Call(asyncio.sleep, 60)
    return items


def undo_nothing(items: list[Any]) -> Plan[None]:
    return
    yield


async def test_calls_in_one_turn_of_the_loop_run_together() -> None:
    store = FakeStore()
    store.let_through()
    batcher = Batcher(store.run_batch)
    assert await asyncio.gather(*(submit(batcher, item) for item in range(5))) == [*map(answer, range(5))]
    assert store.batches == [[0, 1, 2, 3, 4]]


async def twice(batcher: Batcher[Any], item: int, *, turns: int = 1) -> None:
    """Call, let a few turns of the loop pass, and call again, as a caller does that claims and settles."""
    await Submit(batcher, item).arun()
    for _ in range(turns):
        await asyncio.sleep(0)
    await Submit(batcher, -item).arun()


async def test_callers_that_come_back_soon_share_a_batch_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "LINGER_SECONDS", 60.0)  # turns are counted, and a busy machine's are long
    store = FakeStore()
    store.let_through()
    batcher = Batcher(store.run_batch)
    await asyncio.gather(*(twice(batcher, item, turns=item % 3) for item in range(1, 9)))
    assert [len(batch) for batch in store.batches] == [8, 8]


async def test_batch_without_linger_does_not_wait_for_callers() -> None:
    store = FakeStore()
    store.let_through()
    batcher = Batcher(store.run_batch, linger=False)
    await asyncio.gather(*(twice(batcher, item, turns=item) for item in range(1, 5)))
    assert len(store.batches) > 2


async def test_batch_does_not_wait_for_callers_that_stay_away() -> None:
    store = FakeStore()
    store.let_through()
    batcher = Batcher(store.run_batch)
    away = [asyncio.create_task(twice(batcher, item, turns=10_000)) for item in range(1, 5)]
    await asyncio.sleep(0)
    assert await asyncio.wait_for(submit(batcher, 5), 5) == "<5>"
    assert [item for batch in store.batches for item in batch] == [1, 2, 3, 4, 5]
    for task in away:
        task.cancel()


async def test_linger_ends_in_time_though_each_turn_brings_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "LINGER_SECONDS", -1.0)
    store = FakeStore()
    store.let_through()
    batcher = Batcher(store.run_batch)
    await asyncio.gather(*(twice(batcher, item, turns=item) for item in range(1, 5)))
    assert len(store.batches[0]) == 4
    assert len(store.batches) > 2


async def test_loop_has_a_turn_between_two_full_batches() -> None:
    """Also if the event loop writes by itself, and a batch is over without a wait."""
    turns: list[int] = []

    def run_batch(items: list[Any]) -> Plan[list[Any]]:
        turns.append(turn)
        return items
        yield

    turn, batcher = 0, Batcher(run_batch, limit=2)
    tasks = [submit(batcher, item) for item in range(6)]
    while not all(task.done() for task in tasks):
        turn += 1
        await asyncio.sleep(0)
    assert len(set(turns)) == len(turns) == 3


async def test_batch_does_not_run_in_a_callers_context() -> None:
    user: ContextVar[str] = ContextVar("user", default="nobody")

    def run_batch(items: list[Any]) -> Plan[list[Any]]:
        return [user.get()] * len(items)
        yield

    user.set("the first caller")
    assert await Submit(Batcher(run_batch), 1).arun() == "nobody"


@pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks came with Python 3.12")
def test_eager_tasks_are_served() -> None:
    async def main() -> list[Any]:
        asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined]
        batcher: Batcher[int] = Batcher(at_once)
        return [await submit(batcher, item) for item in range(3)]

    assert asyncio.run(main()) == [0, 1, 2]


async def test_cancelled_claim_in_the_queue_is_withdrawn() -> None:
    store = FakeStore()
    batcher = Batcher(store.run_batch, undo=store.undo)
    (first,) = await started(batcher, store, 0)
    one, gone, two = await queued(batcher, 1, "gone", 2)
    gone.cancel()
    store.let_through()
    assert await asyncio.gather(first, one, two) == ["<0>", "<1>", "<2>"]
    assert store.batches == [[0], [1, 2]]
    assert store.undone == []


async def test_queue_of_withdrawn_claims_runs_no_batch() -> None:
    store = FakeStore()
    batcher = Batcher(store.run_batch, undo=store.undo)
    (first,) = await started(batcher, store, 0)
    (gone,) = await queued(batcher, "gone")
    gone.cancel()
    store.let_through()
    assert await first == "<0>"
    await batcher.drain()
    assert store.batches == [[0]]


async def test_cancelled_settle_in_the_queue_is_carried_out() -> None:
    store = FakeStore()
    batcher = Batcher(store.run_batch)
    (first,) = await started(batcher, store, 0)
    (gone,) = await queued(batcher, "settle")
    gone.cancel()
    store.let_through()
    assert await first == "<0>"
    await batcher.drain()
    assert store.batches == [[0], ["settle"]]


@pytest.mark.parametrize(("item", "expected"), [("good", [["good"]]), ("bad", [])])
async def test_claim_cancelled_during_the_batch_is_undone_before_the_next(item: str, expected: list[Any]) -> None:
    def results(items: list[Any]) -> list[Any]:
        seen.append([*store.undone])
        return [ValueError() if item == "bad" else answer(item) for item in items]

    seen: list[Any] = []
    store = FakeStore(results)
    batcher = Batcher(store.run_batch, undo=store.undo)
    gone, stays = await started(batcher, store, item, "stays")
    (later,) = await queued(batcher, "next")
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert store.undone == []
    store.let_through()
    assert [await stays, await later] == ["<stays>", "<next>"]
    assert store.undone == expected
    assert seen == [[], expected]


@pytest.mark.parametrize(("result", "expected"), [("good", [["met"]]), (ValueError("bad"), [])])
async def test_claim_cancelled_when_its_result_arrives_is_undone(
    result: Any, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def submit_and_cancel(loop_batcher: LoopBatcher[Any], item: Any, loop: Any) -> asyncio.Future[Any]:
        future = plain_submit(loop_batcher, item, loop)
        future.add_done_callback(lambda _: task.cancel())  # runs before the caller is woken
        return future

    plain_submit = LoopBatcher.submit
    monkeypatch.setattr(LoopBatcher, "submit", submit_and_cancel)
    store = FakeStore(lambda items: [result])
    store.let_through()
    task = submit(Batcher(store.run_batch, undo=store.undo), "met")
    with pytest.raises(asyncio.CancelledError):
        await task
    assert store.undone == expected


async def test_undo_for_caller_that_is_cancelled_twice_is_finished() -> None:
    store = FakeStore()
    batcher = Batcher(store.run_batch, undo=store.undo)
    future = asyncio.get_running_loop().create_future()
    caller = asyncio.ensure_future(batcher._result_or_undo("met", future))
    await asyncio.sleep(0)
    future.set_result("<met>")
    for _ in range(2):
        caller.cancel()
        await asyncio.sleep(0.01)
    store.let_through()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert store.undone == [["met"]]


async def test_drain_waits_for_queue_and_survives_cancelled_drainers() -> None:
    store = FakeStore()
    batcher = Batcher(store.run_batch, limit=1)
    await batcher.drain()
    tasks = await started(batcher, store, 1)
    tasks += await queued(batcher, 2)
    draining, impatient = (asyncio.create_task(batcher.drain()) for _ in range(2))
    await asyncio.sleep(0.01)
    assert not draining.done()
    impatient.cancel()
    store.let_through()
    await draining
    assert store.batches == [[1], [2]]
    assert await asyncio.gather(*tasks) == ["<1>", "<2>"]


async def test_plan_that_cancels_itself_fails_its_batch_once() -> None:
    async def cancel() -> None:
        raise asyncio.CancelledError

    def run_batch(items: list[Any]) -> Plan[list[Any]]:
        batches.append(items)
        if len(batches) == 1:
            yield Call(cancel)
        return items

    batches: list[Any] = []
    batcher: Batcher[Any] = Batcher(run_batch)
    with pytest.raises(StoreError, match="may or may not"):
        await submit(batcher, "first")
    assert await submit(batcher, "next") == "next"
    assert batches == [["first"], ["next"]]


@pytest.mark.parametrize("undoes", [False, True])
async def test_cancelled_runner_repeats_settles_and_undoes_claims(undoes: bool) -> None:
    store = FakeStore()
    batcher = Batcher(store.run_batch, undo=store.undo if undoes else None)
    (first,) = await started(batcher, store, "first")
    (second,) = await queued(batcher, "second")
    runner = batcher._loops.get().task
    assert runner is not None
    runner.cancel()
    await asyncio.sleep(0.01)
    if not undoes:
        runner.cancel()  # the task may be cancelled more than once
        await asyncio.sleep(0.01)
    store.let_through()
    assert await second == "<second>"
    if undoes:
        with pytest.raises(StoreError, match="may or may not"):
            await first
        assert store.undone == [["first"]]
        assert store.batches == [["first"], ["second"]]
    else:
        assert await first == "<first>"
        assert store.batches == [["first"]] + [["first", "second"]] * 2


def is_claim(item: str) -> bool:
    return item.startswith("claim")


async def test_cancelled_runner_of_mixed_batch_repeats_settle_and_undoes_claim() -> None:
    store = FakeStore()
    batcher = Batcher(store.run_batch, undo=store.undo, can_undo=is_claim)
    claim, settle = await started(batcher, store, "claim", "settle")
    runner = batcher._loops.get().task
    assert runner is not None
    runner.cancel()
    await asyncio.sleep(0.01)
    store.let_through()
    assert await settle == "<settle>"
    with pytest.raises(StoreError, match="may or may not"):
        await claim
    assert store.batches == [["claim", "settle"], ["settle"]]
    assert store.undone == [["claim"]]


async def test_cancelled_callers_of_mixed_batch_undo_the_claim_alone() -> None:
    store = FakeStore()
    batcher = Batcher(store.run_batch, undo=store.undo, can_undo=is_claim)
    tasks = await started(batcher, store, "claim", "settle")
    tasks += await queued(batcher, "claim later", "settle later")
    for task in tasks:
        task.cancel()
    store.let_through()
    await batcher.drain()
    assert store.batches == [["claim", "settle"], ["settle later"]]
    assert store.undone == [["claim"]]


def test_interrupted_leader_of_mixed_batch_undoes_claims_and_repeats_settles() -> None:
    def interrupt_first(items: list[Any]) -> list[Any]:
        return fail(Interrupted()) if len(store.batches) == 1 else items

    store = FakeStore(interrupt_first)
    store.let_through()
    batcher: Batcher[str] = Batcher(store.run_batch, undo=store.undo, can_undo=is_claim)
    with pytest.raises(Interrupted):
        batcher.submit("settle")
    assert store.batches == [["settle"], ["settle"]]
    batcher.orphans += ["claim", "settle"]
    run(batcher.repair())
    assert (store.batches[2:], store.undone) == ([["settle"]], [["claim"]])


@pytest.mark.parametrize("undoes", [False, True])
def test_ctrl_c_in_batch_reaches_its_loop_alone(undoes: bool) -> None:
    def interrupt_first(items: list[Any]) -> list[Any]:
        return fail(KeyboardInterrupt()) if len(store.batches) == 1 else items

    store = FakeStore(interrupt_first)
    store.let_through()
    batcher = Batcher(store.run_batch, limit=1, undo=store.undo if undoes else None)
    with asyncio.Runner() as runner:

        async def call() -> list[asyncio.Task[Any]]:
            return [submit(batcher, 1), submit(batcher, 2)]

        struck, spared = runner.run(call())
        with pytest.raises(KeyboardInterrupt):
            runner.run(asyncio.sleep(5))

        async def end() -> None:
            if undoes:
                with pytest.raises(StoreError):
                    await struck
            else:
                assert await struck == 1
            assert await spared == 2
            assert await submit(batcher, 3) == 3

        runner.run(end())
    assert store.undone == ([[1]] if undoes else [])
    assert store.batches == ([[1], [2], [3]] if undoes else [[1], [1], [2], [3]])
    gc.collect()  # asyncio tells of the interrupted task now, and not in the next test


def test_ctrl_c_in_the_last_batch_leaves_the_batcher_usable() -> None:
    def interrupt_first(items: list[Any]) -> list[Any]:
        return fail(KeyboardInterrupt()) if len(store.batches) == 1 else items

    async def call(item: int) -> Any:
        return await submit(batcher, item)

    store = FakeStore(interrupt_first)
    store.let_through()
    batcher = Batcher(store.run_batch)
    with asyncio.Runner() as runner:
        with pytest.raises(KeyboardInterrupt):
            runner.run(call(1))
        assert runner.run(call(2)) == 2
    gc.collect()


async def test_call_being_taken_at_an_interrupt_is_sent_once() -> None:
    store = FakeStore()
    store.let_through()
    batcher = Batcher(store.run_batch)
    task = submit(batcher, "settle")
    await asyncio.sleep(0)
    loop_batcher = batcher._loops.get()
    loop_batcher.batch = [*loop_batcher.waiting]
    loop_batcher._take_back()
    assert await task == "<settle>"
    assert store.batches == [["settle"]]


@pytest.mark.filterwarnings("ignore:coroutine 'LoopBatcher._run' was never awaited")  # interrupted before that
def test_ctrl_c_before_any_line_on_a_loop_blocks_nobody() -> None:
    """The loop's batcher is interrupted before each line that it comes to, in turn."""
    gc.collect()
    gc.disable()  # or it might end a task that another test has left, in the middle of this one, and be interrupted there
    try:
        reached = [line for line in range(1, 300) if ctrl_c_before_line(line)]
    finally:
        gc.enable()
    assert len(reached) > 100, "the interrupts came in the batcher's own lines"
    assert reached[-1] < 299, "no line was left out"
    gc.collect()  # asyncio tells of the interrupted tasks now, and not in the next test


def ctrl_c_before_line(number: int) -> bool:
    """Whether there was such a line; each caller must get a result, and no claim may be left without its caller."""
    held: list[str] = []  # the claims that the store would consider as granted
    settled: list[str] = []

    def run_batch(items: list[str]) -> Plan[list[str]]:
        yield Call(asyncio.sleep, 0)
        assert len({*items}) == len(items), "an item is in the batch twice"
        held.extend(filter(is_claim, items))
        settled.extend(item for item in items if not is_claim(item))
        return items

    def undo(items: list[str]) -> Plan[None]:
        yield Call(asyncio.sleep, 0)
        held[:] = [item for item in held if item not in items]

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        if frame.f_code.co_filename != batching.__file__:
            return None
        if event == "line":
            lines += 1
            if lines == number:
                raise KeyboardInterrupt
        return trace

    async def call(item: str) -> None:
        with suppress(StoreError):
            assert await batcher.asubmit(item) == item
            answered.append(item)

    async def call_all() -> None:
        tasks.extend(asyncio.ensure_future(call(item)) for item in ("claim 1", "settle 1", "claim 2", "settle 2"))
        await asyncio.wait(tasks)

    async def end() -> None:
        async with asyncio.timeout(PATIENCE):
            await batcher.drain()
            if not any(struck(task) for task in tasks):
                assert held == [item for item in answered if is_claim(item)]
            await call("settle 3")  # it also starts the batcher, if that could not be started for another call
            await asyncio.wait(tasks)
        assert {item for item in answered if not is_claim(item)} <= {*settled}

    lines, tasks, answered = 0, list[asyncio.Task[None]](), list[str]()
    batcher = Batcher(run_batch, limit=2, undo=undo, can_undo=is_claim)
    former = sys.gettrace()  # that of a coverage measurement
    with closing(asyncio.new_event_loop()) as loop:
        sys.settrace(trace)
        try:
            with suppress(KeyboardInterrupt):
                loop.run_until_complete(call_all())
        finally:
            sys.settrace(former)
        loop.run_until_complete(end())
        for task in tasks:
            assert struck(task) or task.exception() is None
    return lines >= number


def struck(task: asyncio.Task[None]) -> bool:
    """Whether it was the caller itself that was interrupted."""
    return task.done() and isinstance(task.exception(), KeyboardInterrupt)


# Event loops that end


done: list[Any] = []
begun: list[Any] = []


def slow_batch(items: list[Any]) -> Plan[list[Any]]:
    begun.extend(items)
    yield Call(asyncio.sleep, 0.02)
    done.extend(items)
    return items


def note_undo(items: list[Any]) -> Plan[None]:
    done.append(f"undo {items}")
    return
    yield


@pytest.fixture(autouse=True)
def _nothing_done() -> None:
    done.clear()
    begun.clear()


def leave_in_mid_batch(batcher: Batcher[Any], *items: str, cancel_twice: bool = False, **loop: Any) -> None:
    """Call with the items one after another, and let the loop end when the first is in a batch."""

    async def main() -> None:
        tasks.append(submit(batcher, items[0]))
        while not begun:
            await asyncio.sleep(0)
        tasks.extend(submit(batcher, item) for item in items[1:])
        await asyncio.sleep(0)
        if cancel_twice:
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            await asyncio.sleep(0)

    tasks: list[asyncio.Task[Any]] = []
    with asyncio.Runner(**loop) as runner:
        runner.run(main())
    assert all(task.cancelled() for task in tasks)


LOOPS = [{}, {"debug": True}, {"loop_factory": uvloop.new_event_loop}]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("cancel_twice", [False, True])
def test_settles_are_carried_out_though_asyncio_run_ends(
    loop: dict[str, Any], cancel_twice: bool, caplog: pytest.LogCaptureFixture
) -> None:
    leave_in_mid_batch(Batcher(slow_batch), "under way", "behind it", cancel_twice=cancel_twice, **loop)
    gc.collect()
    assert done == ["under way", "behind it"]
    assert [each for each in caplog.records if each.levelno >= logging.ERROR] == []  # of a task that was destroyed, say


@pytest.mark.parametrize("loop", LOOPS)
def test_claim_under_way_is_undone_when_asyncio_run_ends(loop: dict[str, Any]) -> None:
    leave_in_mid_batch(Batcher(slow_batch, undo=note_undo), "under way", "behind it", **loop)
    assert done == ["undo ['under way']"]


def test_settle_in_the_loops_last_turn_is_carried_out(caplog: pytest.LogCaptureFixture) -> None:
    """The batcher's task is then cancelled before its first step."""

    async def settle() -> None:
        try:
            await Submit(batcher, "settle").arun()
        finally:
            await asyncio.wait_for(Submit(batcher, "tidy up").arun(), 5)

    async def main() -> None:
        tasks.append(asyncio.create_task(settle()))

    tasks: list[asyncio.Task[None]] = []
    batcher: Batcher[Any] = Batcher(slow_batch)
    asyncio.run(main())
    assert tasks[0].cancelled()
    assert sorted(done) == ["settle", "tidy up"]
    asyncio.run(last_call(batcher))
    assert sorted(done) == ["settle", "settle too", "tidy up"]
    gc.collect()
    assert caplog.records == []


async def last_call(batcher: Batcher[Any]) -> None:
    asyncio.get_running_loop().call_soon(Submit(batcher, "settle too").arun)
    await asyncio.sleep(0)


def test_claim_in_the_loops_last_turn_is_not_sent(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        tasks.append(submit(Batcher(slow_batch, undo=undo_nothing), "claim"))

    tasks: list[asyncio.Task[Any]] = []
    asyncio.run(main())
    gc.collect()
    assert begun == []
    assert caplog.records == []


def test_cancelled_callers_may_call_while_the_loop_ends() -> None:
    async def caller(name: str) -> None:
        try:
            await Submit(batcher, name).arun()
        finally:
            ended.append(await Submit(batcher, f"tidy up {name}").arun())

    async def main() -> None:
        tasks.extend(asyncio.create_task(caller(name)) for name in ("under way", "behind it"))
        while not begun:
            await asyncio.sleep(0)

    tasks: list[asyncio.Task[None]] = []
    ended: list[str] = []
    batcher: Batcher[Any] = Batcher(slow_batch, limit=1)
    asyncio.run(main())
    assert sorted(ended) == ["tidy up behind it", "tidy up under way"]


@pytest.mark.parametrize("undoes", [False, True])
def test_silent_store_delays_the_end_for_limited_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, undoes: bool
) -> None:
    def hanging_batch(items: list[Any]) -> Plan[list[Any]]:
        begun.extend(items)
        yield Call(asyncio.sleep, 10)
        return items

    def hanging_undo(items: list[Any]) -> Plan[None]:
        yield Call(asyncio.sleep, 10)

    monkeypatch.setattr(batching, "LONGEST_SHUTDOWN", 0.1)
    before = time.monotonic()
    leave_in_mid_batch(Batcher(hanging_batch, undo=hanging_undo if undoes else None), "under way", "behind it")
    assert time.monotonic() - before < 5
    assert "the event loop ends without it" in caplog.text
    gc.collect()
    assert len(caplog.records) == 1


def test_silent_store_that_raises_when_cancelled_is_given_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang() -> Any:
        async def hang_and_fail() -> None:
            try:
                await asyncio.sleep(10)
            except asyncio.CancelledError:
                if len(begun) > 1:  # not when the loop ends, but when it is given up
                    raise StoreUnavailable from None
                raise

        return hang_and_fail()

    def hanging_batch(items: list[Any]) -> Plan[list[Any]]:
        begun.extend(items)
        yield Call(hang)
        return items

    monkeypatch.setattr(batching, "LONGEST_SHUTDOWN", 0.1)
    leave_in_mid_batch(Batcher(hanging_batch, limit=1), "under way", "behind it")
    assert begun == ["under way", "under way"]


def test_store_that_answers_may_take_longer_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def steady_batch(items: list[Any]) -> Plan[list[Any]]:
        begun.extend(items)
        yield Call(asyncio.sleep, 0.1)
        done.extend(items)
        return items

    monkeypatch.setattr(batching, "LONGEST_SHUTDOWN", 0.3)
    leave_in_mid_batch(Batcher(steady_batch, limit=1), *"abcdef")
    assert done == [*"abcdef"]


def test_several_loops_in_several_threads_share_a_batcher() -> None:
    def run_batch(items: list[Any]) -> Plan[list[Any]]:
        thread = threading.get_ident()
        yield Call(asyncio.sleep, 0)
        assert threading.get_ident() == thread
        return [(item, thread) for item in items]

    batcher = Batcher(run_batch)
    faults: list[Any] = []

    async def caller(name: int) -> None:
        for count in range(25):
            result = await Submit(batcher, (name, count)).arun()
            if result != ((name, count), threading.get_ident()):
                faults.append(result)

    async def main() -> None:
        await asyncio.gather(*map(caller, range(8)))

    def loops() -> None:
        for _ in range(3):
            asyncio.run(main())

    threads = [threading.Thread(target=loops) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []


def test_ended_loop_is_not_kept_alive() -> None:
    batcher: Batcher[int] = Batcher(at_once)

    async def main() -> weakref.ref[asyncio.AbstractEventLoop]:
        await Submit(batcher, 1).arun()
        return weakref.ref(asyncio.get_running_loop())

    loop = asyncio.run(main())
    gc.collect()
    assert loop() is None
    assert len(batcher._loops.things) == 0


@pytest.mark.parametrize("on_loop", [False, True])
@pytest.mark.parametrize("undoes", [False, True])
def test_items_of_closed_loop_are_repaired_by_next_batch(
    on_loop: bool, undoes: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Claims are undone, and settles carried out; the closed loop is not kept alive."""

    def run_batch(items: list[Any]) -> Plan[list[Any]]:
        if not begun:
            begun.extend(items)
            yield Call(asyncio.sleep, 60)
        done.append(items)
        return items

    async def call_and_go() -> None:
        batcher._loops.get().submit(1, asyncio.get_running_loop())
        while not begun:
            await asyncio.sleep(0)
        batcher._loops.get().submit(2, asyncio.get_running_loop())

    batcher: Batcher[Any] = Batcher(run_batch, undo=note_undo if undoes else None)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(call_and_go())
    loop.close()
    closed = weakref.ref(loop)
    del loop
    if on_loop:
        asyncio.run(wait_for_call(batcher, 3))
    else:
        assert batcher.submit(3) == 3
    assert done == (["undo [1]", [3]] if undoes else [[1, 2], [3]])
    gc.collect()
    assert closed() is None
    assert "Task was destroyed but it is pending" in caplog.text


async def wait_for_call(batcher: Batcher[Any], item: Any) -> None:
    await submit(batcher, item)


def test_answered_claim_is_not_undone_when_its_loop_is_closed() -> None:
    granted: list[str] = []

    def run_batch(items: list[str]) -> Plan[list[str]]:
        yield Call(asyncio.sleep, 0)
        granted.extend(items)
        return items

    def undo(items: list[str]) -> Plan[None]:
        yield Call(asyncio.sleep, 60 if slow else 0)
        granted[:] = [item for item in granted if item not in items]

    slow = True
    batcher = Batcher(run_batch, undo=undo)

    async def end_in_the_middle() -> None:
        kept, gone = asyncio.ensure_future(batcher.asubmit("kept")), asyncio.ensure_future(batcher.asubmit("gone"))
        await asyncio.sleep(0)
        gone.cancel()
        assert await kept == "kept"
        await asyncio.sleep(0.01)  # the undo of the other claim is under way

    loop = asyncio.new_event_loop()
    loop.run_until_complete(end_in_the_middle())
    loop.close()
    slow = False

    async def next_call() -> None:
        assert await batcher.asubmit("next") == "next"

    asyncio.run(next_call())
    assert granted == ["kept", "next"]
    gc.collect()  # the task that the closed loop left behind is logged here, and not in another test


async def test_interrupt_while_the_runner_starts_leaves_the_batcher_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_batch(items: list[str]) -> Plan[list[str]]:
        yield Call(asyncio.sleep, 0)
        return items

    batcher = Batcher(run_batch)
    loop = asyncio.get_running_loop()

    def interrupt(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(loop, "create_task", interrupt)
        with pytest.raises(KeyboardInterrupt):
            batcher.asubmit("struck")
    assert await batcher.asubmit("next") == "next"
