"""The ledger in the database of an asyncpg pool, whose connections are the ones that are lent: `Guard(pool)`.

The ledger's own statements, which are not part of anyone's transaction, go through psycopg; both come with
`pip install 'oncemore[asyncpg]'`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import asyncpg  # type: ignore[import-untyped]
from psycopg.conninfo import conninfo_to_dict

from ..._ledger.store import Store
from ..._ledger.transactions import Loan
from ...errors import ConfigurationError
from .asyncpg_wire import AsyncpgWire
from .lender import busy
from .statements import Ask, Rows
from .store import PostgresStore, url_of
from .transactions import Enlisted

# asyncpg's words for what libpq has others for.
NAMES = {"database": "dbname", "ssl": "sslmode", "passfile": "passfile", "service": "service"}
PLACES = ("host", "port", "user", "password", *NAMES)
HOW = "give the address by options: Guard(connect(pool, host=..., dbname=..., user=..., sslmode=...))"


def enlist(pool: Any, options: Mapping[str, str]) -> Store:
    """The ledger in the pool's database; *options* are those of the store's URL, and of libpq's where they must differ."""
    if not isinstance(pool, asyncpg.Pool):
        raise ConfigurationError(f"{type(pool).__name__} is no pool: hand the guard what asyncpg.create_pool returns")
    store = PostgresStore(url_of(settings_of(pool, options), options))
    store.lender = Enlisted(store, lambda: AsyncpgWire(PoolLoan(pool, store.database.timeout)))
    return store


def settings_of(pool: Any, options: Mapping[str, str]) -> dict[str, Any]:
    """libpq's settings for the address that the pool connects to."""
    said: dict[str, Any] = {}
    args = getattr(pool, "_connect_args", None)
    dsn = args[0] if args else None
    if dsn is not None:
        said = {name: value for name, value in conninfo_to_dict(address(dsn)).items() if value is not None}
    known = getattr(pool, "_connect_kwargs", {})
    for name in PLACES:
        value = known.get(name)
        if value is not None and NAMES.get(name, name) not in options:
            said[NAMES.get(name, name)] = setting(name, value)
    if getattr(pool, "_connect", asyncpg.connect) not in (asyncpg.connect, asyncpg.connection.connect):
        raise ConfigurationError(f"The pool connects by a function of its own, whose address is not known; {HOW}")
    return said


def address(dsn: Any) -> str:
    """The DSN, without what only asyncpg's kind of URL can say: `postgres://` is libpq's too."""
    if not isinstance(dsn, str):
        raise ConfigurationError(f"The pool makes up its address as it goes; {HOW}")
    return dsn


def setting(name: str, value: Any) -> str:
    """One of asyncpg's arguments as libpq takes it."""
    if name == "ssl":
        if value is False:
            return "disable"
        if isinstance(value, str):
            return value
        if not hasattr(value, "name"):  # asyncpg's own modes are an enumeration
            raise ConfigurationError(f"How the pool's ssl={value!r} is said to libpq is not known; {HOW}")
        return str(value.name).replace("_", "-")
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    if callable(value):
        raise ConfigurationError(f"The pool's {name} is a function, and is not known here; {HOW}")
    return str(value)


class PoolLoan(Loan):
    """A connection of the pool's."""

    def __init__(self, pool: Any, timeout: float) -> None:
        self.pool = pool
        self.timeout = timeout
        self._transaction: Any = None
        self._raw: Any = None

    def kept(self) -> bool:
        """What stands for a connection forgets it when that is released; also when it is lost, but then nobody else has it."""
        released = self.connection is None or getattr(self.connection, "_con", self._raw) is None
        return not released or (self._raw is not None and self._raw.is_closed())

    async def begin(self, ask: Ask) -> tuple[Any, Rows]:
        try:
            connection = self.connection = await self.pool.acquire(timeout=self.timeout)
        except TimeoutError as error:
            raise busy(error) from error
        except asyncpg.InterfaceError as error:
            raise ConfigurationError(f"asyncpg: {error}; await the pool before the first request") from error
        raw = self._raw = getattr(connection, "_con", connection)
        self._transaction = connection.transaction()
        await self._transaction.start()
        statement, values = ask
        return raw, await connection.fetch(statement.text, *values)

    async def finish(self) -> None:
        """Savepoints that were left open end with the transaction."""

    async def commit(self) -> None:
        await self._transaction.commit()

    def committed(self) -> None:
        self._transaction = None

    async def roll_back(self) -> None:
        transaction, self._transaction = self._transaction, None
        if transaction is not None and self.kept():
            await transaction.rollback()

    async def give(self, *, healthy: bool, committed: bool) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            if not healthy:
                connection.terminate()
            await self.pool.release(connection)
