"""The ledger within a transaction on a SQLite connection that the performer borrows.

SQLite has one writer at a time, so a transaction takes the lock with its first statement (BEGIN IMMEDIATE) and nobody
else's claim can be in the way.  A savepoint of ours tells at the end whether it is still the same transaction.
"""

from __future__ import annotations

import contextlib
import random
import re
import sqlite3
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from ..._ledger.model import Lease, Operation, Outcome, Record
from ..._ledger.transactions import Again, ended, give_back, over
from ..._runtime.plan import Effect, Plan
from ..._runtime.wakeups import Id
from ...errors import OncemoreError, StoreTimeout
from .batch import Batch, bad_value_error, state_of
from .items import Claim, Settle
from .statements import Statements
from .writer import BAD_VALUES, UNWRITTEN, as_store_error, code, disown, is_busy

T = TypeVar("T")

# Between two tries for a file that another process is writing.
SHORTEST, LONGEST = 0.0005, 0.01

PARAMETER = re.compile(r"\$(\d+)")
DEEPEST = 10  # of errors that are each the cause of another, which may lead in a circle

MARK, MARKED = "SAVEPOINT oncemore_mark", "RELEASE oncemore_mark"


class Wire(Protocol):
    """How one driver lends a SQLite connection: *call* gives a function the raw one, where its thread is."""

    @property
    def connection(self) -> Any: ...
    @property
    def awaited(self) -> bool: ...
    def open(self, id: Id, wait: float) -> Plan[None]: ...
    def call(self, work: Callable[[sqlite3.Connection], T]) -> Effect[T]: ...
    def session(self) -> Any: ...
    def finish(self) -> Plan[None]: ...  # before the outcome is written: what the performer left open is ended
    def end(self, *, healthy: bool, committed: bool) -> Plan[None]: ...  # give the connection back, once
    def drop(self) -> None: ...


class SqliteTransaction:
    """One transaction; *holder* names it, and *timeout* bounds how long it waits for the file."""

    def __init__(self, wire: Wire, sql: Statements, *, path: str, shift: float, holder: str, timeout: float) -> None:
        self._wire = wire
        self._sql = sql
        self._path = path
        self._shift = shift
        self._holder = holder
        self._timeout = timeout
        self._writes: list[Callable[[Batch], None]] = []
        self._open = False  # until the connection is this one's

    @property
    def connection(self) -> Any:
        if not self._open:
            raise over()
        return self._wire.connection

    @property
    def awaited(self) -> bool:
        return self._wire.awaited

    def session(self) -> Any:
        if not self._open:
            raise over()
        return self._wire.session()

    def begin(self, operation: Operation, *, lease: float, wait: float, request: bytes = b"") -> Plan[Lease | Record]:
        try:
            yield from self._wire.open(operation.id, wait)
        except OncemoreError:
            raise
        except Exception as error:
            cause = driver_error(error)
            if cause is None:
                raise
            raise as_store_error(cause, self._path) from error
        self._open = True

        def work(connection: sqlite3.Connection) -> Lease | Record:
            lock(connection, self._sql.lock, self._path, max(wait, self._timeout))
            found = self._claim(connection, operation, lease, request)
            connection.execute(MARK)
            return found

        return (yield self._wire.call(plainly(work)))  # type: ignore[no-any-return]

    def claim(self, operation: Operation, *, lease: float, request: bytes = b"") -> Plan[Lease | Record]:
        work = plainly(lambda connection: self._claim(connection, operation, lease, request))
        return (yield self._wire.call(work))  # type: ignore[no-any-return]

    def _claim(
        self, connection: sqlite3.Connection, operation: Operation, lease: float, request: bytes
    ) -> Lease | Record:
        try:
            return Batch(connection, self._sql, self._shift).claim_one(operation, lease, self._holder, request)
        except BAD_VALUES as error:
            raise bad_value_error(Claim(operation, lease, self._holder), error) from error

    def settle(
        self, held: Lease, outcome: Outcome, *, retention: float, audit: bool = False, note: str = ""
    ) -> Plan[None]:
        item = Settle(held, outcome, retention, audit, note)

        def write(flight: Batch) -> None:
            flight.settle([item])
            if item.result is not None:  # the row is not as this transaction has left it
                raise ended()

        self._writes.append(write)
        return
        yield

    def release(self, held: Lease, *, retention: float) -> Plan[None]:
        self._writes.append(lambda flight: flight.release(held, retention))
        return
        yield

    def find(self, scope: str, key: str) -> Plan[Record | None]:
        record = yield self._wire.call(plainly(lambda c: Batch(c, self._sql, self._shift).find((scope, key))))
        return record if state_of(record) != "absent" else None

    def query(self, text: str, values: Sequence[Any]) -> Plan[Sequence[Sequence[Any]]]:
        """The rows of the user's own statement, whose errors are the user's."""
        text = PARAMETER.sub(r"?\1", text)
        work = plainly(lambda connection: connection.execute(text, values).fetchall())
        return (yield self._wire.call(work))  # type: ignore[no-any-return]

    def commit(self) -> Plan[None]:
        yield from self._wire.finish()
        yield self._wire.call(plainly(self._write_and_commit))
        yield from self._end(healthy=True, committed=True)

    def _write_and_commit(self, connection: sqlite3.Connection) -> None:
        try:
            connection.execute(MARKED)
        except (sqlite3.OperationalError, sqlite3.ProgrammingError) as error:  # it is over, or the connection is
            raise ended() from error
        flight = Batch(connection, self._sql, self._shift)
        try:
            for write in self._writes:
                write(flight)
            connection.execute("COMMIT")
        except sqlite3.IntegrityError:  # of the borrower's own constraint, which waited for the commit
            raise
        except sqlite3.Error as error:
            roll_back(connection)
            if code(error) in UNWRITTEN:
                disown(connection, self._sql.overwrite)
            raise as_store_error(error, self._path) from error

    def abort(self) -> Plan[None]:
        if not self._open:
            return
        healthy = False
        try:
            with contextlib.suppress(Exception):
                yield self._wire.call(roll_back)
                healthy = True
        except BaseException:
            self.drop()
            raise
        yield from self._end(healthy=healthy, committed=False)

    def _end(self, *, healthy: bool, committed: bool) -> Plan[None]:
        self._open = False
        yield from give_back(self._wire, healthy=healthy, committed=committed)

    def drop(self) -> None:
        if self._open:
            self._open = False
            self._wire.drop()


