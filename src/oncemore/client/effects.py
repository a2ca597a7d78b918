"""Effects of the transports: a method with a blocking and an awaited form, and a plan that must end in time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from ..core.plan import Plan, arun, run

T = TypeVar("T")


class Either:
    """Call a method of *owner*: the *blocking* one when run, the *awaited* one otherwise."""

    __slots__ = ("arguments", "awaited", "blocking", "owner")

    def __init__(self, owner: Any, blocking: str, awaited: str, *arguments: Any) -> None:
        self.owner = owner
        self.blocking = blocking
        self.awaited = awaited
        self.arguments = arguments

    def run(self) -> Any:
        return getattr(self.owner, self.blocking)(*self.arguments)

    async def arun(self) -> Any:
        return await getattr(self.owner, self.awaited)(*self.arguments)


class Within:
    """Carry out *plan* in at most *limit* seconds, or raise *late*.

    When awaited, it is cut from here; when run, its sockets must keep the limit (see `deadline`).
    """

    __slots__ = ("late", "limit", "plan")

    def __init__(self, plan: Plan[Any], limit: float, late: type[Exception]) -> None:
        self.plan = plan
        self.limit = limit
        self.late = late

    def run(self) -> Any:
        return run(self.plan)

    def arun(self) -> Awaitable[Any]:
        return within(arun(self.plan), self.limit, self.late)


async def within(awaited: Awaitable[T], limit: float, late: type[Exception]) -> T:
    """What is *awaited*; after *limit* seconds it is cut, and *late* raised."""
    timeout = asyncio.timeout(limit)
    try:
        async with timeout:
            return await awaited
    except TimeoutError as error:
        if not timeout.expired():
            raise
        raise late(f"no answer within {limit:.3g} s") from error
