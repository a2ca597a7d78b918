"""Pairs of claim and settle on PostgreSQL: raw, raw in batches, and through the guard.  It takes about 25 seconds.

    python -m bench.postgres [postgresql://...]

Without a URL it starts its own server, with fsync on.  Raw is asyncpg (psycopg for blocking callers) with prepared
statements, on a table with only a primary key.  For one caller, raw and guarded calls alternate, and the figure is the
median.  For many callers, it is the best of several rounds, because other work on the machine has disturbed it least.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import asyncpg
import psycopg

from oncemore._ledger.context import Op
from oncemore._ledger.guard import Guard
from oncemore._ledger.model import Operation, Outcome
from tests.support.servers import PostgresServer

ROUNDS, SECONDS = 8, 0.6
CALLERS = 64
SCHEMA = f"bench_{uuid.uuid4().hex[:8]}"
FINGERPRINT = "c1:" + "a" * 64
BODY = b'{"id": "rf_123", "amount": 1999, "currency": "EUR", "status": "succeeded"}' * 4
OUTCOME = Outcome("response", 201, (("content-type", "application/json"),), BODY)

TABLE = f"""
    CREATE SCHEMA {SCHEMA};
    CREATE TABLE {SCHEMA}.raw (scope text, key text, fingerprint text, state text, lease_until timestamptz,
        outcome bytea, PRIMARY KEY (scope, key))"""
CLAIM = f"""INSERT INTO {SCHEMA}.raw VALUES ($1, $2, $3, 'running', now() + interval '30 s')
    ON CONFLICT DO NOTHING RETURNING key"""
SETTLE = f"UPDATE {SCHEMA}.raw SET state = 'settled', outcome = $3 WHERE scope = $1 AND key = $2"
CLAIMS = f"""INSERT INTO {SCHEMA}.raw
    SELECT s, k, f, 'running', now() + interval '30 s' FROM unnest($1::text[], $2::text[], $3::text[]) AS u (s, k, f)
    ON CONFLICT DO NOTHING RETURNING key"""
SETTLES = f"""UPDATE {SCHEMA}.raw SET state = 'settled', outcome = o
    FROM unnest($1::text[], $2::text[], $3::bytea[]) AS u (s, k, o) WHERE scope = s AND key = k"""

Work = Callable[[], Awaitable[object]]  # one call of one caller


def key() -> str:
    return str(uuid.uuid4())


def operation() -> Operation:
    return Operation("user:1", key(), FINGERPRINT, "refunds.create")


async def perform(_: Op) -> Outcome:
    return OUTCOME


# One caller


async def one_caller(url: str, own: asyncpg.Connection, guard: Guard) -> None:
    cursor = psycopg.RawCursor(psycopg.connect(url, autocommit=True, prepare_threshold=0))

    async def raw() -> None:
        name = key()
        await own.fetch(CLAIM, "user:1", name, FINGERPRINT)
        await own.execute(SETTLE, "user:1", name, BODY)

    async def raw_blocking() -> None:
        name = key()
        cursor.execute(CLAIM, ["user:1", name, FINGERPRINT]).fetchall()
        cursor.execute(SETTLE, ["user:1", name, BODY])

    async def guarded() -> None:
        await guard.arun(operation(), perform)

    async def guarded_blocking() -> None:
        guard.run(operation(), lambda _: OUTCOME)

    turns: dict[str, Work] = {
        "raw asyncpg": raw,
        "guard.arun": guarded,
        "raw psycopg, blocking": raw_blocking,
        "guard.run, blocking": guarded_blocking,
    }
    took = await in_turns(turns)
    print(f"{'one caller, µs a pair':<36}{'median':>12}{'of raw':>9}")
    for name, beside in zip(turns, ("", "raw asyncpg", "", "raw psycopg, blocking"), strict=True):
        ratio = f"{took[name] / took[beside]:.0%}" if beside else ""
        print(f"{name:<36}{took[name]:>12,.0f}{ratio:>9}", flush=True)


async def in_turns(turns: dict[str, Work]) -> dict[str, float]:
    """Return the median microseconds of each.  They take turns in a changing order."""
    times: dict[str, list[float]] = {name: [] for name in turns}
    ends = time.perf_counter() + ROUNDS * SECONDS
    while time.perf_counter() < ends:
        for name, work in random.sample(list(turns.items()), len(turns)):
            started = time.perf_counter()
            await work()
            times[name].append((time.perf_counter() - started) * 1e6)
    return {name: statistics.median(taken[5:]) for name, taken in times.items()}


# Many callers


@dataclass
class Contender:
    """A contender: each of *callers* calls *work*, which makes *pairs* pairs in one call."""

    name: str
    work: Work
    callers: int = CALLERS
    pairs: int = 1
    best: float = 0.0

    async def run(self) -> None:
        """Let all callers work without a pause for some time."""
        done = 0
        ends = time.perf_counter() + SECONDS

        async def caller() -> None:
            nonlocal done
            while time.perf_counter() < ends:
                await self.work()
                done += self.pairs

        await self.work()
        started = time.perf_counter()
        await asyncio.gather(*(caller() for _ in range(self.callers)))
        self.best = max(self.best, done / (time.perf_counter() - started))


async def many_callers(pool: asyncpg.Pool, own: asyncpg.Connection, guard: Guard) -> None:
    async def pair() -> None:
        name = key()
        async with pool.acquire() as connection:
            await connection.fetch(CLAIM, "user:1", name, FINGERPRINT)
            await connection.execute(SETTLE, "user:1", name, BODY)

    async def group() -> None:
        names = [key() for _ in range(CALLERS)]
        scopes = ["user:1"] * CALLERS
        await own.fetch(CLAIMS, scopes, names, [FINGERPRINT] * CALLERS)
        await own.execute(SETTLES, scopes, names, [BODY] * CALLERS)

    async def guarded() -> None:
        await guard.arun(operation(), perform)

    contenders = (
        Contender("raw, one by one, 16 connections", pair),
        Contender("raw, groups of 64", group, callers=1, pairs=CALLERS),
        Contender("guard.arun", guarded),
    )
    for _ in range(ROUNDS):
        for contender in contenders:
            await contender.run()
    print(f"{'64 callers, pairs a second':<36}{'best':>12}{'of raw':>9}")
    for contender in contenders:
        ratio = f"{contender.best / contenders[1].best:.0%}"
        print(f"{contender.name:<36}{contender.best:>12,.0f}{ratio:>9}")


async def main(url: str) -> None:
    guard = Guard(f"{url}?schema={SCHEMA}")
    async with asyncpg.create_pool(url, min_size=17, max_size=17) as pool, pool.acquire() as own:
        await own.execute(TABLE)
        try:
            await one_caller(url, own, guard)
            await many_callers(pool, own, guard)
        finally:
            await guard.aclose()
            await own.execute(f"DROP SCHEMA {SCHEMA} CASCADE")


@contextmanager
def server(url: str | None) -> Iterator[str]:
    if url is not None:
        yield url
        return
    with PostgresServer() as own:
        yield own.url


if __name__ == "__main__":
    with server(sys.argv[1] if len(sys.argv) > 1 else None) as there:
        asyncio.run(main(there))
