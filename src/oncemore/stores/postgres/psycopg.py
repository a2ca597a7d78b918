"""Transactions on psycopg connections: the adapter, and the ledger's own connections for it."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from ..._ledger.transactions import Do, Query, Rows, at_once, commit_forbidden, no_session
from ..._runtime.clock import SYSTEM
from ..._runtime.forks import reset_in_child
from ..._runtime.plan import Effect, Plan
from ...errors import StoreTimeout
from .pipeline import COMMIT, ROLLBACK, Pipeline, adapt_values, begin_statement
from .transactions import PostgresSource

if TYPE_CHECKING:
    from .store import PostgresStore

IDLE, UNKNOWN = int(TransactionStatus.IDLE), int(TransactionStatus.UNKNOWN)
SHORTEST_CONNECT = 2  # seconds; libpq allows no less
PATIENCE = 5.0  # seconds for a rollback; if the network is silent, closing the connection does as well
PLAIN = (str, bytes, int, float, bool, type(None))  # the values that need no adapters of psycopg


class PsycopgAdapter:
    """One transaction on a psycopg connection, sync or async.

    The claim travels with BEGIN and the outcome with COMMIT, so that the ledger adds no round trip.  *threads* returns the
    sync pool to take a connection from, and *loop* the async pool of the running loop; a user's pool is one of the two.
    """

    def __init__(
        self, threads: Callable[[], Any] | None, loop: Callable[[], Any] | None, *, timeout: float = 30.0
    ) -> None:
        self.connection: Any = None
        self._threads = threads
        self._loop = loop
        self._timeout = timeout
        self._pool: Any = None

    @property
    def awaited(self) -> bool:
        return isinstance(self.connection, psycopg.AsyncConnection)

    def session(self) -> Any:
        raise no_session()

    def begin(self, *queries: Query) -> Plan[Rows]:
        yield Do(self._take if self._threads is not None else None, self._atake if self._loop is not None else None)
        connection = self.connection
        if isinstance(connection, NoCommitConnection | AsyncNoCommitConnection):
            connection.reset_factories()  # the last performer may have changed them
        if getattr(self._pool, "close_returns", False):
            connection.close = refuse_close if not self.awaited else arefuse_close
        rows = yield from self._send((begin_statement(connection), ()), *queries)
        connection.lent = True
        return rows

    # Both store the connection before anything else can happen: a cancelled caller must be able to give it back.

    def _take(self) -> None:
        assert self._threads is not None
        self._pool = self._threads()
        try:
            self.connection = self._pool.getconn(self._timeout)
        except PoolTimeout as error:
            raise pool_timeout(error) from error

    async def _atake(self) -> None:
        assert self._loop is not None
        self._pool = self._loop()
        try:
            self.connection = await self._pool.getconn(self._timeout)
        except PoolTimeout as error:
            raise pool_timeout(error) from error

    def execute(self, *queries: Query) -> Plan[Rows]:
        return (yield from self._send(*(adapt(self.connection, query) for query in queries)))

    def _send(self, *queries: Query, limit: float | None = None) -> Plan[Rows]:
        deadline = None if limit is None else SYSTEM.monotonic() + limit
        pipeline = Pipeline(self.connection, queries, deadline)
        effect: Effect[Any] = pipeline if self.awaited else Do(pipeline.run, None)  # from a loop, in a thread
        results = yield effect
        return results[-1]  # type: ignore[no-any-return]

    def commit(self, *queries: Query) -> Plan[None]:
        """Run *queries* and COMMIT in one pipeline.  If a query fails, the server skips the COMMIT behind it."""
        check_open(self.connection)
        self.connection.lent = False
        yield from self._send(*queries, (COMMIT, ()))
        yield self._give_back()

    def rollback(self) -> Plan[None]:
        connection = self.connection
        if connection is None:
            return
        try:
            connection.lent = False
            if connection.pgconn.transaction_status != IDLE:
                # Not psycopg's rollback(): it would deallocate our prepared statements.
                yield from self._send((ROLLBACK, ()), limit=PATIENCE)
        except Exception:
            connection.pgconn.finish()
        yield self._give_back()

    def discard(self) -> None:
        connection = self.connection
        if connection is None:
            return
        if connection.pgconn.transaction_status != IDLE:
            connection.pgconn.finish()  # not close(), which may only give it back to its pool
        at_once(self._give_back())

    def _give_back(self) -> Do[None]:
        return Do(None, self._aput) if self.awaited else Do(self._put, None)

    # Both forget the connection last: a caller that is cancelled meanwhile discards it.

    def _put(self) -> None:
        vars(self.connection).pop("close", None)
        self._pool.putconn(self.connection)
        self.connection = None

    async def _aput(self) -> None:
        vars(self.connection).pop("close", None)
        await self._pool.putconn(self.connection)
        self.connection = None


def check_open(connection: Any) -> None:
    """Raise TransactionEnded if the performer has ended the transaction or closed the connection.

    A connection that the network has closed passes: the next statement tells of that.
    """
    status = connection.pgconn.transaction_status
    if status == IDLE or (status == UNKNOWN and not connection.broken):
        raise commit_forbidden()


def adapt(connection: Any, query: Query) -> Query:
    """The query with a user's values as psycopg writes them; the ledger's own values need no adapters."""
    statement, values = query
    if all(type(value) in PLAIN for value in values):
        return query
    return statement, adapt_values(connection, values)


def adapter_for(pool: Any, timeout: float) -> PsycopgAdapter:
    """The adapter for one transaction on a connection of the user's pool."""
    if isinstance(pool, AsyncConnectionPool):
        return PsycopgAdapter(None, lambda: pool, timeout=timeout)
    return PsycopgAdapter(lambda: pool, None, timeout=timeout)


