"""The heartbeat on event loops: the same promise, kept by one timer per loop."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar

import pytest

from oncemore._ledger.context import Op
from oncemore._ledger.heartbeat import Beat, end
from oncemore._ledger.model import Lease, Operation

from .pulse import LONG, Ledger, two_leases


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    ledger = Ledger()
    yield ledger
    ledger.heart.close()


async def test_an_awaited_performer_is_renewed_at_each_third_of_its_lease_until_it_ends(ledger: Ledger) -> None:
    """CASES 24."""
    begun = time.monotonic()

    async def work(op: Op) -> str:
        await ledger.auntil_renewed(op.key, 3)
        return "done"

    assert await ledger.perform(work, lease=0.09).arun() == "done"
    assert all(at - begun >= 0.03 * count for count, at in enumerate(ledger.times("k"), 1))
    renewals = len(ledger.renewals)
    await asyncio.sleep(0.1)
    assert len(ledger.renewals) <= renewals + 1
    assert ledger.heart.on_loop().beats == set()
    assert ledger.heart.on_loop().tasks == set()


async def test_a_cancelled_performer_is_not_renewed_any_more(ledger: Ledger) -> None:
    task = asyncio.create_task(ledger.perform(lambda op: asyncio.sleep(60)).arun())
    await asyncio.sleep(0)
    assert len(ledger.heart.on_loop().beats) == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ledger.heart.on_loop().beats == set()


async def test_awaited_performers_of_all_lengths_are_renewed_by_one_timer(ledger: Ledger) -> None:
    """Each is shorter than the ones before it, so that each hastens the timer."""

    async def work(op: Op) -> None:
        await ledger.auntil_renewed(op.key, 2)

    leases = [0.5 - 0.02 * count for count in range(20)]
    begun = time.monotonic()
    await asyncio.gather(*(ledger.perform(work, lease=lease, key=str(lease)).arun() for lease in leases))
    assert ledger.looks <= 20 + len(ledger.renewals) + 40 * (time.monotonic() - begun)


async def test_a_longer_lease_that_comes_later_needs_no_timer_of_its_own(ledger: Ledger) -> None:
    beats = ledger.heart.on_loop()
    soonest: list[float] = []

    async def longer(op: Op) -> None:
        soonest.append(beats.next)
        await ledger.auntil_renewed("short", 1)

    async def short(op: Op) -> None:
        soonest.append(beats.next)
        await ledger.perform(longer, lease=LONG, key="long").arun()

    await ledger.perform(short, lease=0.06, key="short").arun()
    assert soonest[0] == soonest[1]
    assert ledger.times("long") == []


async def test_all_leases_that_an_awaited_performer_depends_on_are_renewed(ledger: Ledger) -> None:
    await two_leases(ledger, lambda op: ledger.auntil_renewed("outer", 2)).arun()
    assert ledger.times("inner") == []


async def test_a_lost_lease_does_not_keep_the_loop_busy(ledger: Ledger) -> None:
    def refuse(beat: Beat) -> None:
        beat.lost = True

    ledger.refuses = refuse
    await ledger.perform(lambda op: asyncio.sleep(0.2), lease=0.03).arun()
    assert len(ledger.renewals) == 1
    assert ledger.looks < 10


async def test_an_awaited_renewal_that_fails_in_an_unforeseen_way_is_logged_and_tried_again(
    ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    attempts = 0

    async def fail_once(beat: Beat) -> None:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            raise ZeroDivisionError

    ledger.refuses = fail_once
    with caplog.at_level(logging.ERROR, "oncemore"):
        await ledger.perform(lambda op: ledger.auntil_renewed("k", 1), lease=0.06).arun()
    assert "could not be renewed" in caplog.text


async def test_a_renewal_carries_nobodys_context(ledger: Ledger) -> None:
    user: ContextVar[str] = ContextVar("user", default="nobody")
    seen: list[str] = []
    ledger.refuses = lambda beat: seen.append(user.get())
    user.set("the performer")
    await ledger.perform(lambda op: ledger.auntil_renewed("k", 1), lease=0.03).arun()
    assert seen == ["nobody"]


async def test_a_plain_function_may_be_performed_on_a_loop(ledger: Ledger) -> None:
    assert await ledger.perform(lambda op: op.key).arun() == "k"


def test_a_loop_that_has_ended_is_not_kept(ledger: Ledger) -> None:
    async def main() -> weakref.ref[asyncio.AbstractEventLoop]:
        await ledger.perform(lambda op: asyncio.sleep(0)).arun()
        return weakref.ref(asyncio.get_running_loop())

    loop = asyncio.run(main())
    gc.collect()
    assert loop() is None


def test_loops_in_several_threads_keep_their_own_leases_alive(ledger: Ledger) -> None:
    async def main(key: str) -> None:
        await ledger.perform(lambda op: ledger.auntil_renewed(key, 2), lease=0.06, key=key).arun()

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


async def test_a_thread_that_ends_a_lease_does_not_stop_the_timer_of_the_others(
    ledger: Ledger, eager_threads: None
) -> None:
    """CASES 24: Django closes a stream, and with it ends its lease, in a thread; on the loop, the others are looked at."""
    loop, over = ledger.heart.on_loop(), threading.Event()
    held = Lease(Operation("s", "stream"), 1, 0.0)
    loop.add(tuple(ledger.heart.beat(held, LONG) for _ in range(3000)))

    def close_streams() -> None:
        while not over.is_set():
            beat = ledger.heart.beat(held, LONG)
            loop.beats.add(beat)
            end(loop.beats, (beat,))

    with ThreadPoolExecutor(1) as pool:
        closed = pool.submit(close_streams)
        try:
            await ledger.perform(lambda op: ledger.auntil_renewed("k", 20), lease=0.03).arun()
        finally:
            over.set()
        closed.result()
