"""Wake-ups: a change of a record wakes its waiters, from any thread, and no notification is lost."""

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
from oncemore._runtime.wakeups import Wait, Waiter, Wakeups

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
async def test_notify_from_another_thread_wakes_the_waiter(waits: Waits) -> None:
    wakeups = Wakeups()
    with wakeups.waiting(ID) as waiter:
        waiting = asyncio.create_task(seconds(waits(waiter.wait(PATIENCE))))
        while waiter._wake is None:
            await asyncio.sleep(0.001)
        await asyncio.to_thread(wakeups.notify, ID)
        assert await waiting < PATIENCE
        assert await seconds(waits(waiter.wait(0.02))) >= 0.019  # that notification is over


@both
async def test_notify_before_the_wait_is_not_lost(waits: Waits) -> None:
    wakeups = Wakeups()
    with wakeups.waiting(ID) as waiter:
        wakeups.notify(ID)
        assert await seconds(waits(waiter.wait(PATIENCE))) < PATIENCE


@both
async def test_two_notifications_end_one_wait(waits: Waits) -> None:
    wakeups = Wakeups()
    with wakeups.waiting(ID) as waiter:
        wakeups.notify(ID)
        wakeups.notify(ID)
        await waits(waiter.wait(PATIENCE))
        assert await seconds(waits(waiter.wait(0.02))) >= 0.019


@both
async def test_wait_ends_after_its_timeout(waits: Waits) -> None:
    with Wakeups().waiting(ID) as waiter:
        assert await seconds(waits(waiter.wait(0.02))) >= 0.019
        assert waiter._wake is None


@both
async def test_notify_of_another_record_wakes_nobody(waits: Waits) -> None:
    wakeups = Wakeups()
    with wakeups.waiting(ID) as waiter:
        wakeups.notify(OTHER)
        assert await seconds(waits(waiter.wait(0.02))) >= 0.019


@both
async def test_notify_in_the_moment_of_the_wait_is_not_lost(waits: Waits) -> None:
    """Each round's change must be seen before the next one is made."""
    wakeups = Wakeups()
    changed, seen = 0, threading.Semaphore(0)
    rounds = 100

    def change() -> None:
        nonlocal changed
        for _ in range(rounds):
            changed += 1
            wakeups.notify(ID)
            assert seen.acquire(timeout=PATIENCE)

    changing = asyncio.create_task(asyncio.to_thread(change))
    with wakeups.waiting(ID) as waiter:
        for expected in range(1, rounds + 1):
            while changed < expected:
                assert await seconds(waits(waiter.wait(PATIENCE))) < PATIENCE
            seen.release()
    await changing


async def test_notify_wakes_all_waiters_on_threads_and_loops() -> None:
    wakeups = Wakeups()
    ready = 0

    async def wait(waits: Waits) -> None:
        nonlocal ready
        with wakeups.waiting(ID) as waiter:
            ready += 1
            await waits(waiter.wait(PATIENCE))

    tasks = [asyncio.create_task(wait(waits)) for waits in (blocking, awaited) for _ in range(3)]
    while ready < 6:
        await asyncio.sleep(0.001)
    wakeups.notify(ID)
    async with asyncio.timeout(PATIENCE / 2):
        await asyncio.gather(*tasks)


async def test_notify_all_wakes_waiters_of_every_record() -> None:
    wakeups = Wakeups()
    wakeups.notify_all()
    with wakeups.waiting(ID) as one, wakeups.waiting(OTHER) as other:
        wakeups.notify_all()
        assert await seconds(asyncio.gather(one.wait(PATIENCE).arun(), other.wait(PATIENCE).arun())) < PATIENCE


async def test_cancelled_wait_leaves_nothing_behind() -> None:
    wakeups = Wakeups()
    waiters: list[Waiter] = []

    async def wait() -> None:
        with wakeups.waiting(ID) as waiter:
            waiters.append(waiter)
            await waiter.wait(PATIENCE).arun()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert waiters[0]._wake is None
    assert wakeups._waiters == {}


