"""Plans: an algorithm is written once, as a generator, and runs on threads and on asyncio.

A plan yields effects and is sent their results; it never blocks and never awaits.  An effect is anything with a `run()` that
blocks and an `arun()` that is awaited.  Two drivers carry out the effects: `run` on a thread, `arun` on an event loop.
"""

from __future__ import annotations

import _thread
import asyncio
import time
from collections.abc import Awaitable, Callable, Generator
from types import CoroutineType
from typing import Any, Protocol, TypeVar

from ..errors import ConfigurationError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Effect(Protocol[T_co]):
    """One action that a plan asks for, with a blocking and an awaited form."""

    def run(self) -> T_co: ...
    def arun(self) -> Awaitable[T_co]: ...


Plan = Generator[Effect[Any], Any, T]


# Python's own function, saved at import so that we can tell if gevent or eventlet replaces it later.
START_NEW_THREAD = _thread.start_new_thread

PATCHED_TOO_LATE = (
    "gevent or eventlet replaced Python's threads after oncemore was imported, so leases would not be renewed, and an "
    "operation might run twice: patch before anything else is imported (the first line of the program or of "
    "gunicorn.conf.py: from gevent import monkey; monkey.patch_all(); for uWSGI: --gevent-early-monkey-patch)"
)
ASYNCIO_ONLY = (
    "The async functions of oncemore work on asyncio only, and no asyncio event loop is running here: under trio, call the "
    "sync functions in a thread (trio.to_thread.run_sync), or run the program on asyncio"
)


def starts_greenlets(start: Callable[..., Any]) -> bool:
    """Whether *start* belongs to gevent or eventlet.  A debugger may replace it too, but still starts threads."""
    return start.__module__.partition(".")[0] in ("gevent", "eventlet")


def run(plan: Plan[T]) -> T:
    """Carry out each effect of the plan on this thread, and return the plan's result."""
    if _thread.start_new_thread is not START_NEW_THREAD and starts_greenlets(_thread.start_new_thread):
        raise ConfigurationError(PATCHED_TOO_LATE)
    try:
        effect = next(plan)
        while True:
            try:
                result = effect.run()
            except BaseException as error:
                effect = plan.throw(error)
            else:
                effect = plan.send(result)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


async def arun(plan: Plan[T]) -> T:
    """Await each effect of the plan, and return its result.  A cancellation is thrown into the plan like any other error."""
    try:
        effect = next(plan)
        try:
            asyncio.get_running_loop()  # not before: a replay from the cache has no effect, and this may be a system call
        except RuntimeError:
            effect = plan.throw(ConfigurationError(ASYNCIO_ONLY))
        while True:
            try:
                result = await effect.arun()
            except BaseException as error:
                effect = plan.throw(error)
            else:
                effect = plan.send(result)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


def run_here(plan: Plan[Any]) -> Any:
    """Return the plan's result, or an awaitable of it if an event loop runs on this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run(plan)
    return arun(plan)


class Call:
    """Effect: call the user's function.  `run` takes a sync function, `arun` an async or a sync one."""

    __slots__ = ("args", "function")

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.function = function
        self.args = args

    def run(self) -> Any:
        result = self.function(*self.args)
        if isinstance(result, CoroutineType):  # nothing of it has run, and it cannot be awaited here
            result.close()
            raise ConfigurationError(f"{self.function!r} is async: use the awaited form of this call")
        return result

    async def arun(self) -> Any:
        result = self.function(*self.args)
        return await result if hasattr(result, "__await__") else result


class Sleep:
    """Effect: wait *seconds*."""

    __slots__ = ("seconds",)

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def run(self) -> None:
        time.sleep(self.seconds)

    def arun(self) -> Awaitable[None]:
        return asyncio.sleep(self.seconds)
