"""Shops: each stores its refunds in a database through one driver, with its ledger in the same database.

A performer is written once, as a plan over `shop.insert` and `shop.sql`, and runs on every driver.
"""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any

import asyncpg
import django
import psycopg
from asgiref.sync import ThreadSensitiveContext, sync_to_async
from django.conf import settings
from django.db import connections
from psycopg.conninfo import conninfo_to_dict
from psycopg_pool import AsyncConnectionPool, ConnectionPool
from sqlalchemy import create_engine, event
from sqlalchemy.ext.asyncio import create_async_engine

from oncemore import Guard, Operation, Policy
from oncemore._ledger.context import Op
from oncemore._ledger.decisions import Answer
from oncemore._ledger.transactions import Do
from oncemore._runtime.plan import arun, run

numbers = itertools.count()
TABLE = "CREATE TABLE IF NOT EXISTS refunds (id text PRIMARY KEY, made_in text)"
Performer = Callable[[Op], Generator[Any, Any, Any]]

POLICY = Policy(effect="transaction", wait="5s")


class Shop:
    """The database at *url*, used through one driver."""

    waits = True  # whether a duplicate in flight can be told from another writer
    sync = True
    mark = "?"

    def __init__(self, url: str) -> None:
        self.url = url
        self.execute(TABLE)
        self.guard = self.made()

    def made(self) -> Guard:
        return Guard(self.url, policy=POLICY)

    async def open(self) -> None:
        """Do the set-up that needs the event loop."""

    def around(self) -> AbstractAsyncContextManager[Any]:
        """Return the context that an operation runs in, such as a request's."""
        return nullcontext()

    async def close(self) -> None:
        await self.guard.aclose()

    # What performers do with the connection that they borrow

    def insert(self, op: Op, id: str) -> Do[Any]:
        return self.sql(op, f"INSERT INTO refunds VALUES ({self.mark}, 'x')", id)

    def sql(self, op: Op, text: str, *values: Any) -> Do[Any]:
        def plain() -> None:
            op.connection.execute(text, values)

        async def awaited() -> None:
            await op.connection.execute(text, values)

        return Do(plain, awaited)

    def ask(self, op: Op, text: str) -> Do[Any]:
        """Effect: run a query, and return its single value."""

        def plain() -> Any:
            return value_of(self.asked(op.connection, text))

        async def awaited() -> Any:
            found = self.asked(op.connection, text)
            cursor = await found
            row = cursor.fetchone()
            return (row if isinstance(row, tuple) or not hasattr(row, "__await__") else await row)[0]

        return Do(plain, awaited)

    def asked(self, connection: Any, text: str) -> Any:
        return connection.execute(text)

    async def run(
        self, operation: Operation, perform: Performer, guard: Guard | None = None, **settings: Any
    ) -> Answer:
        guard = guard or self.guard
        if self.sync:
            return await asyncio.to_thread(guard.run, operation, lambda op: run(perform(op)), **settings)
        return await guard.arun(operation, lambda op: arun(perform(op)), **settings)

    # What is in the database, by a connection that has nothing to do with it

    def refunds(self) -> list[str]:
        return sorted(row[0] for row in self.execute("SELECT id FROM refunds"))

    def execute(self, text: str) -> list[Any]:
        raise NotImplementedError


def value_of(cursor: Any) -> Any:
    return cursor.fetchone()[0]


class Sqlite(Shop):
    def execute(self, text: str) -> list[Any]:
        connection = sqlite3.connect(self.url.removeprefix("sqlite:///"), isolation_level=None, timeout=5)
        try:
            return connection.execute(text).fetchall()
        finally:
            connection.close()


class Aiosqlite(Sqlite):
    sync = False


class Postgres(Shop):
    mark = "%s"

    def execute(self, text: str) -> list[Any]:
        with psycopg.connect(self.url.partition("&schema=")[0], autocommit=True) as connection:
            cursor = connection.execute(text)  # type: ignore[call-overload]
            return cursor.fetchall() if cursor.description else []


class AsyncPostgres(Postgres):
    sync = False


