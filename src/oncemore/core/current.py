"""The operation that runs here now, for code that was not handed it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ..errors import ConfigurationError
from .op import Op

CURRENT: ContextVar[Op] = ContextVar("oncemore_operation")


def current_operation() -> Op:
    """The running operation: its key, its attempt, its steps, and stable keys for providers."""
    try:
        return CURRENT.get()
    except LookupError:
        raise ConfigurationError(
            "No operation is running here: the request is not guarded, or came without a key; "
            "make the key required in the contract, and check that the middleware is installed"
        ) from None


@contextmanager
def running(op: Op) -> Iterator[None]:
    """While this lasts, *op* is the current operation."""
    token = CURRENT.set(op)
    try:
        yield
    finally:
        CURRENT.reset(token)
