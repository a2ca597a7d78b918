"""The FastStream middleware, on a real NATS server."""

from __future__ import annotations

import asyncio
import secrets
import sqlite3
from pathlib import Path

import pytest
from faststream.nats import JStream, NatsBroker

from oncemore import Guard, Inbox, current_operation
from oncemore.messages.faststream import InboxMiddleware

pytestmark = pytest.mark.server


async def test_message_that_comes_twice_is_handled_once(nats_url: str, tmp_path: Path) -> None:
    path = tmp_path / "books.db"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE bookings (event TEXT)")
    inbox = Inbox(Guard(f"sqlite:///{path}"))
    broker = NatsBroker(nats_url, middlewares=[InboxMiddleware(inbox)])
    channel = f"t{secrets.token_hex(8)}"
    handled: asyncio.Queue[str] = asyncio.Queue()

    @broker.subscriber(f"{channel}.refunds", stream=JStream(channel, subjects=[f"{channel}.>"]), queue="ledger")
    async def book(amount: int) -> None:
        op = current_operation()
        await op.connection.execute("INSERT INTO bookings VALUES (?)", (op.key,))
        handled.put_nowait(op.key)

    async with broker:
        await broker.start()
        for id in ("ev_1", "ev_1", "ev_2"):
            await broker.publish(1, f"{channel}.refunds", headers={"ce-id": id, "ce-source": "payments"})
        found = [await asyncio.wait_for(handled.get(), 30) for _ in range(2)]
    assert found == ["ev_1", "ev_2"]
    with sqlite3.connect(path) as database:
        assert [event for (event,) in database.execute("SELECT event FROM bookings")] == ["ev_1", "ev_2"]
