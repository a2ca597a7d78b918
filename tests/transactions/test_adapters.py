"""The contract of a TransactionAdapter on every driver, on which the ledger and the outbox rely."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import Any

import asyncpg
import pytest
from asgiref.sync import sync_to_async
from django.db import connections, transaction

from oncemore._ledger.context import Op
from oncemore._ledger.transactions import Query, Statement, TransactionAdapter
from oncemore._runtime.plan import arun, run
from oncemore.errors import ConfigurationError, TransactionEnded
from oncemore.stores.django import DjangoAdapter
from oncemore.stores.postgres import psycopg as below_psycopg
from oncemore.stores.postgres.asyncpg import AsyncpgAdapter
from oncemore.stores.postgres.psycopg import JoinedPsycopg
from oncemore.stores.sqlalchemy import SqlalchemyAdapter
from oncemore.stores.sqlite import transactions as below_sqlite
from oncemore.stores.sqlite.transactions import JoinedSqlite

from .shops import OnDjango, OnEngine, Shop
from .test_transaction import Performing, asked

Work = Callable[[Any], Generator[Any, Any, Any]]


def query(shop: Shop, text: str, *values: Any) -> Query:
    """Return the query with the database's own kind of parameters."""
    return Statement(text if on_postgres(shop) else text.replace("$", "?")), values


def on_postgres(shop: Shop) -> bool:
    return shop.url.startswith("postgres")


def insert(shop: Shop, id: str, made_in: str = "x") -> Query:
    return query(shop, "INSERT INTO refunds VALUES ($1, $2)", id, made_in)


async def performed(shop: Shop, work: Work) -> Any:
    """Run *work* with the adapter inside an operation, and return its result."""

    def perform(op: Op) -> Performing:
        _ = op.connection
        return (yield from work(adapter_of(op)))

    return (await shop.run(asked(), perform)).value


def adapter_of(op: Op) -> TransactionAdapter:
    assert op.transaction is not None
    adapter: TransactionAdapter = op.transaction._adapter  # type: ignore[attr-defined]
    return adapter


async def test_execute_commits_with_the_effect(shop: Shop) -> None:
    def work(adapter: TransactionAdapter) -> Performing:
        yield from adapter.execute(insert(shop, "by the adapter"))
        return "done"

    assert await performed(shop, work) == "done"
    assert shop.refunds() == ["by the adapter"]


async def test_execute_rolls_back_with_the_effect(shop: Shop) -> None:
    def work(adapter: TransactionAdapter) -> Performing:
        yield from adapter.execute(insert(shop, "by the adapter"))
        raise LookupError

    with pytest.raises(LookupError):
        await performed(shop, work)
    assert shop.refunds() == []


async def test_execute_returns_the_rows_of_the_last_query(shop: Shop) -> None:
    def work(adapter: TransactionAdapter) -> Performing:
        select = query(shop, "SELECT id, made_in FROM refunds ORDER BY id")
        rows = yield from adapter.execute(insert(shop, "a"), insert(shop, "b"), select)
        nothing = yield from adapter.execute(insert(shop, "c"))
        return [[list(row) for row in rows], len(nothing)]

    assert await performed(shop, work) == [[["a", "x"], ["b", "x"]], 0]


async def test_execute_passes_texts_as_they_are(shop: Shop) -> None:
    texts = ["it's", "50% :of $1 ?1 %s", "::text \\ \\:x", 'a "b"', "žluť 🐎", "", "a\nb"]

    def work(adapter: TransactionAdapter) -> Performing:
        found = []
        for number, text in enumerate(texts):
            literal = query(shop, "SELECT made_in, ':a $1 ?1 50%' FROM refunds WHERE id = $1", f"k{number}")
            rows = yield from adapter.execute(insert(shop, f"k{number}", text), literal)
            found.append(list(rows[0]))
        return found

    literal = ":a $1 ?1 50%" if on_postgres(shop) else ":a ?1 ?1 50%"
    assert await performed(shop, work) == [[text, literal] for text in texts]


async def test_execute_passes_numbers_bytes_and_null(shop: Shop) -> None:
    shop.execute("CREATE TABLE odd (n bigint, f double precision, b boolean, none text, data bytea)")

    def work(adapter: TransactionAdapter) -> Performing:
        values = (2**53 + 1, 0.1, True, None, b"\x00\xff'")
        put = query(shop, "INSERT INTO odd VALUES ($1, $2, $3, $4, $5)", *values)
        rows = yield from adapter.execute(put, query(shop, "SELECT * FROM odd"))
        return [tuple(rows[0]) == values]

    assert await performed(shop, work) == [True]


async def test_execute_stops_at_the_first_failure(shop: Shop) -> None:
    def work(adapter: TransactionAdapter) -> Performing:
        yield from adapter.execute(query(shop, "SELECT no_such_column FROM refunds"), insert(shop, "behind"))
        return "unreached"

    with pytest.raises(Exception, match="no_such_column"):
        await performed(shop, work)
    assert shop.refunds() == []


async def test_commit_without_the_claimed_record_is_refused(shop: Shop) -> None:
    """The performer may have deleted or changed the record.  An effect must not be committed without its outcome."""

    def work(adapter: TransactionAdapter) -> Performing:
        yield from adapter.execute(insert(shop, "effect"), query(shop, "DELETE FROM oncemore_records"))
        return "done"

    with pytest.raises(TransactionEnded, match="leave both to the guard"):
        await performed(shop, work)
    assert shop.refunds() == []


