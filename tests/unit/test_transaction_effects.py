"""Effects on a connection whose caller is cancelled or gone."""

from __future__ import annotations

import asyncio
import threading

import pytest

from oncemore._ledger.transactions import Do, at_once, in_thread


async def test_in_thread_cancelled_caller_waits_for_the_thread() -> None:
    """The thread uses the connection, so nobody else may use it before the thread has ended."""
    let_go, ended = threading.Event(), threading.Event()

    def work() -> None:
        let_go.wait(10)
        ended.set()
        raise LookupError  # which nobody hears any more

    task = asyncio.create_task(in_thread(work))
    for _ in range(3):
        await asyncio.sleep(0.01)
        task.cancel()
    await asyncio.sleep(0.01)
    assert not task.done()
    let_go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_in_thread_returns_the_result() -> None:
    assert await in_thread(lambda: 5) == 5


@pytest.mark.parametrize("failing", [True, False])
async def test_at_once_starts_a_task_on_the_loop(failing: bool) -> None:
    done = asyncio.Event()

    async def work() -> None:
        done.set()
        if failing:
            raise LookupError

    at_once(Do(None, work))
    assert not done.is_set()
    await asyncio.wait_for(done.wait(), 5)


def test_at_once_without_a_loop_runs_the_plain_form() -> None:
    done: list[str] = []

    def plain() -> None:
        done.append("plain")
        raise LookupError

    async def awaited() -> None:
        done.append("awaited")

    at_once(Do(plain, awaited))
    at_once(Do(None, awaited))
    assert done == ["plain"]
