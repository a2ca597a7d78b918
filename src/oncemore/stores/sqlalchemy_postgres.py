"""A SQLAlchemy engine's PostgreSQL connections: our statements go by the driver below, which saves round trips."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sqlalchemy import event
from sqlalchemy.engine import Engine
from sqlalchemy.ext.asyncio import AsyncEngine

from .._ledger.store import Store
from ..errors import ConfigurationError
from .postgres import PostgresStore, url_of
from .postgres.statements import Ask, Rows
from .postgres.transactions import Enlisted, Wire
from .sqlalchemy_loan import AsyncBorrowed, Borrowed

# SQLAlchemy's and asyncpg's words for what libpq has others for.
NAMES = {"database": "dbname", "ssl": "sslmode"}
NOT_LIBPQS = {"prepared_statement_cache_size", "prepared_statement_name_func", "command_timeout", "timeout", "context"}


def store_of(engine: Engine | AsyncEngine, options: Mapping[str, str]) -> Store:
    """The ledger in the engine's database."""
    wire = wires(engine)
    store = PostgresStore(url_of(settings_of(engine, options), options))
    store.lender = Enlisted(store, wire)
    return store


def settings_of(engine: Engine | AsyncEngine, options: Mapping[str, str]) -> dict[str, Any]:
    """libpq's settings for the address that the engine's URL names."""
    url = engine.url
    if not (url.host or url.database or url.query) and not {"host", "dbname", "service"} & options.keys():
        raise ConfigurationError(
            "The engine's URL names no database, and what its creator connects to is not known: give the address by options, "
            "as in Guard(connect(engine, host=..., dbname=..., user=...))"
        )
    _, said = engine.dialect.create_connect_args(url)
    return {
        NAMES.get(name, name): ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        for name, value in said.items()
        if value is not None and name not in NOT_LIBPQS and NAMES.get(name, name) not in options
    }


def wires(engine: Engine | AsyncEngine) -> Callable[[], Wire]:
    """What makes the wire of a transaction, by the driver."""
    driver = engine.dialect.driver
    if isinstance(engine, AsyncEngine):
        if driver == "asyncpg":
            from .postgres.asyncpg_wire import AsyncpgWire

            return lambda: AsyncpgWire(AsyncpgBorrowed(engine))
        if driver in ("psycopg", "psycopg_async"):
            from .postgres.psycopg import LoopWire

            return lambda: LoopWire(AsyncBorrowed(engine))
    elif driver == "psycopg":
        from .postgres.psycopg import ThreadWire

        return lambda: ThreadWire(Borrowed(engine))
    elif driver == "psycopg2":
        from .postgres.psycopg2 import Psycopg2Wire, on_return

        event.listen(engine, "reset", on_return)
        return lambda: Psycopg2Wire(Borrowed(engine))
    raise ConfigurationError(
        f"An engine on {driver} cannot lend its connections: use postgresql+psycopg, +psycopg2 or +asyncpg"
    )


class AsyncpgBorrowed(AsyncBorrowed):
    """A connection of asyncpg's below an AsyncEngine's, whose own record of the transaction must be kept true."""

    async def begin(self, ask: Ask) -> tuple[Any, Rows]:
        await self.take()
        if self._adapter.autocommit:  # the claim would be committed at once
            raise ConfigurationError("The engine is in AUTOCOMMIT mode: hand the guard one that begins transactions")
        statement, values = ask
        result = await self.connection.exec_driver_sql(statement.text, tuple(values))
        return self.raw, result.fetchall()

    @property
    def _adapter(self) -> Any:
        return self.connection.sync_connection.connection.dbapi_connection

    async def commit(self) -> None:
        if self._transaction is not None:
            await self._transaction.commit()

    def committed(self) -> None:
        adapter = self._adapter
        adapter._transaction = None
        if hasattr(adapter, "_started"):  # SQLAlchemy 2.0
            adapter._started = False

    async def roll_back(self) -> None:
        if self._transaction is not None and self._transaction.is_active:
            await self._transaction.rollback()
