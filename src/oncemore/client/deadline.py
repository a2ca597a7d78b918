"""A hard end for blocking sockets: a timeout that shrinks as time passes, however slowly the bytes trickle."""

from __future__ import annotations

import contextvars
import ssl
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from math import inf
from typing import TypeVar

T = TypeVar("T")


class Allowance(float):
    """A timeout for one step, in seconds, that also knows when all of it must end.

    Libraries hand timeouts down untouched, as numbers, to whoever reads the socket; so it travels with the request
    through any pool and thread, and to those who do not know it, it is just a number.
    """

    __slots__ = ("_ends", "_step")

    _ends: float
    _step: float | None

    @classmethod
    def within(cls, limit: float, step: float | None = None) -> Allowance:
        """For *limit* seconds from now, and no longer than *step* for each wait."""
        return cls.until(time.monotonic() + limit, limit, step)

    @classmethod
    def until(cls, ends: float, limit: float, step: float | None) -> Allowance:
        """The same, where it is known when *limit* *ends*."""
        allowance = cls(limit if step is None or step > limit else step)
        allowance._ends = ends
        allowance._step = step
        return allowance

    def left(self) -> float | None:
        """Seconds for the next wait; a TimeoutError if the end has come."""
        left, step = self._ends - time.monotonic(), self._step
        if step is not None and step <= left:
            return step
        if left <= 0:
            raise TimeoutError("the deadline has passed")
        return None if left == inf else left

    def lift(self) -> None:
        """Take the end away, for a stream that has none; the step stays."""
        self._ends = inf


def within(timeout: float | None, function: Callable[[], T], close: Callable[[T], object]) -> T:
    """What *function* returns, or a TimeoutError; a result that comes too late is given to *close*.

    Looking up a name cannot be interrupted, so it happens on a thread that can be left behind.
    """
    if not isinstance(timeout, Allowance):
        return function()
    future: Future[T] = Future()
    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(_fulfil, future, function), daemon=True).start()
    try:
        return future.result(timeout.left())
    except BaseException:
        future.add_done_callback(lambda late: None if late.exception() else close(late.result()))
        raise


def _fulfil(future: Future[T], function: Callable[[], T]) -> None:
    try:
        result = function()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


def is_distrust(error: BaseException | None) -> bool:
    """Whether a certificate was refused somewhere below *error*: that does not get better by asking again."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return True
        error = error.__cause__ or error.__context__
    return False
