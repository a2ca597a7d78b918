"""Lends psycopg's connections: sync ones to threads, async ones to event loops, from our own pools or the user's."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg.pq import TransactionStatus
from psycopg_pool import AsyncConnectionPool, ConnectionPool, PoolTimeout

from ..core.fork import reset_in_child
from ..core.lending import Do, Transaction
from ..core.plan import Plan
from ..errors import ConfigurationError, StoreTimeout
from .postgres_transaction import Misuse, PostgresTransaction, Wire, again, ended
from .postgres_trip import COMMIT, Ask, Rows, begin, trip

if TYPE_CHECKING:
    from .postgres import PostgresStore

Pool = ConnectionPool[Any] | AsyncConnectionPool[Any]


class Lent(psycopg.Connection[Any]):
    """A connection whose transaction is the guard's: the borrower can neither commit nor roll back by mistake."""

    lent = False

    def commit(self) -> None:
        if self.lent:
            raise ended()
        super().commit()

    def rollback(self) -> None:
        if self.lent:
            raise ended()
        super().rollback()


class AsyncLent(psycopg.AsyncConnection[Any]):
    """The same, for event loops."""

    lent = False

    async def commit(self) -> None:
        if self.lent:
            raise ended()
        await super().commit()

    async def rollback(self) -> None:
        if self.lent:
            raise ended()
        await super().rollback()


class PostgresLender:
    """Lends connections to *store*'s database: from *pool*, or from pools of our own, up to *most* at a time."""

    def __init__(self, store: PostgresStore, conninfo: str, *, most: int, pool: Pool | None = None) -> None:
        self.store = store
        self.conninfo = conninfo
        self.most = most
        self.pool = pool
        self._reset()
        reset_in_child(self)

    def _reset(self) -> None:
        self._threads: ConnectionPool[Any] | None = None
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncConnectionPool[Any]] = (
            weakref.WeakKeyDictionary()
        )

    def open(self) -> Plan[Transaction]:
        store = self.store
        yield from store.ready()
        wire: Wire = yield Do(self._for_thread, None if isinstance(self.pool, ConnectionPool) else self._for_loop)
        return PostgresTransaction(wire, store.database.sql, shift=store.shift, holder=store.holder)

    def _for_thread(self) -> Wire:
        if isinstance(self.pool, AsyncConnectionPool):
            raise ConfigurationError("This guard's pool is async: await it, or hand the guard a ConnectionPool")
        if self.pool is not None:
            return ThreadWire(self.pool, self.store.database.timeout)
        if self._threads is None:
            self._threads = ConnectionPool(
                self.conninfo, connection_class=Lent, min_size=0, max_size=self.most, open=True, name="oncemore"
            )
        return ThreadWire(self._threads, self.store.database.timeout)

    async def _for_loop(self) -> Wire:
        if isinstance(self.pool, AsyncConnectionPool):
            return LoopWire(self.pool, self.store.database.timeout)
        loop = asyncio.get_running_loop()
        pool = self._loops.get(loop)
        if pool is None:
            pool = self._loops[loop] = AsyncConnectionPool(
                self.conninfo, connection_class=AsyncLent, min_size=0, max_size=self.most, open=False, name="oncemore"
            )
            await pool.open()
        return LoopWire(pool, self.store.database.timeout)

    def again(self, error: BaseException) -> bool:
        return again(error)

    def close(self) -> None:
        """End our own pool of the threads; one that was handed to us is its owner's."""
        if self._threads is not None:
            self._threads.close()
            self._threads = None

    async def aclose(self) -> None:
        pool = self._loops.pop(asyncio.get_running_loop(), None)
        if pool is not None:
            await pool.close()
        await asyncio.to_thread(self.close)


