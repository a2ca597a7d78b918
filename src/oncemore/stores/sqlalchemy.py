"""The ledger in the database of a SQLAlchemy 2 engine: `Guard(engine)`.

Transactions run on the engine's connections.  `op.connection` is a Connection or AsyncConnection.  `op.session()`
returns a Session or AsyncSession that joins its transaction by savepoints.  Every driver for PostgreSQL and SQLite
works, sync or async.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from typing import Any, Literal, TypeVar

from sqlalchemy import TextClause, event, text
from sqlalchemy.engine import Connection, Engine, RootTransaction
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session

from .._ledger.context import CURRENT
from .._ledger.events import log
from .._ledger.store import Store
from .._ledger.tables import not_a_place, not_in_transaction
from .._ledger.transactions import Do, Query, Rows, at_once, commit_forbidden
from .._runtime.plan import Plan
from ..errors import ConfigurationError, StoreTimeout, TransactionEnded
from ._compat import pool_of

T = TypeVar("T")

# In this mode, a session's commit() and rollback() end only a savepoint, not the guard's transaction.
JOIN: Literal["create_savepoint"] = "create_savepoint"
WRITE = re.compile(r"\s*(INSERT|UPDATE|DELETE|REPLACE|CREATE|ALTER|DROP)\b", re.IGNORECASE)
# Seconds for a rollback on an event loop.  After that, the connection is closed instead, which rolls back as well.
PATIENCE = 5.0

# Matches a parameter ($1, ?1 or ?), or text that may only look like one: a comment, a literal, a quoted name.
PARAMETER = re.compile(r"""--[^\n]*|'(?:[^']|'')*'|"(?:[^"]|"")*"|[$?](\d+)|(\?)""")

# SQLAlchemy's and asyncpg's names for libpq's settings, and their settings that libpq does not have.
LIBPQ_NAMES = {"database": "dbname", "ssl": "sslmode"}
NOT_LIBPQ = {"prepared_statement_cache_size", "prepared_statement_name_func", "command_timeout", "timeout", "context"}


def enlist(engine: Any, options: Mapping[str, str]) -> Store:
    """Return the ledger in the engine's database.  *options* are those of a store's URL."""
    if not isinstance(engine, Engine | AsyncEngine):
        raise ConfigurationError(f"{type(engine).__name__} is no engine: pass the guard the result of create_engine()")
    dialect = engine.dialect.name
    if dialect == "postgresql":
        return postgres_store(engine, options)
    if dialect == "sqlite":
        return sqlite_store(engine, options)
    raise ConfigurationError(f"An engine on {dialect} has no store: use PostgreSQL or SQLite")


def sqlite_store(engine: Engine | AsyncEngine, options: Mapping[str, str]) -> Store:
    from .sqlite import connect, url_of
    from .sqlite.transactions import SqliteSource, lock_query

    store = connect(url_of(engine.url.database or "", options))

    def first_queries(connection: Connection) -> Sequence[Query]:
        driver: Any = connection.connection.driver_connection
        return [lock_query(store.sql, driver.in_transaction)]

    store.lender = SqliteSource(
        store, lambda writer: SqlalchemyAdapter(engine, first_queries), awaited=isinstance(engine, AsyncEngine)
    )
    event.listen(getattr(engine, "sync_engine", engine), "before_cursor_execute", refuse_own_write)
    return store


def postgres_store(engine: Engine | AsyncEngine, options: Mapping[str, str]) -> Store:
    from .postgres import PostgresStore, url_of
    from .postgres.transactions import PostgresSource

    store = PostgresStore(url_of(libpq_settings(engine, options), options))
    if engine.dialect.driver in ("psycopg", "psycopg_async"):
        store.lender = PostgresSource(store.database, lambda: PipelineAdapter(engine))
    else:
        store.lender = PostgresSource(store.database, lambda: SqlalchemyAdapter(engine, refuse_autocommit))
    return store


def refuse_autocommit(connection: Connection) -> Sequence[Query]:
    driver: Any = connection.connection.dbapi_connection
    if driver.autocommit:  # the claim would be committed before the effect
        raise ConfigurationError("The engine is in AUTOCOMMIT mode: pass the guard an engine that begins transactions")
    return ()


