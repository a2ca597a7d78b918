"""A SQLAlchemy engine's SQLite connections: our statements go by sqlite3 below, on whatever thread that is."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Mapping
from typing import Any, TypeVar

from sqlalchemy.engine import Engine
from sqlalchemy.ext.asyncio import AsyncEngine

from .._ledger.store import Store
from .._ledger.transactions import Do, ended
from .._runtime.plan import Effect, Plan
from .._runtime.wakeups import Id
from ..errors import ConfigurationError
from .sqlalchemy_loan import AsyncBorrowed, Borrowed
from .sqlite import connect, url_of
from .sqlite.desk import Enlisted, Taken, ThreadDesk, Work
from .sqlite.lender import passed

T = TypeVar("T")
DRIVERS = ("pysqlite", "aiosqlite")


def store_of(engine: Engine | AsyncEngine, options: Mapping[str, str]) -> Store:
    """The ledger in the engine's file."""
    driver = engine.dialect.driver
    if driver not in DRIVERS:
        raise ConfigurationError(f"An engine on {driver} cannot lend its connections: use sqlite or sqlite+aiosqlite")
    store = connect(url_of(engine.url.database or "", options))
    path = store.path
    if isinstance(engine, AsyncEngine):
        store.lender = Enlisted(store, loop=lambda: AsyncEngineDesk(engine, path))
    else:
        store.lender = Enlisted(store, threads=lambda: EngineDesk(engine, path))
    return store


class EngineDesk(ThreadDesk):
    """Where an Engine's connections are lent, one at a time."""

    def __init__(self, engine: Engine, path: str) -> None:
        super().__init__(path)
        self.engine = engine
        self.loan = Borrowed(engine)

    def take(self) -> None:
        self.loan = Borrowed(self.engine)
        try:
            self.loan.take()
        except BaseException:
            self.loan.give(healthy=False, committed=False)
            raise
        self.connection = self.loan.connection

    def raw(self) -> sqlite3.Connection:
        return self.loan.raw  # type: ignore[no-any-return]

    def session(self) -> Any:
        return self.loan.session()

    def finish(self) -> Plan[None]:
        yield self.do(self.loan.finish)

    def give(self, *, committed: bool) -> Plan[None]:
        yield self.do(lambda: self.loan.give(healthy=True, committed=committed))

    def shut(self) -> None:
        self.connection = None
        self.loan.give(healthy=False, committed=False)


class AsyncEngineDesk:
    """The same for an AsyncEngine's, on one event loop."""

    awaited = True

    def __init__(self, engine: AsyncEngine, path: str) -> None:
        self.engine = engine
        self.path = path
        self.loan = AsyncBorrowed(engine)
        self.running: Id | None = None
        self.owner: object = None
        self.gate = asyncio.Lock()

    @property
    def connection(self) -> Any:
        return self.loan.connection

    def here(self) -> object:
        return asyncio.current_task()

    def turn(self, limit: float, taken: Taken) -> Effect[None]:
        return Do(None, lambda: self._turn(limit, taken))

    async def _turn(self, limit: float, taken: Taken) -> None:
        if not await passed(self.gate, limit):
            return
        self.loan = AsyncBorrowed(self.engine)
        try:
            await self.loan.take()
        except BaseException:
            self.loan.drop()
            self.gate.release()
            raise
        taken()

    def call(self, work: Work[T]) -> Effect[T]:
        if not self.loan.kept():
            raise ended()
        connection = self.loan.raw

        async def awaited() -> T:
            result: T = await connection._execute(work, connection._conn)
            return result

        return Do(None, awaited)

    def session(self) -> Any:
        return self.loan.session()

    def finish(self) -> Plan[None]:
        yield Do(None, self.loan.finish)

    def give(self, *, committed: bool) -> Plan[None]:
        yield Do(None, lambda: self.loan.give(healthy=True, committed=committed))

    def shut(self) -> None:
        self.loan.drop()

    def end(self) -> Plan[None]:
        self.shut()
        return
        yield

    def leave(self) -> None:
        self.running = self.owner = None
        self.gate.release()
