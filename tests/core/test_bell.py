"""The bell: whoever waits for a record is woken by its change, from any thread, and no ring is lost."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from oncemore import Guard, Operation
from oncemore._ledger.connect import connect
from oncemore._runtime.wakeups import Bell, Wait, Waiter

PATIENCE = 20.0  # a wait that long was not woken
ID = ("scope", "key")
OTHER = ("scope", "other key")

Waits = Callable[[Wait], Awaitable[None]]


async def blocking(wait: Wait) -> None:
    await asyncio.to_thread(wait.run)


async def awaited(wait: Wait) -> None:
    await wait.arun()


both = pytest.mark.parametrize("waits", [blocking, awaited])


async def seconds(waiting: Awaitable[Any]) -> float:
    begun = time.monotonic()
    await waiting
    return time.monotonic() - begun


@both
async def test_a_ring_from_another_thread_wakes_whoever_waits_for_the_record(waits: Waits) -> None:
    bell = Bell()
    with bell.waiting(ID) as waiter:
        waiting = asyncio.create_task(seconds(waits(waiter.wait(PATIENCE))))
        while waiter._wake is None:
            await asyncio.sleep(0.001)
        await asyncio.to_thread(bell.ring, ID)
        assert await waiting < PATIENCE
        assert await seconds(waits(waiter.wait(0.02))) >= 0.019  # that ring is over


@both
async def test_a_ring_before_the_wait_is_not_lost(waits: Waits) -> None:
    bell = Bell()
    with bell.waiting(ID) as waiter:
        bell.ring(ID)
        assert await seconds(waits(waiter.wait(PATIENCE))) < PATIENCE


@both
async def test_one_ring_ends_one_wait(waits: Waits) -> None:
    bell = Bell()
    with bell.waiting(ID) as waiter:
        bell.ring(ID)
        bell.ring(ID)
        await waits(waiter.wait(PATIENCE))
        assert await seconds(waits(waiter.wait(0.02))) >= 0.019


@both
async def test_a_wait_ends_by_itself(waits: Waits) -> None:
    with Bell().waiting(ID) as waiter:
        assert await seconds(waits(waiter.wait(0.02))) >= 0.019
        assert waiter._wake is None


@both
async def test_another_records_ring_wakes_nobody(waits: Waits) -> None:
    bell = Bell()
    with bell.waiting(ID) as waiter:
        bell.ring(OTHER)
        assert await seconds(waits(waiter.wait(0.02))) >= 0.019


@both
async def test_no_ring_is_lost_however_close_it_comes_to_the_wait(waits: Waits) -> None:
    """Each round's change must be seen before the next one is made."""
    bell = Bell()
    changed, seen = 0, threading.Semaphore(0)
    rounds = 100

    def change() -> None:
        nonlocal changed
        for _ in range(rounds):
            changed += 1
            bell.ring(ID)
            assert seen.acquire(timeout=PATIENCE)

    changing = asyncio.create_task(asyncio.to_thread(change))
    with bell.waiting(ID) as waiter:
        for expected in range(1, rounds + 1):
            while changed < expected:
                assert await seconds(waits(waiter.wait(PATIENCE))) < PATIENCE
            seen.release()
    await changing


async def test_all_who_wait_for_a_record_are_woken_on_threads_and_loops_alike() -> None:
    bell = Bell()
    ready = 0

    async def wait(waits: Waits) -> None:
        nonlocal ready
        with bell.waiting(ID) as waiter:
            ready += 1
            await waits(waiter.wait(PATIENCE))

    tasks = [asyncio.create_task(wait(waits)) for waits in (blocking, awaited) for _ in range(3)]
    while ready < 6:
        await asyncio.sleep(0.001)
    bell.ring(ID)
    async with asyncio.timeout(PATIENCE / 2):
        await asyncio.gather(*tasks)


async def test_everyone_is_woken_when_messages_may_have_been_missed() -> None:
    bell = Bell()
    bell.ring_all()
    with bell.waiting(ID) as one, bell.waiting(OTHER) as other:
        bell.ring_all()
        assert await seconds(asyncio.gather(one.wait(PATIENCE).arun(), other.wait(PATIENCE).arun())) < PATIENCE


