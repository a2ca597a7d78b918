"""Ten thousand requests, most of them invalid, to an app that takes payments: no fault, no hang, no second effect."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn

from oncemore import Guard
from oncemore._contract.contract import Contract
from oncemore._contract.rule import Rule
from oncemore._runtime.plan import arun
from oncemore.web.asgi import IdempotencyMiddleware, current_operation
from oncemore.web.asgi.response import ABANDONED

from .fuzz import PRINCIPALS, Request, requests

COUNT = 10_000
CONNECTIONS = 20
PATIENCE = 10.0  # seconds; a response that takes longer is a hang

CONTRACT = Contract(
    Rule("POST /payments", name="payments", key={"required": True, "format": "uuid"}, unique_by="{body.id}"),
    Rule("POST /refunds", name="refunds", key="required", reverses="payments", in_flight="conflict"),
    Rule("PATCH|PUT /accounts/{id}", key="optional", in_flight="accepted"),
    Rule("POST /messages", name="messages", key="body:/id"),
    Rule("POST /reports", name="reports", key="template:{body.subject}:{header.content-type}", on_duplicate="reject"),
    max_request=65_536,
    wait="1s",
)


class Payments:
    """Takes payments, and notes how often it performed each operation.  Its answers name their caller."""

    def __init__(self) -> None:
        self.performed: Counter[tuple[str, str]] = Counter()
        self.failures: list[BaseException] = []
        self.guard = Guard("memory://")
        self.door = IdempotencyMiddleware(self.app, guard=self.guard, contract=CONTRACT)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await self.door(scope, receive, send)
        except Exception as error:
            self.failures.append(error)
            raise

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
        guarded = noted(self.performed)
        await asyncio.sleep(0.001 if guarded else 0)
        owner = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1").removeprefix("Bearer ")
        status = 201 if readable(body) else 422
        content = json.dumps({"owner": f"<{owner}>", "status": status}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})


def noted(performed: Counter[tuple[str, str]]) -> bool:
    try:
        operation = current_operation().operation
    except Exception:
        return False
    performed[operation.id] += 1
    return True


def readable(body: bytes) -> bool:
    try:
        return isinstance(json.loads(body), dict)
    except (ValueError, RecursionError):
        return False


@asynccontextmanager
async def served(app: Any) -> AsyncIterator[int]:
    """The port at which uvicorn serves the app, in this event loop."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", lifespan="off"))
    running = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    await running


async def answered(reader: asyncio.StreamReader, *, bodiless: bool) -> tuple[int, bytes]:
    """The status and all bytes of the next response."""
    seen = await reader.readuntil(b"\r\n\r\n")
    status = int(seen.split(b" ", 2)[1])
    if status == 100:
        return await answered(reader, bodiless=bodiless)
    length = [line for line in seen.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return status, seen + await reader.readexactly(int(length[0].split(b":")[1]) if length and not bodiless else 0)


class Client:
    """Sends the remaining requests, on a connection that it renews after each refusal."""

    def __init__(self, port: int, todo: list[Request], statuses: Counter[int], leaks: list[bytes]) -> None:
        self.port = port
        self.todo = todo
        self.statuses = statuses
        self.leaks = leaks
        self.writer: asyncio.StreamWriter | None = None

    async def run(self) -> None:
        while self.todo:
            try:
                await asyncio.wait_for(self.ask(self.todo.pop()), PATIENCE)
            except (asyncio.IncompleteReadError, ConnectionError):
                self.statuses[0] += 1
                self.close()
        self.close()

    async def ask(self, request: Request) -> None:
        if self.writer is None:
            self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writer.write(request.data)
        if request.odd:
            self.writer.write_eof()
        if request.cut:
            return self.close()
        status, answer = await answered(self.reader, bodiless=request.data.startswith(b"HEAD"))
        self.statuses[status] += 1
        strangers = [name for name in PRINCIPALS if name != request.principal]
        self.leaks += [answer for name in strangers if f"<{name}>".encode() in answer]
        return self.close() if status >= 400 or request.odd else None

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
        self.writer = None


@pytest.mark.parametrize("seed", [20261115])
async def test_fuzzed_requests_cause_no_fault_and_no_second_effect(seed: int) -> None:
    app = Payments()
    todo = requests(seed, COUNT)
    statuses: Counter[int] = Counter()
    leaks: list[bytes] = []
    async with served(app) as port:
        await asyncio.gather(*(Client(port, todo, statuses, leaks).run() for _ in range(CONNECTIONS)))
    assert app.failures == []
    assert leaks == []
    assert {status for status in statuses if status >= 500} == set()
    assert {operation: count for operation, count in app.performed.items() if count > 1} == {}
    assert min(statuses[201], statuses[400], statuses[409], statuses[413]) > 50  # it got everywhere
    assert (await arun(app.guard.store.stats())).running == 0
    assert not ABANDONED
