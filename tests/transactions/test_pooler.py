"""Transactions behind a pooler in transaction mode, in which each transaction may run in another server process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import psycopg
import pytest
from psycopg_pool import ConnectionPool

from oncemore import Guard, Operation, Policy, connect
from oncemore._ledger.context import Op
from oncemore.errors import ConfigurationError

OFTEN = 40  # more often than psycopg waits before it prepares what the performer asks, on each server process
POLICY = Policy(effect="transaction")


@pytest.fixture
def url(pgbouncer_url: str, postgres_url: str, postgres_schema: str) -> str:
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {postgres_schema}")  # type: ignore[arg-type]
        connection.execute(f"CREATE TABLE {postgres_schema}.refunds (id text PRIMARY KEY)")  # type: ignore[arg-type]
    return f"{pgbouncer_url}?schema={postgres_schema}"


def refunds(postgres_url: str, schema: str) -> int:
    with psycopg.connect(postgres_url) as connection:
        found = connection.execute(f"SELECT count(*) FROM {schema}.refunds").fetchone()  # type: ignore[arg-type]
        assert found is not None
        return int(found[0])


def of_psycopg(url: str) -> ConnectionPool[Any]:
    return ConnectionPool(url, min_size=0, max_size=8, open=True, kwargs={"prepare_threshold": None})


@pytest.mark.parametrize("kind", ["url", "pool"])
def test_threads_of_two_processes_effect_each_once(
    url: str, pgbouncer_url: str, postgres_url: str, postgres_schema: str, kind: str
) -> None:
    """Nothing is prepared, by the ledger or by the performer, on connections that are shared."""
    pools = [of_psycopg(pgbouncer_url) for _ in range(2 * (kind == "pool"))]
    guards = [Guard(connect(pool, schema=postgres_schema)) for pool in pools] or [Guard(url), Guard(url)]

    def perform(op: Op) -> int:
        op.connection.execute(f"INSERT INTO {postgres_schema}.refunds VALUES (%s)", (op.key,))
        return 1

    def refund(number: int) -> str:
        return guards[number % 2].run(Operation("s", str(number)), perform, policy=POLICY).how

    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(refund, range(OFTEN))) == {"stored"}
        assert set(threads.map(refund, range(OFTEN))) == {"replayed"}
    assert refunds(postgres_url, postgres_schema) == OFTEN
    for each in (*guards, *pools):
        each.close()


@pytest.mark.parametrize("encoding", ["utf-8", "unicode"])
def test_pooler_that_repeats_client_encoding_is_supported(
    url: str, pgbouncer_url: str, postgres_schema: str, encoding: str
) -> None:
    kwargs = {"prepare_threshold": None, "client_encoding": encoding}
    with ConnectionPool(pgbouncer_url, min_size=0, max_size=1, open=True, kwargs=kwargs) as pool:
        guard = Guard(connect(pool, schema=postgres_schema))
        assert guard.run(Operation("s", "žluť"), lambda op: 1, policy=POLICY).how == "stored"
        guard.close()


def test_pool_that_prepares_behind_a_pooler_is_refused(url: str, pgbouncer_url: str, postgres_schema: str) -> None:
    pools = [ConnectionPool(pgbouncer_url, min_size=0, max_size=1, open=True) for _ in range(2)]
    guards = [Guard(connect(pool, schema=postgres_schema)) for pool in pools]

    def refund_often() -> None:
        for number in range(OFTEN):
            guards[number % 2].run(Operation("s", str(number)), lambda op: 1, policy=POLICY)

    with pytest.raises(
        ConfigurationError, match=r"already exists: behind a pooler .* prepare_threshold=None to psycopg"
    ):
        refund_often()
    for each in (*guards, *pools):
        each.close()


@asynccontextmanager
async def on_psycopg(url: str, _: str) -> AsyncIterator[Guard]:
    guard = Guard(url)
    yield guard
    await guard.aclose()


@asynccontextmanager
async def on_asyncpg(url: str, schema: str) -> AsyncIterator[Guard]:
    async with asyncpg.create_pool(url.partition("?")[0], min_size=0, max_size=8, statement_cache_size=0) as pool:
        guard = Guard(connect(pool, schema=schema))
        yield guard
        await guard.aclose()


@pytest.mark.parametrize(("opened", "mark"), [(on_psycopg, "%s"), (on_asyncpg, "$1")])
async def test_tasks_of_two_processes_effect_each_once(
    url: str, postgres_url: str, postgres_schema: str, opened: Callable[..., Any], mark: str
) -> None:

    async def perform(op: Op) -> int:
        values = (op.key,) if mark == "$1" else ((op.key,),)
        await op.connection.execute(f"INSERT INTO {postgres_schema}.refunds VALUES ({mark})", *values)
        return 1

    async with opened(url, postgres_schema) as one, opened(url, postgres_schema) as two:

        async def refund(number: int) -> str:
            answer = await (one, two)[number % 2].arun(Operation("s", str(number)), perform, policy=POLICY)
            return str(answer.how)

        assert set(await asyncio.gather(*map(refund, range(OFTEN)))) == {"stored"}
        assert set(await asyncio.gather(*map(refund, range(OFTEN)))) == {"replayed"}
    assert refunds(postgres_url, postgres_schema) == OFTEN