async def test_second_notify_at_the_end_of_a_wait_is_harmless() -> None:
    waiter, troubles = Waiter(), []  # a callback's error is told to the loop, and to nobody else
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: troubles.append(context))
    waiting = asyncio.ensure_future(waiter.wait(PATIENCE).arun())
    await asyncio.sleep(0)
    waiter.notify()
    waiter.notify()
    await waiting
    await asyncio.sleep(0)
    assert troubles == []


def test_notify_ignores_waiters_of_a_closed_loop() -> None:
    wakeups = Wakeups()
    loop = asyncio.new_event_loop()

    async def wait() -> None:
        with wakeups.waiting(ID) as waiter:
            await waiter.wait(PATIENCE).arun()

    waiting = loop.create_task(wait())
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    wakeups.notify(ID)
    waiting._log_destroy_pending = False  # type: ignore[attr-defined]


def test_waiter_is_forgotten_when_its_block_ends() -> None:
    wakeups = Wakeups()
    with wakeups.waiting(ID):
        with wakeups.waiting(ID) as second:
            pass
        assert second not in wakeups._waiters[ID]
        assert len(wakeups._waiters[ID]) == 1
    assert wakeups._waiters == {}


def test_forgotten_wait_may_end_during_notify() -> None:
    """The garbage collector may close an abandoned plan at any time, in any thread."""
    wakeups = Wakeups()

    def forgotten() -> Iterator[Waiter]:
        with wakeups.waiting(ID) as waiter:
            yield waiter

    class Collecting(str):
        def __hash__(self) -> int:
            gc.collect()
            return hash(str(self))

    plan: list[Any] = [forgotten()]
    next(plan[0])
    plan.append(plan)  # a cycle, which only the collector ends
    del plan
    notifying = threading.Thread(target=wakeups.notify, args=[("scope", Collecting("key"))], daemon=True)
    notifying.start()
    notifying.join(PATIENCE)
    assert not notifying.is_alive()
    assert wakeups._waiters == {}


def test_subscribers_of_many_threads_are_all_kept() -> None:
    wakeups = Wakeups()

    def come() -> None:
        for _ in range(200):
            wakeups.subscribe(lambda id: None)

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
    assert len(wakeups._subscribers) == 800


def test_subscribers_are_called_for_every_change() -> None:
    wakeups = Wakeups()
    heard: list[Any] = []
    wakeups.subscribe(heard.append)
    wakeups.subscribe(heard.append)
    wakeups.notify(ID)
    wakeups.notify(OTHER)
    wakeups.notify_all()
    assert heard == [ID, ID, OTHER, OTHER, None, None]
    wakeups.unsubscribe(heard.append)
    wakeups.notify(ID)
    assert len(heard) == 6


def test_store_drops_the_cache_of_a_dropped_guard() -> None:
    store = connect("memory://")
    caches = [weakref.ref(Guard(store).cache) for _ in range(3)]
    gc.collect()
    last = Guard(store)
    last.run(Operation(*ID), lambda op: 1)
    assert last.cache.get(ID) is not None
    store.wakeups.notify(ID)
    assert last.cache.get(ID) is None  # it was told of the change
    assert [cache() for cache in caches] == [None] * 3
    assert len(store.wakeups._subscribers) == 1


FORK = """
import os, sys, threading
from oncemore._runtime.wakeups import Wakeups

def hold(lock):
    with lock:
        held.set()
        let_go.wait(20)

wakeups, heard, held, let_go = Wakeups(), [], threading.Event(), threading.Event()
wakeups.subscribe(heard.append)
with wakeups.waiting(("s", "k")) as waiter:
    threading.Thread(target=hold, args=[wakeups._lock]).start()
    held.wait(20)
    child = os.fork()  # at the worst moment
    let_go.set()
    if child == 0:
        with wakeups.waiting(("s", "mine")) as mine:
            wakeups.notify(("s", "mine"))
            mine.wait(20).run()
        wakeups.notify(("s", "k"))
        assert heard == [("s", "mine"), ("s", "k")]
        assert waiter._notified is False
if child == 0:
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def test_forked_child_has_the_subscribers_but_no_waiters() -> None:
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=PATIENCE)