def pool_timeout(error: Exception) -> StoreTimeout:
    return StoreTimeout(
        f"No connection was free in time: {error}; raise pool= in the store's URL, or the pool's max_size"
    )


def refuse_close() -> None:
    """Replaces close() if that gives a connection back to its pool: the next user of it would be in our transaction."""
    raise commit_forbidden()


async def arefuse_close() -> None:
    raise commit_forbidden()


class NoCommitConnection(psycopg.Connection[Any]):
    """A connection of the ledger's own.  While it is lent, the performer can neither commit nor roll back by mistake."""

    lent = False

    def reset_factories(self) -> None:
        self.row_factory, self.cursor_factory = tuple_row, psycopg.Cursor

    def commit(self) -> None:
        if self.lent:
            raise commit_forbidden()
        super().commit()

    def rollback(self) -> None:
        if self.lent:
            raise commit_forbidden()
        super().rollback()


class AsyncNoCommitConnection(psycopg.AsyncConnection[Any]):
    """The same for event loops."""

    lent = False

    def reset_factories(self) -> None:
        self.row_factory, self.cursor_factory = tuple_row, psycopg.AsyncCursor

    async def commit(self) -> None:
        if self.lent:
            raise commit_forbidden()
        await super().commit()

    async def rollback(self) -> None:
        if self.lent:
            raise commit_forbidden()
        await super().rollback()


class OwnPool:
    """The ledger's own connections for the transactions of threads: up to *limit*, kept open for the next one.

    *connect* opens one.  The last that was given back is the first that is taken: its server process is still warm.
    """

    def __init__(self, connect: Callable[[], Any], limit: int) -> None:
        self._connect = connect
        self._free = threading.BoundedSemaphore(limit)
        self._idle: list[Any] = []
        self._closed = False

    def getconn(self, timeout: float) -> Any:
        if not self._free.acquire(timeout=timeout):
            raise PoolTimeout(f"all of them are in use since {timeout:g} s")
        try:
            return take_open(self._idle) or self._connect()
        except BaseException:
            self._free.release()
            raise

    def putconn(self, connection: Any) -> None:
        keep(self._idle, connection, closed=self._closed)
        self._free.release()

    def close(self) -> None:
        """Close the idle connections now, and each of the others when it is given back."""
        self._closed = True
        close_all(self._idle)


