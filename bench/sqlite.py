"""Claims and settles on SQLite through the Guard, compared with plain SQL on the same disk.

    python -m bench.sqlite [folder]

A single async caller is compared with aiosqlite and with blocking code.
"""

from __future__ import annotations

import asyncio
import sqlite3
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import aiosqlite

from oncemore._ledger.guard import Guard
from oncemore._ledger.model import Operation, Outcome

CALLERS = 64
SECONDS = 0.3  # per measurement; measurements take turns, so that disturbances affect all
ROUNDS = 12

BODY = b'{"id": "pay_0123456789", "amount": 4200, "currency": "EUR", "status": "succeeded"}' * 3
OUTCOME = Outcome("response", 201, (("content-type", "application/json"),), BODY)

TABLE = """CREATE TABLE raw (scope TEXT, key TEXT, fingerprint TEXT, state TEXT, token INTEGER, lease_until REAL,
           expires_at REAL, outcome BLOB, PRIMARY KEY (scope, key))"""
CLAIM = "INSERT INTO raw VALUES ('tenant', ?, ?, 'running', 1, 1e9, NULL, NULL) ON CONFLICT DO NOTHING"
SETTLE = (
    "UPDATE raw SET state = 'settled', expires_at = 1e9, outcome = ? WHERE scope = 'tenant' AND key = ? AND token = 1"
)


def raw(folder: Path, group: int) -> float:
    """Return pairs of claim and settle per second in plain SQL, with *group* of them per commit."""
    connection = sqlite3.connect(folder / f"{uuid.uuid4()}.db", isolation_level=None)
    for statement in ("PRAGMA journal_mode = WAL", "PRAGMA synchronous = FULL", TABLE):
        connection.execute(statement)

    def commit(text: str, rows: list[tuple[object, ...]]) -> None:
        connection.execute("BEGIN IMMEDIATE")
        for row in rows:
            assert connection.execute(text, row).rowcount == 1
        connection.execute("COMMIT")

    def pairs() -> int:
        keys = [str(uuid.uuid4()) for _ in range(group)]
        commit(CLAIM, [(key, "c1:" + "f" * 32) for key in keys])
        commit(SETTLE, [(BODY, key) for key in keys])
        return group

    try:
        return rate(pairs)
    finally:
        connection.close()


async def raw_awaited(folder: Path) -> float:
    """Return pairs per second in plain SQL through aiosqlite, with one per commit."""
    async with aiosqlite.connect(folder / f"{uuid.uuid4()}.db", isolation_level=None) as connection:
        for statement in ("PRAGMA journal_mode = WAL", "PRAGMA synchronous = FULL", TABLE):
            await connection.execute(statement)

        async def commit(text: str, row: tuple[object, ...]) -> None:
            await connection.execute("BEGIN IMMEDIATE")
            assert (await connection.execute(text, row)).rowcount == 1
            await connection.execute("COMMIT")

        done, start = 0, time.perf_counter()
        while time.perf_counter() - start < SECONDS:
            key = str(uuid.uuid4())
            await commit(CLAIM, (key, "c1:" + "f" * 32))
            await commit(SETTLE, (BODY, key))
            done += 1
        return done / (time.perf_counter() - start)


def rate(pairs: Callable[[], int]) -> float:
    done, start = 0, time.perf_counter()
    while time.perf_counter() - start < SECONDS:
        done += pairs()
    return done / (time.perf_counter() - start)


def operation() -> Operation:
    return Operation("tenant", str(uuid.uuid4()), "c1:" + "f" * 32, "payments.create")


def blocking(folder: Path) -> float:
    """Return pairs per second of one blocking caller."""
    guard = Guard(f"sqlite:///{folder}/{uuid.uuid4()}.db")

    def pairs() -> int:
        guard.run(operation(), lambda op: OUTCOME)
        return 1

    try:
        return rate(pairs)
    finally:
        guard.close()


async def awaited(folder: Path, callers: int) -> float:
    """Return pairs per second of *callers* callers on one event loop."""
    guard = Guard(f"sqlite:///{folder}/{uuid.uuid4()}.db")
    done, start = 0, time.perf_counter()

    async def perform(op: object) -> Outcome:
        return OUTCOME

    async def call() -> None:
        nonlocal done
        while time.perf_counter() - start < SECONDS:
            await guard.arun(operation(), perform)
            done += 1

    await asyncio.gather(*(call() for _ in range(callers)))
    taken = time.perf_counter() - start
    await guard.aclose()
    return done / taken


def main(folder: Path) -> None:
    alone, grouped, awaiting = "raw, one by one", f"raw, {CALLERS} to a commit", "raw, awaited (aiosqlite)"
    kinds: dict[str, tuple[str, Callable[[], float]]] = {
        alone: (alone, lambda: raw(folder, 1)),
        "guard.run, one caller": (alone, lambda: blocking(folder)),
        awaiting: (awaiting, lambda: asyncio.run(raw_awaited(folder))),
        "guard.arun, one caller": (awaiting, lambda: asyncio.run(awaited(folder, 1))),
        grouped: (grouped, lambda: raw(folder, CALLERS)),
        f"guard.arun, {CALLERS} callers": (grouped, lambda: asyncio.run(awaited(folder, CALLERS))),
    }
    rounds = [{name: measure() for name, (_, measure) in kinds.items()} for _ in range(ROUNDS)]
    print(f"SQLite {sqlite3.sqlite_version}, WAL, synchronous=FULL; {ROUNDS} rounds")
    print(f"{'':24} {'best pairs/s':>14} {'best us':>9} {'of raw (median of the rounds)':>31}")
    for name, (base, _) in kinds.items():
        best = max(each[name] for each in rounds)
        ratio = statistics.median(each[name] / each[base] for each in rounds)
        print(f"{name:24} {best:14.0f} {1e6 / best:9.0f} {ratio:31.0%}")
    blocking_too = statistics.median(each["guard.arun, one caller"] / each[alone] for each in rounds)
    print(f"guard.arun, one caller, of the blocking raw one: {blocking_too:.0%}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as folder:
        main(Path(folder))
