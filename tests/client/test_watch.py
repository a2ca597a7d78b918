"""The one timer of an event loop that cuts each attempt at its own end."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from typing import Any

import pytest

from oncemore.client.watch import within


class Late(Exception):
    """It took too long."""


async def took(limit: float, seconds: float = 30.0) -> float:
    """How long it was until the attempt was cut."""
    began = time.monotonic()
    with pytest.raises(Late):
        await within(asyncio.sleep(seconds), limit, Late)
    return time.monotonic() - began


def cancelling() -> int:
    task = asyncio.current_task()
    assert task is not None
    return task.cancelling()


async def test_each_of_many_attempts_is_cut_at_its_own_end() -> None:
    """CASES 37.  Also those that came later and end sooner, and in the order of their ends."""
    limits = [0.6, 0.1, 0.35, 0.2, 0.102, 0.5]
    tasks = []
    for limit in limits:
        tasks.append(asyncio.create_task(took(limit)))
        await asyncio.sleep(0.01)
    cut = await asyncio.gather(*tasks)
    assert all(limit <= after < limit + 2 for limit, after in zip(limits, cut, strict=True))
    assert [limits[at] for at in sorted(range(len(limits)), key=lambda at: cut[at])] == sorted(limits)


async def test_what_ends_in_time_is_left_alone() -> None:
    assert await within(asyncio.sleep(0, "first"), 0.05, Late) == "first"
    await asyncio.sleep(0.1)  # the timer has looked, and found nothing
    assert await within(asyncio.sleep(0.02, "second"), 0.5, Late) == "second"
    await took(0.05)
    assert cancelling() == 0


async def test_a_cancellation_from_elsewhere_is_no_lateness() -> None:
    """CASES 37."""
    task = asyncio.create_task(within(asyncio.sleep(30), 30, Late))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_who_is_cancelled_and_late_at_once_is_cancelled() -> None:
    """CASES 37.  As with asyncio.timeout: somebody else waits for this task to be gone."""

    async def stubborn() -> None:
        try:
            await asyncio.sleep(30)
        finally:
            task.cancel()  # while it is being cut

    task: asyncio.Task[Any] = asyncio.create_task(within(stubborn(), 0.05, Late))
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_error_that_came_of_the_cut_is_told_as_it_is_and_the_task_goes_on() -> None:
    async def converting() -> None:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            raise ConnectionResetError from None

    with pytest.raises(ConnectionResetError):
        await within(converting(), 0.05, Late)
    assert cancelling() == 0


async def test_a_deadline_around_it_is_still_that_ones() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await within(asyncio.sleep(30), 30, Late)


def test_a_loop_is_not_kept_alive_by_the_timer_that_it_was_given() -> None:
    def used() -> weakref.ref[Any]:
        loop = asyncio.new_event_loop()
        loop.run_until_complete(within(asyncio.sleep(0), 3600, Late))
        loop.close()
        return weakref.ref(loop)

    loop = used()
    gc.collect()
    assert loop() is None
