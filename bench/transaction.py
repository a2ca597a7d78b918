"""A refund with effect = "transaction" beside the same handler without idempotency; about two minutes.

    python -m bench.transaction

The handler writes a refund and two ledger entries in one transaction.  Sixteen callers have sixteen connections, bare and
guarded in turns on the same server, each of them first in every other round, after one round that does not count: all
connections are open then, and the statements prepared.  Of the ratios, the median.  SQLite has one writer, and those
who share a process can do better than to meet at the file, as the guard does: so there is a second row for it, with one
connection behind a lock.  Through `Guard` itself, without HTTP around it, which would only make the difference smaller.
"""

from __future__ import annotations

import asyncio
import sqlite3
import statistics
import tempfile
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import aiosqlite
import psycopg
from psycopg_pool import AsyncConnectionPool, ConnectionPool

from oncemore import Guard, Operation, Policy
from oncemore.testing.servers import PostgresServer

ROUNDS, SECONDS, CALLERS = 11, 0.8, 16
TABLES = (
    "CREATE TABLE refunds (id text PRIMARY KEY, payment text NOT NULL, amount integer NOT NULL)",
    "CREATE TABLE entries (refund text NOT NULL, account text NOT NULL, amount integer NOT NULL)",
)
STATEMENTS = (
    ("INSERT INTO refunds VALUES ({0}, {0}, {0})", lambda id: (id, "pay_123", 1999)),
    ("INSERT INTO entries VALUES ({0}, {0}, {0})", lambda id: (id, "customer", 1999)),
    ("INSERT INTO entries VALUES ({0}, {0}, {0})", lambda id: (id, "merchant", -1999)),
)
ON_POSTGRES = [(text.format("%s"), values) for text, values in STATEMENTS]
ON_SQLITE = [(text.format("?"), values) for text, values in STATEMENTS]
POLICY = Policy(effect="transaction")
PATIENCE = 30.0  # of SQLite's own waiting

Turn = Callable[[], Any]


def asked() -> Operation:
    return Operation("user:1", str(uuid.uuid4()), "c1:" + "a" * 64, "refunds.create")


def answer(id: str) -> dict[str, Any]:
    return {"id": id, "payment": "pay_123", "amount": 1999, "currency": "EUR", "status": "succeeded"}


# Rates: how often per second sixteen callers get through


def rate_of_threads(turn: Turn) -> float:
    ends, counts = time.perf_counter() + SECONDS, [0] * CALLERS

    def call(n: int) -> None:
        while time.perf_counter() < ends:
            turn()
            counts[n] += 1

    threads = [threading.Thread(target=call, args=(n,)) for n in range(CALLERS)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - began)


async def rate_of_tasks(turn: Callable[[], Awaitable[Any]]) -> float:
    ends, count = time.perf_counter() + SECONDS, 0

    async def call() -> None:
        nonlocal count
        while time.perf_counter() < ends:
            await turn()
            count += 1

    began = time.perf_counter()
    await asyncio.gather(*(call() for _ in range(CALLERS)))
    return count / (time.perf_counter() - began)


def told(name: str, bare: list[float], ours: list[float]) -> None:
    ratio = statistics.median(mine / theirs for mine, theirs in zip(ours, bare, strict=True))
    print(f"{name:<28}{statistics.median(bare):>10,.0f}{statistics.median(ours):>10,.0f}{ratio:>8.2f} x", flush=True)


# The handler, on each driver


async def with_psycopg_async(url: str) -> None:
    guard = Guard(url, policy=POLICY)
    async with AsyncConnectionPool(url, min_size=CALLERS, max_size=CALLERS) as pool:

        async def write(connection: Any, id: str) -> dict[str, Any]:
            for text, values in ON_POSTGRES:
                await connection.execute(text, values(id))
            return answer(id)

        async def bare() -> None:
            async with pool.connection() as connection:
                await write(connection, str(uuid.uuid4()))

        async def guarded() -> None:
            await guard.arun(asked(), lambda op: write(op.connection, op.key))

        await in_turns("PostgreSQL, psycopg async", bare, guarded)
    await guard.aclose()


def with_psycopg(url: str) -> None:
    guard = Guard(url, policy=POLICY)
    with ConnectionPool(url, min_size=CALLERS, max_size=CALLERS) as pool:

        def write(connection: Any, id: str) -> dict[str, Any]:
            for text, values in ON_POSTGRES:
                connection.execute(text, values(id))
            return answer(id)

        def bare() -> None:
            with pool.connection() as connection:
                write(connection, str(uuid.uuid4()))

        rates_in_turns("PostgreSQL, psycopg", bare, lambda: guard.run(asked(), lambda op: write(op.connection, op.key)))
    guard.close()


