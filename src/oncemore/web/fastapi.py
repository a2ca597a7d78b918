"""FastAPI: the ASGI middleware, the running operation as a dependency, and the contract in the app's OpenAPI document.

app.add_middleware(IdempotencyMiddleware, guard=Guard("sqlite:///once.db"))
"""

from __future__ import annotations

from .._contract.rule import idempotent
from .._ledger import context
from .._ledger.context import Op
from .asgi import IdempotencyMiddleware
from .openapi import document

__all__ = ["IdempotencyMiddleware", "Op", "current_operation", "document", "idempotent"]


async def current_operation() -> Op:
    """Return the running operation, as a dependency: `op: Annotated[Op, Depends(current_operation)]`."""
    return context.current_operation()
