"""A thread for work that would block an event loop: there while it is needed, gone with whoever needed it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from ..._runtime.batching import set_result


class Worker:
    """Does jobs one after another, on a thread called *name*, and answers on the event loop that sent them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._jobs: SimpleQueue[Any] | None = None
        self._thread: threading.Thread | None = None

    def send(self, job: Callable[[], Any]) -> asyncio.Future[Any]:
        """A future of what *job* returns, for the running event loop."""
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        with self._lock:
            if self._jobs is None:
                self._start()
            assert self._jobs is not None
            self._jobs.put((job, loop, future))
        return future

    def _start(self) -> None:
        jobs: SimpleQueue[Any] = SimpleQueue()
        thread = threading.Thread(target=serve, args=(jobs,), name=self.name, daemon=True)
        thread.start()  # which may be refused; then the next job tries again
        weakref.finalize(self, jobs.put, None)  # a store that nobody closed takes its thread with it
        self._jobs, self._thread = jobs, thread

    def stop(self) -> None:
        """Return when all jobs are done and the thread is over."""
        with self._lock:
            jobs, thread, self._jobs, self._thread = self._jobs, self._thread, None, None
        if jobs is not None and thread is not None:
            jobs.put(None)
            thread.join()


def serve(jobs: SimpleQueue[Any]) -> None:
    """Do the jobs, one after another, until there is a None."""
    while (entry := jobs.get()) is not None:
        job, loop, future = entry
        try:
            answer = job()
        except BaseException as error:
            answer = error
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits any more
            loop.call_soon_threadsafe(set_result, future, answer)
        del entry, job, loop, future, answer  # while the thread waits, it keeps nothing alive
