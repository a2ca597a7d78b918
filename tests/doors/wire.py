"""Both ends of an ASGI app, message by message: the messages of a server, and simple apps."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from oncemore import Guard, Outcome
from oncemore._ledger.model import Lease
from oncemore._ledger.store import Filter
from oncemore._runtime.plan import Plan, Sleep, arun
from oncemore.stores.memory import MemoryStore

Message = dict[str, Any]
Headers = Sequence[tuple[str, str]]
App = Callable[[Any, Any, Any], Awaitable[None]]


class Wire:
    """One request.  It sends *messages* in turn, then none until `leave`; the app's messages are in *sent*."""

    def __init__(
        self,
        path: str = "/things",
        *,
        method: str = "POST",
        key: str | None = "k",
        headers: Headers = (),
        body: bytes = b"{}",
        messages: Sequence[Message] | None = None,
        **scope: Any,
    ) -> None:
        fields = [("host", "test"), ("authorization", "Bearer alice"), ("content-type", "application/json"), *headers]
        fields += [("idempotency-key", key)] if key is not None else []
        self.scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path.partition("?")[0],
            "raw_path": path.encode(),
            "query_string": path.partition("?")[2].encode(),
            "root_path": "",
            "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
            **scope,
        }
        self.messages = list(messages) if messages is not None else [{"type": "http.request", "body": body}]
        self.sent: list[Message] = []
        self.left = asyncio.Event()

    def leave(self) -> None:
        """Let the client leave."""
        self.left.set()

    async def receive(self) -> Message:
        if self.messages:
            return self.messages.pop(0)
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    async def through(self, app: App) -> Wire:
        """Call the app, and return this wire after its answer."""
        await app(self.scope, self.receive, self.send)
        return self

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode("latin-1"): value.decode("latin-1") for name, value in self.sent[0]["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent[1:])

    @property
    def said(self) -> str | None:
        return self.headers.get("idempotency-status")


class Counted:
    """An app that counts its runs and answers 201, in the given number of pieces."""

    def __init__(self, *pieces: bytes, length: bool = True) -> None:
        self.runs = 0
        self.pieces = pieces or (b"done",)
        self.length = length

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.runs += 1
        size = sum(map(len, self.pieces))
        headers = [(b"content-length", b"%d" % size)] if self.length else []
        await self.work(receive)
        await send({"type": "http.response.start", "status": 201, "headers": headers})
        for number, piece in enumerate(self.pieces, 1):
            await send({"type": "http.response.body", "body": piece, "more_body": number < len(self.pieces)})

    async def work(self, receive: Any) -> None:
        """Do the app's work before its answer."""


class SlowSettling(MemoryStore):
    """A store that settles slowly, so that a test can act meanwhile."""

    def settle(self, held: Lease, outcome: Outcome, **options: Any) -> Plan[None]:
        yield Sleep(0.1)
        yield from super().settle(held, outcome, **options)


async def state(guard: Guard) -> str:
    """The state of the only record."""
    page = await arun(guard.store.list(Filter()))
    [record] = page.records
    return record.state
