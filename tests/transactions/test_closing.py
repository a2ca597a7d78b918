"""A performer that closes its connection gets an error, and no other transaction is affected."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from typing import Any

import asyncpg
import pytest
from psycopg_pool import AsyncConnectionPool, ConnectionPool
from sqlalchemy import NullPool

from oncemore import Guard
from oncemore._ledger.context import Op
from oncemore._ledger.transactions import Do
from oncemore._runtime.plan import run
from oncemore.errors import TransactionEnded

from .conftest import emptied, opened
from .shops import POLICY, AlchemyPsycopg, AlchemyPsycopg2, AlchemyPsycopgAsync, Asyncpg, AsyncPool, Pool, Shop
from .test_cut_off import ALL_ENDED
from .test_transaction import Performing, asked, refund

pytestmark = pytest.mark.server


class Returning(Pool):
    """A pool whose connections return to it on close(), as psycopg's documentation advises for SQLAlchemy."""

    def made(self) -> Guard:
        self.pool = ConnectionPool(self.url, min_size=0, max_size=2, open=True, close_returns=True)
        return Guard(self.pool, policy=POLICY)


class AsyncReturning(AsyncPool):
    def made(self) -> Guard:
        self.pool = AsyncConnectionPool(self.url, min_size=0, max_size=2, open=False, close_returns=True)
        return Guard(self.pool, policy=POLICY)


class EngineOnPool(AlchemyPsycopg):
    """An engine on such a pool."""

    def made(self) -> Guard:
        self.pool = ConnectionPool(self.url, min_size=0, max_size=2, timeout=2, open=True, close_returns=True)
        return super().made()

    @property
    def pooled(self) -> dict[str, Any]:
        return {"creator": self.pool.getconn, "poolclass": NullPool}

    async def close(self) -> None:
        await super().close()
        await asyncio.to_thread(self.pool.close)


class AsyncEngineOnPool(AlchemyPsycopgAsync):
    def made(self) -> Guard:
        self.pool = AsyncConnectionPool(self.url, min_size=0, max_size=2, timeout=2, open=False, close_returns=True)
        return super().made()

    @property
    def pooled(self) -> dict[str, Any]:
        return {"async_creator": self.pool.getconn, "poolclass": NullPool}

    async def open(self) -> None:
        await self.pool.open()

    async def close(self) -> None:
        await super().close()
        await self.pool.close()


@pytest.fixture(params=[Returning, AsyncReturning])
async def returning(request: pytest.FixtureRequest, shops_url: str) -> AsyncIterator[Shop]:
    async for each in opened(request.param, emptied(shops_url)):
        yield each


def closing(op: Op) -> Do[Any]:
    def plain() -> None:
        op.connection.close()

    async def awaited() -> None:
        await op.connection.close()

    return Do(plain, awaited)


class Closing:
    """Inserts a refund, closes the connection, and returns without an error.  *runs* counts its calls."""

    def __init__(self, shop: Shop) -> None:
        self.shop = shop
        self.runs = 0

    def __call__(self, op: Op) -> Performing:
        self.runs += 1
        yield self.shop.insert(op, "before")
        yield closing(op)
        return "done"


@pytest.mark.parametrize("shop", ["psycopg", "psycopg-async", "pool", "pool-async"], indirect=True)
async def test_connection_closed_by_the_performer_raises_transaction_ended(shop: Shop) -> None:
    """The database is not at fault, and another run would only close the next connection."""
    perform = Closing(shop)
    with pytest.raises(TransactionEnded, match="leave both to the guard"):
        await shop.run(asked(), perform)
    assert (perform.runs, shop.refunds()) == (1, [])
    assert (await shop.run(asked(), refund(shop))).how == "stored"


async def test_connection_whose_close_returns_it_stays_borrowed(returning: Shop) -> None:
    """Otherwise its next user would be in our transaction, and would be rolled back with it."""
    pool: Any = returning.pool  # type: ignore[attr-defined]
    others: list[Any] = []

    def perform(op: Op) -> Performing:
        with suppress(TransactionEnded):
            yield closing(op)
        others.append((yield Do(pool.getconn, pool.getconn)))
        insert = partial(others[0].execute, "INSERT INTO refunds VALUES ('others', 'x')")
        yield Do(insert, insert)
        raise LookupError

    with pytest.raises(LookupError):
        await returning.run(asked(), perform)
    for method in (others[0].commit, partial(pool.putconn, others[0])):
        if inspect.isawaitable(done := method()):
            await done
    assert returning.refunds() == ["others"]
    for key in ("a", "b", "c"):
        assert (await returning.run(asked(key), refund(returning))).how == "stored"


