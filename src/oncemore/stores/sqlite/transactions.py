"""Transactions in a SQLite file: the ledger's verbs, the order of writers, and the adapter for sqlite3 and aiosqlite.

SQLite has one writer at a time.  A transaction takes the write lock with its first statement (BEGIN IMMEDIATE), so no
other claim can intervene.  The savepoint MARK shows at the end whether it is still the same transaction.
"""

from __future__ import annotations

import asyncio
import random
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from ..._ledger.model import Holder, Lease, Operation, Outcome, Record, state_of
from ..._ledger.transactions import (
    Again,
    Do,
    Query,
    Rows,
    Statement,
    Transaction,
    TransactionAdapter,
    commit_forbidden,
)
from ..._runtime.clock import SYSTEM
from ..._runtime.forks import check_usable, close_before_fork, reset_in_child
from ..._runtime.loops import PerLoop
from ..._runtime.plan import Call, Plan, Sleep
from ..._runtime.wakeups import Id
from ...errors import ConfigurationError, InProgress, OncemoreError, StoreTimeout
from .._compat import check_aiosqlite, open_aiosqlite, run_in_aiosqlite
from .batch import ClaimItem, as_record, claim_values, claimable, invalid_names, settle_row, taken_over
from .statements import NOW, SqliteStatements
from .writer import LONGEST_PAUSE, MEMORY, SHORTEST_PAUSE, UNWRITTEN, Writer, as_store_error, code, is_busy

T = TypeVar("T")

PARAMETER = re.compile(r"\$(\d+)")
DEEPEST = 10  # errors in a chain of causes to look at; a chain may be a circle

MARK = "oncemore_mark"
BEGIN, COMMIT = (Statement("BEGIN IMMEDIATE"), ()), (Statement("COMMIT"), ())
SET_MARK, CHECK_MARK = (Statement(f"SAVEPOINT {MARK}"), ()), (Statement(f"RELEASE {MARK}"), ())

# The number of rows that the previous statement wrote, and the last token that was inserted (the table's rowid).
INSERTED = (Statement("SELECT changes(), last_insert_rowid()"), ())
# Fails with "integer overflow" unless the previous statement wrote one row.  The COMMIT after it is then not run.
# A division by zero would not fail: in SQLite it is NULL.
CHECK = (Statement("SELECT abs(-9223372036854775807 - (1 - changes()))"), ())
RELEASE = "UPDATE {records} SET state = 'released', expires_at = {now} + ?2 WHERE token = ?3 AND state = 'running'"


class LedgerFile(Protocol):
    """The parts of a store that its transactions need."""

    path: str
    timeout: float
    shift: float
    sql: SqliteStatements
    holder: Holder

    def ready(self) -> Plan[None]: ...


