"""Time in attempts: hard deadlines for blocking sockets and for tasks, and pauses that tests can skip."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from math import inf
from typing import TypeVar

T = TypeVar("T")

_recorded: list[float] | None = None
_skipped = 0.0  # seconds; never reset, because `now` must not go back


def now() -> float:
    """Return the monotonic time in seconds, plus the pauses that `no_sleeping` skipped."""
    return time.monotonic() + _skipped


@contextmanager
def no_sleeping() -> Iterator[list[float]]:
    """Skip all pauses between attempts, for tests.  Yield the list of the delays that were skipped, in seconds.

    Deadlines still see the skipped time pass.  Every retry in the process is affected until the block ends.
    """
    global _recorded
    before, _recorded = _recorded, []
    try:
        yield _recorded
    finally:
        _recorded = before


class Pause:
    """Effect: let *seconds* pass before the next attempt."""

    __slots__ = ("seconds",)

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def run(self) -> None:
        if not self._skip():
            time.sleep(self.seconds)

    async def arun(self) -> None:
        await asyncio.sleep(0 if self._skip() else self.seconds)

    def _skip(self) -> bool:
        global _skipped
        if _recorded is None:
            return False
        _recorded.append(self.seconds)
        _skipped += self.seconds
        return True


class Deadline(float):
    """A timeout in seconds that also knows when the attempt must end.

    HTTP libraries pass timeouts unchanged, as numbers, to the code that reads the socket.  A Deadline therefore travels with
    its request through any connection pool; code that does not know it sees a number.  *step* is the caller's own timeout for
    one wait.
    """

    __slots__ = ("_ends", "_step")

    _ends: float
    _step: float | None

    def __new__(cls, seconds: float, step: float | None = None) -> Deadline:
        self = float.__new__(cls, step if step is not None and step < seconds else seconds)
        self._ends = time.monotonic() + seconds
        self._step = step
        return self

    def next_timeout(self) -> float | None:
        """Return the seconds that the next wait may take, or raise TimeoutError if the deadline has passed."""
        left = self._ends - time.monotonic()
        if left <= 0:
            raise TimeoutError("the deadline has passed")
        if self._step is not None and self._step <= left:
            return self._step
        return None if left == inf else left

    def lift(self) -> None:
        """Remove the deadline, because the response is a stream without an end.  The timeout of each wait stays."""
        self._ends = inf


def call_with_deadline(timeout: float | None, function: Callable[[], T], close: Callable[[T], object]) -> T:
    """Return the result of *function*.  If *timeout* is a Deadline, raise TimeoutError when it has passed.

    A name lookup cannot be interrupted, so *function* runs in a thread, which is abandoned at the deadline.  A result
    that comes later is passed to *close*.
    """
    if not isinstance(timeout, Deadline):
        return function()
    future: Future[T] = Future()
    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(_set_result, future, function), daemon=True).start()
    try:
        return future.result(timeout.next_timeout())
    except BaseException:
        future.add_done_callback(lambda late: None if late.exception() else close(late.result()))
        raise


def _set_result(future: Future[T], function: Callable[[], T]) -> None:
    try:
        result = function()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


async def with_deadline(
    awaitable: Awaitable[T], seconds: float, error: type[Exception], what: str = "the attempt"
) -> T:
    """Return the result of *awaitable*.  After *seconds*, cancel it and raise *error*.

    A cancellation from elsewhere stays a cancellation.
    """
    timeout = asyncio.timeout(seconds)
    try:
        async with timeout:
            return await awaitable
    except TimeoutError as cause:
        if timeout.expired():
            raise error(f"{what} took longer than {seconds:.3g} s and was cut") from cause
        raise