def libpq_settings(engine: Engine | AsyncEngine, options: Mapping[str, str]) -> dict[str, Any]:
    """Return libpq's settings for the address in the engine's URL.  The ledger's own connections use them."""
    url = engine.url
    if not (url.host or url.database or url.query) and not {"host", "dbname", "service"} & options.keys():
        raise ConfigurationError(
            "The engine's URL names no database, and the address that its creator connects to is not known: pass it as "
            "options, as in Guard(connect(engine, host=..., dbname=..., user=...))"
        )
    _, settings = engine.dialect.create_connect_args(url)
    return {
        LIBPQ_NAMES.get(name, name): ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        for name, value in settings.items()
        if value is not None and name not in NOT_LIBPQ and LIBPQ_NAMES.get(name, name) not in options
    }


def refuse_own_write(connection: Connection, cursor: Any, statement: str, *_: Any) -> None:
    """Refuse a write on another connection of the engine while this code has a transaction on the same file.

    The write would wait for the file's write lock, which the transaction holds until the code returns.
    """
    op = CURRENT.get()
    if op is None or op.transaction is None or not WRITE.match(statement):
        return
    lent: Any = None
    with suppress(TransactionEnded):  # the transaction is over, so it holds no lock
        lent = op.transaction.connection
    lent = getattr(lent, "sync_connection", lent)
    if isinstance(lent, Connection) and lent.engine is connection.engine and lent is not connection:
        raise ConfigurationError(
            "This code writes on its own connection, while the operation's transaction holds SQLite's only write lock: "
            "use op.session() or op.connection, which are in that transaction"
        )


class NoCommitSession(Session):
    """A session in the guard's transaction.  Its work is kept if its `with` block or the performer raises nothing.

    SQLAlchemy's own Session loses its work if its user closes it without a commit.  Here, the outcome would then be
    stored without the rows.  `rollback()`, `close()` and an exception discard uncommitted work.
    """

    def keep(self) -> None:
        """Flush, and release the savepoint.  After a failed flush there is nothing to keep: it was rolled back."""
        if self.in_transaction() and self.is_active:
            self.expire_on_commit = False  # objects that the performer returns must stay readable after the commit
            self.commit()

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        try:
            if kind is None:
                self.keep()
        finally:
            super().__exit__(kind, error, traceback)


class NoCommitAsyncSession(AsyncSession):
    """A NoCommitSession for an AsyncEngine."""

    sync_session_class = NoCommitSession
    sync_session: NoCommitSession

    async def __aexit__(self, kind: Any, error: Any, traceback: Any) -> None:
        try:
            if kind is None:
                await self.run_sync(NoCommitSession.keep)  # type: ignore[arg-type]
        finally:
            await super().__aexit__(kind, error, traceback)


