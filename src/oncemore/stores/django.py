"""The ledger in a database of Django's: `Guard("django:default")`.

The operation runs in `transaction.atomic(using=alias, durable=True)`: the ORM's writes are part of it, `on_commit` hooks run
after it, and the view's own atomic blocks (also those of `ATOMIC_REQUESTS`) are savepoints.  Under an event loop, this
happens on the thread that the ORM's async methods use (`sync_to_async`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from asgiref.sync import sync_to_async
from django.db import connections, transaction  # type: ignore[import-untyped]
from django.utils.connection import ConnectionDoesNotExist  # type: ignore[import-untyped]

from .._ledger.connect import DJANGO
from .._ledger.events import log
from .._ledger.store import Store
from .._ledger.tables import not_in_transaction
from .._ledger.transactions import Do, Query, Rows, at_once, commit_forbidden
from .._runtime.loops import finish_despite_cancel
from .._runtime.plan import Plan
from ..errors import ConfigurationError, TransactionEnded

T = TypeVar("T")

LIBPQ_NAMES = {"NAME": "dbname", "USER": "user", "PASSWORD": "password", "HOST": "host", "PORT": "port"}


def enlist(source: str, options: Mapping[str, str]) -> Store:
    """Return the ledger in the database with the alias in *source*.  *options* are those of a store's URL."""
    alias = source.removeprefix(DJANGO)
    try:
        database = connections[alias]
    except ConnectionDoesNotExist as error:
        raise ConfigurationError(
            f"{source!r} names no database of settings.DATABASES: {error}; add it there, or use another alias"
        ) from error
    if database.vendor == "postgresql":
        return postgres_store(alias, database.settings_dict, options)
    if database.vendor == "sqlite":
        return sqlite_store(alias, database.settings_dict, options)
    raise ConfigurationError(f"{source!r} is on {database.vendor}, which has no store: use PostgreSQL or SQLite")


def postgres_store(alias: str, settings: Mapping[str, Any], options: Mapping[str, str]) -> Store:
    from .postgres import PostgresStore, url_of
    from .postgres.psycopg import BelowDjango
    from .postgres.transactions import PostgresSource

    store = PostgresStore(url_of(libpq_settings(settings), options))
    store.lender = PostgresSource(store.database, lambda: DjangoAdapter(alias, BelowDjango()))
    return store


def libpq_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return libpq's settings for an entry of settings.DATABASES.  The ledger's own connections use them."""
    from psycopg.pq import Conninfo

    known = {option.keyword.decode() for option in Conninfo.get_defaults()}
    found = {name: value for name, value in settings.get("OPTIONS", {}).items() if name in known}
    found |= {name: settings[ours] for ours, name in LIBPQ_NAMES.items() if settings.get(ours)}
    if settings.get("NAME", "") is None:
        found["dbname"] = "postgres"  # as Django does
    return found


def sqlite_store(alias: str, settings: Mapping[str, Any], options: Mapping[str, str]) -> Store:
    from .sqlite import connect, url_of
    from .sqlite.transactions import SqliteBelowDjango, SqliteSource

    store = connect(url_of(str(settings["NAME"]), options))
    store.lender = SqliteSource(store, lambda writer: DjangoAdapter(alias, SqliteBelowDjango(store.sql)))
    return store


class Driver(Protocol):
    """Runs the ledger's statements on *raw*, the driver's connection below Django's."""

    def begin(self, raw: Any, queries: Sequence[Query]) -> Rows: ...  # begins the transaction: Django has sent no BEGIN
    def execute(self, raw: Any, queries: Sequence[Query]) -> Rows: ...
    def commit(self, raw: Any, queries: Sequence[Query]) -> None: ...
    def rollback(self, raw: Any) -> None: ...
    def close(self, raw: Any) -> None: ...


class RolledBack(Exception):
    """Makes Django's atomic block end as rolled back, so that it runs no hooks."""


