"""Tables of a feature (outbox, webhooks, jobs) in the guard's database, beside the user's own tables.

A feature declares its tables once, and its statements once for each database:

    OUTBOX = Feature(
        "outbox",
        postgres=("CREATE TABLE {p}outbox (id text PRIMARY KEY, due_at timestamptz NOT NULL, ...);",),
        sqlite=("CREATE TABLE {p}outbox (id TEXT PRIMARY KEY, due_at REAL NOT NULL, ...);",),
    )
    ADD = Sql("INSERT INTO {p}outbox VALUES ($2, {now})")
    DUE = Sql(
        postgres="SELECT id FROM {p}outbox WHERE due_at <= {now} LIMIT $2 FOR UPDATE SKIP LOCKED",
        sqlite="SELECT id FROM {p}outbox WHERE due_at <= {now} LIMIT ?2",
    )

Each string in *postgres* or *sqlite* is the script of one version, and more are only ever added at the end.  In scripts and
statements, `{p}` begins a table's name (with its schema on PostgreSQL) and `{prefix}` an index's; a brace that stands for
itself is doubled.  `{now}` is the database's clock, which `oncemore.testing.clock.Clock` can move: on PostgreSQL a timestamptz,
on SQLite seconds since 1970.  A statement with `{now}` has the store's shift as parameter 1, so its own begin at 2;
`Tables.query` adds it.  The module is registered in FEATURES, so that `oncemore.stores.schema(url)` has the tables too.

    tables = Tables(guard.store, OUTBOX)                        # ConfigurationError if the store has no tables
    yield from tables.execute_in(op, tables.query(ADD, id))     # in the user's transaction: an Op, a connection, a session
    (rows,) = yield from tables.execute(tables.query(DUE, 10))  # in a transaction of our own
    transaction = yield from tables.open()                      # the same in several steps, see TransactionAdapter
    rows = yield from transaction.begin(tables.query(DUE, 10))
    yield from transaction.commit(...)                          # or rollback()

The tables are made on first use, unless the store's URL says `create=false`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol, cast

from .._runtime.plan import Plan
from .._runtime.wakeups import Id
from ..errors import ConfigurationError
from .context import Op
from .transactions import Query, Rows, Statement, TransactionAdapter

Dialect = Literal["postgres", "sqlite"]

# The modules that declare tables, each as FEATURE.
FEATURES = ("oncemore.messages.outbox_tables", "oncemore.webhooks.tables")


@dataclass(frozen=True, slots=True)
class Feature:
    """The tables of one feature: for each database a script per version, the oldest first."""

    name: str
    postgres: tuple[str, ...]
    sqlite: tuple[str, ...]

    @property
    def version(self) -> int:
        return len(self.postgres)


class Sql:
    """One statement.  Without a text of its own, SQLite gets PostgreSQL's, with `?1` for `$1`."""

    __slots__ = ("postgres", "sqlite")

    def __init__(self, postgres: str, sqlite: str | None = None) -> None:
        self.postgres = postgres
        self.sqlite = postgres.replace("$", "?") if sqlite is None else sqlite


class TableAccess(Protocol):
    """A store's part: it makes tables, and runs statements on its own connections or on the user's."""

    dialect: Dialect

    def statement(self, text: str) -> Statement:
        """The statement with the names of this store's tables in it."""
        ...

    def ready(self, feature: Feature) -> Plan[None]:
        """Make the feature's tables, unless they are there."""
        ...

    def ready_in(self, feature: Feature, adapter: Executes) -> Plan[None]:
        """The same before a statement in the user's transaction, which may have locked the database."""
        ...

    def execute(self, queries: Sequence[Query], *, patient: bool) -> Plan[list[Rows]]:
        """Run *queries* in one transaction on the store's own connections, and return the rows of each.

        If the connection fails they are sent again, so each must be one that may run twice.  A *patient* caller waits up to
        a minute for the answer.
        """
        ...

    def open(self) -> TransactionAdapter:
        """A transaction on a connection of the store's own."""
        ...

    def join(self, place: Any) -> Plan[Executes]:
        """The adapter for the user's transaction on *place*; ConfigurationError if none is open, or will be."""
        ...

    @property
    def pooled(self) -> bool:
        """Whether a connection pooler is in between, so that a long transaction keeps a connection from others."""
        ...

    async def aclose(self) -> None:
        """Close the connections of the running event loop."""
        ...

    def notify(self, id: Id) -> Plan[None]:
        """Wake the waiters for *id* in the other processes, as far as the database can."""
        ...

    def listen(self) -> None:
        """Hear of `notify` in other processes from now on."""
        ...


