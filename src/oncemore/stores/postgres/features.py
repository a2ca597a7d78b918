"""The tables of features on PostgreSQL: made by the store itself, and used in any driver's transaction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg.pq import PipelineStatus

from ..._ledger.connect import adapter_module
from ..._ledger.tables import Dialect, Executes, Feature, belongs_to, not_a_place, not_in_transaction
from ..._ledger.transactions import Do, Query, Rows, Statement, TransactionAdapter
from ..._runtime.clock import SYSTEM
from ..._runtime.plan import Plan
from ..._runtime.wakeups import Id
from ...errors import ConfigurationError, StoreUnavailable
from . import tables
from .batch import Batches
from .pipeline import Pipeline, begin_statement
from .psycopg import IDLE, BelowDjango, PsycopgAdapter
from .session import HOW_TO_CREATE, SERIALIZATION_FAILURES, is_lost, message_of, translate_error
from .statements import prepared
from .transactions import LedgerStore

# Stable within a statement, unlike clock_timestamp(), so that a comparison with it can use an index.
NOW = "(statement_timestamp() + make_interval(secs => $1))"


class PostgresTables:
    """Tables beside the ledger's, in the same schema."""

    dialect: Dialect = "postgres"

    def __init__(self, store: LedgerStore, batches: Batches) -> None:
        self.store = store
        self.database = store.database
        self.batches = batches
        self._ready: set[str] = set()

    def statement(self, text: str) -> Statement:
        return prepared(text.format(**self.database.names, now=NOW))

    def ready(self, feature: Feature) -> Plan[None]:
        if feature.name in self._ready:
            return
        yield from self.store.ready()
        names = self.database.names
        version = yield from self._version(feature)
        if version > feature.version:
            raise ConfigurationError(
                f"The tables of the {feature.name} are of version {version}, made by a newer release; this one knows "
                f"{feature.version}: upgrade it"
            )
        if version < feature.version:
            if not self.database.create:
                raise ConfigurationError(
                    f"The tables of the {feature.name} are missing or outdated, and create=false; {HOW_TO_CREATE}"
                )
            yield from self.database.admin_rows(Statement(tables.feature_block(names, feature)), ())
        self._ready.add(feature.name)

    def _version(self, feature: Feature) -> Plan[int]:
        known = Statement(f"SELECT to_regclass('{self.database.names['features']}') IS NOT NULL")
        [(exists,)] = yield from self.database.admin_rows(known, ())
        if not exists:
            return 0
        statement = Statement(tables.FEATURE_VERSION.format(**self.database.names))
        rows = yield from self.database.admin_rows(statement, (feature.name,))
        return int(rows[0][0]) if rows else 0

    def ready_in(self, feature: Feature, adapter: Executes) -> Plan[None]:
        """Make the tables on a connection of our own: nobody else can use a table that the user has not committed."""
        return self.ready(feature)

    def execute(self, queries: Sequence[Query], *, patient: bool) -> Plan[list[Rows]]:
        return self.database.feature_rows(queries, patient=patient)

    def open(self) -> TransactionAdapter:
        return OwnTransaction(self.database.features, self.database.timeout, self._configure)

    def _configure(self, connection: Any) -> Pipeline:
        query = self.database.session_query(self.database.features, connection)
        return Pipeline(connection, [query], SYSTEM.monotonic() + self.database.timeout)

    def join(self, place: Any) -> Plan[Executes]:
        if isinstance(place, psycopg.Connection | psycopg.AsyncConnection):
            # psycopg begins a transaction with the first statement, unless it is in autocommit mode; so does the adapter.
            if place.autocommit and place.pgconn.transaction_status == IDLE:
                raise not_in_transaction(place)
            return JoinedPsycopg.on(place)
        if isinstance(place, str):
            return (yield from adapter_module("django").join(place, "postgresql", JoinedBelowDjango()))  # type: ignore[no-any-return]
        if belongs_to(place, "asyncpg"):
            return adapter_module("asyncpg").join(place)  # type: ignore[no-any-return]
        if belongs_to(place, "sqlalchemy"):
            return (yield from adapter_module("sqlalchemy").join(place, "postgresql"))  # type: ignore[no-any-return]
        raise not_a_place(place)

    @property
    def pooled(self) -> bool:
        return self.database.pooled

    async def aclose(self) -> None:
        await self.database.aclose()

    def notify(self, id: Id) -> Plan[None]:
        return self.batches.notify([id])

    def listen(self) -> None:
        self.batches.listener.listen()


class OwnTransaction(PsycopgAdapter):
    """A transaction of a feature's own.  It raises a StoreError if the server fails or refuses: the caller begins another one."""

    def begin(self, *queries: Query) -> Plan[Rows]:
        with store_errors():
            return (yield from super().begin(*queries))

    def execute(self, *queries: Query) -> Plan[Rows]:
        with store_errors():
            return (yield from super().execute(*queries))

    def commit(self, *queries: Query) -> Plan[None]:
        with store_errors():
            yield from super().commit(*queries)


@contextmanager
def store_errors() -> Iterator[None]:
    """Raise a StoreError for each error of psycopg."""
    try:
        yield
    except psycopg.Error as error:
        if is_lost(error) or error.sqlstate in SERIALIZATION_FAILURES:
            raise StoreUnavailable(f"PostgreSQL could not finish the transaction: {message_of(error)}") from error
        raise translate_error(error) from error


class JoinedPsycopg(PsycopgAdapter):
    """Statements in a transaction on a psycopg connection of the user's."""

    def on_commit(self, callback: Callable[[], object]) -> None:
        """Nothing: the driver does not tell of commits, so relays find the message when they look."""

    def execute(self, *queries: Query) -> Plan[Rows]:
        pgconn = self.connection.pgconn
        if pgconn.pipeline_status != PipelineStatus.OFF:  # the user is in `with connection.pipeline()`
            return (yield self._by_cursor(queries))  # type: ignore[no-any-return]
        if pgconn.transaction_status == IDLE:
            queries = ((begin_statement(self.connection), ()), *queries)
        return (yield from super().execute(*queries))

    def _by_cursor(self, queries: Sequence[Query]) -> Do[Rows]:
        connection = self.connection

        def plain() -> Rows:
            with psycopg.RawCursor(connection) as cursor:
                for statement, values in queries:
                    cursor.execute(statement.text.encode(), values)
                return cursor.fetchall() if cursor.description else ()

        async def awaited() -> Rows:
            async with psycopg.AsyncRawCursor(connection) as cursor:
                for statement, values in queries:
                    await cursor.execute(statement.text.encode(), values)
                return await cursor.fetchall() if cursor.description else ()

        return Do(None, awaited) if self.awaited else Do(plain, None)


class JoinedBelowDjango(BelowDjango):
    """Statements in the user's atomic block.  Django leaves it to psycopg to begin with the first statement."""

    def execute(self, raw: Any, queries: Sequence[Query]) -> Rows:
        if raw.pgconn.transaction_status == IDLE:
            queries = [(begin_statement(raw), ()), *queries]
        return super().execute(raw, queries)