class SqliteTransaction(Transaction):
    """The ledger's verbs in one transaction.  *writer* is the queue in which it waits for its turn to write."""

    def __init__(self, store: LedgerFile, writer: Writer, adapter: TransactionAdapter) -> None:
        super().__init__(adapter)
        self._store = store
        self._sql = store.sql
        self._writer = writer
        self._writes: list[Query] = []
        self._open = False  # True from its turn to its end

    def begin(self, operation: Operation, *, lease: float, wait: float, request: bytes = b"") -> Plan[Lease | Record]:
        claim = ClaimItem(operation.id, operation, lease, self._store.holder.next(), request)
        rows = yield from self.begin_with(claim.id, wait, self._insert_query(claim), SET_MARK, INSERTED)
        return (yield from self._claimed(claim, rows))

    def begin_with(self, id: Id, wait: float, *queries: Query) -> Plan[Rows]:
        """Wait for the turn to write and for other processes, run *queries*, and return the rows of the last one."""
        yield from self._take_turn(id, wait)
        limit = max(wait, self._store.timeout)
        ends = time.monotonic() + limit
        while True:
            try:
                return (yield from self._adapter.begin(*queries))
            except UnicodeError as error:
                raise invalid_names() from error
            except Exception as error:
                cause = sqlite_error(error)
                if cause is None or isinstance(error, OncemoreError):
                    raise
                yield from self._adapter.rollback()
                if not is_busy(cause):
                    raise as_store_error(cause, self._store.path) from error
                if time.monotonic() > ends:
                    raise StoreTimeout(
                        f"{self._store.path}: locked by another connection for {limit:g} s; retry, or raise timeout= "
                        "in the store's URL"
                    ) from error
            yield Sleep(random.uniform(SHORTEST_PAUSE, LONGEST_PAUSE))

    def claim(self, operation: Operation, *, lease: float, request: bytes = b"") -> Plan[Lease | Record]:
        claim = ClaimItem(operation.id, operation, lease, self._store.holder.next(), request)
        try:
            rows = yield from self._adapter.execute(self._insert_query(claim), INSERTED)
        except UnicodeError as error:
            raise invalid_names() from error
        return (yield from self._claimed(claim, rows))

    def _insert_query(self, claim: ClaimItem) -> Query:
        """Return the query that inserts a record unless there is one."""
        return Statement(self._sql.claim_one), (self._store.shift, *claim_values(claim))

    def _find_query(self, id: Id) -> Query:
        return Statement(self._sql.look.single), (self._store.shift, *id)

    def _claimed(self, claim: ClaimItem, rows: Rows) -> Plan[Lease | Record]:
        """Return the lease if a record was inserted or can be taken over, else the record that prevents the claim."""
        [(inserted, token)] = rows
        if inserted:
            return Lease(claim.operation, token, SYSTEM.time() + self._store.shift + claim.lease)
        rows = yield from self._adapter.execute(self._find_query(claim.id))
        record = as_record(tuple(rows[0]))
        if not claimable(claim.operation, record):
            return record
        [(token, _)] = yield from self._adapter.execute((Statement(self._sql.next_token), (self._store.shift,)))
        columns, lease = taken_over(record, claim, token)
        archive: Query = (Statement(self._sql.archive), (record.token,))
        change: Query = (Statement(self._sql.change(columns)), (*columns.values(), record.token))
        queries = [archive, change] if lease.attempt == 1 else [change]  # attempt 1: the record had expired
        yield from self._adapter.execute(*queries)
        return lease

    def settle(
        self, held: Lease, outcome: Outcome, *, retention: float, audit: bool = False, note: str = ""
    ) -> Plan[None]:
        values = (self._store.shift, *settle_row(held, outcome, retention, audit, note))
        self._writes += ((Statement(self._sql.settle.single), values), CHECK)
        return
        yield

    def release(self, held: Lease, *, retention: float) -> Plan[None]:
        text = RELEASE.format(records=f"{self._sql.prefix}records", now=NOW)
        self._writes += ((Statement(text), (self._store.shift, retention, held.token)), CHECK)
        return
        yield

    def find(self, scope: str, key: str) -> Plan[Record | None]:
        rows = yield from self._adapter.execute(self._find_query((scope, key)))
        record = as_record(tuple(rows[0])) if rows else None
        return record if record is not None and state_of(record) != "absent" else None

    def query(self, text: str, values: Sequence[Any]) -> Plan[Rows]:
        return (yield from self._adapter.execute((Statement(PARAMETER.sub(r"?\1", text)), values)))

    def commit(self, *queries: Query) -> Plan[None]:
        try:
            yield from self._adapter.commit(CHECK_MARK, *self._writes, *queries)
        except Exception as error:
            cause = sqlite_error(error)
            if cause is None or isinstance(cause, sqlite3.IntegrityError):  # the user's deferred constraint failed
                raise
            if was_ended(cause):
                raise commit_forbidden() from error
            yield from self._adapter.rollback()
            if code(cause) in UNWRITTEN:
                yield from self._overwrite()
            raise as_store_error(cause, self._store.path) from error
        self._end()
        for callback in self._callbacks:
            callback()

    def _overwrite(self) -> Plan[None]:
        """Write over the transaction that a failed commit may have left in the log: see `overwrite_log`."""
        try:
            yield from self._adapter.begin((Statement(self._sql.overwrite), ()))
            yield from self._adapter.commit()
        except Exception:
            yield from self._adapter.rollback()

    # The turn to write

    def _take_turn(self, id: Id, wait: float) -> Plan[None]:
        writer, caller = self._writer, current_caller()
        if writer.owner is not None and writer.owner == caller:
            raise ConfigurationError(
                "SQLite has one writer at a time, so an operation with effect = 'transaction' cannot run inside "
                "another one: do its work on the outer operation's op.connection"
            )
        duplicate = writer.operation == id
        limit = wait if duplicate else max(wait, self._store.timeout)
        try:
            yield writer.turn(limit, self._got_turn)
        except BaseException:  # a cancelled caller may have got the turn nevertheless
            self._end()
            raise
        if self._open:
            writer.operation, writer.owner = id, caller
        elif duplicate:
            raise InProgress("The first request with this key is still running; retry later", retry_after=1.0)
        else:
            raise StoreTimeout(
                f"{self._store.path}: another operation of this process has been writing it for {limit:g} s; retry, or "
                "raise timeout= in the store's URL"
            )

    def _got_turn(self) -> None:
        self._open = True

    def _end(self) -> None:
        if self._open:
            self._open = False
            self._writer.end_turn()


