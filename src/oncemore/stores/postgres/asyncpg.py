"""The ledger in the database of an asyncpg pool: `Guard(pool)`.  Transactions run on the pool's connections.

The ledger's statements outside of transactions go through psycopg.  Both drivers come with
`pip install 'oncemore[asyncpg]'`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import asyncpg  # type: ignore[import-untyped]
from psycopg.conninfo import conninfo_to_dict

from ..._ledger.events import log
from ..._ledger.store import Store
from ..._ledger.tables import not_a_place, not_in_transaction
from ..._ledger.transactions import Do, Query, Rows, at_once, commit_forbidden
from ..._runtime.plan import Plan
from ...errors import ConfigurationError, StoreTimeout
from .._compat import asyncpg_address, asyncpg_connection
from .psycopg import PATIENCE
from .store import PostgresStore, url_of
from .transactions import PostgresSource

# asyncpg's names for libpq's settings.
NAMES = {"database": "dbname", "ssl": "sslmode", "passfile": "passfile", "service": "service"}
ADDRESS = ("host", "port", "user", "password", *NAMES)
HOW = "pass the address as options: Guard(connect(pool, host=..., dbname=..., user=..., sslmode=...))"


def enlist(pool: Any, options: Mapping[str, str]) -> Store:
    """Return the ledger in the pool's database.  *options* are those of a store's URL; libpq's override the pool's."""
    if not isinstance(pool, asyncpg.Pool):
        raise ConfigurationError(
            f"{type(pool).__name__} is no pool: pass the guard the result of asyncpg.create_pool()"
        )
    store = PostgresStore(url_of(settings_of(pool, options), options))
    store.lender = PostgresSource(store.database, lambda: AsyncpgAdapter(pool, store.database.timeout))
    return store


def settings_of(pool: Any, options: Mapping[str, str]) -> dict[str, Any]:
    """Return libpq's settings for the address that the pool connects to."""
    settings: dict[str, Any] = {}
    dsn, known, connect = asyncpg_address(pool)
    if dsn is not None:
        if not isinstance(dsn, str):
            raise ConfigurationError(f"The pool computes its address for each connection; {HOW}")
        settings = {name: value for name, value in conninfo_to_dict(dsn).items() if value is not None}
    for name in ADDRESS:
        value = known.get(name)
        if value is not None and NAMES.get(name, name) not in options:
            settings[NAMES.get(name, name)] = setting(name, value)
    if connect not in (asyncpg.connect, asyncpg.connection.connect):
        raise ConfigurationError(f"The pool connects through a function of its own, so its address is not known; {HOW}")
    return settings


def setting(name: str, value: Any) -> str:
    """Return the value of one of asyncpg's arguments as libpq takes it."""
    if name == "ssl":
        if value is False:
            return "disable"
        if isinstance(value, str):
            return value
        if not hasattr(value, "name"):  # asyncpg's own modes are an enumeration
            raise ConfigurationError(f"The pool's ssl={value!r} cannot be translated for libpq; {HOW}")
        return str(value.name).replace("_", "-")
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    if callable(value):
        raise ConfigurationError(f"The pool's {name} is a function, so its value is not known; {HOW}")
    return str(value)


def join(place: Any) -> AsyncpgAdapter:
    """Return an adapter for the user's transaction on *place*, a connection."""
    if not isinstance(place, asyncpg.Connection | asyncpg.pool.PoolConnectionProxy):
        raise not_a_place(place)
    if not place.is_in_transaction():
        raise not_in_transaction(place)
    return AsyncpgAdapter.on(place)


class AsyncpgAdapter:
    """One transaction on a connection of an asyncpg pool.  Each statement, also BEGIN, is a round trip in asyncpg."""

    awaited = True

    def __init__(self, pool: Any, timeout: float) -> None:
        self.pool = pool
        self.timeout = timeout
        self.connection: Any = None
        self._raw: Any = None
        self._transaction: Any = None

    @classmethod
    def on(cls, connection: Any) -> AsyncpgAdapter:
        """Return an adapter for `execute` in the user's transaction on *connection*."""
        adapter = cls(None, 0.0)
        adapter.connection, adapter._raw = connection, asyncpg_connection(connection)
        return adapter

    def on_commit(self, callback: Callable[[], object]) -> None:
        """Do nothing, because the driver does not report commits.  Relays find the message when they look."""

    def begin(self, *queries: Query) -> Plan[Rows]:
        return (yield Do(None, lambda: self._begin(queries)))  # type: ignore[no-any-return]

    async def _begin(self, queries: Sequence[Query]) -> Rows:
        try:
            self.connection = await self.pool.acquire(timeout=self.timeout)
        except TimeoutError as error:
            raise StoreTimeout(f"No connection was free in time: {error}; raise the pool's max_size") from error
        except asyncpg.InterfaceError as error:
            raise ConfigurationError(f"asyncpg: {error}; await the pool before the first request") from error
        self._raw = asyncpg_connection(self.connection)
        self._transaction = self.connection.transaction()
        await self._transaction.start()
        return await self._run(queries)

    async def _run(self, queries: Sequence[Query]) -> Rows:
        if self._was_released():
            raise commit_forbidden()
        rows: Rows = ()
        for statement, values in queries:
            rows = await self.connection.fetch(statement.text, *values)
        return rows

    def _was_released(self) -> bool:
        """Whether the performer has given the connection back to its pool, which may have lent it again."""
        return asyncpg_connection(self.connection) is None and not self._raw.is_closed()

    def execute(self, *queries: Query) -> Plan[Rows]:
        return (yield Do(None, lambda: self._run(queries)))  # type: ignore[no-any-return]

    def commit(self, *queries: Query) -> Plan[None]:
        yield Do(None, lambda: self._commit(queries))

    async def _commit(self, queries: Sequence[Query]) -> None:
        await self._run(queries)
        await self._transaction.commit()
        try:
            await self._give_back()
        except Exception:  # the pool's reset failed, so asyncpg has closed the connection
            log.exception("The transaction was committed, but its connection could not be given back to the pool")
            self.discard()

    def rollback(self) -> Plan[None]:
        try:
            if self.connection is not None:
                yield Do(None, self._rollback)
        except Exception:
            self.discard()

    async def _rollback(self) -> None:
        async with asyncio.timeout(PATIENCE):
            if asyncpg_connection(self.connection) is not None and self.connection.is_in_transaction():
                await self._transaction.rollback()
            await self._give_back()

    async def _give_back(self) -> None:
        await self.pool.release(self.connection)
        self.connection = None

    def discard(self) -> None:
        connection = self.connection
        if connection is not None:
            if asyncpg_connection(connection) is not None:
                connection.terminate()
            at_once(Do(None, self._give_back))
