"""The ledger within a transaction on a PostgreSQL connection that the performer borrows.

The claim is an INSERT: whoever else asks for the same operation waits on that row until this transaction ends, and then
finds the outcome or takes its place.  It goes with the BEGIN, and the outcome with the COMMIT, where the driver can.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from ..._ledger.decisions import is_over
from ..._ledger.model import Lease, Operation, Outcome, Record, encode_outcome
from ..._ledger.store import Holder
from ..._ledger.transactions import Again, Stale, Transaction, ended, give_back, over
from ..._runtime.plan import Effect, Plan
from ...errors import ConfigurationError, InProgress, OncemoreError, StoreUnavailable, TransactionEnded
from .pipeline import ALREADY_PREPARED
from .rows import LONGEST_SPAN, IdRow, check_length, encode_rows, escape_text, is_expired, read_record
from .session import SERIALIZATION_FAILURES, translate_error
from .statements import Ask, Rows, Statements, prepared

if TYPE_CHECKING:
    from .store import PostgresStore

DEEPEST = 10  # of errors that are each the cause of another, which may lead in a circle
LONGEST_WAIT = 2**31 - 1  # milliseconds: as long as PostgreSQL's limits go, which is 24 days
VIOLATION = "23"
NO_LOCK, DIVISION_BY_ZERO, FAILED_BEFORE, FORGOTTEN = "55P03", "22012", "25P02", "26000"


class Wire(Protocol):
    """How one driver lends a PostgreSQL connection and runs statements on it."""

    @property
    def connection(self) -> Any: ...
    @property
    def awaited(self) -> bool: ...
    def session(self) -> Any: ...
    def begin(self, ask: Ask) -> Effect[Rows]: ...  # take a connection, BEGIN, and the first statement
    def rows(self, ask: Ask) -> Effect[Rows]: ...
    def query(self, ask: Ask) -> Effect[Rows]: ...  # the user's own, with values of any type that the driver knows
    def commit(self, asks: Sequence[Ask]) -> Effect[None]: ...  # these statements and COMMIT; one that fails stops it
    def roll_back(self) -> Effect[None]: ...
    def end(self, *, healthy: bool, committed: bool) -> Plan[None]: ...  # give the connection back, once
    def drop(self) -> None: ...


class Enlisted:
    """Lends the user's own connections: *wire* makes the wire of one transaction."""

    def __init__(self, store: PostgresStore, wire: Callable[[], Wire]) -> None:
        self.store = store
        self.wire = wire

    def open(self) -> Plan[Transaction]:
        store = self.store
        yield from store.ready()
        return PostgresTransaction(self.wire(), store.database.sql, shift=store.shift, holder=store.holder)

    def again(self, error: BaseException) -> bool:
        return again(error)

    def close(self) -> None:
        """Nothing here is ours to close."""

    async def aclose(self) -> None:
        """Nothing here is ours to close."""


