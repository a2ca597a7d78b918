"""A SQLAlchemy connection for one transaction, and the sessions that join it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

from sqlalchemy.engine import Connection, Engine, RootTransaction
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, AsyncTransaction
from sqlalchemy.orm import Session

from .._ledger.transactions import Do, ended
from ..errors import StoreTimeout

T = TypeVar("T")

# A session's own commit() and rollback() end a savepoint, and leave the guard's transaction alone.
JOINING: Literal["create_savepoint"] = "create_savepoint"


class Borrowed:
    """A connection of an Engine's."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.connection: Any = None
        self._transaction: RootTransaction | None = None
        self._sessions: list[Session] = []

    def session(self) -> Session:
        session = Session(bind=self.connection, join_transaction_mode=JOINING)
        self._sessions.append(session)
        return session

    def kept(self) -> bool:
        return self.connection is not None and not self.connection.closed

    def do(self, work: Callable[[], T]) -> Do[T]:
        return Do(work, None)

    def take(self) -> Any:
        """The driver's own connection; SQLAlchemy believes that it has begun, and so do its sessions."""
        try:
            connection: Connection = self.engine.connect()
        except PoolTimeout as error:
            raise busy(error) from error
        self.connection = connection
        self._transaction = connection.begin()
        return self.raw

    @property
    def raw(self) -> Any:
        return self.connection.connection.driver_connection

    def finish(self) -> None:
        """As when a session is closed: what it has not committed is rolled back."""
        for session in self._sessions:
            session.close()
        if self._transaction is None or self.connection.get_transaction() is not self._transaction:
            raise ended()

    def give(self, *, healthy: bool, committed: bool) -> None:
        """The driver has ended the transaction; SQLAlchemy hears of it here, and sends nothing more."""
        connection, self.connection = self.connection, None
        if connection is None or connection.closed:
            return
        try:
            if not healthy:
                raw = None if connection.invalidated else connection.connection.driver_connection
                connection.invalidate()
                if (pool := home_of(raw)) is not None:
                    pool.putconn(raw)
            elif self._transaction is not None and self._transaction.is_active:
                (self._transaction.commit if committed else self._transaction.rollback)()
        finally:
            connection.close()


class AsyncBorrowed:
    """A connection of an AsyncEngine's."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self.connection: Any = None
        self.raw: Any = None
        self._transaction: AsyncTransaction | None = None
        self._sessions: list[AsyncSession] = []

    def session(self) -> AsyncSession:
        session = AsyncSession(bind=self.connection, join_transaction_mode=JOINING)
        self._sessions.append(session)
        return session

    def kept(self) -> bool:
        return self.connection is not None and not self.connection.closed

    async def take(self) -> Any:
        try:
            connection: AsyncConnection = await self.engine.connect()
        except PoolTimeout as error:
            raise busy(error) from error
        self.connection = connection
        self._transaction = await connection.begin()
        self.raw = (await connection.get_raw_connection()).driver_connection
        return self.raw

    async def finish(self) -> None:
        for session in self._sessions:
            await session.close()
        if self._transaction is None or self.connection.get_transaction() != self._transaction:
            raise ended()

    async def give(self, *, healthy: bool, committed: bool) -> None:
        connection, self.connection = self.connection, None
        if connection is None or connection.closed:
            return
        try:
            if not healthy:
                await connection.invalidate()
                if (pool := home_of(self.raw)) is not None:
                    await pool.putconn(self.raw)
            elif self._transaction is not None and self._transaction.is_active:
                await (self._transaction.commit() if committed else self._transaction.rollback())
        finally:
            await connection.close()

    def drop(self) -> None:
        """End the connection at once."""
        connection, self.connection = self.connection, None
        if connection is not None and not connection.closed:
            connection.sync_connection.invalidate()


def home_of(raw: Any) -> Any:
    """The pool of psycopg's below an engine that a dead connection came from: close() gives it none but the living back."""
    pool = getattr(raw, "_pool", None)
    return pool if getattr(pool, "close_returns", False) and raw.closed else None


def busy(error: Exception) -> StoreTimeout:
    return StoreTimeout(f"No connection was free in time: {error}; raise the engine's pool_size or max_overflow")
