"""What every transport offers besides sending: see what was left without an answer, ask for it once more, or forget it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from .._runtime.plan import arun, run
from .engine import Engine
from .keyring.entry import Entry, Resumed


class Continuing:
    """For transports that block."""

    engine: Engine

    def pending(self) -> list[Entry]:
        """Operations without a final answer that no living process is working on, oldest first."""
        return run(self.engine.ring().pending())

    def forget(self, entry: Entry) -> None:
        """Take a pending operation off the ring: its outcome was found out, or no longer matters."""
        run(self.engine.ring().forget(entry))

    def _resume(self, send: Callable[[Entry], Any], opened: bool) -> list[Resumed]:
        return run(self.engine.resume(send, opened=opened))


class AsyncContinuing:
    """For those that are awaited."""

    engine: Engine

    async def pending(self) -> list[Entry]:
        """Operations without a final answer that no living process is working on, oldest first."""
        return await arun(self.engine.ring().pending())

    async def forget(self, entry: Entry) -> None:
        """Take a pending operation off the ring: its outcome was found out, or no longer matters."""
        await arun(self.engine.ring().forget(entry))

    async def _resume(self, send: Callable[[Entry], Awaitable[Any]], opened: bool) -> list[Resumed]:
        return await arun(self.engine.resume(send, opened=opened))
