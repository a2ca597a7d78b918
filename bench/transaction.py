"""A refund with effect = "transaction", compared with the same handler without idempotency.  It takes about two minutes.

    python -m bench.transaction

The handler writes a refund and two ledger entries in one transaction.  Sixteen callers have sixteen connections, in three
variants: bare; with a key by hand, the minimum that refuses a second request (an INSERT before, an UPDATE with the answer
after, no fingerprint, no replay); and guarded.  They take turns on the same server in a changing order, after one round
that opens the connections and prepares the statements.  The figure is the median ratio to bare.  SQLite has one writer,
so callers of one process are faster if they share one connection, as in the guard; a second row measures that.  The calls
go to `Guard` itself, because HTTP would make the difference smaller.
"""

from __future__ import annotations

import asyncio
import json
import queue
import sqlite3
import statistics
import tempfile
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import aiosqlite
import psycopg
from psycopg_pool import AsyncConnectionPool, ConnectionPool

from oncemore import Guard, Operation, Policy
from tests.support.servers import PostgresServer

ROUNDS, SECONDS, CALLERS = 11, 0.8, 16
TABLES = (
    "CREATE TABLE refunds (id text PRIMARY KEY, payment text NOT NULL, amount integer NOT NULL)",
    "CREATE TABLE entries (refund text NOT NULL, account text NOT NULL, amount integer NOT NULL)",
    "CREATE TABLE keys (scope text, key text, answer text, expires double precision, PRIMARY KEY (scope, key))",
    "CREATE INDEX keys_expires ON keys (expires)",
)
STATEMENTS: tuple[tuple[str, Callable[[str], tuple[Any, ...]]], ...] = (
    ("INSERT INTO refunds VALUES ({0}, {0}, {0})", lambda id: (id, "pay_123", 1999)),
    ("INSERT INTO entries VALUES ({0}, {0}, {0})", lambda id: (id, "customer", 1999)),
    ("INSERT INTO entries VALUES ({0}, {0}, {0})", lambda id: (id, "merchant", -1999)),
)
BEFORE = "INSERT INTO keys (scope, key) VALUES ({0}, {0}) ON CONFLICT DO NOTHING"
AFTER = "UPDATE keys SET answer = {0}, expires = {0} WHERE scope = {0} AND key = {0}"
POLICY = Policy(effect="transaction")
BUSY_TIMEOUT = 30.0  # seconds that SQLite waits for a lock

Turn = Callable[[], Any]
Awaited = Callable[[], Awaitable[Any]]


def new_operation() -> Operation:
    return Operation("user:1", str(uuid.uuid4()), "c1:" + "a" * 64, "refunds.create")


def answer(id: str) -> dict[str, Any]:
    return {"id": id, "payment": "pay_123", "amount": 1999, "currency": "EUR", "status": "succeeded"}


class Handler:
    """The handler for drivers that mark parameters with *mark*: sync and async, bare and with a key by hand."""

    def __init__(self, mark: str) -> None:
        self.statements = [(text.format(mark), values) for text, values in STATEMENTS]
        self.before, self.after = BEFORE.format(mark), AFTER.format(mark)

    def write(self, connection: Any, id: str) -> dict[str, Any]:
        for text, values in self.statements:
            connection.execute(text, values(id))
        return answer(id)

    async def awrite(self, connection: Any, id: str) -> dict[str, Any]:
        for text, values in self.statements:
            await connection.execute(text, values(id))
        return answer(id)

    def by_hand(self, connection: Any, id: str) -> None:
        if connection.execute(self.before, ("user:1", id)).rowcount != 1:
            raise RuntimeError("here the answer would be looked up")
        connection.execute(self.after, (*kept(self.write(connection, id)), "user:1", id))

    async def aby_hand(self, connection: Any, id: str) -> None:
        if (await connection.execute(self.before, ("user:1", id))).rowcount != 1:
            raise RuntimeError("here the answer would be looked up")
        await connection.execute(self.after, (*kept(await self.awrite(connection, id)), "user:1", id))


def kept(written: dict[str, Any]) -> tuple[str, float]:
    return json.dumps(written), time.time() + 86400


ON_POSTGRES, ON_SQLITE = Handler("%s"), Handler("?")


# Rates: calls per second of sixteen callers


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


async def rate_of_tasks(turn: Awaited) -> float:
    ends, count = time.perf_counter() + SECONDS, 0

    async def call() -> None:
        nonlocal count
        while time.perf_counter() < ends:
            await turn()
            count += 1

    began = time.perf_counter()
    await asyncio.gather(*(call() for _ in range(CALLERS)))
    return count / (time.perf_counter() - began)


def rates_in_turns(name: str, bare: Turn, by_hand: Turn, guarded: Turn) -> None:
    turns = (bare, by_hand, guarded)
    print_rates(name, [[rate_of_threads(turn) for turn in turns[::way]][::way] for way in ways()])


async def in_turns(name: str, bare: Awaited, by_hand: Awaited, guarded: Awaited) -> None:
    turns = (bare, by_hand, guarded)
    print_rates(name, [[await rate_of_tasks(turn) for turn in turns[::way]][::way] for way in ways()])


