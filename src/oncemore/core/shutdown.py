"""What an event loop waits for when it is shut down, after all of its tasks were cancelled."""

from __future__ import annotations

import asyncio
import sys
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress


def at_shutdown(work: Callable[[], Awaitable[None]]) -> object:
    """Have the running loop await *work* before it is closed, as long as the caller keeps what this returns.

    asyncio.run cancels all tasks, then ends the generators that have begun on its loop, and then closes that: this is one
    of them.  It has no finalizer, which would keep the loop alive.  A loop that already ends them takes no more, and whoever
    asks for something then is waited for by one that has begun before.
    """
    loop = asyncio.get_running_loop()
    if getattr(loop, "_asyncgens_shutdown_called", False):
        return None
    waiting = _waiting(weakref.ref(loop), work)
    hooks = sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(finalizer=None)
    try:
        with suppress(StopIteration):  # by which it says that it has begun
            waiting.__anext__().send(None)
    finally:
        sys.set_asyncgen_hooks(*hooks)
    return waiting


async def _waiting(loop: Callable[[], object], work: Callable[[], Awaitable[None]]) -> AsyncGenerator[None]:
    try:
        yield
    finally:
        running = asyncio._get_running_loop()
        if running is not None and running is loop():  # else it is merely collected
            await work()
