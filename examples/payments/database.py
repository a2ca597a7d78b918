"""The service's tables, and one function to query SQLite and PostgreSQL, because their drivers mark values differently."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiosqlite
import psycopg

# SQLite checks REFERENCES only if the connection turns them on, which the guard's do not; PostgreSQL always does.
TABLES = (
    """CREATE TABLE IF NOT EXISTS customers (
        id text PRIMARY KEY, name text NOT NULL DEFAULT '', email text NOT NULL DEFAULT '', version bigint NOT NULL DEFAULT 1
    )""",
    """CREATE TABLE IF NOT EXISTS payments (
        id text PRIMARY KEY,
        order_id text NOT NULL,
        customer_id text NOT NULL REFERENCES customers (id) DEFERRABLE INITIALLY DEFERRED,
        amount bigint NOT NULL CHECK (amount > 0),
        currency text NOT NULL CHECK (length(currency) = 3),
        status text NOT NULL DEFAULT 'authorized' CHECK (status IN ('authorized', 'capturing', 'captured', 'voided')),
        charge_id text UNIQUE,
        refunded bigint NOT NULL DEFAULT 0 CHECK (refunded BETWEEN 0 AND amount),
        CHECK (refunded = 0 OR status = 'captured'),
        CHECK ((status = 'captured') = (charge_id IS NOT NULL))
    )""",
    # One successful payment per order, even under different keys: the last line of defence.
    "CREATE UNIQUE INDEX IF NOT EXISTS one_payment_per_order ON payments (order_id) WHERE status <> 'voided'",
    """CREATE TABLE IF NOT EXISTS refunds (
        id text PRIMARY KEY,
        payment_id text NOT NULL REFERENCES payments (id),
        amount bigint NOT NULL CHECK (amount > 0),
        currency text NOT NULL,
        status text NOT NULL DEFAULT 'pending' CHECK (status IN ('pending', 'succeeded', 'failed')),
        payout_id text UNIQUE,
        settled bigint NOT NULL DEFAULT 0,
        CHECK ((status = 'succeeded') = (payout_id IS NOT NULL))
    )""",
    # Double entry with both sides in one row, so that entries always balance.
    """CREATE TABLE IF NOT EXISTS entries (
        number {number},
        kind text NOT NULL CHECK (kind IN ('capture', 'refund', 'settlement')),
        reference text NOT NULL,
        debit text NOT NULL,
        credit text NOT NULL CHECK (credit <> debit),
        amount bigint NOT NULL CHECK (amount > 0),
        currency text NOT NULL
    )""",
    "CREATE UNIQUE INDEX IF NOT EXISTS booked_once ON entries (kind, reference) WHERE kind <> 'settlement'",
)
NUMBER = {"sqlite": "integer PRIMARY KEY", "postgresql": "bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY"}
TABLES_LOCK = 7_263_801  # the advisory lock for processes that start at the same time

Row = dict[str, Any]


async def rows(connection: Any, text: str, *values: Any) -> list[Row]:
    """Return the rows of a statement on a connection of either driver; `?` marks a value."""
    if isinstance(connection, psycopg.AsyncConnection):
        text = text.replace("?", "%s")
    cursor = await connection.execute(text, values)
    if cursor.description is None:
        return []
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in await cursor.fetchall()]


@asynccontextmanager
async def read_connection(url: str) -> AsyncIterator[Any]:
    """Open a connection for reading.  Changes use the connection of the operation (`op.connection`)."""
    if url.startswith("sqlite"):
        async with aiosqlite.connect(url.removeprefix("sqlite:///"), isolation_level=None) as connection:
            yield connection
    else:
        async with await psycopg.AsyncConnection.connect(url, autocommit=True) as served:
            yield served


async def create_tables(url: str) -> None:
    """Create the tables that do not exist; several processes may start at the same time."""
    kind = "sqlite" if url.startswith("sqlite") else "postgresql"
    async with read_connection(url) as connection:
        if kind == "sqlite":
            await connection.execute("PRAGMA journal_mode = WAL")
            await connection.execute("PRAGMA busy_timeout = 5000")
            await connection.execute("BEGIN IMMEDIATE")
        else:
            await connection.execute("BEGIN")
            await connection.execute("SELECT pg_advisory_xact_lock(%s)", [TABLES_LOCK])
        for statement in TABLES:
            await connection.execute(statement.replace("{number}", NUMBER[kind]))
        await connection.execute("COMMIT")
