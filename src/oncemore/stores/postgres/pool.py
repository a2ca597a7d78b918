"""A pool of psycopg's for an event loop that may end at any moment."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from psycopg_pool import AsyncConnectionPool


class LoopPool(AsyncConnectionPool[Any]):
    """A pool of our own on an event loop, whose tasks end when they are cancelled: asyncio.run waits for them at its end.

    A worker that is cancelled while it connects would take that for a failure, and go back to its queue; the scheduler, one
    that comes together with an order.  A psycopg_pool that is made in another way than those we know is left as it is.
    """

    def _start_workers(self) -> None:
        sched = getattr(self, "_sched", None)
        if hasattr(sched, "_event"):
            sched._event = Wake()  # type: ignore[union-attr]
        super()._start_workers()

    @classmethod
    async def worker(cls, q: Any, *more: Any, **others: Any) -> None:
        await super().worker(Tasks(q), *more, **others)  # type: ignore[arg-type]


class Tasks:
    """A worker's view of the queue *q*."""

    def __init__(self, q: Any) -> None:
        self.q = q

    def __getattr__(self, name: str) -> Any:
        return getattr(self.q, name)

    async def get(self) -> Any:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError
        return await self.q.get()


class Wake(asyncio.Event):
    """What the scheduler waits for; `asyncio.wait_for` loses cancellations before Python 3.12."""

    async def wait_timeout(self, timeout: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                return await self.wait()
        return False
