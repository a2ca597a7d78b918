"""Effects of the transports: a method with a blocking and an awaited form, and a plan that a cancellation cannot stop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from .._runtime.loops import keep_task
from .._runtime.plan import Plan, arun, run


class CallMethod:
    """Effect: call the *blocking* method of *owner*, or await the *awaited* one."""

    __slots__ = ("awaited", "blocking", "owner")

    def __init__(self, owner: Any, blocking: str, awaited: str) -> None:
        self.owner = owner
        self.blocking = blocking
        self.awaited = awaited

    def run(self) -> Any:
        return getattr(self.owner, self.blocking)()

    def arun(self) -> Awaitable[Any]:
        awaitable: Awaitable[Any] = getattr(self.owner, self.awaited)()
        return awaitable


class FinishDespiteCancel:
    """Effect: carry *plan* out to its end, in the background if the task that awaits it is cancelled meanwhile."""

    __slots__ = ("plan",)

    def __init__(self, plan: Plan[Any]) -> None:
        self.plan = plan

    def run(self) -> Any:
        return run(self.plan)

    async def arun(self) -> Any:
        return await asyncio.shield(keep_task(arun(self.plan)))
