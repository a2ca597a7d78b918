"""The heartbeat on event loops: one timer per loop renews leases in time."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from contextvars import ContextVar

import pytest

from oncemore import Guard
from oncemore._ledger.model import Operation
from oncemore._runtime.heartbeat import NEVER, Renewal

from .pulse import LONG, Ledger


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    ledger = Ledger()
    yield ledger
    ledger.heartbeat.close()


@asynccontextmanager
async def kept(ledger: Ledger, lease: float = LONG, key: str = "k") -> AsyncGenerator[Renewal]:
    """A lease that is kept alive within the block, by the loop's timer."""
    renewal = ledger.renewal(lease, key)
    await renewal.arun()
    try:
        yield renewal
    finally:
        renewal.stop()


async def test_awaiting_holder_is_renewed_each_third_until_it_stops(ledger: Ledger) -> None:
    begun = time.monotonic()
    async with kept(ledger, 0.09):
        await ledger.auntil_renewed("k", 3)
    assert all(at - begun >= 0.03 * count for count, at in enumerate(ledger.times("k"), 1))
    renewals = len(ledger.renewals)
    await asyncio.sleep(0.1)
    assert len(ledger.renewals) <= renewals + 1
    timer = ledger.heartbeat.on_loop()
    assert (timer.renewals, timer.shortest) == (set(), NEVER)


async def test_cancelled_performer_is_not_renewed_any_more() -> None:
    guard = Guard("memory://")
    task = asyncio.create_task(guard.arun(Operation("s", "k"), lambda op: asyncio.sleep(60)))
    await asyncio.sleep(0)
    assert len(guard.heartbeat.on_loop().renewals) == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert guard.heartbeat.on_loop().renewals == set()


async def test_leases_of_all_lengths_are_renewed_by_one_timer(ledger: Ledger) -> None:
    """Each is shorter than the ones before it, so that each shortens the interval."""

    async def work(lease: float) -> None:
        async with kept(ledger, lease, str(lease)):
            await ledger.auntil_renewed(str(lease), 2)

    begun = time.monotonic()
    await asyncio.gather(*(work(0.5 - 0.02 * count) for count in range(20)))
    assert ledger.looks <= 20 + 6 * (time.monotonic() - begun) / 0.12


async def test_longer_lease_added_later_does_not_move_the_timer(ledger: Ledger) -> None:
    timer = ledger.heartbeat.on_loop()
    async with kept(ledger, 0.06, "short"):
        soonest = timer.started
        async with kept(ledger, LONG, "long"):
            assert timer.started == soonest
            await ledger.auntil_renewed("short", 1)
    assert ledger.times("long") == []


async def test_stream_of_short_leases_does_not_delay_the_tick(ledger: Ledger) -> None:
    async with kept(ledger, 0.006, "first"), asyncio.timeout(20):
        while not ledger.times("first"):
            async with kept(ledger, 0.006, "other"):
                await asyncio.sleep(0.0005)


async def test_lost_lease_is_not_renewed_again(ledger: Ledger) -> None:
    def refuse(renewal: Renewal) -> None:
        renewal.lost = True

    ledger.refuses = refuse
    async with kept(ledger, 0.03):
        await asyncio.sleep(0.2)
    assert len(ledger.renewals) == 1


async def test_failing_renewal_is_logged_and_tried_again(ledger: Ledger, caplog: pytest.LogCaptureFixture) -> None:
    attempts = 0

    async def fail_once(renewal: Renewal) -> None:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            raise ZeroDivisionError

    ledger.refuses = fail_once
    with caplog.at_level(logging.ERROR, "oncemore"):
        async with kept(ledger, 0.06):
            await ledger.auntil_renewed("k", 1)
    assert "could not be renewed" in caplog.text


async def test_renewal_runs_in_an_empty_context(ledger: Ledger) -> None:
    user: ContextVar[str] = ContextVar("user", default="nobody")
    seen: list[str] = []
    ledger.refuses = lambda renewal: seen.append(user.get())
    user.set("the holder")
    async with kept(ledger, 0.03):
        await ledger.auntil_renewed("k", 1)
    assert seen == ["nobody"]


async def test_plain_function_may_be_performed_on_a_loop() -> None:
    assert (await Guard("memory://").arun(Operation("s", "k"), lambda op: op.key)).value == "k"


async def test_blocking_call_on_a_loop_is_renewed_by_the_thread(ledger: Ledger) -> None:
    """The loop is blocked, so that its own timer could not tick."""
    with ledger.kept(0.06):
        ledger.until_renewed("k", 2)
    assert threading.current_thread() not in ledger.renewers


def test_loop_that_has_ended_is_not_kept(ledger: Ledger) -> None:
    async def main() -> weakref.ref[asyncio.AbstractEventLoop]:
        async with kept(ledger):
            await asyncio.sleep(0)
        return weakref.ref(asyncio.get_running_loop())

    loop = asyncio.run(main())
    gc.collect()
    assert loop() is None


def test_loops_in_several_threads_keep_their_own_leases_alive(ledger: Ledger) -> None:
    async def main(key: str) -> None:
        async with kept(ledger, 0.06, key):
            await ledger.auntil_renewed(key, 2)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda key: asyncio.run(main(key)), "abcd"))
    assert len(ledger.renewers) == 4


@pytest.fixture
def eager_threads() -> Iterator[None]:
    """Threads take turns as often as they can."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


async def test_lease_ended_by_thread_keeps_the_timer_of_others(ledger: Ledger, eager_threads: None) -> None:
    """Django closes a stream, and with it ends its lease, in a thread, while the loop looks at the others."""
    timer, over = ledger.heartbeat.on_loop(), threading.Event()
    for _ in range(3000):
        timer.add(ledger.renewal(LONG, "stream"))

    def close_streams() -> None:
        while not over.is_set():
            renewal = ledger.renewal(LONG, "stream")
            renewal.group = timer.renewals
            timer.renewals.add(renewal)
            renewal.stop()

    with ThreadPoolExecutor(1) as pool:
        closed = pool.submit(close_streams)
        try:
            async with kept(ledger, 0.03):
                await ledger.auntil_renewed("k", 20)
        finally:
            over.set()
        closed.result()