class ThreadWire:
    """A sync connection of psycopg's."""

    def __init__(self, pool: ConnectionPool[Any], timeout: float) -> None:
        self.pool = pool
        self.timeout = timeout
        self.connection: Any = None

    def session(self) -> Any:
        raise no_session()

    def begin(self, ask: Ask) -> Do[Rows]:
        return Do(lambda: self._begin(ask), None)

    def _begin(self, ask: Ask) -> Rows:
        try:
            connection = self.connection = self.pool.getconn(self.timeout)
        except PoolTimeout as error:
            raise busy(error) from error
        _, rows = self._sent((begin(connection), ()), ask)
        connection.lent = True
        return rows

    def _sent(self, *asks: Ask) -> list[Rows]:
        connection = self.connection
        with connection.lock:
            sent: list[Rows] = connection.wait(trip(connection, asks, prepare=prepares(connection)))
        return sent

    def rows(self, ask: Ask) -> Do[Rows]:
        return Do(lambda: self._sent(ask)[0], None)

    def commit(self, asks: Sequence[Ask]) -> Do[None]:
        return Do(lambda: self._commit(asks), None)

    def _commit(self, asks: Sequence[Ask]) -> None:
        connection = self.connection
        check(connection)
        connection.lent = False
        self._sent(*asks, (COMMIT, ()))

    def roll_back(self) -> Do[None]:
        return Do(self._roll_back, None)

    def _roll_back(self) -> None:
        if self.connection is not None:
            self.connection.lent = False
            self.connection.rollback()

    def end(self, *, healthy: bool) -> Do[None]:
        return Do(lambda: self._end(healthy), None)

    def _end(self, healthy: bool) -> None:
        if self.connection is not None:
            if not healthy:
                self.connection.close()
            self.pool.putconn(self.connection)
            self.connection = None

    def drop(self) -> None:
        with suppress(Exception):
            self._end(False)


class LoopWire:
    """An async connection of psycopg's."""

    def __init__(self, pool: AsyncConnectionPool[Any], timeout: float) -> None:
        self.pool = pool
        self.timeout = timeout
        self.connection: Any = None

    def session(self) -> Any:
        raise no_session()

    def begin(self, ask: Ask) -> Do[Rows]:
        return Do(None, lambda: self._begin(ask))

    async def _begin(self, ask: Ask) -> Rows:
        try:
            connection = self.connection = await self.pool.getconn(self.timeout)
        except PoolTimeout as error:
            raise busy(error) from error
        _, rows = await self._sent((begin(connection), ()), ask)
        connection.lent = True
        return rows

    async def _sent(self, *asks: Ask) -> list[Rows]:
        connection = self.connection
        async with connection.lock:
            sent: list[Rows] = await connection.wait(trip(connection, asks, prepare=prepares(connection)))
        return sent

    def rows(self, ask: Ask) -> Do[Rows]:
        return Do(None, lambda: self._rows(ask))

    async def _rows(self, ask: Ask) -> Rows:
        return (await self._sent(ask))[0]

    def commit(self, asks: Sequence[Ask]) -> Do[None]:
        return Do(None, lambda: self._commit(asks))

    async def _commit(self, asks: Sequence[Ask]) -> None:
        connection = self.connection
        check(connection)
        connection.lent = False
        await self._sent(*asks, (COMMIT, ()))

    def roll_back(self) -> Do[None]:
        return Do(None, self._roll_back)

    async def _roll_back(self) -> None:
        if self.connection is not None:
            self.connection.lent = False
            await self.connection.rollback()

    def end(self, *, healthy: bool) -> Do[None]:
        return Do(None, lambda: self._end(healthy))

    async def _end(self, healthy: bool) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            if not healthy:
                await connection.close()
            await self.pool.putconn(connection)

    def drop(self) -> None:
        if self.connection is not None:
            self.connection.pgconn.finish()
            with suppress(RuntimeError):  # without a loop there is no pool to go back to
                asyncio.get_running_loop().create_task(self._end(False))


def prepares(connection: Any) -> bool:
    """Whether our statements are prepared: not where the pool says that nothing is, as behind a pooler."""
    return connection.prepare_threshold is not None


def check(connection: Any) -> None:
    """Refuse to settle on a connection whose transaction is over."""
    if connection.info.transaction_status == TransactionStatus.IDLE:
        raise Misuse


def busy(error: Exception) -> StoreTimeout:
    return StoreTimeout(
        f"No connection was free in time: {error}; raise pool= in the store's URL, or the pool's max_size"
    )


def no_session() -> ConfigurationError:
    return ConfigurationError("op.session() needs SQLAlchemy: hand the guard an Engine, as in Guard(engine)")
