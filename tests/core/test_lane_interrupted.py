"""A lane among threads, interrupted: a signal's exception may come at any point, and wedges nobody."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from random import Random
from typing import Any

import pytest

from oncemore._runtime.batching import Lane, Seat
from oncemore._runtime.plan import Call, Plan
from oncemore.errors import StoreError, StoreUnavailable

from .sky import PATIENCE, Sky, fail, queue_up, take_off, until


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(32) as pool:
        yield pool


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
