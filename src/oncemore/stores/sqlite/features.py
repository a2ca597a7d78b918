"""The tables of features in a SQLite file: made and used by the store's own connections, or in the user's transaction."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..._ledger.connect import adapter_module
from ..._ledger.tables import Dialect, Executes, Feature, belongs_to, not_a_place, not_in_transaction
from ..._ledger.transactions import Query, Rows, Statement, TransactionAdapter
from ..._runtime.plan import Call, Effect, Plan
from ..._runtime.wakeups import Id
from ...errors import ConfigurationError
from .statements import NOW
from .tables import feature_statements
from .transactions import SET_MARK, LedgerFile, SqliteAdapter, SqliteBelowDjango, SqliteSource, run_queries
from .writer import MEMORY, Connection, Use, Write

FILES = (Statement("PRAGMA database_list"), ())


class SqliteTables:
    """Tables beside the ledger's, in the same file."""

    dialect: Dialect = "sqlite"

    def __init__(
        self, store: LedgerFile, writer: Connection, reader: Connection, source: SqliteSource, *, create: bool
    ) -> None:
        self.store = store
        self._writer = writer
        self._reader = reader
        self._source = source
        self._create = create
        self._ready: set[str] = set()
        self._made_in_transactions: set[str] = set()

    def statement(self, text: str) -> Statement:
        return Statement(text.format(p=self.store.sql.prefix, prefix=self.store.sql.prefix, now=NOW))

    def ready(self, feature: Feature) -> Plan[None]:
        if feature.name not in self._ready:
            yield Use(self._writer, partial(self._make, feature))
            self._ready.add(feature.name)

    def _make(self, feature: Feature, connection: sqlite3.Connection) -> None:
        def version() -> int:
            exists = run_queries(connection, [self._exists])
            return as_version(run_queries(connection, [self._version(feature)]) if exists else ())

        if self._missing(feature, version()):
            connection.execute("BEGIN IMMEDIATE")
            for text in self._missing(feature, version()):  # again: another process may just have done it
                connection.execute(text)
            connection.execute("COMMIT")

    def ready_in(self, feature: Feature, adapter: Executes) -> Plan[None]:
        """Make the tables in the user's transaction: it may have locked the file, and then nobody else can make them.

        If the transaction is rolled back, they are gone again; so a table that was made like this is not relied on later.
        """
        if feature.name in self._ready:
            return
        rows: Rows = yield from adapter.execute(self._exists)
        if rows:
            rows = yield from adapter.execute(self._version(feature))
        missing = self._missing(feature, as_version(rows))
        for text in missing:
            yield from adapter.execute((Statement(text), ()))
        if missing:
            self._made_in_transactions.add(feature.name)
        elif feature.name not in self._made_in_transactions:
            self._ready.add(feature.name)

    @property
    def _exists(self) -> Query:
        return Statement("SELECT 1 FROM sqlite_schema WHERE name = ?1"), (f"{self.store.sql.prefix}features",)

    def _version(self, feature: Feature) -> Query:
        return Statement(f"SELECT version FROM {self.store.sql.prefix}features WHERE name = ?1"), (feature.name,)

    def _missing(self, feature: Feature, version: int) -> list[str]:
        """The statements that bring the tables from *version* to the latest."""
        latest = len(feature.sqlite)
        if version == latest:
            return []
        if version > latest:
            raise ConfigurationError(
                f"{self.store.path}: the tables of the {feature.name} are of version {version}, made by a newer release; this "
                f"one knows {latest}: upgrade it"
            )
        if not self._create:
            raise ConfigurationError(
                f"{self.store.path}: the tables of the {feature.name} are missing or old, and create=false; run the script "
                "from oncemore.stores.schema(url)"
            )
        return feature_statements(self.store.sql.prefix, feature, since=version)

    def execute(self, queries: Sequence[Query], *, patient: bool) -> Plan[list[Rows]]:
        if all(statement.text.lstrip().startswith("SELECT") for statement, _ in queries):
            return (yield Use(self._reader, partial(run_together, queries=queries, begin="BEGIN")))  # type: ignore[no-any-return]
        work = partial(run_together, queries=queries, begin="BEGIN IMMEDIATE")
        return (yield Write(self._writer, work))  # type: ignore[no-any-return]

    def open(self) -> TransactionAdapter:
        return OwnSqliteTransaction(self._source)

    def join(self, place: Any) -> Plan[Executes]:
        adapter: Executes
        if isinstance(place, sqlite3.Connection) or belongs_to(place, "aiosqlite"):
            # sqlite3 begins a transaction with the first INSERT, unless it is in autocommit mode.
            begins = place.isolation_level is not None and getattr(place, "autocommit", None) is not True
            if not place.in_transaction and not begins:
                raise not_in_transaction(place)
            adapter = JoinedSqlite.on(place)
        elif isinstance(place, str):
            adapter = yield from adapter_module("django").join(place, "sqlite", SqliteBelowDjango(self.store.sql))
        elif belongs_to(place, "sqlalchemy"):
            adapter = yield from adapter_module("sqlalchemy").join(place, "sqlite")
        else:
            raise not_a_place(place)
        yield from self._check_file(place, adapter)
        return adapter

    def _check_file(self, place: Any, adapter: Executes) -> Plan[None]:
        """Refuse a connection to another file: the row would be there, and nobody would look for it."""
        rows = yield from adapter.execute(FILES)
        path = next((row[2] for row in rows if row[1] == "main"), "")
        if self.store.path == MEMORY or os.path.realpath(path) != os.path.realpath(self.store.path):
            raise ConfigurationError(
                f"This {type(place).__name__} is on {path or MEMORY!r}, and the guard on {self.store.path!r}: what must commit "
                "together must be in one file"
            )

    pooled = False

    async def aclose(self) -> None:
        """Nothing: the store's connections belong to threads."""

    def notify(self, id: Id) -> Plan[None]:
        """Nothing to send: other processes look for themselves."""
        return
        yield

    def listen(self) -> None:
        """Nothing to hear."""