class PostgresTransaction:
    """One transaction; *holder* names its claims."""

    def __init__(self, wire: Wire, sql: Statements, *, shift: float, holder: Holder) -> None:
        self._wire = wire
        self._sql = sql
        self._shift = shift
        self._holder = holder
        self._wait = 0.0
        self._writes: list[Ask] = []
        self._open = True

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
        self._wait = wait
        try:
            rows = yield self._wire.begin(self._claim(operation, lease, request))
        except Exception as error:
            meant = told(error)
            if isinstance(meant, StoreUnavailable) and self._wire.connection is not None:
                raise Stale(f"the connection was stale: {error}") from error  # nothing was done: try another
            raise meant from error
        return first(operation, rows) if rows else (yield from self._met(operation, lease, request))

    def claim(self, operation: Operation, *, lease: float, request: bytes = b"") -> Plan[Lease | Record]:
        rows = yield from self._rows(self._claim(operation, lease, request))
        if rows:
            return first(operation, rows)
        found = yield from self._met(operation, lease, request)
        if isinstance(found, Record):  # the performer may go on, under its own limit
            yield from self._rows((self._sql.restore, []))
        return found

    def _claim(self, operation: Operation, lease: float, request: bytes) -> Ask:
        milliseconds = min(max(1, int(1000 * self._wait)), LONGEST_WAIT)  # 0 would be to wait for ever
        return self._sql.claim_here, [*self._named(operation, lease), str(milliseconds), request or None]

    def _named(self, operation: Operation, lease: float) -> list[Any]:
        scope, key = map(escape_text, operation.id)
        check_length(scope, key)
        return [
            scope,
            key,
            escape_text(operation.name),
            escape_text(operation.fingerprint),
            self._holder.next(),
            min(lease, LONGEST_SPAN),
            self._shift,
        ]

    def _met(self, operation: Operation, lease: float, request: bytes) -> Plan[Lease | Record]:
        """A record is in the way: it makes way, or it is the answer."""
        while True:
            record = yield from self._look(*operation.id)
            if record is None:  # gone since, or not to be seen from this transaction
                raise Again("the record in the way has gone")
            if is_expired(record):  # an audited one goes to the archive first
                named = encode_rows([IdRow(n=0, scope=escape_text(record.scope), key=escape_text(record.key))]).decode()
                yield from self._rows((self._sql.archive, [named, self._shift]))
            elif not is_over(record) or record.fingerprint != operation.fingerprint:
                return record
            rows = yield from self._rows((self._sql.take_here, [*self._named(operation, lease), request or None]))
            if rows:
                _, token, attempts, until, lapsed, *_ = rows[0]
                return Lease(operation, token, until, attempts, lapsed)

    def find(self, scope: str, key: str) -> Plan[Record | None]:
        record = yield from self._look(scope, key)
        return None if record is None or is_expired(record) else record

    def _look(self, scope: str, key: str) -> Plan[Record | None]:
        rows = yield from self._rows((self._sql.find_here, [escape_text(scope), escape_text(key), self._shift]))
        return read_record(rows[0]) if rows else None

    def settle(
        self, held: Lease, outcome: Outcome, *, retention: float, audit: bool = False, note: str = ""
    ) -> Plan[None]:
        scope, key = held.operation.id
        kept = [outcome.status, encode_outcome(outcome), outcome.digest(), escape_text(note), audit]
        retention = min(retention, LONGEST_SPAN)
        values = [escape_text(scope), escape_text(key), held.token, retention, self._shift, *kept]
        self._writes.append((self._sql.settle_here, values))
        return
        yield

    def release(self, held: Lease, *, retention: float) -> Plan[None]:
        scope, key = held.operation.id
        values = [escape_text(scope), escape_text(key), held.token, min(retention, LONGEST_SPAN), self._shift]
        self._writes.append((self._sql.release_here, values))
        return
        yield

    def query(self, text: str, values: Sequence[Any]) -> Plan[Rows]:
        """The rows of the user's own statement, whose errors are the user's."""
        return (yield self._wire.query((prepared(text), values)))  # type: ignore[no-any-return]

    def commit(self) -> Plan[None]:
        try:
            yield self._wire.commit(self._writes)
        except Exception as error:
            retell(error, committing=True)
        yield from self._end(healthy=True, committed=True)

    def abort(self) -> Plan[None]:
        if not self._open:
            return
        healthy = False
        try:
            with contextlib.suppress(Exception):
                yield self._wire.roll_back()
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

    def _rows(self, ask: Ask) -> Plan[Rows]:
        try:
            return (yield self._wire.rows(ask))  # type: ignore[no-any-return]
        except Exception as error:
            retell(error)


def first(operation: Operation, rows: Rows) -> Lease:
    """The lease on what nobody has claimed before."""
    token, until, *_ = rows[0]
    return Lease(operation, token, until)


def sqlstate_of(error: BaseException | None) -> str:
    """The server's code for an error of any driver, also where a library has wrapped it; or nothing."""
    for _ in range(DEEPEST):
        state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
        if isinstance(state, str):
            return state
        error = getattr(error, "orig", None) or getattr(error, "__cause__", None)
    return ""


def retell(error: Exception, *, committing: bool = False) -> NoReturn:
    """Raise what a driver's error means to the guard."""
    meant = told(error, committing=committing)
    if meant is error:
        raise error
    raise meant from error


def again(error: BaseException) -> bool:
    """Whether the database refused the transaction for what others did, so that the same may work next time."""
    return isinstance(error, Again) or sqlstate_of(error) in SERIALIZATION_FAILURES


def told(error: Exception, *, committing: bool = False) -> Exception:
    """What a driver's error means to the guard."""
    state = sqlstate_of(error)
    if isinstance(error, OncemoreError | Again) or state in SERIALIZATION_FAILURES or state == FORGOTTEN:
        return error if not state else Again(str(error))
    if state == NO_LOCK:
        return InProgress("The first request with this key is still running; retry later", retry_after=1.0)
    if state == ALREADY_PREPARED:
        return ConfigurationError(
            f"{error}: behind a pooler in transaction mode nothing can be prepared; say so to your pool or engine, by "
            "prepare_threshold=None to psycopg, or statement_cache_size=0 to asyncpg"
        )
    if state == DIVISION_BY_ZERO or isinstance(error, Misuse):
        return ended()
    if state == FAILED_BEFORE:
        return TransactionEnded(
            "A statement failed in the transaction that the guard lent, and the code went on; let the error out, or use a "
            "savepoint: PostgreSQL commits nothing after a failure"
        )
    if committing and state.startswith(VIOLATION):  # of the borrower's own constraint, which waited for the commit
        return error
    if state and not state.startswith(("08", "57" if committing else "57P")):  # 57014 is a statement's own time limit
        return translate_error(error, state)
    if committing:  # whether it was committed is for whoever claims the key next to see
        return Again(f"the answer to the commit was lost: {error}")
    return StoreUnavailable(f"PostgreSQL cannot be reached: {error}", retry_after=1.0)


class Misuse(Exception):
    """Raised by a wire that finds no open transaction where it left one."""