def with_sqlite(path: str) -> None:
    """Bare: a connection for each thread, which wait for each other at the file; and one for all, behind a lock."""
    guard = Guard(f"sqlite:///{path}", policy=POLICY)
    own, shared, lock = threading.local(), opened(path), threading.Lock()

    def write(connection: Any, id: str) -> dict[str, Any]:
        for text, values in ON_SQLITE:
            connection.execute(text, values(id))
        return answer(id)

    def written(connection: Any) -> None:
        connection.execute("BEGIN IMMEDIATE")
        write(connection, str(uuid.uuid4()))
        connection.execute("COMMIT")

    def bare() -> None:
        if not hasattr(own, "connection"):
            own.connection = opened(path)
        written(own.connection)

    def behind_a_lock() -> None:
        with lock:
            written(shared)

    def guarded() -> None:
        guard.run(asked(), lambda op: write(op.connection, op.key))

    rates_in_turns("SQLite, sqlite3", bare, guarded)
    rates_in_turns("  bare behind a lock", behind_a_lock, guarded)
    shared.close()
    guard.close()


def opened(path: str) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=PATIENCE)
    connection.execute("PRAGMA synchronous = FULL")
    return connection


async def with_aiosqlite(path: str) -> None:
    guard = Guard(f"sqlite:///{path}", policy=POLICY)
    pool: asyncio.Queue[Any] = asyncio.Queue()
    lock = asyncio.Lock()
    for _ in range(CALLERS):
        connection = await aiosqlite.connect(path, isolation_level=None, timeout=PATIENCE)
        await connection.execute("PRAGMA synchronous = FULL")
        pool.put_nowait(connection)

    async def write(connection: Any, id: str) -> dict[str, Any]:
        for text, values in ON_SQLITE:
            await connection.execute(text, values(id))
        return answer(id)

    async def bare() -> None:
        connection = await pool.get()
        await connection.execute("BEGIN IMMEDIATE")
        await write(connection, str(uuid.uuid4()))
        await connection.execute("COMMIT")
        pool.put_nowait(connection)

    async def behind_a_lock() -> None:
        async with lock:
            await bare()

    async def guarded() -> None:
        await guard.arun(asked(), lambda op: write(op.connection, op.key))

    await in_turns("SQLite, aiosqlite", bare, guarded)
    await in_turns("  bare behind a lock", behind_a_lock, guarded)
    for _ in range(CALLERS):
        await (await pool.get()).close()
    await guard.aclose()


def rates_in_turns(name: str, bare: Turn, guarded: Turn) -> None:
    guarded()  # the tables are there
    rates: dict[Turn, list[float]] = {bare: [], guarded: []}
    for number in range(ROUNDS + 1):
        for turn in (bare, guarded) if number % 2 else (guarded, bare):
            rates[turn].append(rate_of_threads(turn))
    told(name, rates[bare][1:], rates[guarded][1:])


async def in_turns(name: str, bare: Callable[[], Awaitable[Any]], guarded: Callable[[], Awaitable[Any]]) -> None:
    await guarded()
    rates: dict[Turn, list[float]] = {bare: [], guarded: []}
    for number in range(ROUNDS + 1):
        for turn in (bare, guarded) if number % 2 else (guarded, bare):
            rates[turn].append(await rate_of_tasks(turn))
    told(name, rates[bare][1:], rates[guarded][1:])


@contextmanager
def sqlite_file() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/bench.db"
        connection = sqlite3.connect(path)
        for text in TABLES:
            connection.execute(text)
        connection.close()
        yield path


def main() -> None:
    print(f"Refunds per second, {CALLERS} callers (0.80 x asked)\n{'':<28}{'bare':>10}{'guarded':>10}{'ratio':>10}")
    with PostgresServer() as server:
        with psycopg.connect(server.url, autocommit=True) as connection:
            for text in TABLES:
                connection.execute(text)
        asyncio.run(with_psycopg_async(server.url))
        with_psycopg(server.url)
    with sqlite_file() as path:
        with_sqlite(path)
    with sqlite_file() as path:
        asyncio.run(with_aiosqlite(path))


if __name__ == "__main__":
    main()