def current_caller() -> object:
    """Return the running task, or the thread's id if there is no task."""
    loop = asyncio._get_running_loop()  # returns None, instead of raising, if no loop runs
    return (asyncio.current_task(loop) if loop is not None else None) or threading.get_ident()


class SqliteSource:
    """Opens transactions on *store*'s file.  *make_adapter* makes a transaction's adapter from its writer.

    *awaited* says that the adapter works only on event loops.
    """

    def __init__(
        self, store: LedgerFile, make_adapter: Callable[[Writer], TransactionAdapter], *, awaited: bool = False
    ) -> None:
        self.store = store
        self._make_adapter = make_adapter
        self._awaited = awaited
        self._reset()
        reset_in_child(self)

    def _reset(self) -> None:
        path = self.store.path
        self._threads = Writer(path)
        self._loops = PerLoop(lambda: Writer(path, for_loop=True), Writer.close_connection)

    def open(self) -> Plan[Transaction]:
        if self.store.path == MEMORY:
            raise ConfigurationError(
                "A ledger in memory lends no connection, and effect = 'transaction' needs one: use a file, as in "
                "sqlite:///once.db"
            )
        writer: Writer = yield Do(None if self._awaited else lambda: self._threads, self._on_loop)
        yield from self.store.ready()
        return SqliteTransaction(self.store, writer, self._make_adapter(writer))

    def check_driver(self) -> None:
        """Raise MissingDriver if aiosqlite, which transactions on an event loop need, is missing or too old."""
        check_aiosqlite()

    async def _on_loop(self) -> Writer:
        return self._loops.get()

    def again(self, error: BaseException) -> bool:
        """Whether the same transaction may work next time, because another connection had the lock.

        False after StoreTimeout: the caller has waited for the lock for its full time.
        """
        if isinstance(error, Again | StoreTimeout):
            return isinstance(error, Again)
        cause = sqlite_error(error)
        return cause is not None and is_busy(cause)

    def close(self) -> None:
        self._loops.drop_closed()
        self._threads.close()

    async def aclose(self) -> None:
        writer = self._loops.pop()
        if writer is not None:
            await writer.aclose()
        self.close()


class SqliteAdapter:
    """One transaction on the ledger's own connection, which is sqlite3's on threads and aiosqlite's on event loops."""

    def __init__(self, writer: Writer, prepare: Callable[[sqlite3.Connection], None]) -> None:
        self._writer = writer
        self._prepare = prepare

    @property
    def connection(self) -> Any:
        return self._writer.connection

    @property
    def awaited(self) -> bool:
        return not isinstance(self._writer.connection, sqlite3.Connection)

    def begin(self, *queries: Query) -> Plan[Rows]:
        if self._writer.connection is None:
            check_usable(self._writer.path)
            yield Do(self._connect, self._aconnect)
        return (yield self._do(lambda connection: begin_again(connection, queries)))  # type: ignore[no-any-return]

    def _connect(self) -> None:
        # Before the file is opened: this turn has the writer's lock, so a fork meanwhile finds the file in use.
        close_before_fork(self._writer)
        connection = sqlite3.connect(self._writer.path, **CONNECTION)
        try:
            self._prepare(connection)
        except BaseException:
            connection.close()
            raise
        self._writer.keep_open(connection)

    async def _aconnect(self) -> None:
        close_before_fork(self._writer)
        connection = await open_aiosqlite(self._writer.path, **CONNECTION)
        self._writer.keep_open(connection)
        try:
            await run_in_aiosqlite(connection, self._prepare)
        except BaseException:
            self._writer.close_connection()
            raise

    def _do(self, work: Callable[[sqlite3.Connection], T]) -> Do[T]:
        connection = self._writer.connection
        return Do(lambda: work(connection), lambda: run_in_aiosqlite(connection, work))

    def execute(self, *queries: Query) -> Plan[Rows]:
        return (yield self._do(lambda connection: run_queries(connection, queries)))  # type: ignore[no-any-return]

    def commit(self, *queries: Query) -> Plan[None]:
        yield from self.execute(*queries, COMMIT)

    def rollback(self) -> Plan[None]:
        try:
            if self._writer.connection is not None:
                yield self._do(roll_back)
        except Exception:
            self.discard()

    def discard(self) -> None:
        self._writer.close_connection()


class SqliteNoCommit(sqlite3.Connection):
    """A connection in the guard's transaction.  Its `commit` and `rollback` raise, because only the guard commits."""

    def commit(self) -> None:
        raise commit_forbidden()

    def rollback(self) -> None:
        raise commit_forbidden()

    def __exit__(self, *_: object) -> Any:
        return False  # sqlite3's own method would commit at the end of `with connection:`


CONNECTION: dict[str, Any] = {
    "timeout": 0,  # `begin_with` waits instead, and keeps the caller's time limit
    "isolation_level": None,
    "check_same_thread": False,
    "factory": SqliteNoCommit,
}


