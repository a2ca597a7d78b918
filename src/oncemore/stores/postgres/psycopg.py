"""Transactions on psycopg connections: the ledger's own, the user's, and Django's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from ..._ledger.transactions import Do, Query, Rows, Transaction, commit_forbidden
from ..._runtime.clock import SYSTEM
from ..._runtime.plan import Effect, Plan
from ...errors import StoreUnavailable
from .connection import Connections
from .pipeline import COMMIT, ROLLBACK, Pipeline, adapt_values, begin_statement, state_of
from .session import SERIALIZATION_FAILURES, Database, is_lost, message_of, translate_error
from .transactions import PostgresSource

IDLE, UNKNOWN = int(TransactionStatus.IDLE), int(TransactionStatus.UNKNOWN)
PATIENCE = 5.0  # seconds for a rollback; after that, the connection is closed instead, which rolls back as well
PLAIN = (bytes, int, float, bool, type(None))  # the types of values that need no adapters of psycopg


class PsycopgAdapter:
    """One transaction on the ledger's own psycopg connection, sync or async.

    The claim is sent with BEGIN and the outcome with COMMIT, so the ledger adds no round trips.
    """

    def __init__(self, connections: Connections, timeout: float, configure: Callable[[Any], Pipeline]) -> None:
        self.connection: Any = None
        self._connections = connections
        self._timeout = timeout
        self._configure = configure  # returns the effect that sets up the session of a new connection

    @property
    def awaited(self) -> bool:
        return isinstance(self.connection, psycopg.AsyncConnection)

    def begin(self, *queries: Query) -> Plan[Rows]:
        yield self._take()
        rows = yield from self._send((begin_statement(self.connection), ()), *queries)
        self.connection.lent = True
        self.connection.nested = False
        return rows

    def can_defer(self) -> bool:
        """Whether a statement may be sent with the COMMIT instead, because no rollback to a savepoint could undo it.

        Only the ledger's own connections note savepoints.
        """
        return getattr(self.connection, "nested", True) is False

    def _take(self) -> Do[None]:
        """Effect: take a connection.  It is stored before its set-up, so that a cancelled caller gives it back."""

        def plain() -> None:
            connection = self.connection = self._connections.take(self._timeout)
            connection.row_factory, connection.cursor_factory = tuple_row, NotingCursor  # for the next performer
            if not state_of(connection).configured:
                self._configure(connection).run()
                state_of(connection).configured = True

        async def awaited() -> None:
            connection = self.connection = await self._connections.atake(self._timeout)
            connection.row_factory, connection.cursor_factory = tuple_row, AsyncNotingCursor
            if not state_of(connection).configured:
                await self._configure(connection).arun()
                state_of(connection).configured = True

        return Do(plain, awaited)

    def execute(self, *queries: Query) -> Plan[Rows]:
        return (yield from self._send(*(adapt(self.connection, query) for query in queries)))

    def _send(self, *queries: Query, limit: float | None = None) -> Plan[Rows]:
        deadline = None if limit is None else SYSTEM.monotonic() + limit
        pipeline = Pipeline(self.connection, queries, deadline)
        effect: Effect[Any] = pipeline if self.awaited else Do(pipeline.run, None)  # Do: an event loop uses a thread
        results = yield effect
        return results[-1]  # type: ignore[no-any-return]

    def commit(self, *queries: Query) -> Plan[None]:
        """Run *queries* and COMMIT in one pipeline.  If a query fails, the server skips the COMMIT after it."""
        check_open(self.connection)
        self.connection.lent = False
        yield from self._send(*queries, (COMMIT, ()))
        yield from self._give_back()

    def rollback(self) -> Plan[None]:
        connection = self.connection
        if connection is None:
            return
        try:
            connection.lent = False
            if connection.pgconn.transaction_status != IDLE:
                # Not psycopg's rollback(): it would deallocate our prepared statements.
                yield from self._send((ROLLBACK, ()), limit=PATIENCE)
        except Exception:
            connection.pgconn.finish()
        yield from self._give_back()

    def discard(self) -> None:
        if self.connection is not None:
            self._connections.give_back(self.connection)  # closes it if it is in a transaction
            self.connection = None

    def _give_back(self) -> Plan[None]:
        self._connections.give_back(self.connection)
        self.connection = None
        return
        yield


def check_open(connection: Any) -> None:
    """Raise TransactionEnded if the performer has ended the transaction or closed the connection.

    If the network has closed the connection, this raises nothing, because the next statement will.
    """
    status = connection.pgconn.transaction_status
    if status == IDLE or (status == UNKNOWN and not connection.broken):
        raise commit_forbidden()


def adapt(connection: Any, query: Query) -> Query:
    """Return the query with a user's values as psycopg writes them.  The ledger's own values need no adapters.

    psycopg refuses a text with a NUL.  Without this check, libpq would cut the text off there.
    """
    statement, values = query
    if all(type(value) in PLAIN or (type(value) is str and "\0" not in value) for value in values):
        return query
    return statement, adapt_values(connection, values)


def is_savepoint(query: Any) -> bool:
    """Whether the performer's statement sets a savepoint."""
    text = query if isinstance(query, str) else query.decode() if isinstance(query, bytes) else repr(query)
    return "SAVEPOINT" in text.upper()


