"""The service without idempotency (PAYMENTS_GUARD=off), for comparison.

Every request gets a new key in place of its own, so no repeat is recognised.  All other code, transactions included, is
the same.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any


def new_key() -> str:
    return str(uuid.uuid4())


class Unguarded:
    """ASGI middleware that replaces the caller's key by a new one."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            others = [pair for pair in scope["headers"] if pair[0] != b"idempotency-key"]
            scope = {**scope, "headers": [*others, (b"idempotency-key", new_key().encode())]}
        await self.app(scope, receive, send)