def run_queries(connection: sqlite3.Connection, queries: Sequence[Query]) -> Rows:
    """Run *queries*, and return the rows of the last one as tuples, even if the performer has set a row factory."""
    factories = connection.row_factory, connection.text_factory
    if factories != (None, str):
        connection.row_factory, connection.text_factory = None, str
    try:
        rows: Rows = ()
        for statement, values in queries:
            rows = connection.execute(statement.text, values).fetchall()
        return rows
    finally:
        if factories != (None, str):
            connection.row_factory, connection.text_factory = factories


def begin_again(connection: sqlite3.Connection, queries: Sequence[Query]) -> Rows:
    """Begin a transaction on a connection that another performer may have changed."""
    connection.row_factory, connection.text_factory = None, str
    return run_queries(connection, [BEGIN, *queries])


def roll_back(connection: sqlite3.Connection) -> None:
    if connection.in_transaction:
        connection.execute("ROLLBACK")


def lock_query(sql: SqliteStatements, in_transaction: bool) -> Query:
    """Return the query that takes the write lock.

    A library may have begun the transaction with a plain BEGIN, which takes no lock.  Then an UPDATE of no rows takes
    it.  Nothing was read before, so it can wait for the lock as BEGIN IMMEDIATE does.
    """
    return (Statement(sql.lock), ()) if in_transaction else BEGIN


def sqlite_error(error: BaseException | None) -> BaseException | None:
    """Return SQLite's own error, even if a library has wrapped it, or None if there is none."""
    for _ in range(DEEPEST):
        if error is None or isinstance(error, sqlite3.Error) or code(error):
            return error
        error = getattr(error, "orig", None) or error.__cause__
    return None


def was_ended(error: BaseException) -> bool:
    """Whether a commit failed because the performer has ended the transaction, closed the connection or changed the record."""
    text = str(error)
    return isinstance(error, sqlite3.ProgrammingError) or MARK in text or "integer overflow" in text


class JoinedSqlite:
    """Runs statements in a transaction on the user's own connection, which is sqlite3's or aiosqlite's."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    def on_commit(self, callback: Callable[[], object]) -> None:
        """Do nothing, because the driver does not report commits.  Relays find the message when they look."""

    def execute(self, *queries: Query) -> Plan[Rows]:
        connection = self.connection
        if not connection.in_transaction:  # sqlite3 itself begins before an INSERT, but not before a CREATE TABLE
            queries = ((Statement(f"BEGIN {connection.isolation_level}"), ()), *queries)
        if isinstance(connection, sqlite3.Connection):  # runs on this thread, because the connection belongs to it
            return (yield Call(run_queries, connection, queries))  # type: ignore[no-any-return]
        work = partial(run_queries, queries=queries)
        return (yield Do(None, lambda: run_in_aiosqlite(connection, work)))  # type: ignore[no-any-return]


class OwnSqliteTransaction:
    """A feature's transaction on the store's own connection.  On an event loop it needs aiosqlite."""

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
        # No operation and no other transaction has this name, so this one waits for its turn like another operation.
        name = ("", str(id(self)))
        rows = yield from transaction.begin_with(name, 0.0, SET_MARK, *queries)
        return rows  # type: ignore[no-any-return]

    def execute(self, *queries: Query) -> Plan[Rows]:
        try:
            return (yield from self._transaction.execute(*queries))  # type: ignore[no-any-return]
        except sqlite3.OperationalError as error:  # a full disk, for instance: the caller begins another one
            raise as_store_error(error, self._source.store.path) from error

    def commit(self, *queries: Query) -> Plan[None]:
        yield from self._transaction.commit(*queries)

    def rollback(self) -> Plan[None]:
        if self._transaction is not None:
            yield from self._transaction.abort()

    def discard(self) -> None:
        if self._transaction is not None:
            self._transaction.drop()


class SqliteBelowDjango:
    """Runs the ledger's statements on the sqlite3 connection below Django's."""

    def __init__(self, sql: SqliteStatements) -> None:
        self._sql = sql

    def begin(self, raw: sqlite3.Connection, queries: Sequence[Query]) -> Rows:
        return run_queries(raw, [lock_query(self._sql, raw.in_transaction), *queries])

    def execute(self, raw: sqlite3.Connection, queries: Sequence[Query]) -> Rows:
        return run_queries(raw, queries)

    def commit(self, raw: sqlite3.Connection, queries: Sequence[Query]) -> None:
        run_queries(raw, [*queries, COMMIT])

    def rollback(self, raw: sqlite3.Connection) -> None:
        roll_back(raw)

    def close(self, raw: sqlite3.Connection) -> None:
        raw.close()