class AsyncOwnPool:
    """The same for the transactions of one event loop."""

    def __init__(self, connect: Callable[[], Any], limit: int) -> None:
        self._connect = connect
        self._free = asyncio.BoundedSemaphore(limit)
        self._idle: list[Any] = []
        self._closed = False
        weakref.finalize(self, close_all, self._idle)  # the loop may be gone before anybody closes its pool

    async def getconn(self, timeout: float) -> Any:
        if self._free.locked():
            try:
                async with asyncio.timeout(timeout):
                    await self._free.acquire()
            except TimeoutError:
                raise PoolTimeout(f"all of them are in use since {timeout:g} s") from None
        else:
            await self._free.acquire()  # does not wait
        try:
            return take_open(self._idle) or await self._connect()
        except BaseException:
            self._free.release()
            raise

    async def putconn(self, connection: Any) -> None:
        keep(self._idle, connection, closed=self._closed)
        self._free.release()

    def close(self) -> None:
        self._closed = True
        close_all(self._idle)


def take_open(idle: list[Any]) -> Any:
    while idle:
        connection = idle.pop()
        if connection.pgconn.transaction_status == IDLE:
            return connection
    return None


def keep(idle: list[Any], connection: Any, *, closed: bool) -> None:
    if closed or connection.pgconn.transaction_status != IDLE:
        connection.pgconn.finish()
    else:
        idle.append(connection)


def close_all(idle: list[Any]) -> None:
    while idle:
        idle.pop().pgconn.finish()


class OwnSource(PostgresSource):
    """Opens transactions on the ledger's own connections: up to *limit* for threads, and as many for each event loop."""

    def __init__(self, store: PostgresStore, conninfo: str, *, limit: int) -> None:
        timeout = store.database.timeout
        super().__init__(store, lambda: PsycopgAdapter(self._thread_pool, self._loop_pool, timeout=timeout))
        self._conninfo = conninfo
        self._limit = limit
        self._timeout = timeout
        self._reset()
        reset_in_child(self)

    def _reset(self) -> None:
        self._threads = OwnPool(self._connect, self._limit)
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncOwnPool] = weakref.WeakKeyDictionary()

    def _thread_pool(self) -> OwnPool:
        return self._threads

    def _loop_pool(self) -> AsyncOwnPool:
        loop = asyncio.get_running_loop()
        pool = self._loops.get(loop)
        if pool is None:
            self._close_ended_loops()
            pool = self._loops[loop] = AsyncOwnPool(self._aconnect, self._limit)
        return pool

    def _settings(self) -> dict[str, Any]:
        """Behind a pooler nothing is prepared, by the performer neither.  The store has been asked by now, and knows."""
        return {"prepare_threshold": None} if self.store.database.pooled else {}

    def _connect(self) -> psycopg.Connection[Any]:
        seconds = max(SHORTEST_CONNECT, int(self._timeout))
        return NoCommitConnection.connect(self._conninfo, connect_timeout=seconds, **self._settings())

    async def _aconnect(self) -> psycopg.AsyncConnection[Any]:
        async with asyncio.timeout(self._timeout):
            return await AsyncNoCommitConnection.connect(self._conninfo, **self._settings())

    def _close_ended_loops(self) -> None:
        for loop, pool in tuple(self._loops.items()):
            if loop.is_closed():
                self._loops.pop(loop, None)  # another thread may have been quicker
                pool.close()

    def close(self) -> None:
        self._close_ended_loops()
        pool, self._threads = self._threads, OwnPool(self._connect, self._limit)
        pool.close()

    async def aclose(self) -> None:
        pool = self._loops.pop(asyncio.get_running_loop(), None)
        if pool is not None:
            pool.close()
        self.close()


class BelowDjango:
    """Runs the ledger's statements on the psycopg connection below Django's."""

    def begin(self, raw: Any, queries: Sequence[Query]) -> Rows:
        return self.execute(raw, [(begin_statement(raw), ()), *queries])

    def execute(self, raw: Any, queries: Sequence[Query]) -> Rows:
        return Pipeline(raw, [adapt(raw, query) for query in queries]).run()[-1]

    def commit(self, raw: Any, queries: Sequence[Query]) -> None:
        check_open(raw)
        self.execute(raw, [*queries, (COMMIT, ())])

    def rollback(self, raw: Any) -> None:
        if raw.pgconn.transaction_status != IDLE:
            self.execute(raw, [(ROLLBACK, ())])

    def close(self, raw: Any) -> None:
        raw.pgconn.finish()
