"""Runs a relay, consumer or sender as a process: on an event loop of its own, until it is told to stop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


async def nothing() -> None:
    return


def run_service(
    work: Callable[[], Awaitable[T]],
    *,
    stop: Callable[[], object] | None = None,
    close: Callable[[], Awaitable[object]] = nothing,
) -> T:
    """Run *work* on a new event loop, then *close* to end the connections of that loop, and return the result.

    If *stop* is given, SIGTERM and SIGINT call it instead of ending the process.
    """
    if asyncio._get_running_loop() is not None:  # get_running_loop() raises instead
        raise RuntimeError("An event loop is running on this thread: await the method with an `a` before its name")

    async def serve() -> T:
        if stop is not None:
            loop = asyncio.get_running_loop()
            for each in (signal.SIGTERM, signal.SIGINT):
                with suppress(ValueError, NotImplementedError, RuntimeError):  # not the main thread, or Windows
                    loop.add_signal_handler(each, stop)
        try:
            return await work()
        finally:
            await close()

    return asyncio.run(serve())
