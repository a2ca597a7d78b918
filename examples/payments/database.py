"""The service's tables, and one way to ask SQLite and PostgreSQL, whose drivers differ in how they mark a value."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiosqlite
import psycopg

# SQLite looks at REFERENCES only where a connection asks it to, which a lent one does not; PostgreSQL always does.
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
    # One successful payment per order, whatever keys the callers made up: the last line of defence.
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
    # Double entry, one row for both sides: what is taken from one account is given to the other, so entries balance.
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
MAKING_TABLES = 7_263_801  # the advisory lock of processes that start at once

Row = dict[str, Any]


async def rows(connection: Any, text: str, *values: Any) -> list[Row]:
    """The rows that a statement gives, on a connection of either driver; a `?` marks a value."""
    if isinstance(connection, psycopg.AsyncConnection):
        text = text.replace("?", "%s")
    cursor = await connection.execute(text, values)
    if cursor.description is None:
        return []
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in await cursor.fetchall()]


@asynccontextmanager
async def reading(url: str) -> AsyncIterator[Any]:
    """A connection to look with; what changes anything borrows the operation's own."""
    if url.startswith("sqlite"):
        async with aiosqlite.connect(url.removeprefix("sqlite:///"), isolation_level=None) as connection:
            yield connection
    else:
        async with await psycopg.AsyncConnection.connect(url, autocommit=True) as served:
            yield served


async def create_tables(url: str) -> None:
    """Make what is not there yet; several processes may start at once."""
    kind = "sqlite" if url.startswith("sqlite") else "postgresql"
    async with reading(url) as connection:
        if kind == "sqlite":
            await connection.execute("PRAGMA journal_mode = WAL")
            await connection.execute("PRAGMA busy_timeout = 5000")
            await connection.execute("BEGIN IMMEDIATE")
        else:
            await connection.execute("BEGIN")
            await connection.execute("SELECT pg_advisory_xact_lock(%s)", [MAKING_TABLES])
        for statement in TABLES:
            await connection.execute(statement.replace("{number}", NUMBER[kind]))
        await connection.execute("COMMIT")
