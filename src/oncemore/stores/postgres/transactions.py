"""Transactions on PostgreSQL: the ledger's verbs, over the adapter of any driver.

The claim is an INSERT.  Another claim of the same operation waits for that row until this transaction ends.  Then it
finds the outcome or, after a rollback, inserts its own row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ..._ledger.decisions import is_free
from ..._ledger.model import Lease, Operation, Outcome, Record, encode_outcome
from ..._ledger.transactions import (
    Again,
    Query,
    Rows,
    Stale,
    Transaction,
    TransactionAdapter,
    commit_forbidden,
)
from ..._runtime.plan import Plan
from ...errors import ConfigurationError, InProgress, OncemoreError, StoreUnavailable, TransactionEnded
from .pipeline import ALREADY_PREPARED, NOT_PREPARED
from .rows import LONGEST_SPAN, check_length, escape_text, is_expired, read_record
from .session import NO_LOCK, SERIALIZATION_FAILURES, Database, translate_error
from .statements import prepared

DEEPEST = 10  # errors in a chain of causes to look at; a chain may be a circle
LONGEST_WAIT = 2**31 - 1  # milliseconds: PostgreSQL's own limit, 24 days
VIOLATION = "23"  # the class of violated constraints
DIVISION_BY_ZERO, FAILED_BEFORE = "22012", "25P02"


class PostgresSource:
    """Opens transactions on *database*.  *make_adapter* makes the adapter for each one."""

    def __init__(self, database: Database, make_adapter: Callable[[], TransactionAdapter]) -> None:
        self.database = database
        self._make_adapter = make_adapter

    def open(self) -> Plan[Transaction]:
        yield from self.database.ready()
        return PostgresTransaction(self.database, self._make_adapter())

    def again(self, error: BaseException) -> bool:
        """Whether the database refused the transaction because of another one, so that it may work next time."""
        return isinstance(error, Again) or sqlstate_of(error) in SERIALIZATION_FAILURES

    def close(self) -> None:
        """Do nothing, because the connections belong to the user."""

    async def aclose(self) -> None:
        """Do nothing, because the connections belong to the user."""


class PostgresTransaction(Transaction):
    """The ledger's verbs in one transaction."""

    def __init__(self, database: Database, adapter: TransactionAdapter) -> None:
        super().__init__(adapter)
        self._database = database
        self._sql = database.sql
        self._wait = 0.0
        self._writes: list[Query] = []

    def begin(self, operation: Operation, *, lease: float, wait: float, request: bytes = b"") -> Plan[Lease | Record]:
        self._wait = wait
        try:
            rows = yield from self._adapter.begin(self._claim_query(operation, lease, request))
        except Exception as error:
            translated = translate(error)
            if isinstance(translated, StoreUnavailable) and self._adapter.connection is not None:
                raise Stale(f"the connection was stale: {error}") from error  # nothing was done: try another connection
            if translated is error:
                raise
            raise translated from error
        return new_lease(operation, rows) if rows else (yield from self._take_over(operation, lease, request))

    def claim(self, operation: Operation, *, lease: float, request: bytes = b"") -> Plan[Lease | Record]:
        rows = yield from self._execute(self._claim_query(operation, lease, request))
        if rows:
            return new_lease(operation, rows)
        found = yield from self._take_over(operation, lease, request)
        if isinstance(found, Record):  # the performer may go on, so it gets its own lock_timeout back
            yield from self._execute((self._sql.restore, []))
        return found

    def _claim_query(self, operation: Operation, lease: float, request: bytes) -> Query:
        milliseconds = min(max(1, int(1000 * self._wait)), LONGEST_WAIT)  # PostgreSQL waits for ever at 0
        return self._sql.claim_here, [*self._claim_values(operation, lease), str(milliseconds), request or None]

    def _claim_values(self, operation: Operation, lease: float) -> list[Any]:
        scope, key = map(escape_text, operation.id)
        check_length(scope, key)
        holder = self._database.holder.next()
        names = [scope, key, escape_text(operation.name), escape_text(operation.fingerprint), holder]
        return [*names, min(lease, LONGEST_SPAN), self._database.shift]

    def _take_over(self, operation: Operation, lease: float, request: bytes) -> Plan[Lease | Record]:
        """Claim the existing record, and return the lease.  If the record prevents the claim, return the record."""
        while True:
            record = yield from self._find(*operation.id)
            if record is None:  # deleted meanwhile, or not visible to this transaction
                raise Again("the record that prevented the claim is gone")
            if is_expired(record):  # an audited record must be archived first
                yield from self._execute((self._sql.archive_here, [*map(escape_text, record.id), self._database.shift]))
            elif not is_free(record) or record.fingerprint != operation.fingerprint:
                return record
            rows = yield from self._execute(
                (self._sql.take_here, [*self._claim_values(operation, lease), request or None])
            )
            if rows:
                _, token, attempts, until, lapsed, *_ = rows[0]
                return Lease(operation, token, until, attempts, lapsed)

    def find(self, scope: str, key: str) -> Plan[Record | None]:
        record = yield from self._find(scope, key)
        return None if record is None or is_expired(record) else record

    def _find(self, scope: str, key: str) -> Plan[Record | None]:
        rows = yield from self._execute(
            (self._sql.find_here, [escape_text(scope), escape_text(key), self._database.shift])
        )
        return read_record(rows[0]) if rows else None

    def settle(
        self, held: Lease, outcome: Outcome, *, retention: float, audit: bool = False, note: str = ""
    ) -> Plan[None]:
        result = [outcome.status, encode_outcome(outcome), outcome.digest(), escape_text(note), audit]
        self._writes.append((self._sql.settle_here, [*self._end_values(held, retention), *result]))
        return
        yield

    def release(self, held: Lease, *, retention: float) -> Plan[None]:
        self._writes.append((self._sql.release_here, self._end_values(held, retention)))
        return
        yield

    def _end_values(self, held: Lease, retention: float) -> list[Any]:
        return [*map(escape_text, held.operation.id), held.token, min(retention, LONGEST_SPAN), self._database.shift]

    def query(self, text: str, values: Sequence[Any]) -> Plan[Rows]:
        return (yield from self._adapter.execute((prepared(text), values)))  # not translated: its errors are the user's

    def can_defer(self) -> bool:
        can_defer = getattr(self._adapter, "can_defer", None)
        return can_defer is not None and can_defer()

    def commit(self) -> Plan[None]:
        try:
            yield from self._adapter.commit(*self.deferred, *self._writes)
        except Exception as error:
            raise_translated(error, committing=True)
        self._end()
        for callback in self._callbacks:
            callback()

    def _execute(self, query: Query) -> Plan[Rows]:
        try:
            return (yield from self._adapter.execute(query))
        except Exception as error:
            raise_translated(error)