class Noting:
    """Notes on its connection if the performer's statement sets a savepoint."""

    connection: Any

    def execute(self, query: Any, *args: Any, **settings: Any) -> Any:
        if is_savepoint(query):
            self.connection.nested = True
        return super().execute(query, *args, **settings)  # type: ignore[misc]


class NotingCursor(Noting, psycopg.Cursor[Any]):
    """For threads."""


class AsyncNotingCursor(Noting, psycopg.AsyncCursor[Any]):
    """For event loops.  `execute` returns a coroutine."""


class NoCommit:
    """Makes `commit` and `rollback` of the ledger's own connections raise while a performer has the connection."""

    lent = False  # whether a performer has the connection
    nested = False  # whether the performer has set a savepoint

    def transaction(self, *args: Any, **settings: Any) -> Any:
        self.nested = True
        return super().transaction(*args, **settings)  # type: ignore[misc]

    def commit(self) -> Any:
        if self.lent:
            raise commit_forbidden()
        return super().commit()  # type: ignore[misc]

    def rollback(self) -> Any:
        if self.lent:
            raise commit_forbidden()
        return super().rollback()  # type: ignore[misc]


class NoCommitConnection(NoCommit, psycopg.Connection[Any]):
    """For threads."""


class AsyncNoCommitConnection(NoCommit, psycopg.AsyncConnection[Any]):
    """For event loops.  `commit` and `rollback` return coroutines."""


class OwnSource(PostgresSource):
    """Opens transactions on the ledger's own connections: up to *limit* for threads, and as many on each event loop."""

    def __init__(self, database: Database, *, limit: int) -> None:
        super().__init__(database, lambda: PsycopgAdapter(self.connections, database.timeout, self._configure))
        self.connections = Connections(
            database.conninfo,
            limit=limit,
            autocommit=False,
            sync_class=NoCommitConnection,
            async_class=AsyncNoCommitConnection,
        )

    def _configure(self, connection: Any) -> Pipeline:
        database = self.database
        values = [connection.pgconn.backend_pid, str(int(1000 * database.idle))]
        return Pipeline(
            connection, [(database.sql.configure_transactions, values)], SYSTEM.monotonic() + database.timeout
        )

    def open(self) -> Plan[Transaction]:
        transaction = yield from super().open()
        self.connections.prepares = not self.database.pooled  # known by now, because `open` has used the database
        return transaction

    def close(self) -> None:
        self.connections.close()

    async def aclose(self) -> None:
        await self.connections.aclose()
        self.connections.close()


class FeatureTransaction(PsycopgAdapter):
    """A feature's own transaction.  It raises a StoreError if the server fails or refuses, so the caller can retry."""

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


class JoinedPsycopg:
    """Runs statements in a transaction on the user's own psycopg connection, with psycopg's cursor.

    psycopg's cursor begins a transaction with the first statement, and works inside `with connection.pipeline()`.
    """

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    def on_commit(self, callback: Callable[[], object]) -> None:
        """Do nothing, because the driver does not report commits.  Relays find the message when they look."""

    def execute(self, *queries: Query) -> Plan[Rows]:
        on_loop = isinstance(self.connection, psycopg.AsyncConnection)
        run = Do(None, lambda: self._aexecute(queries)) if on_loop else Do(lambda: self._execute(queries), None)
        return (yield run)  # type: ignore[no-any-return]

    def _execute(self, queries: Sequence[Query]) -> Rows:
        with psycopg.RawCursor(self.connection, row_factory=tuple_row) as cursor:
            for statement, values in queries:
                cursor.execute(statement.text.encode(), values)
            return cursor.fetchall() if cursor.description else ()

    async def _aexecute(self, queries: Sequence[Query]) -> Rows:
        async with psycopg.AsyncRawCursor(self.connection, row_factory=tuple_row) as cursor:
            for statement, values in queries:
                await cursor.execute(statement.text.encode(), values)
            return await cursor.fetchall() if cursor.description else ()


class BelowDjango:
    """Runs the ledger's statements on the psycopg connection below Django's."""

    def begin(self, raw: Any, queries: Sequence[Query]) -> Rows:
        return self.execute(raw, [(begin_statement(raw), ()), *queries])

    def execute(self, raw: Any, queries: Sequence[Query]) -> Rows:
        return Pipeline(raw, [adapt(raw, query) for query in queries]).run()[-1]

    def commit(self, raw: Any, queries: Sequence[Query]) -> None:
        check_open(raw)
        self.execute(raw, [*queries, (COMMIT, ())])

    def rollback(self, raw: Any) -> None:
        if raw.pgconn.transaction_status != IDLE:
            self.execute(raw, [(ROLLBACK, ())])

    def close(self, raw: Any) -> None:
        raw.pgconn.finish()


class JoinedBelowDjango(BelowDjango):
    """Runs statements in the user's atomic block.  Django has sent no BEGIN, so the first statement may need one."""

    def execute(self, raw: Any, queries: Sequence[Query]) -> Rows:
        if raw.pgconn.transaction_status == IDLE:
            queries = [(begin_statement(raw), ()), *queries]
        return super().execute(raw, queries)
