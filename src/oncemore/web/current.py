"""The operation that the current request performs, for code that was not handed it."""

from __future__ import annotations

from contextvars import ContextVar

from ..core.op import Op
from ..errors import ConfigurationError

CURRENT: ContextVar[Op] = ContextVar("oncemore_operation")


def current_operation() -> Op:
    """The running operation: its key, its attempt, and stable keys for providers."""
    try:
        return CURRENT.get()
    except LookupError:
        raise ConfigurationError(
            "No operation is running here: the request is not guarded, or came without a key; "
            "make the key required in the contract, and check that the middleware is installed"
        ) from None
