"""A small ledger service: it hears of refunds from the payments service, and books each once, in its own database.

python -m examples.payments.books --broker nats://127.0.0.1:4222/payments
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import uvicorn
from fastapi import FastAPI

from examples.sql import Row, read_connection, rows
from oncemore import Guard, Inbox, Op, Operation
from oncemore.messages import Consumer, Envelope
from oncemore.observe import Event

from .observability import log_to_stderr
from .unguarded import new_key

TABLE = """CREATE TABLE IF NOT EXISTS entries (
    number integer PRIMARY KEY, reference text NOT NULL, amount bigint NOT NULL, currency text NOT NULL
)"""


async def book(op: Op, message: Envelope) -> None:
    """Book a refund; the entry commits with the record that the message was handled."""
    refund = message.data
    await rows(
        op.connection,
        "INSERT INTO entries (reference, amount, currency) VALUES (?, ?, ?)",
        *(refund["id"], refund["amount"], refund["currency"]),
    )


class ForgetfulConsumer(Consumer):
    """For the demo without a guard: each delivery has a key of its own, so a repeated message is handled again."""

    def operation(self, envelope: Envelope) -> Operation:
        known = super().operation(envelope)
        return msgspec.structs.replace(known, key=f"{known.key}:{new_key()}")


def create(database: str, broker: str, *, guarded: bool) -> FastAPI:
    """Create the app, which handles messages while it runs."""
    deliveries: Counter[str] = Counter()  # the number of answered deliveries by the message's id

    def count(event: Event) -> None:
        if event.kind == "received":
            deliveries[event.operation.key.partition(":")[0]] += 1

    guard = Guard(database, observers=[count])
    kind = Consumer if guarded else ForgetfulConsumer
    books = kind(Inbox(guard, name="books"), broker, {"refund.succeeded": book})
    read = partial(read_connection, database)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with read() as connection:
            await connection.execute("PRAGMA journal_mode = WAL")
            await connection.execute(TABLE)
        consuming = asyncio.create_task(books.arun())
        yield
        books.stop()
        await asyncio.wait([consuming])
        await guard.aclose()

    app = FastAPI(title="Books", version="1", lifespan=lifespan)

    @app.get("/entries")
    async def show_entries() -> dict[str, Any]:
        async with read() as connection:
            entries: list[Row] = await rows(connection, "SELECT * FROM entries ORDER BY number")
        return {"entries": entries, "deliveries": dict(deliveries)}

    @app.get("/health")
    async def show_health() -> Row:
        return {"pid": os.getpid()}

    return app


if __name__ == "__main__":
    options = argparse.ArgumentParser(prog="python -m examples.payments.books", description="The books.")
    options.add_argument("--port", type=int, default=8020)
    options.add_argument("--database", default="sqlite:///books.db")
    options.add_argument("--broker", default="nats://127.0.0.1:4222/payments")
    given = options.parse_args()
    log_to_stderr()
    app = create(given.database, given.broker, guarded=os.environ.get("PAYMENTS_GUARD", "on") != "off")
    uvicorn.run(app, host="127.0.0.1", port=given.port, log_config=None, access_log=False)