def as_version(rows: Rows) -> int:
    return int(rows[0][0]) if rows else 0


def run_together(connection: sqlite3.Connection, *, queries: Sequence[Query], begin: str) -> list[Rows]:
    """Run *queries* in one transaction, and return the rows of each.  If one fails, the caller rolls back."""
    connection.execute(begin)
    results = [run_queries(connection, [query]) for query in queries]
    connection.execute("COMMIT")
    return results


class JoinedSqlite(SqliteAdapter):
    """Statements in a transaction on a connection of the user's.  sqlite3's are run on the caller's own thread."""

    def on_commit(self, callback: Callable[[], object]) -> None:
        """Nothing: the driver does not tell of commits, so relays find the message when they look."""

    def execute(self, *queries: Query) -> Plan[Rows]:
        if not self.connection.in_transaction:  # sqlite3 itself begins before an INSERT, but not before a CREATE TABLE
            queries = ((Statement(f"BEGIN {self.connection.isolation_level}"), ()), *queries)
        effect: Effect[Rows]
        if self.awaited:
            effect = self._do(lambda connection: run_queries(connection, queries))
        else:  # on this very thread also under an event loop, because a sqlite3 connection belongs to its thread
            effect = Call(run_queries, self.connection, queries)
        return (yield effect)  # type: ignore[no-any-return]


class OwnSqliteTransaction:
    """A transaction of several steps on the store's own connection; on an event loop it needs aiosqlite."""

    awaited = False

    def __init__(self, source: SqliteSource) -> None:
        self._source = source
        self._transaction: Any = None

    @property
    def connection(self) -> Any:
        return self._transaction.connection

    def begin(self, *queries: Query) -> Plan[Rows]:
        transaction: Any = yield from self._source.open()
        self._transaction = transaction
        # The name of no operation, and not that of another such transaction: this one waits until that has ended.
        name = ("", str(id(self)))
        rows = yield from transaction.begin_with(name, 0.0, SET_MARK, *queries)
        return rows  # type: ignore[no-any-return]

    def execute(self, *queries: Query) -> Plan[Rows]:
        return (yield from self._transaction.execute(*queries))  # type: ignore[no-any-return]

    def commit(self, *queries: Query) -> Plan[None]:
        yield from self._transaction.commit(*queries)

    def rollback(self) -> Plan[None]:
        if self._transaction is not None:
            yield from self._transaction.abort()

    def discard(self) -> None:
        if self._transaction is not None:
            self._transaction.drop()
