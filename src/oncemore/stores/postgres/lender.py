"""Lends psycopg's connections: sync ones to threads, async ones to event loops, from our own pools or the user's."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg
from psycopg.rows import tuple_row
from psycopg_pool import AsyncConnectionPool, ConnectionPool, PoolTimeout

from ..._ledger.transactions import Do, Loan, Transaction, ended
from ..._runtime.forks import reset_in_child
from ..._runtime.plan import Plan
from ...errors import StoreTimeout
from .pool import LoopPool
from .psycopg import LoopWire, ThreadWire
from .transactions import PostgresTransaction, Wire, again

if TYPE_CHECKING:
    from .store import PostgresStore

T = TypeVar("T")


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
    """Lends connections to *store*'s database from pools of our own, up to *most* at a time."""

    def __init__(self, store: PostgresStore, conninfo: str, *, most: int) -> None:
        self.store = store
        self.conninfo = conninfo
        self.most = most
        self._reset()
        reset_in_child(self)

    def _reset(self) -> None:
        self._making = threading.Lock()  # the first callers may come at once, and one pool is enough
        self._threads: ConnectionPool[Any] | None = None
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncConnectionPool[Any]] = (
            weakref.WeakKeyDictionary()
        )

    def open(self) -> Plan[Transaction]:
        store = self.store
        yield from store.ready()
        wire: Wire = yield Do(self._for_thread, self._for_loop)
        return PostgresTransaction(wire, store.database.sql, shift=store.shift, holder=store.holder)

    def _for_thread(self) -> Wire:
        with self._making:
            pool = self._threads
            if pool is None:
                pool = self._threads = ConnectionPool(connection_class=Lent, open=True, **self._settings())
        return ThreadWire(OwnLoan(pool, self.store.database.timeout))

    async def _for_loop(self) -> Wire:
        loop = asyncio.get_running_loop()
        pool = self._loops.get(loop)
        if pool is None:
            self._forget_closed()
            pool = self._loops[loop] = LoopPool(connection_class=AsyncLent, open=False, **self._settings())
        if pool.closed:  # not opened yet; to open it once more, as those do who come meanwhile, is nothing
            await pool.open()
        return LoopWire(AsyncOwnLoan(pool, self.store.database.timeout))

    def _settings(self) -> dict[str, Any]:
        """Those of a pool.  The store has been asked by now, and knows of a pooler; then not even the borrower prepares."""
        kwargs = {"prepare_threshold": None} if self.store.database.pooled else {}
        return {"conninfo": self.conninfo, "kwargs": kwargs, "min_size": 0, "max_size": self.most, "name": "oncemore"}

    def _forget_closed(self) -> None:
        """End the connections of loops that are no more, whose pools can no longer do it."""
        for loop, pool in tuple(self._loops.items()):
            if loop.is_closed():
                self._loops.pop(loop, None)  # another thread may forget it, too
                for connection in getattr(pool, "_pool", ()):
                    connection.pgconn.finish()

    def again(self, error: BaseException) -> bool:
        return again(error)

    def close(self) -> None:
        """End our own pool of the threads."""
        self._forget_closed()
        with self._making:
            pool, self._threads = self._threads, None
        if pool is not None:
            pool.close()

    async def aclose(self) -> None:
        pool = self._loops.pop(asyncio.get_running_loop(), None)
        if pool is not None:
            await pool.close()
        await asyncio.to_thread(self.close)


class PoolLoan(Loan):
    """A connection of a ConnectionPool's."""

    def __init__(self, pool: ConnectionPool[Any], timeout: float) -> None:
        self.pool = pool
        self.timeout = timeout

    def do(self, work: Callable[[], T]) -> Do[T]:
        return Do(work, None)

    def take(self) -> Any:
        try:
            self.connection = self.pool.getconn(self.timeout)
        except PoolTimeout as error:
            raise busy(error) from error
        if getattr(self.pool, "close_returns", False):
            self.connection.close = refuse
        return self.connection

    def finish(self) -> None:
        """Nothing can be left open but the transaction itself."""

    def give(self, *, healthy: bool, committed: bool) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            vars(connection).pop("close", None)
            self.pool.putconn(connection)


class AsyncPoolLoan(Loan):
    """A connection of an AsyncConnectionPool's."""

    def __init__(self, pool: AsyncConnectionPool[Any], timeout: float) -> None:
        self.pool = pool
        self.timeout = timeout

    async def take(self) -> Any:
        try:
            self.connection = await self.pool.getconn(self.timeout)
        except PoolTimeout as error:
            raise busy(error) from error
        if getattr(self.pool, "close_returns", False):
            self.connection.close = arefuse
        return self.connection

    async def finish(self) -> None:
        """Nothing can be left open but the transaction itself."""

    async def give(self, *, healthy: bool, committed: bool) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            vars(connection).pop("close", None)
            await self.pool.putconn(connection)


class OwnLoan(PoolLoan):
    """A connection of our own pool: whatever a borrower makes of its rows, the next one has them as ever."""

    def take(self) -> Any:
        connection = super().take()
        connection.row_factory, connection.cursor_factory = tuple_row, psycopg.Cursor
        return connection


class AsyncOwnLoan(AsyncPoolLoan):
    """The same, for event loops."""

    async def take(self) -> Any:
        connection = await super().take()
        connection.row_factory, connection.cursor_factory = tuple_row, psycopg.AsyncCursor
        return connection


def refuse() -> None:
    """Stands for close() where that gives a connection back to its pool: whoever got it next would be in our transaction."""
    raise ended()


async def arefuse() -> None:
    refuse()


def wire_of(pool: ConnectionPool[Any] | AsyncConnectionPool[Any], timeout: float) -> Wire:
    """The wire of one transaction on a connection of the user's pool."""
    if isinstance(pool, AsyncConnectionPool):
        return LoopWire(AsyncPoolLoan(pool, timeout))
    return ThreadWire(PoolLoan(pool, timeout))


def busy(error: Exception) -> StoreTimeout:
    return StoreTimeout(
        f"No connection was free in time: {error}; raise pool= in the store's URL, or the pool's max_size"
    )