@pytest.mark.parametrize("raises", [True, False])
@pytest.mark.parametrize("shop", ["asyncpg"], indirect=True)
async def test_connection_released_by_the_performer_is_left_alone(shop: Shop, raises: bool) -> None:
    pool: Any = shop.pool  # type: ignore[attr-defined]
    others: list[Any] = []

    async def release() -> None:
        await pool.release(others.pop())
        others.append(await pool.acquire())
        await others[0].execute("BEGIN; INSERT INTO refunds VALUES ('others', 'x')")

    def perform(op: Op) -> Performing:
        others.append(op.connection)
        yield Do(None, release)
        if raises:
            raise LookupError
        return "done"

    with pytest.raises(LookupError if raises else TransactionEnded):
        await shop.run(asked(), perform)
    await others[0].execute("COMMIT")
    await pool.release(others[0])
    assert shop.refunds() == ["others"]
    assert (await shop.run(asked(), refund(shop))).how == "stored"


def driver_connection(connection: Any) -> Any:
    return connection.connection.driver_connection if hasattr(connection, "engine") else connection


@pytest.mark.parametrize("kind", [Returning, AlchemyPsycopg, AlchemyPsycopg2])
async def test_untrusted_connection_is_ended_instead_of_returned(shops_url: str, kind: type[Shop]) -> None:
    """A caller that vanishes in an operation leaves a transaction open, which no other caller may get."""
    async for shop in opened(kind, emptied(shops_url)):
        source: Any = shop.guard.store.lender
        pids: list[int] = []

        def begun(source: Any = source, pids: list[int] = pids) -> None:
            transaction = run(source.open())
            run(transaction.begin(asked(), lease=30.0, wait=1.0))
            connection = transaction.connection
            pids.append(driver_connection(connection).info.backend_pid)
            transaction.drop()

        await asyncio.to_thread(begun)
        gone = f"SELECT pid FROM pg_stat_activity WHERE pid = {pids[0]}"
        async with asyncio.timeout(5):
            while shop.execute(gone):
                await asyncio.sleep(0.02)
        assert (await shop.run(asked(), refund(shop))).how == "stored"
        assert shop.refunds() == ["k"]


@pytest.mark.parametrize("kind", [EngineOnPool, AsyncEngineOnPool])
async def test_dead_connections_make_room_in_the_engines_pool(shops_url: str, kind: type[Shop]) -> None:
    """The pool counts a dead connection as taken until it is given back."""
    async for shop in opened(kind, emptied(shops_url)):
        for number in range(4):
            assert (await shop.run(asked(f"k{number}"), refund(shop))).how == "stored"
            shop.execute(ALL_ENDED)


async def test_asyncpg_reset_failing_after_commit_is_logged_and_stored(
    shops_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(connection: Any) -> None:
        raise OSError("the reset failed")

    class FailingReset(Asyncpg):
        def made(self) -> Guard:
            self.pool = asyncpg.create_pool(self.url, min_size=0, max_size=2, reset=fail)
            return Guard(self.pool, policy=POLICY)

    async for shop in opened(FailingReset, emptied(shops_url)):
        assert (await shop.run(asked(), refund(shop))).how == "stored"
        assert "could not be given back" in caplog.text
        assert shop.refunds() == ["k"]
        assert (await shop.run(asked(), refund(shop))).how == "replayed"


@pytest.mark.parametrize("shop", ["psycopg-async"], indirect=True)
async def test_rollback_does_not_wait_for_a_query_left_behind(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oncemore.stores.postgres.psycopg.PATIENCE", 0.2)
    left: list[asyncio.Task[Any]] = []

    async def leave_a_query(connection: Any) -> None:
        left.append(asyncio.create_task(connection.execute("SELECT pg_sleep(100)")))
        while not connection.lock.locked():
            await asyncio.sleep(0.01)

    def perform(op: Op) -> Performing:
        connection = op.connection
        yield Do(None, lambda: leave_a_query(connection))
        raise LookupError

    with pytest.raises(LookupError):
        await asyncio.wait_for(shop.run(asked(), perform), 30)
    left[0].cancel()
    await asyncio.wait(left, timeout=30)
    shop.execute(ALL_ENDED)  # the server would sleep on, and keep the lock on the key's row
    assert (await shop.run(asked(), refund(shop))).how == "stored"