async def test_session_needs_sqlalchemy(shop: Shop) -> None:
    def perform(op: Op) -> Performing:
        op.session()
        return "done"
        yield

    if isinstance(shop, OnEngine):
        assert (await shop.run(asked(), perform)).how == "stored"
    else:
        with pytest.raises(ConfigurationError, match="needs SQLAlchemy"):
            await shop.run(asked(), perform)


async def test_abort_after_the_end_does_nothing(shop: Shop) -> None:
    """Another caller may have the connection after a commit or an earlier `abort`."""
    source: Any = shop.guard.store.lender

    def plan() -> Performing:
        first = yield from source.open()
        yield from first.begin(asked("aborted"), lease=30.0, wait=1.0)
        yield from first.abort()
        second = yield from source.open()
        lease = yield from second.begin(asked("released"), lease=30.0, wait=1.0)
        yield from first.abort()
        first.drop()
        yield from second.release(lease, retention=60.0)
        yield from second.commit()
        yield from second.abort()
        second.drop()

    await driven(shop, plan)
    found = [await shop.guard.afind(*asked(key).id) for key in ("aborted", "released")]
    assert [record and record.state for record in found] == [None, "released"]


async def test_discard_leaves_nothing_behind(shop: Shop) -> None:
    source: Any = shop.guard.store.lender

    def plan() -> Performing:
        transaction = yield from source.open()
        yield from transaction.begin(asked(), lease=30.0, wait=1.0)
        yield from transaction._adapter.execute(insert(shop, "discarded"))
        transaction.drop()

    await driven(shop, plan)
    for _ in range(100):  # a server may notice it a little later
        if await shop.guard.afind(*asked().id) is None and shop.refunds() == []:
            break
        await asyncio.sleep(0.02)
    await performed(shop, lambda adapter: adapter.execute(insert(shop, "next")))
    assert shop.refunds() == ["next"]


@pytest.mark.parametrize("commits", [True, False])
async def test_execute_joins_a_transaction_of_the_users_own(shop: Shop, commits: bool) -> None:
    async def as_user() -> None:
        if isinstance(shop, OnDjango):
            await joined_django(shop, commits)
        elif isinstance(shop, OnEngine):
            await joined_engine(shop, commits)
        else:
            await joined_driver(shop, commits)

    await as_user()
    assert shop.refunds() == (["joined", "own"] if commits else [])


async def driven(shop: Shop, plan: Callable[[], Performing]) -> None:
    """Run the plan on the thread or event loop of the shop's operations."""
    if not shop.sync or type(shop).__name__ == "AlchemyUnderLoop":
        async with shop.around():
            await arun(plan())
        return

    def in_thread() -> None:
        try:
            run(plan())
        finally:
            if isinstance(shop, OnDjango):
                connections[shop.alias].close()

    await asyncio.to_thread(in_thread)


OWN = "INSERT INTO refunds VALUES ('own', 'x')"


async def joined_django(shop: OnDjango, commits: bool) -> None:
    driver = below_psycopg.BelowDjango() if on_postgres(shop) else below_sqlite.SqliteBelowDjango(shop.guard.store.sql)  # type: ignore[attr-defined]

    def work() -> None:
        with transaction.atomic(using=shop.alias):
            with connections[shop.alias].cursor() as cursor:
                cursor.execute(OWN)
            run(DjangoAdapter.on(shop.alias, driver).execute(insert(shop, "joined")))
            transaction.set_rollback(not commits, using=shop.alias)
        connections[shop.alias].close()

    async with shop.around():
        await (asyncio.to_thread(work) if shop.sync else sync_to_async(work)())


async def joined_engine(shop: OnEngine, commits: bool) -> None:
    if not shop.sync:
        async with shop.engine.connect() as connection:
            await connection.exec_driver_sql(OWN)
            await arun(SqlalchemyAdapter.on(connection).execute(insert(shop, "joined")))
            await (connection.commit() if commits else connection.rollback())
        return
    with shop.engine.connect() as connection:
        connection.exec_driver_sql(OWN)
        run(SqlalchemyAdapter.on(connection).execute(insert(shop, "joined")))
        (connection.commit if commits else connection.rollback)()


async def joined_driver(shop: Shop, commits: bool) -> None:
    import aiosqlite
    import psycopg

    if isinstance(getattr(shop, "pool", None), asyncpg.Pool):
        async with shop.pool.acquire() as connection:  # type: ignore[attr-defined]
            own = connection.transaction()
            await own.start()
            await connection.execute(OWN)
            await arun(AsyncpgAdapter.on(connection).execute(insert(shop, "joined")))
            await (own.commit() if commits else own.rollback())
    elif on_postgres(shop) and shop.sync:
        with psycopg.connect(shop.url) as connection:
            connection.execute(OWN)
            run(JoinedPsycopg(connection).execute(insert(shop, "joined")))
            (connection.commit if commits else connection.rollback)()
    elif on_postgres(shop):
        async with await psycopg.AsyncConnection.connect(shop.url) as connection:
            await connection.execute(OWN)
            await arun(JoinedPsycopg(connection).execute(insert(shop, "joined")))
            await (connection.commit() if commits else connection.rollback())
    else:
        async with aiosqlite.connect(shop.url.removeprefix("sqlite:///")) as connection:
            await connection.execute(OWN)
            await arun(JoinedSqlite(connection).execute(insert(shop, "joined")))
            await (connection.commit() if commits else connection.rollback())
