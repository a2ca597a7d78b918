"""Queries SQLite and PostgreSQL in one way for the examples, because the drivers mark values differently."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import aiosqlite
import psycopg

NUMBER = {"sqlite": "integer PRIMARY KEY", "postgresql": "bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY"}
PATIENCE = 30_000  # milliseconds that a writer of SQLite waits for another process

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
    """Open a connection for reading.  Guarded changes use the connection of the operation (`op.connection`)."""
    if url.startswith("sqlite"):
        async with aiosqlite.connect(
            url.removeprefix("sqlite:///").partition("?")[0], isolation_level=None
        ) as connection:
            await connection.execute(f"PRAGMA busy_timeout = {PATIENCE}")
            yield connection
    else:
        async with await psycopg.AsyncConnection.connect(url, autocommit=True) as served:
            yield served


@asynccontextmanager
async def transaction(url: str) -> AsyncIterator[Any]:
    """Open a connection in a transaction of its own, for changes that are not guarded.  It commits unless the code raises."""
    async with read_connection(url) as connection:
        await connection.execute("BEGIN IMMEDIATE" if url.startswith("sqlite") else "BEGIN")
        try:
            yield connection
        except BaseException:
            await connection.execute("ROLLBACK")
            raise
        await connection.execute("COMMIT")


async def create_tables(url: str, tables: Iterable[str], lock: int) -> None:
    """Create the tables that do not exist.  Several processes may start at the same time: *lock* is their advisory lock."""
    kind = "sqlite" if url.startswith("sqlite") else "postgresql"
    if kind == "sqlite":
        async with read_connection(url) as connection:
            await connection.execute("PRAGMA journal_mode = WAL")
    async with transaction(url) as connection:
        if kind == "postgresql":
            await connection.execute("SELECT pg_advisory_xact_lock(%s)", [lock])
        for statement in tables:
            await connection.execute(statement.replace("{number}", NUMBER[kind]))