class SqlalchemyAdapter:
    """One transaction on a connection of an Engine or AsyncEngine, by `connection.execute(text(...))`.

    Each method does its work in one function that takes a sync Connection.  For an Engine, the function runs on this
    thread or, from an event loop, on another one.  For an AsyncEngine, `AsyncConnection.run_sync` runs it.
    *first_queries* returns the queries that begin a transaction, or raises if the connection cannot be used.
    """

    def __init__(
        self, engine: Engine | AsyncEngine, first_queries: Callable[[Connection], Sequence[Query]] = lambda _: ()
    ) -> None:
        self.engine = engine
        self.first_queries = first_queries
        self.awaited = isinstance(engine, AsyncEngine)
        self.connection: Any = None
        self._transaction: RootTransaction | None = None
        self._sessions: list[NoCommitSession] = []

    @classmethod
    def on(cls, connection: Any) -> SqlalchemyAdapter:
        """Return an adapter for `execute` in the user's transaction on *connection*, sync or async."""
        adapter = cls(connection.engine)
        adapter.connection = connection
        return adapter

    def on_commit(self, callback: Callable[[], object]) -> None:
        """Call *callback* after the next commit of the user's connection."""
        connection = self.connection.sync_connection if self.awaited else self.connection
        event.listen(connection, "commit", lambda _: callback(), once=True)

    def session(self, **options: Any) -> Session | AsyncSession:
        for name in options.keys() & {"bind", "binds", "join_transaction_mode"}:
            raise ConfigurationError(
                f"op.session({name}=...): the session is in the operation's transaction; drop {name}"
            )
        kind: Any = NoCommitAsyncSession if self.awaited else NoCommitSession
        session: Session | AsyncSession = kind(bind=self.connection, join_transaction_mode=JOIN, **options)
        self._sessions.append(getattr(session, "sync_session", session))  # type: ignore[arg-type]
        return session

    def _do(self, work: Callable[[Connection], T], *, limit: float | None = None) -> Do[T]:
        """Effect: call *work* with the connection.  On an AsyncEngine, it may take *limit* seconds."""
        connection = self.connection
        if connection is None or connection.closed:  # `with op.connection:` gives the connection back to its pool
            raise commit_forbidden()

        async def awaited() -> T:
            async with asyncio.timeout(limit):
                result: T = await connection.run_sync(work)
                return result

        return Do(None, awaited) if self.awaited else Do(lambda: work(connection), None)

    def begin(self, *queries: Query) -> Plan[Rows]:
        engine: Any = self.engine

        def plain() -> Rows:
            with pool_errors():
                self.connection = engine.connect()
            return self._begin(self.connection, queries)

        async def awaited() -> Rows:
            with pool_errors():
                self.connection = await engine.connect()
            rows: Rows = await self.connection.run_sync(self._begin, queries)
            return rows

        return (yield Do(None, awaited) if self.awaited else Do(plain, None))  # type: ignore[no-any-return]

    def _begin(self, connection: Connection, queries: Sequence[Query]) -> Rows:
        self._transaction = connection.begin()
        return self._run(connection, [*self.first_queries(connection), *queries])

    def _run(self, connection: Connection, queries: Sequence[Query]) -> Rows:
        rows: Rows = ()
        for statement, values in queries:
            parameters = {f"p{number}": value for number, value in enumerate(values, 1)}
            result = connection.execute(as_text(statement.text), parameters)
            rows = [[as_bytes(value) for value in row] for row in result] if result.returns_rows else ()
        return rows

    def execute(self, *queries: Query) -> Plan[Rows]:
        return (yield self._do(lambda connection: self._run(connection, queries)))  # type: ignore[no-any-return]

    def commit(self, *queries: Query) -> Plan[None]:
        yield self._do(lambda connection: self._commit(connection, queries))

    def _commit(self, connection: Connection, queries: Sequence[Query]) -> None:
        transaction = self._transaction
        if transaction is None or connection.get_transaction() is not transaction:
            raise commit_forbidden()
        for session in self._sessions:
            session.keep()
            session.close()
        self._end(connection, transaction, queries)
        self.connection = None
        try:
            connection.close()
        except Exception:
            log.exception(
                "The transaction was committed, but its connection could not be given back to the engine's pool"
            )

    def _end(self, connection: Connection, transaction: RootTransaction, queries: Sequence[Query]) -> None:
        self._run(connection, queries)
        transaction.commit()

    def rollback(self) -> Plan[None]:
        try:
            if self.connection is not None and not self.connection.closed:
                yield self._do(self._rollback, limit=PATIENCE)
            self.connection = None
        except Exception:
            self.discard()

    def _rollback(self, connection: Connection) -> None:
        if self._transaction is not None and self._transaction.is_active:
            self._transaction.rollback()
        connection.close()

    def discard(self) -> None:
        connection, self.connection = self.connection, None
        if connection is not None and not connection.closed:
            with suppress(Exception):
                self._invalidate(connection.sync_connection if self.awaited else connection)

    def _invalidate(self, connection: Connection) -> None:
        connection.invalidate()
        connection.close()


