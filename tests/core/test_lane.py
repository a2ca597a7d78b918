"""A lane among threads: what came in while the last group was in flight flies together, and nobody is forgotten."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from random import Random
from typing import Any

import pytest

from oncemore.core.lane import Ask, Lane, Seat, as_own
from oncemore.core.plan import Call, Plan, run
from oncemore.errors import StoreError, StoreUnavailable

PATIENCE = 20.0  # far beyond what any of this takes: a wait that long has failed


def until(condition: Callable[[], bool]) -> None:
    """Return when the condition holds."""
    ends = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < ends, "it never came to that"
        time.sleep(0.001)


class Sky:
    """The far end of a lane: it notes each group, and keeps every flight in the air until it may land."""

    def __init__(self, answer: Callable[[list[Any]], Sequence[Any]] = lambda items: [f"<{item}>" for item in items]):
        self.answer = answer
        self.groups: list[list[Any]] = []
        self.aloft = 0
        self.landings = threading.Semaphore(0)

    def land(self, flights: int = 1000) -> None:
        self.landings.release(flights)

    def fly(self, items: list[Any]) -> Plan[Sequence[Any]]:
        self.aloft += 1
        assert self.aloft == 1, "two flights at once"
        self.groups.append(items)
        try:
            yield Call(self.landings.acquire, True, PATIENCE)
            return self.answer(items)
        finally:
            self.aloft -= 1


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(32) as pool:
        yield pool


def queue_up(pool: ThreadPoolExecutor, lane: Lane[Any], items: Sequence[Any]) -> list[Future[Any]]:
    """Each item asked for by a thread of its own, in this order."""
    asked = []
    for count, item in enumerate(items, len(lane._waiting) + 1):
        asked.append(pool.submit(lane.submit, item))
        until(lambda count=count: len(lane._waiting) == count)
    return asked


def take_off(pool: ThreadPoolExecutor, lane: Lane[Any], sky: Sky, item: Any) -> Future[Any]:
    """A flight of its own."""
    count = len(sky.groups)
    first = pool.submit(lane.submit, item)
    until(lambda: len(sky.groups) > count)
    return first


def test_a_lone_caller_flies_at_once_on_its_own_thread() -> None:
    flown_by: list[threading.Thread] = []

    def fly(items: list[int]) -> Plan[list[int]]:
        flown_by.append((yield Call(threading.current_thread)))
        return [item * 2 for item in items]

    lane = Lane(fly)
    assert [run(ask(lane, item)) for item in (1, 2)] == [2, 4]
    assert flown_by == [threading.current_thread()] * 2


def ask(lane: Lane[Any], item: Any) -> Plan[Any]:
    return (yield Ask(lane, item))


def test_a_group_is_what_came_in_while_the_last_one_flew_in_its_order(pool: ThreadPoolExecutor) -> None:
    sky = Sky()
    lane = Lane(sky.fly)
    first = take_off(pool, lane, sky, 0)
    others = queue_up(pool, lane, range(1, 9))
    sky.land()
    assert [future.result(PATIENCE) for future in (first, *others)] == [f"<{item}>" for item in range(9)]
    assert sky.groups == [[0], [1, 2, 3, 4, 5, 6, 7, 8]]


def test_no_group_is_larger_than_the_most(pool: ThreadPoolExecutor) -> None:
    sky = Sky()
    lane = Lane(sky.fly, most=3)
    first = take_off(pool, lane, sky, 0)
    others = queue_up(pool, lane, range(1, 9))
    sky.land()
    assert [future.result(PATIENCE) for future in (first, *others)] == [f"<{item}>" for item in range(9)]
    assert sky.groups == [[0], [1, 2, 3], [4, 5, 6], [7, 8]]


def test_one_items_error_is_its_own(pool: ThreadPoolExecutor) -> None:
    sky = Sky(lambda items: [ValueError(item) if item == 2 else item for item in items])
    lane = Lane(sky.fly)
    first = take_off(pool, lane, sky, 0)
    others = queue_up(pool, lane, [1, 2, 3])
    sky.land()
    assert [first.result(PATIENCE), others[0].result(PATIENCE), others[2].result(PATIENCE)] == [0, 1, 3]
    with pytest.raises(ValueError, match="2"):
        others[1].result(PATIENCE)


def fail(error: BaseException) -> Any:
    raise error


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
def test_a_failing_flight_fails_each_with_an_error_of_its_own(
    pool: ThreadPoolExecutor, error: Exception, given: type[Exception]
) -> None:
    sky = Sky(lambda items: fail(error) if items != [0] else items)
    lane = Lane(sky.fly)
    take_off(pool, lane, sky, 0)
    others = queue_up(pool, lane, [1, 2])
    sky.land()
    mine, yours = (future.exception(PATIENCE) for future in others)
    assert type(mine) is type(yours) is given
    assert mine is not yours
    assert mine is not error
    assert mine.__cause__ is yours.__cause__ is error
    assert getattr(mine, "retry_after", None) == getattr(error, "retry_after", None)
    assert str(error.args[0]) in str(mine)


def test_a_store_that_answers_too_few_fails_all_and_wedges_nobody(pool: ThreadPoolExecutor) -> None:
    sky = Sky(lambda items: items[:-1])
    sky.land()
    lane = Lane(sky.fly)
    for _ in range(2):
        with pytest.raises(StoreError, match="0 answers to 1 questions"):
            pool.submit(lane.submit, 1).result(PATIENCE)


def test_a_copied_error_keeps_what_it_says() -> None:
    error = StoreUnavailable("gone", retry_after=2.5)
    own = as_own(error)
    assert (own.detail, own.retry_after, own.args) == ("gone", 2.5, ("gone",))  # type: ignore[attr-defined]


def test_every_answer_goes_to_its_own_caller_among_many_threads(pool: ThreadPoolExecutor) -> None:
    sky = Sky()
    sky.land(16 * 150)
    lane = Lane(sky.fly, most=5)

    def caller(name: int) -> None:
        for count in range(150):
            assert lane.submit((name, count)) == f"<{(name, count)}>"

    for future in [pool.submit(caller, name) for name in range(16)]:
        future.result(PATIENCE)
    flown = [item for group in sky.groups for item in group]
    assert len(flown) == len(set(flown)) == 16 * 150
    assert max(map(len, sky.groups)) <= 5
    assert all([count for caller, count in flown if caller == name] == list(range(150)) for name in range(16))


# Interruptions: a signal's exception may come at any point of the main thread


class Interrupted(BaseException):
    pass


def interrupt_in_main_thread(*_: Any) -> None:
    raise Interrupted


@contextmanager
def interrupted_after(prepare: Callable[[], None]) -> Iterator[None]:
    """The block, which must be interrupted; the signal comes when *prepare* returns."""

    def send() -> None:
        prepare()
        time.sleep(0.01)  # let the main thread come to rest
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    former = signal.signal(signal.SIGUSR1, interrupt_in_main_thread)
    sender = threading.Thread(target=send)
    sender.start()
    try:
        with pytest.raises(Interrupted):
            yield
    finally:
        sender.join()
        signal.signal(signal.SIGUSR1, former)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, Interrupted])
def test_an_interrupted_leader_wedges_nobody_and_hands_its_interruption_to_nobody(
    pool: ThreadPoolExecutor, kind: type[BaseException]
) -> None:
    flights = 0

    def answer(items: list[int]) -> list[int]:
        nonlocal flights
        flights += 1
        return fail(kind()) if flights == 2 else items

    sky = Sky(answer)
    lane = Lane(sky.fly, most=2)
    first = take_off(pool, lane, sky, 0)
    leader, passenger, *others = queue_up(pool, lane, [1, 2, 3, 4])
    sky.land()
    assert first.result(PATIENCE) == 0
    assert type(leader.exception(PATIENCE)) is kind
    assert type(passenger.exception(PATIENCE)) is StoreError
    assert "may or may not have happened" in str(passenger.exception())
    assert [future.result(PATIENCE) for future in others] == [3, 4]
    assert lane.submit(5) == 5


def test_a_caller_interrupted_before_its_flight_takes_its_item_back(pool: ThreadPoolExecutor) -> None:
    sky = Sky()
    lane = Lane(sky.fly)
    first = take_off(pool, lane, sky, 0)
    with interrupted_after(lambda: until(lambda: len(lane._waiting) == 1)):
        lane.submit("mine")
    (other,) = queue_up(pool, lane, [1])
    sky.land()
    assert [first.result(PATIENCE), other.result(PATIENCE)] == ["<0>", "<1>"]
    assert sky.groups == [[0], [1]]


@pytest.mark.parametrize(("item", "expected"), [("good", [("good", "<good>")]), ("bad", [])])
def test_the_answer_of_a_caller_interrupted_in_flight_is_given_back(
    pool: ThreadPoolExecutor, item: str, expected: list[Any]
) -> None:
    given_back: list[Any] = []

    def abandoned(item: Any, answer: Any) -> Plan[None]:
        given_back.append((yield Call(lambda: (item, answer))))

    sky = Sky(lambda items: [ValueError() if item == "bad" else f"<{item}>" for item in items])
    lane = Lane(sky.fly, abandoned=abandoned)
    first = take_off(pool, lane, sky, 0)
    (leader,) = queue_up(pool, lane, [1])

    def fly_together() -> None:
        until(lambda: len(lane._waiting) == 2)
        sky.land(1)
        until(lambda: len(sky.groups) == 2)

    with interrupted_after(fly_together):
        lane.submit(item)
    sky.land()
    assert [first.result(PATIENCE), leader.result(PATIENCE)] == ["<0>", "<1>"]
    assert sky.groups == [[0], [1, item]]
    assert given_back == expected


def test_an_answer_that_arrives_with_the_interruption_is_given_back() -> None:
    given_back: list[Any] = []

    def abandoned(item: Any, answer: Any) -> Plan[None]:
        given_back.append(item)
        return
        yield

    sky = Sky()
    sky.land()
    lane: Lane[str] = Lane(sky.fly, abandoned=abandoned)
    pass_lead = lane._pass_lead

    def interrupted(seat: Any) -> None:
        pass_lead(seat)
        lane._pass_lead = pass_lead  # type: ignore[method-assign]
        raise Interrupted

    lane._pass_lead = interrupted  # type: ignore[method-assign]
    with pytest.raises(Interrupted):
        lane.submit("mine")
    assert given_back == ["mine"]
    assert lane.submit("next") == "<next>"


def test_a_leader_interrupted_while_it_wakes_the_others_leaves_nobody_asleep(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    sky, wake, struck = Sky(), Seat.wake, []

    def interrupted(seat: Seat[Any]) -> None:
        if seat.item == "passenger" and not struck:
            struck.append(seat)
            raise Interrupted
        wake(seat)

    monkeypatch.setattr(Seat, "wake", interrupted)
    lane = Lane(sky.fly)
    take_off(pool, lane, sky, 0)
    leader, passenger, last = queue_up(pool, lane, ["leader", "passenger", "last"])
    sky.land()
    assert type(leader.exception(PATIENCE)) is Interrupted
    assert passenger.result(PATIENCE) == "<passenger>"
    assert type(last.exception(PATIENCE)) is StoreError
    assert lane.submit("next") == "<next>"


def test_a_failure_to_give_back_is_logged_and_disturbs_nobody(
    pool: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    sky = Sky()
    lane = Lane(sky.fly, abandoned=lambda item, answer: fail(StoreUnavailable("gone")))
    first = take_off(pool, lane, sky, 0)
    (leader,) = queue_up(pool, lane, [1])
    lane._waiting[0].left = True  # as an interruption would
    with caplog.at_level(logging.ERROR, "oncemore"):
        sky.land()
        assert [first.result(PATIENCE), leader.result(PATIENCE)] == ["<0>", "<1>"]
        until(lambda: bool(caplog.records))
    assert "could not be given back" in caplog.text


def test_interruptions_at_any_point_wedge_nobody(pool: ThreadPoolExecutor) -> None:
    """Signals strike one caller between any two steps; all others get their answers, or are told."""

    def fly(items: list[Any]) -> Plan[list[str]]:
        yield Call(time.sleep, 0)  # let others come
        return [f"<{item}>" for item in items]

    def bystander(name: int) -> int:
        answers = 0
        while not stop:
            with suppress(StoreError):  # the one who was struck had the lead
                assert lane.submit(name) == f"<{name}>"
                answers += 1
        return answers

    lane, stop = Lane(fly, most=3), False
    bystanders = [pool.submit(bystander, name) for name in range(4)]
    with signals_at_any_moment() as next_one:
        for _ in range(300):
            with suppress(Interrupted):
                next_one.release()
                while True:
                    with suppress(StoreError):
                        assert lane.submit("struck") == "<struck>"
    stop = True
    assert all(future.result(PATIENCE) for future in bystanders)
    assert lane.submit("last") == "<last>"


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

    former = signal.signal(signal.SIGUSR1, interrupt_in_main_thread)
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
from oncemore.core.lane import Lane
from oncemore.core.plan import Call

open_again = threading.Event()

def fly(items):
    if items == ["parent"]:
        yield Call(open_again.wait, 20)
    return [os.getpid() for _ in items]

lane = Lane(fly)
answers = []
flying = threading.Thread(target=lambda: answers.append(lane.submit("parent")))
flying.start()
while lane._leader is None or lane._waiting:
    time.sleep(0.001)
waiting = threading.Thread(target=lambda: answers.append(lane.submit("waiting")))
waiting.start()
while not lane._waiting:
    time.sleep(0.001)

def hold(lock):
    with lock:
        held.set()
        let_go.wait(20)

held, let_go = threading.Event(), threading.Event()
threading.Thread(target=hold, args=[lane._lock]).start()
held.wait(20)
child = os.fork()  # at the worst moment
let_go.set()
if child == 0:
    sys.exit(0 if lane.submit("child") == os.getpid() else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
open_again.set()
flying.join(20), waiting.join(20)
assert answers == [os.getpid()] * 2, answers
"""


def test_a_forked_child_can_use_a_lane_that_was_in_use_and_so_can_its_parent() -> None:
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=PATIENCE)