def ways() -> list[int]:
    """Return the direction of each round's order: forward (1) and backward (-1) in turn."""
    return [1 if number % 2 else -1 for number in range(ROUNDS + 1)]


def print_rates(name: str, rounds: list[list[float]]) -> None:
    rows = rounds[1:]
    rates = (statistics.median(kind) for kind in zip(*rows, strict=True))
    by_hand, ours = (statistics.median(row[kind] / row[0] for row in rows) for kind in (1, 2))
    print(
        f"{name:<28}" + "".join(f"{rate:>10,.0f}" for rate in rates) + f"{by_hand:>10.2f} x{ours:>8.2f} x", flush=True
    )


# The handler, on each driver


async def with_psycopg_async(url: str) -> None:
    guard, handler = Guard(url, policy=POLICY), ON_POSTGRES
    async with AsyncConnectionPool(url, min_size=CALLERS, max_size=CALLERS) as pool:

        async def bare() -> None:
            async with pool.connection() as connection:
                await handler.awrite(connection, str(uuid.uuid4()))

        async def by_hand() -> None:
            async with pool.connection() as connection:
                await handler.aby_hand(connection, str(uuid.uuid4()))

        async def guarded() -> None:
            await guard.arun(new_operation(), lambda op: handler.awrite(op.connection, op.key))

        await in_turns("PostgreSQL, psycopg async", bare, by_hand, guarded)
    await guard.aclose()


def with_psycopg(url: str) -> None:
    guard, handler = Guard(url, policy=POLICY), ON_POSTGRES
    with ConnectionPool(url, min_size=CALLERS, max_size=CALLERS) as pool:

        def bare() -> None:
            with pool.connection() as connection:
                handler.write(connection, str(uuid.uuid4()))

        def by_hand() -> None:
            with pool.connection() as connection:
                handler.by_hand(connection, str(uuid.uuid4()))

        def guarded() -> None:
            guard.run(new_operation(), lambda op: handler.write(op.connection, op.key))

        rates_in_turns("PostgreSQL, psycopg", bare, by_hand, guarded)
    guard.close()


def with_sqlite(path: str) -> None:
    """Measure SQLite with a connection per thread, and with one connection that all threads share in turn."""
    guard, handler = Guard(f"sqlite:///{path}", policy=POLICY), ON_SQLITE
    own: queue.SimpleQueue[sqlite3.Connection] = queue.SimpleQueue()
    for _ in range(CALLERS):
        own.put(opened(path))
    shared: queue.SimpleQueue[sqlite3.Connection] = queue.SimpleQueue()
    shared.put(opened(path))

    def within(pool: queue.SimpleQueue[sqlite3.Connection], work: Callable[[Any, str], Any]) -> None:
        connection = pool.get()
        connection.execute("BEGIN IMMEDIATE")
        work(connection, str(uuid.uuid4()))
        connection.execute("COMMIT")
        pool.put(connection)

    def guarded() -> None:
        guard.run(new_operation(), lambda op: handler.write(op.connection, op.key))

    for name, pool in (("SQLite, sqlite3", own), ("  one connection, lent", shared)):
        rates_in_turns(name, partial(within, pool, handler.write), partial(within, pool, handler.by_hand), guarded)
        while not pool.empty():
            pool.get().close()
    guard.close()


def opened(path: str) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=BUSY_TIMEOUT)
    connection.execute("PRAGMA synchronous = FULL")
    return connection


async def with_aiosqlite(path: str) -> None:
    guard, handler = Guard(f"sqlite:///{path}", policy=POLICY), ON_SQLITE

    async def filled(size: int) -> asyncio.Queue[Any]:
        pool: asyncio.Queue[Any] = asyncio.Queue()
        for _ in range(size):
            connection = await aiosqlite.connect(path, isolation_level=None, timeout=BUSY_TIMEOUT)
            await connection.execute("PRAGMA synchronous = FULL")
            pool.put_nowait(connection)
        return pool

    async def within(pool: asyncio.Queue[Any], work: Callable[[Any, str], Awaitable[Any]]) -> None:
        connection = await pool.get()
        await connection.execute("BEGIN IMMEDIATE")
        await work(connection, str(uuid.uuid4()))
        await connection.execute("COMMIT")
        pool.put_nowait(connection)

    async def guarded() -> None:
        await guard.arun(new_operation(), lambda op: handler.awrite(op.connection, op.key))

    for name, size in (("SQLite, aiosqlite", CALLERS), ("  one connection, lent", 1)):
        pool = await filled(size)
        await in_turns(name, partial(within, pool, handler.awrite), partial(within, pool, handler.aby_hand), guarded)
        while not pool.empty():
            await pool.get_nowait().close()
    await guard.aclose()


@contextmanager
def sqlite_file() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/bench.db"
        connection = sqlite3.connect(path)
        connection.execute("PRAGMA journal_mode = WAL")
        for text in TABLES:
            connection.execute(text)
        connection.close()
        yield path


def main() -> None:
    print(f"Refunds per second, {CALLERS} callers (0.80 x asked)")
    print(f"{'':<28}{'bare':>10}{'by hand':>10}{'guarded':>10}{'by hand':>12}{'guarded':>10}")
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
