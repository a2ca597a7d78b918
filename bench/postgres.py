"""Claim + settle pairs on PostgreSQL: raw one by one and grouped, and through the guard; about 20 seconds.

    python bench/postgres.py [postgresql://...]

Without a URL it starts a server of its own, with fsync on.  Raw is asyncpg with prepared statements on a table with
nothing but a primary key.  Figures are pairs per second and microseconds per pair; the ratios are what counts.
"""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import asyncpg

from oncemore.core.guard import Guard
from oncemore.core.model import Operation, Outcome
from oncemore.core.op import Op
from oncemore.testing.servers import PostgresServer

ROUNDS, SECONDS = 6, 0.6
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

Work = Callable[[], Awaitable[object]]  # one turn of one caller


@dataclass
class Contender:
    """Someone who makes pairs: *work* makes so many *pairs* at once, for each of so many *callers*."""

    name: str
    work: Work
    callers: int = 1
    pairs: int = 1
    beside: str = ""
    best: float = 0.0

    async def run(self) -> None:
        """Take turns for a while, without a pause; the best while counts, for the machine has other things to do."""
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


def raw(pool: asyncpg.Pool, own: asyncpg.Connection) -> list[Contender]:
    async def pair() -> None:
        async with pool.acquire() as connection:
            await alone(connection)

    async def alone(connection: asyncpg.Connection = own) -> None:
        key = str(uuid.uuid4())
        await connection.fetch(CLAIM, "user:1", key, FINGERPRINT)
        await connection.execute(SETTLE, "user:1", key, BODY)

    async def group() -> None:
        keys = [str(uuid.uuid4()) for _ in range(CALLERS)]
        scopes = ["user:1"] * CALLERS
        await own.fetch(CLAIMS, scopes, keys, [FINGERPRINT] * CALLERS)
        await own.execute(SETTLES, scopes, keys, [BODY] * CALLERS)

    return [
        Contender("raw, one caller", alone),
        Contender("raw, 64 callers, 16 connections", pair, callers=CALLERS),
        Contender("raw, groups of 64", group, pairs=CALLERS),
    ]


def ours(guard: Guard) -> list[Contender]:
    async def perform(_: Op) -> Outcome:
        return OUTCOME

    async def pair() -> None:
        await guard.arun(Operation("user:1", str(uuid.uuid4()), FINGERPRINT, "refunds.create"), perform)

    return [
        Contender("guard, one caller", pair, beside="raw, one caller"),
        Contender("guard, 64 callers", pair, callers=CALLERS, beside="raw, groups of 64"),
    ]


async def main(url: str) -> None:
    guard = Guard(f"{url}?schema={SCHEMA}")
    async with asyncpg.create_pool(url, min_size=17, max_size=17) as pool, pool.acquire() as own:
        await own.execute(TABLE)
        try:
            contenders = [*raw(pool, own), *ours(guard)]
            for _ in range(ROUNDS):
                for contender in contenders:
                    await contender.run()
            show(contenders)
        finally:
            await guard.aclose()
            await own.execute(f"DROP SCHEMA {SCHEMA} CASCADE")


def show(contenders: list[Contender]) -> None:
    rates = {contender.name: contender.best for contender in contenders}
    print(f"{'pairs of claim and settle':<36}{'per second':>12}{'µs each':>10}{'of raw':>9}")
    for one in sorted(contenders, key=lambda one: one.best):
        ratio = f"{one.best / rates[one.beside]:.0%}" if one.beside else ""
        print(f"{one.name:<36}{one.best:>12,.0f}{1e6 / one.best:>10.0f}{ratio:>9}")


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