class DjangoAdapter:
    """One transaction on the thread's Django connection.

    The driver ends the transaction.  Then the adapter leaves Django's atomic block: Django sends nothing more, and runs
    its hooks if the transaction was committed.
    """

    awaited = False

    def __init__(self, alias: str, driver: Driver) -> None:
        self.alias = alias
        self.driver = driver
        self.connection: Any = None
        self._atomic: Any = None
        self._hook: Callable[[], object] | None = None

    @classmethod
    def on(cls, alias: str, driver: Driver) -> DjangoAdapter:
        """Return an adapter for `execute` in the transaction that the user has begun on this thread's connection."""
        adapter = cls(alias, driver)
        adapter.connection = connections[alias]
        return adapter

    def on_commit(self, callback: Callable[[], object]) -> None:
        """Call *callback* after the commit of the user's atomic block.  The next statement registers it with Django."""
        self._hook = callback

    def begin(self, *queries: Query) -> Plan[Rows]:
        return (yield on_orm_thread(lambda: self._begin(queries)))  # type: ignore[no-any-return]

    def _begin(self, queries: Sequence[Query]) -> Rows:
        connection = connections[self.alias]
        if connection.in_atomic_block or not connection.get_autocommit():
            raise ConfigurationError(
                f"The connection {self.alias!r} is in a transaction already, and effect = 'transaction' must be the outermost: "
                "call the guard outside of atomic(); in tests, use TransactionTestCase; on an event loop without a "
                "request, give each operation its own thread with asgiref's ThreadSensitiveContext"
            )
        atomic = transaction.atomic(using=self.alias, durable=True)
        atomic.__enter__()
        self.connection, self._atomic = connection, atomic
        return self.driver.begin(connection.connection, queries)

    def execute(self, *queries: Query) -> Plan[Rows]:
        return (yield on_orm_thread(lambda: self._execute(queries)))  # type: ignore[no-any-return]

    def _execute(self, queries: Sequence[Query]) -> Rows:
        if self.connection.closed_in_transaction:
            raise commit_forbidden()
        if self._hook is not None:
            transaction.on_commit(self._hook, using=self.alias)
            self._hook = None
        return self.driver.execute(self.connection.connection, queries)

    def commit(self, *queries: Query) -> Plan[None]:
        yield on_orm_thread(lambda: self._commit(queries))

    def _commit(self, queries: Sequence[Query]) -> None:
        connection = self.connection
        if connection.closed_in_transaction:
            raise commit_forbidden()
        if connection.needs_rollback:
            raise TransactionEnded(
                "A database error or set_rollback(True) has marked the transaction for rollback, and the code went on: "
                "let the error propagate, or run the code that may fail in its own atomic() block"
            )
        self.driver.commit(connection.connection, queries)
        try:
            self._leave(None)
        except Exception:  # a failed hook cannot undo the commit, but must not be silent
            log.exception("The transaction was committed, but an on_commit hook of Django has failed")

    def rollback(self) -> Plan[None]:
        if self._atomic is not None:
            yield on_orm_thread(self._rollback)

    def _rollback(self) -> None:
        raw = self.connection.connection
        try:
            if not self.connection.closed_in_transaction:
                self.driver.rollback(raw)
        except Exception:
            self.driver.close(raw)
        with suppress(Exception):
            self._leave(RolledBack())

    def discard(self) -> None:
        if self._atomic is not None:
            at_once(on_orm_thread(self._discard))

    def _discard(self) -> None:
        self.driver.close(self.connection.connection)
        self._leave(RolledBack())

    def _leave(self, error: Exception | None) -> None:
        """Leave the atomic block.  A second call does nothing."""
        atomic, self._atomic, self.connection = self._atomic, None, None
        if atomic is not None:
            atomic.__exit__(type(error) if error is not None else None, error, None)


def join(alias: str, vendor: str, driver: Driver) -> Plan[DjangoAdapter]:
    """Return an adapter for the user's atomic block on the database with this alias."""
    alias = alias.removeprefix(DJANGO)
    return (yield on_orm_thread(lambda: joined(alias, vendor, driver)))  # type: ignore[no-any-return]


def joined(alias: str, vendor: str, driver: Driver) -> DjangoAdapter:
    try:
        database = connections[alias]
    except ConnectionDoesNotExist as error:
        raise ConfigurationError(
            f"{alias!r} names no database of settings.DATABASES: {error}; add it there, or use another alias"
        ) from error
    if database.vendor != vendor:
        raise ConfigurationError(
            f"The database {alias!r} is on {database.vendor}, but the guard's is on {vendor}: use the same database"
        )
    database.ensure_connection()
    if not database.in_atomic_block and database.get_autocommit():
        raise not_in_transaction(alias)
    database.validate_no_broken_transaction()
    return DjangoAdapter.on(alias, driver)


def on_orm_thread(work: Callable[[], T]) -> Do[T]:
    """Effect: call *work* on this thread or, from an event loop, on the thread that Django's ORM uses there."""

    async def awaited() -> T:
        return await finish_despite_cancel(sync_to_async(work, thread_sensitive=True)())

    return Do(work, awaited)
