"""What an event loop waits for when it is shut down, after all of its tasks were cancelled."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any
from weakref import WeakSet

ENDING: WeakSet[asyncio.AbstractEventLoop] = WeakSet()


def at_shutdown(work: Callable[[], Awaitable[object]]) -> object:
    """Have the running loop await *work* before it is closed, as long as the caller keeps what this returns.

    asyncio.run cancels all tasks, then ends the generators that have begun on its loop, and then closes that: this passes
    for one of them.  A loop that already ends them takes no more, and would warn; whoever asks for something then is
    waited for by one that has begun before.
    """
    loop = asyncio.get_running_loop()
    begun: Callable[[Any], None] | None = sys.get_asyncgen_hooks().firstiter
    # asyncio's own loops tell that they end; of others (uvloop) it is known where we have been waited for.
    if begun is None or loop in ENDING or getattr(loop, "_asyncgens_shutdown_called", False):
        return None
    staying = Staying(work)
    begun(staying)
    return staying


class Staying:
    """All that a loop knows of a generator: how it is ended.  A real one would also be ended when it is collected."""

    __slots__ = ("__weakref__", "work")

    def __init__(self, work: Callable[[], Awaitable[object]]) -> None:
        self.work = work

    async def aclose(self) -> None:
        ENDING.add(asyncio.get_running_loop())
        await self.work()