class PipelineAdapter(SqlalchemyAdapter):
    """Sends the ledger's statements in libpq pipelines on the psycopg connection, so that they add no round trips."""

    def __init__(self, engine: Engine | AsyncEngine) -> None:
        from .postgres import pipeline, psycopg  # imported here, because an engine on SQLite does not need psycopg

        super().__init__(engine, self._first_queries)
        self._pipeline: Any = pipeline
        self._psycopg: Any = psycopg

    def _first_queries(self, connection: Connection) -> Sequence[Query]:
        raw = driver_connection(connection)
        if raw.pgconn.transaction_status != self._psycopg.IDLE:  # an event hook has begun the transaction already
            return ()
        return [(self._pipeline.begin_statement(raw), ())]

    def _run(self, connection: Connection, queries: Sequence[Query]) -> Rows:
        raw = driver_connection(connection)
        pipeline = self._pipeline.Pipeline(raw, [self._psycopg.adapt(raw, query) for query in queries])
        if self.awaited:
            adapted: Any = connection.connection.dbapi_connection
            results = adapted.run_async(lambda _: pipeline.arun())
        else:
            results = pipeline.run()
        return results[-1] if results else ()

    def _end(self, connection: Connection, transaction: RootTransaction, queries: Sequence[Query]) -> None:
        self._psycopg.check_open(driver_connection(connection))
        self._run(connection, [*queries, (self._pipeline.COMMIT, ())])
        try:
            transaction.commit()  # sends nothing, because psycopg sees that the transaction is over
        except Exception:
            log.exception("The transaction was committed, but an event hook of the engine has failed")

    def _rollback(self, connection: Connection) -> None:
        if driver_connection(connection).pgconn.transaction_status != self._psycopg.IDLE:
            # Not psycopg's rollback(): it would deallocate our prepared statements.
            self._run(connection, [(self._pipeline.ROLLBACK, ())])
        super()._rollback(connection)

    def _invalidate(self, connection: Connection) -> None:
        raw = driver_connection(connection)
        raw.pgconn.finish()  # raw.close() might only give it back to a psycopg_pool below the engine
        super()._invalidate(connection)
        if (pool := pool_of(raw)) is not None:  # otherwise the pool would count it as taken for ever
            at_once(Do(None, lambda: pool.putconn(raw)) if self.awaited else Do(lambda: pool.putconn(raw), None))


def join(place: Any, dialect: str) -> Plan[SqlalchemyAdapter]:
    """Return an adapter for the user's transaction on *place*: a Connection or a Session, sync or async.

    SQLAlchemy begins a transaction with the first statement, unless the connection is in autocommit mode.
    """
    awaited = isinstance(place, AsyncConnection | AsyncSession | async_scoped_session)
    if isinstance(place, AsyncSession | async_scoped_session):
        place = yield Do(None, place.connection)
    elif isinstance(place, Session | scoped_session):
        place = yield Do(place.connection, None)
    elif not isinstance(place, Connection | AsyncConnection):
        raise not_a_place(place)
    if place.dialect.name != dialect:
        raise ConfigurationError(
            f"This {type(place).__name__} is on {place.dialect.name}, but the guard's database is on {dialect}: use "
            "the same database"
        )
    check = partial(check_begun, place=place)
    yield Do(None, lambda: place.run_sync(check)) if awaited else Do(lambda: check(place), None)
    return SqlalchemyAdapter.on(place)


def check_begun(connection: Connection, *, place: Any) -> None:
    """Begin a transaction unless one is open.  Raise ConfigurationError if the connection is in autocommit mode."""
    on_sqlite = connection.dialect.name == "sqlite"
    raw: Any = connection.connection.dbapi_connection
    if not on_sqlite and raw.autocommit:
        raise not_in_transaction(place)
    if not connection.in_transaction():
        connection.begin()
    driver: Any = connection.connection.driver_connection
    if on_sqlite and not driver.in_transaction:
        if driver.isolation_level is None:
            raise not_in_transaction(place)
        connection.exec_driver_sql("BEGIN")  # sqlite3 itself begins before an INSERT, but not before a CREATE TABLE


def driver_connection(connection: Connection) -> Any:
    return connection.connection.driver_connection


@contextmanager
def pool_errors() -> Iterator[None]:
    """Raise StoreTimeout if the engine's pool has no free connection in time."""
    try:
        yield
    except PoolTimeout as error:
        raise StoreTimeout(
            f"No connection was free in time: {error}; raise the engine's pool_size or max_overflow"
        ) from error


@lru_cache(maxsize=256)
def as_text(sql: str) -> TextClause:
    """Return the statement with SQLAlchemy's parameters (:p1 and so on).  All other colons are escaped."""
    parts: list[str] = []
    end = numbered = 0
    for found in PARAMETER.finditer(sql):
        if found[1] or found[2]:
            numbered = int(found[1]) if found[1] else numbered + 1
            parts += (escape_colons(sql[end : found.start()]), f":p{numbered}")
            end = found.end()
    return text("".join([*parts, escape_colons(sql[end:])]))


def escape_colons(sql: str) -> str:
    return sql.replace(":", "\\:")


def as_bytes(value: Any) -> Any:
    return bytes(value) if isinstance(value, memoryview) else value  # psycopg2 reads bytea as memoryview
