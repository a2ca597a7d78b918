"""The ledger in the database of a user's psycopg_pool: `Guard(pool)`.  Transactions run on the pool's connections."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from psycopg.conninfo import conninfo_to_dict
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from ..._ledger.store import Store
from ..._ledger.transactions import Do, at_once, commit_forbidden
from ..._runtime.plan import Plan
from ...errors import ConfigurationError, StoreTimeout
from .psycopg import IDLE, PsycopgAdapter
from .store import PostgresStore, url_of
from .transactions import PostgresSource

# Arguments of psycopg's connect() that libpq does not know.
CLIENT_SIDE = {"autocommit", "prepare_threshold", "context", "row_factory", "cursor_factory"}


def enlist(pool: Any, options: Mapping[str, str]) -> Store:
    """Return the ledger in the database of a psycopg_pool.  *options* are those of a store's URL."""
    if callable(pool.conninfo) or callable(pool.kwargs):
        raise ConfigurationError(
            "The pool computes its address for each connection: pass the guard a pool with a fixed conninfo and kwargs"
        )
    kwargs = {name: value for name, value in (pool.kwargs or {}).items() if name not in CLIENT_SIDE}
    store = PostgresStore(url_of(conninfo_to_dict(pool.conninfo, **kwargs), options))
    store.lender = PostgresSource(store.database, lambda: PoolAdapter(pool, store.database.timeout))
    return store


class PoolAdapter(PsycopgAdapter):
    """One transaction on a connection of the user's psycopg_pool.  An event loop uses a sync pool in threads."""

    def __init__(self, pool: Any, timeout: float) -> None:
        self.connection: Any = None
        self._pool = pool
        self._timeout = timeout

    def can_defer(self) -> bool:
        """Return False, because the user's connections do not note savepoints."""
        return False

    def _take(self) -> Do[None]:
        pool, timeout = self._pool, self._timeout

        def plain() -> None:
            with pool_errors():
                self.connection = pool.getconn(timeout)
            self._keep_open(refuse_close)

        async def awaited() -> None:
            with pool_errors():
                self.connection = await pool.getconn(timeout)
            self._keep_open(arefuse_close)

        return Do(None, awaited) if isinstance(pool, AsyncConnectionPool) else Do(plain, None)

    def _keep_open(self, refuse: Callable[[], Any]) -> None:
        if getattr(self._pool, "close_returns", False):
            self.connection.close = refuse

    def _give_back(self) -> Plan[None]:
        yield self._put()

    def _put(self) -> Do[None]:
        """Effect: give the connection back, and then forget it, so that `discard` still has it after a cancellation."""

        def plain() -> None:
            vars(self.connection).pop("close", None)
            self._pool.putconn(self.connection)
            self.connection = None

        async def awaited() -> None:
            vars(self.connection).pop("close", None)
            await self._pool.putconn(self.connection)
            self.connection = None

        return Do(None, awaited) if self.awaited else Do(plain, None)

    def discard(self) -> None:
        if self.connection is not None:
            if self.connection.pgconn.transaction_status != IDLE:
                self.connection.pgconn.finish()  # close() might only give the connection back to its pool
            at_once(self._put())


def refuse_close() -> None:
    """Replaces a close() that gives the connection back to its pool, whose next user would be in our transaction."""
    raise commit_forbidden()


async def arefuse_close() -> None:
    raise commit_forbidden()


@contextmanager
def pool_errors() -> Iterator[None]:
    """Raise StoreTimeout if the pool has no free connection in time."""
    try:
        yield
    except PoolTimeout as error:
        raise StoreTimeout(f"No connection was free in time: {error}; raise the pool's max_size") from error
