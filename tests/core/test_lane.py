"""A lane among threads: what came in while the last group was in flight flies together, and nobody is forgotten."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from oncemore._runtime.batching import Ask, Lane, as_own
from oncemore._runtime.plan import Call, Plan, run
from oncemore.errors import StoreError, StoreUnavailable

from .sky import PATIENCE, Sky, fail, queue_up, take_off


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(32) as pool:
        yield pool


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


FORK = """
import os, sys, threading, time
from oncemore._runtime.batching import Lane
from oncemore._runtime.plan import Call

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
