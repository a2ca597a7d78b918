"""The state of a resource before it is changed: what an ASGI app itself answers to a GET."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from ..request import NOT_OF_A_GET

Message = MutableMapping[str, Any]

NOT_ASKED = frozenset(name.encode() for name in NOT_OF_A_GET)


async def look(app: Callable[[Any, Any, Any], Awaitable[None]], scope: MutableMapping[str, Any]) -> tuple[int, str]:
    """The status and the ETag of what is at the URL of *scope*, for the same caller."""
    found: dict[Any, Any] = {}
    asked: list[bool] = []
    left: list[bool] = []

    async def receive() -> Message:
        if asked:  # someone listens for the client to leave, which it does not
            await asyncio.Event().wait()
        asked.append(True)
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            found.update({name.lower(): value for name, value in message.get("headers", ())}, status=message["status"])
        elif message.get("more_body"):  # it may be large, or never end, and nobody reads it: as if the client had left
            left.append(True)
            raise OSError("Only the ETag was asked for")

    headers = [(name, value) for name, value in scope["headers"] if name not in NOT_ASKED]
    try:
        await app({**scope, "method": "GET", "headers": headers}, receive, send)
    except Exception:
        if not left:
            raise
    return found.get("status", 500), found.get(b"etag", b"").decode("latin-1")