class Pool(Postgres):
    """The user's own pool, passed to the guard."""

    def made(self) -> Guard:
        self.pool = ConnectionPool(self.url, min_size=0, max_size=16, open=True)
        return Guard(self.pool, policy=POLICY)

    async def close(self) -> None:
        await super().close()
        await asyncio.to_thread(self.pool.close)


class AutocommitPool(Pool):
    """A pool whose connections are in autocommit mode, which is common."""

    def made(self) -> Guard:
        self.pool = ConnectionPool(self.url, min_size=0, max_size=16, open=True, kwargs={"autocommit": True})
        return Guard(self.pool, policy=POLICY)


class PoolUnderLoop(Pool):
    """A sync pool under async middleware: its work is done in threads."""

    sync = False

    def sql(self, op: Op, text: str, *values: Any) -> Do[Any]:
        return Do(lambda: op.connection.execute(text, values) and None, None)


class AsyncPool(Postgres):
    sync = False

    def made(self) -> Guard:
        self.pool = AsyncConnectionPool(self.url, min_size=0, max_size=16, open=False)
        return Guard(self.pool, policy=POLICY)

    async def open(self) -> None:
        await self.pool.open()

    async def close(self) -> None:
        await super().close()
        await self.pool.close()


class Asyncpg(Postgres):
    sync = False
    mark = "$1"

    def made(self) -> Guard:
        self.pool = asyncpg.create_pool(self.url, min_size=0, max_size=16)
        return Guard(self.pool, policy=POLICY)

    def sql(self, op: Op, text: str, *values: Any) -> Do[Any]:
        return Do(None, lambda: op.connection.execute(text, *values))

    async def open(self) -> None:
        await self.pool

    async def close(self) -> None:
        await super().close()
        await self.pool.close()


class OnEngine(Shop):
    """A database behind a SQLAlchemy engine, with its *dialect* and driver."""

    dialect = ""

    def made(self) -> Guard:
        make = create_engine if self.sync else create_async_engine
        place = self.url.partition("://")[2]
        self.engine: Any = make(f"{self.dialect}://{place}", **self.pooled)
        return Guard(self.engine, policy=POLICY)

    @property
    def pooled(self) -> dict[str, Any]:
        return {"pool_size": 16}

    def sql(self, op: Op, text: str, *values: Any) -> Do[Any]:
        def plain() -> None:
            op.connection.exec_driver_sql(text, values or None)

        async def awaited() -> None:
            await op.connection.exec_driver_sql(text, values or None)

        return Do(plain, awaited)

    def asked(self, connection: Any, text: str) -> Any:
        return connection.exec_driver_sql(text)

    async def close(self) -> None:
        await super().close()
        if self.sync:
            await asyncio.to_thread(self.engine.dispose)
        else:
            await self.engine.dispose()


class AlchemyPsycopg(OnEngine, Postgres):
    dialect = "postgresql+psycopg"


class AlchemyPsycopg2(OnEngine, Postgres):
    dialect = "postgresql+psycopg2"


class AlchemyPg8000(OnEngine, Postgres):
    dialect = "postgresql+pg8000"


class AlchemyPsycopgAsync(OnEngine, Postgres):
    dialect = "postgresql+psycopg"
    sync = False


class AlchemyAsyncpg(OnEngine, Postgres):
    dialect = "postgresql+asyncpg"
    sync = False
    mark = "$1"


class AlchemySqlite(OnEngine, Sqlite):
    dialect = "sqlite"


class AlchemyAiosqlite(OnEngine, Sqlite):
    dialect = "sqlite+aiosqlite"
    sync = False


