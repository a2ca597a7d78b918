"""The consumer with a ledger in PostgreSQL: handlers on threads and on the loop, each in its own transaction."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import psycopg
import pytest

from oncemore import Guard, Inbox, Op
from oncemore.messages import Consumer, Envelope, Outbox
from oncemore.messages.broker import connect


@pytest.mark.parametrize("awaited", [False, True], ids=["thread", "loop"])
def test_effect_record_and_outbox_of_a_handler_commit_together(
    postgres_url: str, postgres_schema: str, own_schema: str, awaited: bool
) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as database:
        database.execute(f"CREATE SCHEMA IF NOT EXISTS {postgres_schema}".encode())
        database.execute(f"CREATE TABLE {postgres_schema}.bookings (event TEXT)".encode())
    insert = f"INSERT INTO {postgres_schema}.bookings VALUES (%s)"
    guard = Guard(own_schema)
    outbox = Outbox(guard, source="ledger")

    def book(op: Op, envelope: Envelope) -> None:
        op.connection.execute(insert, (envelope.id,))
        outbox.add(op, "booked", envelope.id)
        if envelope.data == "poison":
            raise ValueError("poison")

    async def book_async(op: Op, envelope: Envelope) -> None:
        await op.connection.execute(insert, (envelope.id,))
        await outbox.aadd(op, "booked", envelope.id)
        if envelope.data == "poison":
            raise ValueError("poison")

    url = f"memory://{secrets.token_hex(8)}"
    sent = [Envelope("refund", 1, id=f"ev_{n}", source="payments", subject=f"rf_{n % 3}") for n in range(30)]
    poison = Envelope("refund", "poison", id="ev_poison", source="payments", subject="rf_0")
    asyncio.run(connect(url).publish([*sent, poison]))
    inbox = Inbox(guard, attempts=1)
    handler: Any = book_async if awaited else book
    assert Consumer(inbox, url, {"*": handler}).run_once() == 31
    assert [letter.key for letter in inbox.dead("payments").records] == ["ev_poison"]
    with psycopg.connect(postgres_url) as database:
        found = {event for (event,) in database.execute(f"SELECT event FROM {postgres_schema}.bookings".encode())}
    assert found == {envelope.id for envelope in sent}
    assert outbox.stats().pending == 30
    guard.close()