class Executes(Protocol):
    """An open transaction, as far as statements in it go."""

    def execute(self, *queries: Query) -> Plan[Rows]: ...
    def on_commit(self, callback: Callable[[], object]) -> None: ...  # call it after the commit, if that is noticed


class Tables:
    """The tables of *feature* in the database of *store*."""

    def __init__(self, store: Any, feature: Feature) -> None:
        access = getattr(store, "tables", None)
        if access is None:
            raise ConfigurationError(
                f"{store.url} has no tables, and the {feature.name} needs some that commit with your own: give the guard "
                "postgresql://, sqlite:///file, a pool or an engine"
            )
        self.store = store
        self.feature = feature
        self.access = cast("TableAccess", access)
        self._statements: dict[Sql, tuple[Statement, bool]] = {}

    @cached_property
    def dialect(self) -> Dialect:
        return self.access.dialect

    def query(self, sql: Sql, *values: Any) -> Query:
        """The statement for this database, with its values."""
        known = self._statements.get(sql)
        if known is None:
            text: str = getattr(sql, self.dialect)
            known = self._statements[sql] = (self.access.statement(text), "{now}" in text)
        statement, needs_shift = known
        return statement, [self.store.shift, *values] if needs_shift else list(values)

    def execute_in(self, place: Any, *queries: Query, after_commit: Callable[[], object] | None = None) -> Plan[Rows]:
        """Run *queries* in the user's transaction, and return the rows of the last one.

        *place* is an Op with a transaction, or the user's own connection or session, or a database alias of Django's.
        *after_commit* is called once the transaction is committed, if the driver tells of that: the guard's own transactions,
        SQLAlchemy and Django do.
        """
        transaction: Executes
        if isinstance(place, Op):
            transaction = place.borrowed(f"the {self.feature.name}")
        else:
            transaction = yield from self.access.join(place)
        yield from self.access.ready_in(self.feature, transaction)
        if after_commit is not None:
            transaction.on_commit(after_commit)
        return (yield from transaction.execute(*queries))

    def execute(self, *queries: Query, patient: bool = False) -> Plan[list[Rows]]:
        """Run *queries* in one transaction of our own, and return the rows of each.  Each must be one that may run twice."""
        yield from self.access.ready(self.feature)
        return (yield from self.access.execute(queries, patient=patient))

    def open(self) -> Plan[TransactionAdapter]:
        """A transaction of our own, for several steps: `begin` comes first, and after an error `rollback`.

        On SQLite it keeps every other writer waiting, so do nothing slow in it.
        """
        yield from self.access.ready(self.feature)
        return self.access.open()


def features() -> list[Feature]:
    """The registered features."""
    return [importlib.import_module(name).FEATURE for name in FEATURES]


def not_a_place(place: object) -> ConfigurationError:
    """The error for something that is no connection."""
    return ConfigurationError(
        f"{type(place).__name__} has no transaction: give the Op, or your open connection or session (psycopg, asyncpg, "
        "sqlite3, aiosqlite, SQLAlchemy), or a database alias of Django's, such as 'default'"
    )


def not_in_transaction(place: object) -> ConfigurationError:
    """The error for a connection on which each statement would be committed by itself."""
    what = f"The database {place!r}" if isinstance(place, str) else f"This {type(place).__name__}"
    return ConfigurationError(
        f"{what} is in no transaction, so the row would be committed at once, whatever becomes of your own changes: begin one "
        "first"
    )


def belongs_to(thing: object, package: str) -> bool:
    """Whether *thing* is an instance of one of the package's classes, or of a subclass; nothing is imported."""
    return any(kind.__module__.partition(".")[0] == package for kind in type(thing).__mro__)
