"""Bytes kept and bytes written for a settled record, on SQLite, PostgreSQL and Valkey.

    python -m bench.storage

For each store and each size of outcome, 10 000 operations run through the guard, 64 at a time, then all expire and are
purged.  This is done three times, to resemble a ledger that has been in use for some time, and the largest size counts.
Outcomes are random bytes, which do not compress.  The figures are the constants of `oncemore capacity`
(`src/oncemore/tools/commands/capacity.py`), and the tests check that they still match a record.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psycopg
import redis

from oncemore._contract.policy import Policy
from oncemore._ledger.guard import Guard
from oncemore._ledger.model import Operation, Outcome
from tests.support.servers import PostgresServer, ValkeyServer

RECORDS, ROUNDS, CALLERS = 10_000, 3, 64
FINGERPRINT = "c1:" + "a" * 64
HEADERS = (("content-type", "application/json"),)
SCOPE = "refunds.create:principal:"  # filled up until scope and key have the wanted length
TTL = 86400.0


class Gauge(NamedTuple):
    """A ledger with functions that return its size and its bytes written.  *tidy* frees space, as the server does later."""

    guard: Guard
    kept: Callable[[], int]
    written: Callable[[], int]
    tidy: Callable[[], object]


class Case(NamedTuple):
    """The size of scope and key together, and of the outcome's body, in bytes."""

    names: int
    body: int


# Between two sizes the figures are nearly linear.  Over all sizes they are not, because a page holds whole records.
NAMES, SIZES = 80, (0, 256, 1024, 2048, 4096, 16384)
LONG_NAMES = Case(144, 0)


@contextmanager
def on_sqlite() -> Iterator[Gauge]:
    with tempfile.TemporaryDirectory() as folder:
        guard = Guard(f"sqlite:///{folder}/once.db", cache=0)
        yield Gauge(
            guard, lambda: sum(file.stat().st_size for file in Path(folder).iterdir()), own_writes, lambda: None
        )
        guard.close()


def own_writes() -> int:
    """Return the bytes that this process has passed to write calls."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("wchar")))


@contextmanager
def on_postgres(server: PostgresServer) -> Iterator[Gauge]:
    schema = f"s{uuid.uuid4().hex[:8]}"
    with psycopg.connect(server.url, autocommit=True) as connection:

        def ask(query: str) -> int:
            return int(connection.execute(query).fetchone()[0])  # type: ignore[arg-type, index]

        guard = Guard(f"{server.url}?schema={schema}", cache=0)
        guard.stats()
        yield Gauge(
            guard,
            lambda: ask(f"SELECT pg_total_relation_size('{schema}.oncemore_records')"),
            lambda: ask("SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')"),
            lambda: connection.execute(f"VACUUM {schema}.oncemore_records"),
        )
        guard.close()
        connection.execute(f"DROP SCHEMA {schema} CASCADE")


@contextmanager
def on_valkey(server: ValkeyServer) -> Iterator[Gauge]:
    with redis.Redis.from_url(server.url) as connection:
        connection.flushall()
        empty = int(connection.info("memory")["used_memory"])
        guard = Guard(f"{server.url}?prefix=oncemore", cache=0)
        yield Gauge(
            guard,
            lambda: int(connection.info("memory")["used_memory"]) - empty,
            lambda: int(connection.info("persistence")["aof_current_size"]),
            connection.flushall,  # the server would remove expired records itself, but only after a day
        )
        guard.close()


async def fill(guard: Guard, case: Case) -> None:
    """Run RECORDS new operations, CALLERS at a time."""
    left = iter(range(RECORDS))

    async def caller() -> None:
        for _ in left:
            key = str(uuid.uuid4())
            scope = SCOPE + "u" * (case.names - len(SCOPE) - len(key))
            outcome = Outcome("response", 201, HEADERS, os.urandom(case.body))
            operation = Operation(scope, key, FINGERPRINT, "refunds.create")
            await guard.arun(operation, lambda op, outcome=outcome: outcome, policy=Policy(ttl=TTL))  # type: ignore[misc]

    await asyncio.gather(*(caller() for _ in range(CALLERS)))
    await guard.aclose()


def measure(gauge: Gauge, case: Case) -> tuple[float, float]:
    """Return bytes kept and bytes written per operation."""
    kept, written = [], []
    for _ in range(ROUNDS):
        before = gauge.written()
        asyncio.run(fill(gauge.guard, case))
        written.append(gauge.written() - before)
        kept.append(gauge.kept())
        gauge.guard.store.shift += TTL + 3600
        gauge.guard.purge(batch=RECORDS)
        gauge.tidy()
    return max(kept) / RECORDS, statistics.median(written) / RECORDS


def main() -> None:
    print(f"{'store':<12}{'names':>7}{'outcome':>9}{'kept/record':>14}{'written/operation':>19}")
    with PostgresServer(max_wal_size="4GB") as postgres, ValkeyServer(auto_aof_rewrite_percentage=0) as valkey:
        stores = {"sqlite": on_sqlite, "postgresql": lambda: on_postgres(postgres), "redis": lambda: on_valkey(valkey)}
        for name, begin in stores.items():
            found = {}
            for case in (LONG_NAMES, *(Case(NAMES, size) for size in SIZES)):
                with begin() as gauge:
                    kept, written = found[case] = measure(gauge, case)
                print(f"{name:<12}{case.names:>7}{case.body:>9}{kept:>14.0f}{written:>19.0f}", flush=True)
            print(f"  {name}: {constants(found)}", flush=True)


def constants(found: dict[Case, tuple[float, float]]) -> str:
    """Return the constants for `oncemore capacity`: figures for each size of outcome, and for a byte of names."""
    lines = []
    for at, what in enumerate(("kept", "written")):
        curve = tuple(round(found[Case(NAMES, size)][at]) for size in SIZES)
        name = (found[LONG_NAMES][at] - found[Case(NAMES, 0)][at]) / (LONG_NAMES.names - NAMES)
        lines.append(f"{what}={curve}, {what}_per_name_byte={name:.1f}")
    return ", ".join(lines)


if __name__ == "__main__":
    main()
