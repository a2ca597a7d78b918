"""The same service as it would be without idempotency (PAYMENTS_GUARD=off): every request is a stranger.

Each gets a key of its own, whatever it brought along.  So the code that runs is the very same, its transactions included,
and only one thing is gone: a repeat is not known as one.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any


def new_key() -> str:
    return str(uuid.uuid4())


class Unguarded:
    """ASGI middleware that puts a new key in the place of the caller's."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            others = [pair for pair in scope["headers"] if pair[0] != b"idempotency-key"]
            scope = {**scope, "headers": [*others, (b"idempotency-key", new_key().encode())]}
        await self.app(scope, receive, send)
