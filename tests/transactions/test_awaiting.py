"""An async connection does nothing unless it is awaited, so code that cannot or does not await it gets an error."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Response

from oncemore import Contract, Inbox, Operation, Rule
from oncemore._ledger.context import Op
from oncemore.errors import ConfigurationError
from oncemore.web import asgi
from tests.doors.live import live

from .shops import POLICY, Aiosqlite, Shop

ASKED = Operation("customer-1", "k", "same", "refunds.create")
on_async_drivers = pytest.mark.parametrize(
    "shop",
    [
        "aiosqlite",
        "alchemy-aiosqlite",
        *(pytest.param(name, marks=pytest.mark.server) for name in ("psycopg-async", "asyncpg", "alchemy-asyncpg")),
    ],
    indirect=True,
)
# What is never awaited warns of it, if anyone looks.
pytestmark = pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")


def test_plain_endpoint_is_refused_an_async_connection(tmp_path: Path) -> None:
    """FastAPI calls it in a thread: the statement would never be sent, but its success would be replayed."""
    app, shop = FastAPI(), Aiosqlite(f"sqlite:///{tmp_path / 'shop.db'}")
    contract = Contract(Rule("POST /refunds", key="required", effect="transaction"))
    app.add_middleware(asgi.IdempotencyMiddleware, guard=shop.guard, contract=contract)

    @app.post("/refunds", status_code=201)
    def refund() -> str:
        asgi.current_operation().connection.execute("INSERT INTO refunds VALUES ('r1', 'x')")
        return "refunded"

    @app.exception_handler(ConfigurationError)
    def told(request: Any, error: ConfigurationError) -> Response:
        return Response(error.detail, 500)

    with live(app) as client:
        answer = client.post("/refunds", headers={"Idempotency-Key": "k"})
    assert (answer.status_code, answer.headers["idempotency-status"]) == (500, "unstored")
    assert "must be awaited, and this code runs in a thread" in answer.text


@on_async_drivers
async def test_thread_is_refused_an_async_connection(shop: Shop) -> None:
    async def refund(op: Op) -> None:
        await asyncio.to_thread(lambda: op.connection.execute("INSERT INTO refunds VALUES ('r1', 'x')"))

    with pytest.raises(ConfigurationError, match="must be awaited, and this code runs in a thread"):
        await shop.guard.arun(ASKED, refund)


@on_async_drivers
async def test_plain_handler_with_unawaited_statements_fails_its_event(shop: Shop) -> None:
    def book(op: Op, event: Any) -> str:
        op.connection.execute("INSERT INTO refunds VALUES ('r1', 'x')")
        return "booked"

    inbox = Inbox(shop.guard)
    with pytest.raises(ConfigurationError, match=r"book at .* has awaited nothing; write 'async def' and await it"):
        await inbox.ahandle("ev_1", "payments", {}, book)

    async def mended(op: Op, event: Any) -> str:
        await shop.insert(op, "r1").arun()
        return "booked"

    assert (await inbox.ahandle("ev_1", "payments", {}, mended)).how == "processed"
    assert shop.refunds() == ["r1"]


@on_async_drivers
async def test_plain_step_with_unawaited_statements_leaves_no_checkpoint(shop: Shop) -> None:
    async def pay(op: Op) -> Any:
        return await op.step(
            "book", lambda connection: bool(connection.execute("INSERT INTO refunds VALUES ('r', '')"))
        )

    with pytest.raises(ConfigurationError, match="of step 'book' used a connection that must be awaited"):
        await shop.guard.arun(ASKED, pay, policy=POLICY.but(effect="steps"))


@on_async_drivers
async def test_plain_handler_without_a_connection_succeeds(shop: Shop) -> None:
    assert (await Inbox(shop.guard).ahandle("ev_1", "payments", {}, lambda op, event: op.key)).value == "ev_1"