def plainly(work: Callable[[sqlite3.Connection], T]) -> Callable[[sqlite3.Connection], T]:
    """The work on a connection whose rows are tuples and whose texts are texts, whatever its borrower has made of them."""

    def done(connection: sqlite3.Connection) -> T:
        rows, texts = connection.row_factory, connection.text_factory
        if rows is None and texts is str:
            return work(connection)
        make_plain(connection)
        try:
            return work(connection)
        finally:
            connection.row_factory, connection.text_factory = rows, texts

    return done


def make_plain(connection: Any) -> None:
    connection.row_factory, connection.text_factory = None, str


def lock(connection: sqlite3.Connection, upgrade: str, path: str, limit: float) -> None:
    """Become the file's one writer; where another process is that, wait.

    A library may have begun already, with a BEGIN that takes no lock before it must: then *upgrade*, which writes nothing,
    takes it.  Nothing was read before that, so it can wait like a BEGIN IMMEDIATE.
    """
    ends = time.monotonic() + limit
    statement = upgrade if connection.in_transaction else "BEGIN IMMEDIATE"
    while True:
        try:
            connection.execute(statement)
            return
        except sqlite3.Error as error:
            if not is_busy(error):
                raise as_store_error(error, path) from error
            if time.monotonic() > ends:
                raise StoreTimeout(f"{path}: locked by another for {limit:g} s") from error
        time.sleep(random.uniform(SHORTEST, LONGEST))


def roll_back(connection: sqlite3.Connection) -> None:
    if connection.in_transaction:
        connection.execute("ROLLBACK")


def again(error: BaseException) -> bool:
    """Whether the same transaction may work next time: another process had the lock that it wanted.

    One who has waited for that lock as long as it may is not to wait once more.
    """
    if isinstance(error, Again | StoreTimeout):
        return isinstance(error, Again)
    cause = driver_error(error)
    return cause is not None and is_busy(cause)


def driver_error(error: BaseException | None) -> BaseException | None:
    """SQLite's own error, also where a library has wrapped it."""
    for _ in range(DEEPEST):
        if error is None or isinstance(error, sqlite3.Error) or code(error):
            return error
        error = getattr(error, "orig", None) or error.__cause__
    return None
