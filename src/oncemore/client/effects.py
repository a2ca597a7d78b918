"""Effects of the transports: a method with a blocking and an awaited form, and plans that must end in time, or at all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

from .._runtime.plan import Plan, arun, run

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


class Unbroken:
    """Carry out *plan* to its end, also where whoever awaits it is cancelled meanwhile: some are, at every await."""

    __slots__ = ("plan",)

    def __init__(self, plan: Plan[Any]) -> None:
        self.plan = plan

    def run(self) -> Any:
        return run(self.plan)

    def arun(self) -> Awaitable[Any]:
        return unbroken(arun(self.plan))


async def unbroken(awaited: Coroutine[Any, Any, T]) -> T:
    """What is *awaited*, in a task of its own that a cancellation does not reach."""
    task = asyncio.create_task(awaited)
    _unbroken.add(task)
    task.add_done_callback(_unbroken.discard)
    return await asyncio.shield(task)


async def with_deadline(awaited: Awaitable[T], seconds: float, error: type[Exception]) -> T:
    """Await *awaited*; after *seconds* cancel it and raise *error*.  A cancellation from elsewhere stays one."""
    timeout = asyncio.timeout(seconds)
    try:
        async with timeout:
            return await awaited
    except TimeoutError as cause:
        if timeout.expired():
            raise error(f"no answer within {seconds:.3g} s") from cause
        raise


_unbroken: set[asyncio.Task[Any]] = set()  # the loop itself would forget them


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
        return with_deadline(arun(self.plan), self.limit, self.late)
