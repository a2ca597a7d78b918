"""The operation that runs here now, for code that was not handed it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ..errors import ConfigurationError
from .context import Op

CURRENT: ContextVar[Op | None] = ContextVar("oncemore_operation", default=None)


def current_operation() -> Op:
    """The running operation: its key, its attempt, its steps, and stable keys for providers."""
    op = CURRENT.get()
    if op is None:
        raise ConfigurationError(
            "No operation is running here: the request is not guarded, or came without a key; "
            "make the key required in the contract, and check that the middleware is installed"
        )
    return op


@contextmanager
def running(op: Op) -> Iterator[None]:
    """While this lasts, *op* is the current operation."""
    token = CURRENT.set(op)
    try:
        yield
    finally:
        CURRENT.reset(token)
