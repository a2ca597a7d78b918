"""Runs the slots of a schedule side by side: in threads, or in tasks of the running event loop."""

from __future__ import annotations

import _thread
import asyncio
import contextvars
import signal
import threading
from collections.abc import Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Protocol

from .._runtime.plan import Call, Effect, Plan, arun, run


class Runner(Protocol):
    """Starts plans.  At most *most* plans of a group run at the same time.  A plan must not raise."""

    def start(self, group: Hashable, most: int, plan: Plan[None]) -> None: ...
    def drain(self) -> Effect[None]: ...  # waits until all plans have ended


class ThreadRunner:
    """Runs plans in threads.  `close` drops plans that have not begun, and waits for the others."""

    def __init__(self) -> None:
        self._pools: dict[Hashable, ThreadPoolExecutor] = {}
        self._futures: set[Future[None]] = set()

    def start(self, group: Hashable, most: int, plan: Plan[None]) -> None:
        pool = self._pools.get(group)
        if pool is None:
            pool = self._pools[group] = ThreadPoolExecutor(most, thread_name_prefix="oncemore-jobs")
        future = pool.submit(contextvars.copy_context().run, run, plan)
        self._futures.add(future)
        future.add_done_callback(self._futures.discard)

    def drain(self) -> Effect[None]:
        return Call(lambda: wait(tuple(self._futures)))

    def close(self) -> None:
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
        for pool in self._pools.values():
            pool.shutdown(wait=True)


class TaskRunner:
    """Runs plans in tasks.  `stop` drops plans that have not begun, waits for the others, and then cancels them."""

    def __init__(self) -> None:
        self._groups: dict[Hashable, asyncio.Semaphore] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopped = False

    def start(self, group: Hashable, most: int, plan: Plan[None]) -> None:
        free = self._groups.setdefault(group, asyncio.Semaphore(most))
        task = asyncio.get_running_loop().create_task(self._run(free, plan))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, free: asyncio.Semaphore, plan: Plan[None]) -> None:
        async with free:
            if self._stopped:
                plan.close()
            else:
                await arun(plan)

    def drain(self) -> Effect[None]:
        return Call(self._await_all)

    async def _await_all(self) -> None:
        if self._tasks:
            await asyncio.wait(tuple(self._tasks))

    async def stop(self, grace: float) -> None:
        """Let the plans that have begun end for *grace* seconds; then cancel them, which releases their slots."""
        self._stopped = True
        tasks = tuple(self._tasks)
        if tasks:
            await asyncio.wait(tasks, timeout=grace)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


@contextmanager
def stopped_by_signal(stop: threading.Event) -> Iterator[None]:
    """Have SIGTERM set *stop* inside the block.  Does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # On another thread, because this one may hold the lock of *stop* when the signal comes.
    former = signal.signal(signal.SIGTERM, lambda *_: _thread.start_new_thread(stop.set, ()))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)