async def test_a_cancelled_wait_leaves_nothing_behind() -> None:
    bell = Bell()
    waiters: list[Waiter] = []

    async def wait() -> None:
        with bell.waiting(ID) as waiter:
            waiters.append(waiter)
            await waiter.wait(PATIENCE).arun()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert waiters[0]._wake is None
    assert bell._waiters == {}


async def test_a_ring_that_comes_with_the_end_of_the_wait_is_harmless() -> None:
    waiter, troubles = Waiter(), []  # a callback's error is told to the loop, and to nobody else
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: troubles.append(context))
    waiting = asyncio.ensure_future(waiter.wait(PATIENCE).arun())
    await asyncio.sleep(0)
    waiter.ring()
    waiter.ring()
    await waiting
    await asyncio.sleep(0)
    assert troubles == []


def test_the_one_who_rings_does_not_suffer_from_a_loop_that_was_closed_under_its_waiters() -> None:
    bell = Bell()
    loop = asyncio.new_event_loop()

    async def wait() -> None:
        with bell.waiting(ID) as waiter:
            await waiter.wait(PATIENCE).arun()

    waiting = loop.create_task(wait())
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    bell.ring(ID)
    waiting._log_destroy_pending = False  # type: ignore[attr-defined]


def test_a_waiter_is_forgotten_when_its_block_ends_and_the_others_are_not() -> None:
    bell = Bell()
    with bell.waiting(ID):
        with bell.waiting(ID) as second:
            pass
        assert second not in bell._waiters[ID]
        assert len(bell._waiters[ID]) == 1
    assert bell._waiters == {}


def test_a_forgotten_wait_may_end_while_the_bell_rings() -> None:
    """A plan that nobody goes on with ends when the garbage is collected: at any time, in any thread."""
    bell = Bell()

    def forgotten() -> Iterator[Waiter]:
        with bell.waiting(ID) as waiter:
            yield waiter

    class Collecting(str):
        def __hash__(self) -> int:
            gc.collect()
            return hash(str(self))

    plan: list[Any] = [forgotten()]
    next(plan[0])
    plan.append(plan)  # a cycle, which only the collector ends
    del plan
    ringing = threading.Thread(target=bell.ring, args=[("scope", Collecting("key"))], daemon=True)
    ringing.start()
    ringing.join(PATIENCE)
    assert not ringing.is_alive()
    assert bell._waiters == {}


def test_listeners_that_come_at_once_are_all_heard_of() -> None:
    bell = Bell()

    def come() -> None:
        for _ in range(200):
            bell.hear(lambda id: None)

    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=come) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(switch)
    assert len(bell._listeners) == 800


def test_listeners_hear_of_every_change() -> None:
    bell = Bell()
    heard: list[Any] = []
    bell.hear(heard.append)
    bell.hear(heard.append)
    bell.ring(ID)
    bell.ring(OTHER)
    bell.ring_all()
    assert heard == [ID, ID, OTHER, OTHER, None, None]


def test_a_store_keeps_nothing_of_a_guard_that_was_dropped() -> None:
    store = connect("memory://")
    caches = [weakref.ref(Guard(store).cache) for _ in range(3)]
    gc.collect()
    last = Guard(store)
    last.run(Operation(*ID), lambda op: 1)
    assert last.cached(Operation(*ID), last.policy) is not None
    store.bell.ring(ID)
    assert last.cached(Operation(*ID), last.policy) is None  # it was told
    assert [cache() for cache in caches] == [None] * 3
    assert len(store.bell._listeners) == 1


FORK = """
import os, sys, threading
from oncemore._runtime.wakeups import Bell

def hold(lock):
    with lock:
        held.set()
        let_go.wait(20)

bell, heard, held, let_go = Bell(), [], threading.Event(), threading.Event()
bell.hear(heard.append)
with bell.waiting(("s", "k")) as waiter:
    threading.Thread(target=hold, args=[bell._lock]).start()
    held.wait(20)
    child = os.fork()  # at the worst moment
    let_go.set()
    if child == 0:
        with bell.waiting(("s", "mine")) as mine:
            bell.ring(("s", "mine"))
            mine.wait(20).run()
        bell.ring(("s", "k"))
        assert heard == [("s", "mine"), ("s", "k")]
        assert waiter._rung is False
if child == 0:
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def test_a_forked_child_has_a_bell_of_its_own_with_the_same_listeners() -> None:
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=PATIENCE)