class AlchemyBeginning(AlchemySqlite):
    """An engine whose hook begins the transactions, as SQLAlchemy's documentation advises for savepoints."""

    def made(self) -> Guard:
        guard = super().made()
        event.listen(self.engine, "connect", lambda raw, _: setattr(raw, "isolation_level", None))
        event.listen(self.engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN") and None)
        return guard


class AlchemyUnderLoop(AlchemyPsycopg):
    """A sync engine under async middleware: its work is done in threads."""

    async def run(
        self, operation: Operation, perform: Performer, guard: Guard | None = None, **settings: Any
    ) -> Answer:
        return await (guard or self.guard).arun(operation, lambda op: arun(perform(op)), **settings)

    def ask(self, op: Op, text: str) -> Do[Any]:
        return Do(super().ask(op, text).plain, None)

    def sql(self, op: Op, text: str, *values: Any) -> Do[Any]:
        return Do(lambda: op.connection.exec_driver_sql(text, values or None) and None, None)


class OnDjango(Shop):
    """A database of Django's, with its own alias."""

    mark = "%s"
    persistent = False  # whether a thread's connection outlives its operation

    def made(self) -> Guard:
        if not settings.configured:
            settings.configure(USE_TZ=True, LOGGING_CONFIG=None, SECRET_KEY="of these tests")
            django.setup()
        self.alias = f"shop{next(numbers)}"
        said = connections.configure_settings({"default": {}, self.alias: self.database()})
        connections.settings[self.alias] = said[self.alias]
        return Guard(f"django:{self.alias}", policy=POLICY)

    def database(self) -> dict[str, Any]:
        raise NotImplementedError

    def sql(self, op: Op, text: str, *values: Any) -> Do[Any]:
        def plain() -> None:
            with op.connection.cursor() as cursor:
                cursor.execute(text, values or None)

        return Do(plain, sync_to_async(plain))

    async def run(
        self, operation: Operation, perform: Performer, guard: Guard | None = None, **settings: Any
    ) -> Answer:
        guard = guard or self.guard
        if self.sync:
            return await asyncio.to_thread(self._in_thread, guard, operation, perform, settings)
        async with self.around():
            return await guard.arun(operation, lambda op: arun(perform(op)), **settings)

    @asynccontextmanager
    async def around(self) -> AsyncIterator[None]:
        if self.sync:
            yield
            return
        async with ThreadSensitiveContext():  # as each request has one
            try:
                yield
            finally:
                await sync_to_async(lambda: connections[self.alias].close())()

    def _in_thread(self, guard: Guard, operation: Operation, perform: Performer, settings: dict[str, Any]) -> Answer:
        try:
            return guard.run(operation, lambda op: run(perform(op)), **settings)
        finally:
            if not self.persistent:
                connections[self.alias].close()


class DjangoSqlite(OnDjango, Sqlite):
    def database(self) -> dict[str, Any]:
        return {"ENGINE": "django.db.backends.sqlite3", "NAME": self.url.removeprefix("sqlite:///")}


class DjangoPostgres(OnDjango, Postgres):
    def database(self) -> dict[str, Any]:
        said = conninfo_to_dict(self.url)
        names = {"NAME": "dbname", "USER": "user", "PASSWORD": "password", "HOST": "host", "PORT": "port"}
        return {"ENGINE": "django.db.backends.postgresql", **{ours: said.get(name, "") for ours, name in names.items()}}


class AsyncDjangoSqlite(DjangoSqlite):
    sync = False


class AsyncDjangoPostgres(DjangoPostgres):
    sync = False


ON_SQLITE: dict[str, type[Shop]] = {
    "sqlite3": Sqlite,
    "aiosqlite": Aiosqlite,
    "alchemy-pysqlite": AlchemySqlite,
    "alchemy-pysqlite-beginning": AlchemyBeginning,
    "alchemy-aiosqlite": AlchemyAiosqlite,
    "django-sqlite": DjangoSqlite,
    "django-sqlite-async": AsyncDjangoSqlite,
}
ON_POSTGRES: dict[str, type[Shop]] = {
    "psycopg": Postgres,
    "psycopg-async": AsyncPostgres,
    "pool": Pool,
    "pool-autocommit": AutocommitPool,
    "pool-under-a-loop": PoolUnderLoop,
    "pool-async": AsyncPool,
    "asyncpg": Asyncpg,
    "alchemy-psycopg": AlchemyPsycopg,
    "alchemy-psycopg2": AlchemyPsycopg2,
    "alchemy-pg8000": AlchemyPg8000,
    "alchemy-under-a-loop": AlchemyUnderLoop,
    "alchemy-psycopg-async": AlchemyPsycopgAsync,
    "alchemy-asyncpg": AlchemyAsyncpg,
    "django-postgres": DjangoPostgres,
    "django-postgres-async": AsyncDjangoPostgres,
}