def new_lease(operation: Operation, rows: Rows) -> Lease:
    token, until, *_ = rows[0]
    return Lease(operation, token, until)


def sqlstate_of(error: BaseException | None) -> str:
    """Return the server's code for an error of any driver, even if a library has wrapped it, or "" if there is none."""
    for _ in range(DEEPEST):
        state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
        if state is None and error is not None and error.args and isinstance(error.args[0], dict):
            state = error.args[0].get("C")  # pg8000 raises the fields of the server's message
        if isinstance(state, str):
            return state
        error = getattr(error, "orig", None) or getattr(error, "__cause__", None)
    return ""


def raise_translated(error: Exception, *, committing: bool = False) -> NoReturn:
    translated = translate(error, committing=committing)
    if translated is error:
        raise error
    raise translated from error


def translate(error: Exception, *, committing: bool = False) -> Exception:
    """Return the guard's error for an error of the driver, or *error* itself if the caller should get it."""
    state = sqlstate_of(error)
    if isinstance(error, OncemoreError | Again):
        return error
    if state in SERIALIZATION_FAILURES or state == NOT_PREPARED:
        return Again(str(error))
    if state == NO_LOCK:
        return InProgress("The first request with this key is still running; retry later", retry_after=1.0)
    if state == ALREADY_PREPARED:
        return ConfigurationError(
            f"{error}: behind a pooler in transaction mode nothing can be prepared; configure your pool or engine so: "
            "pass prepare_threshold=None to psycopg, or statement_cache_size=0 to asyncpg"
        )
    if state == DIVISION_BY_ZERO:  # see STILL_HERE: the row is not as this transaction left it
        return commit_forbidden()
    if state == FAILED_BEFORE:
        return TransactionEnded(
            "A statement failed in the transaction that the guard lent, and the code went on: let the error propagate, "
            "or use a savepoint, because PostgreSQL commits nothing after a failure"
        )
    if committing and state.startswith(VIOLATION):  # the user's deferred constraint failed
        return error
    if state and not state.startswith(("08", "57" if committing else "57P")):  # 57014 is a statement's own time limit
        return translate_error(error, state)
    if committing:  # the next claim of the key finds out whether it was committed
        return Again(f"the answer to the commit was lost: {error}")
    return StoreUnavailable(f"PostgreSQL cannot be reached: {error}", retry_after=1.0)
