"""Deadlines of awaited attempts: they are cut at their end, and a cancellation from elsewhere stays a cancellation."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from oncemore.client.deadlines import with_deadline


class Late(Exception):
    """The attempt took too long."""


def cancelling() -> int:
    task = asyncio.current_task()
    assert task is not None
    return task.cancelling()


async def test_deadline_cuts_each_of_many_attempts_at_its_own_end() -> None:
    async def duration(limit: float) -> float:
        began = time.monotonic()
        with pytest.raises(Late):
            await with_deadline(asyncio.sleep(30), limit, Late)
        return time.monotonic() - began

    limits = [0.4, 0.1, 0.25]
    durations = await asyncio.gather(*map(duration, limits))
    assert all(limit <= took < limit + 2 for limit, took in zip(limits, durations, strict=True))
    assert cancelling() == 0


async def test_deadline_leaves_result_in_time_alone() -> None:
    assert await with_deadline(asyncio.sleep(0, "first"), 0.05, Late) == "first"
    await asyncio.sleep(0.1)
    assert cancelling() == 0


async def test_deadline_passes_cancellation_from_elsewhere_on() -> None:
    task = asyncio.create_task(with_deadline(asyncio.sleep(30), 30, Late))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_deadline_and_cancellation_together_are_a_cancellation() -> None:
    async def stubborn() -> None:
        try:
            await asyncio.sleep(30)
        finally:
            task.cancel()  # while it is being cut

    task: asyncio.Task[Any] = asyncio.create_task(with_deadline(stubborn(), 0.05, Late))
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_deadline_keeps_error_that_the_cut_caused() -> None:
    async def converting() -> None:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            raise ConnectionResetError from None

    with pytest.raises(ConnectionResetError):
        await with_deadline(converting(), 0.05, Late)
    assert cancelling() == 0


async def test_deadline_inside_earlier_timeout_leaves_that_timeout_its_own() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await with_deadline(asyncio.sleep(30), 30, Late)
