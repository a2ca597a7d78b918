"""The FastStream middleware, on a real NATS server, and with the headers that it has on Kafka."""

from __future__ import annotations

import asyncio
import secrets
import sqlite3
from pathlib import Path

import pytest
from faststream.confluent import KafkaBroker, TestKafkaBroker
from faststream.nats import JStream, NatsBroker

from oncemore import Guard, Inbox, current_operation
from oncemore.errors import ConfigurationError
from oncemore.messages import Envelope
from oncemore.messages.envelope import binary
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


async def test_kafka_messages_of_a_relay_are_recognised(tmp_path: Path) -> None:
    """On Kafka, CloudEvents headers begin with `ce_`."""
    inbox = Inbox(Guard(f"sqlite:///{tmp_path / 'books.db'}"))
    broker = KafkaBroker(middlewares=[InboxMiddleware(inbox)])
    handled: list[str] = []

    @broker.subscriber("refunds")
    async def book(amount: int) -> None:
        handled.append(current_operation().key)

    headers, body = binary(Envelope("refund.succeeded", 1, id="ev_1", source="payments"), "ce_")
    async with TestKafkaBroker(broker) as testing:
        for _ in range(2):
            await testing.publish(body, "refunds", headers=headers)
        with pytest.raises(ConfigurationError, match="no header 'ce-id'"):
            await testing.publish(1, "refunds")
    assert handled == ["ev_1"]
