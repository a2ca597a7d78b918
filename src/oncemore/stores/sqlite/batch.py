"""One write transaction that carries out the items of many callers.  Each caller gets its own result."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..._ledger.decisions import fenced, not_deletable, not_resolvable
from ..._ledger.model import UNREADABLE, Lease, Operation, Outcome, Record, decode_outcome, encode_outcome, state_of
from ..._ledger.states import HELD, RELEASED, RUNNING, SETTLED, Verb, follows
from ..._runtime.clock import SYSTEM
from ..._runtime.wakeups import Id
from ...errors import InvalidKey, OncemoreError
from .statements import HASH, NOTE, OUTCOME, REQUEST, Row, SqliteStatements
from .writer import BAD_VALUES, as_store_error, is_bad_value, is_busy

# The columns that a new claim of a record resets, with their values.  The request is not reset.
BLANK: dict[str, Any] = {
    "settled_at": None,
    "expires_at": None,
    "accessed_at": None,
    "status": None,
    "outcome": None,
    "response_hash": "",
    "note": "",
    "audit": 0,
    "lapsed": 0,
}


SWEEP_PAUSE = 0.1  # seconds until the next look, after one that found no expired record
MOST_SWEPT = 64  # records in one commit, so that its callers do not wait long
OVERDUE = 3600.0  # seconds; if the oldest record expired longer ago, a sweep removes twice as many records

NO_RECORD: Id = ("", "")  # the id of an item that concerns no record in particular


@dataclass(slots=True, eq=False)
class ClaimItem:
    """Claims *operation* for *lease* seconds.  *result* is the lease, or the record that prevents the claim."""

    can_undo = True
    notifies = False  # nobody waits for a record to become running

    id: Id  # the operation's
    operation: Operation
    lease: float
    holder: str
    request: bytes
    result: Any = field(default=None, init=False)


class SettleItem:
    """Stores the outcome of *held*.  *row* has the values that are written."""

    __slots__ = ("held", "id", "result", "row")
    can_undo = False
    notifies = True

    def __init__(self, held: Lease, outcome: Outcome, retention: float, audit: bool, note: str) -> None:
        self.id = (held.operation.scope, held.operation.key)
        self.held = held
        self.result: Any = None
        self.row = settle_row(held, outcome, retention, audit, note)


class ChangeItem:
    """Any other write.  *apply* is called in the transaction.  *notifies* says whether to wake the record's waiters."""

    __slots__ = ("apply", "id", "notifies", "result")
    can_undo = False

    def __init__(self, id: Id, apply: Callable[[SqliteBatch], Any], *, notifies: bool = False) -> None:
        self.id = id
        self.apply = apply
        self.notifies = notifies
        self.result: Any = None


# One caller's part of a batch.  The caller gets its result; if that is an exception, the caller raises it.
Item = ClaimItem | SettleItem | ChangeItem


def claim_values(claim: ClaimItem) -> Row:
    """Return the values that insert a record for *claim*, without the token, which comes first."""
    names = (*claim.id, claim.operation.name, claim.operation.fingerprint, claim.holder)
    return (*names, claim.lease, claim.request or None)


def settle_row(held: Lease, outcome: Outcome, retention: float, audit: bool, note: str) -> Row:
    """Return the values that settle the record of *held*."""
    operation, data, digest = held.operation, encode_outcome(outcome), hashlib.sha256(outcome.body).hexdigest()
    key = (held.token, operation.scope, operation.key)
    return (*key, retention, outcome.status, data, digest, note, int(audit))


class Sweep:
    """Removes expired records as fast as claims come: a batch removes one for each claim, in the same commit.

    A batch of one item removes none, because its caller would have to wait.  The next larger batch does it instead.
    """

    def __init__(self) -> None:
        self._due = 0  # the number of claims for which no record was removed yet
        self._next_look = 0.0  # on the monotonic clock

    def run(self, batch: SqliteBatch, items: list[Item]) -> None:
        self._due = min(MOST_SWEPT, self._due + sum(isinstance(item, ClaimItem) for item in items))
        if len(items) == 1 or not self._due or SYSTEM.monotonic() < self._next_look:
            return
        if not batch.sweep(self._due):
            self._next_look = SYSTEM.monotonic() + SWEEP_PAUSE
        self._due = 0


def run_batch(
    connection: sqlite3.Connection,
    sql: SqliteStatements,
    shift: float,
    items: list[Item],
    sweep: Sweep | None = None,
) -> list[Any]:
    """Carry out *items* with one commit, and return their results.  If this raises, nothing was committed."""
    batch = SqliteBatch(connection, sql, shift)
    try:
        if len(items) == 1 and batch.run_single(items[0]):
            if sweep is not None:
                sweep.run(batch, items)
            return [items[0].result]
        connection.execute("BEGIN IMMEDIATE")
        batch.run(items)
        if sweep is not None:
            sweep.run(batch, items)
        connection.execute("COMMIT")
    except BaseException as error:
        # Replays need no lock, so they are answered even while another process writes.
        if is_busy(error) and not connection.in_transaction and batch.find_obstacles(items):
            return [item.result for item in items]
        raise
    return [item.result for item in items]


def find_record(connection: sqlite3.Connection, sql: SqliteStatements, shift: float, id: Id) -> Record | None:
    """Return the record, or None if it has expired or does not exist."""
    record = SqliteBatch(connection, sql, shift).find(id)
    return record if record is not None and state_of(record) != "absent" else None


def split_duplicates(items: list[Item]) -> Sequence[list[Item]]:
    """Split the items into groups, in order, so that no group has two items for the same record."""
    if len(items) == 1 or len({item.id for item in items}) == len(items):
        return (items,)
    groups: list[list[Item]] = []
    counts: dict[Id, int] = {}
    for item in items:
        number = counts[item.id] = counts.get(item.id, -1) + 1
        if number == len(groups):
            groups.append([])
        groups[number].append(item)
    return groups


class SqliteBatch:
    """The ledger's verbs in one transaction of *connection*.

    Precondition: the transaction holds the write lock (BEGIN IMMEDIATE), so a record that it reads cannot change until
    COMMIT.  `run_single`, `find` and `find_obstacles` also work without a transaction.
    """

    def __init__(self, connection: sqlite3.Connection, sql: SqliteStatements, shift: float) -> None:
        self.execute = connection.execute
        self.sql = sql
        self.shift = shift

    # Many items

    def run(self, items: list[Item]) -> None:
        """Carry out the items together.  If one has bad values, carry them out one by one."""
        try:
            for group in split_duplicates(items):
                self.run_distinct(group)
        except BAD_VALUES as error:
            if not is_bad_value(error):
                raise
            self.execute("ROLLBACK")
            self.execute("BEGIN IMMEDIATE")
            self.run_one_by_one(items)

    def run_distinct(self, items: list[Item]) -> None:
        """Carry out items that are all for different records."""
        if claims := [item for item in items if isinstance(item, ClaimItem)]:
            self.claim(claims)
        if settles := [item for item in items if isinstance(item, SettleItem)]:
            self.settle(settles)
        if len(claims) + len(settles) < len(items):
            for item in items:
                if isinstance(item, ChangeItem):
                    item.result = self.apply(item)

    def run_single(self, item: Item) -> bool:
        """Carry out the item by a single statement, which commits by itself.  Return False if that is not possible."""
        try:
            if isinstance(item, ClaimItem):
                written = self.execute(self.sql.claim_one, (self.shift, *claim_values(item)))
                if written.rowcount == 1 and written.lastrowid is not None:
                    until = SYSTEM.time() + self.shift + item.lease
                    item.result = Lease(item.operation, written.lastrowid, until)
                    return True
            elif isinstance(item, SettleItem):
                return self.execute(self.sql.settle.single, (self.shift, *item.row)).rowcount == 1
        except BAD_VALUES as error:
            if not is_bad_value(error):
                raise
        return False

    def run_one_by_one(self, items: list[Item]) -> None:
        """Carry out the items, each in a savepoint, so that an item with bad values fails alone."""
        for item in items:
            self.execute("SAVEPOINT item")
            try:
                self.run_distinct([item])
            except Exception as error:
                if not is_bad_value(error):
                    raise
                self.execute("ROLLBACK TO item")
                item.result = bad_value_error(item, error)
            self.execute("RELEASE item")

    def find_obstacles(self, items: list[Item]) -> bool:
        """Whether all items are claims that existing records prevent.  If so, each item's result is that record."""
        claims = [item for item in items if isinstance(item, ClaimItem)]
        existing = self.find_all({item.id for item in claims}) if len(claims) == len(items) else {}
        for claim in claims:
            claim.result = existing.get(claim.id)
            if claim.result is None or claimable(claim.operation, claim.result):
                return False
        return len(claims) == len(items)

    def apply(self, item: ChangeItem) -> Any:
        try:
            return item.apply(self)
        except OncemoreError as error:  # raised before anything is written
            return error

    def claim(self, claims: list[ClaimItem]) -> None:
        """Give each claim its lease, or the record that prevents it.

        Guarantee: each token is greater than all earlier tokens of the operation.
        """
        first_token, now = self.next_token()
        inserted = self.insert_running(claims, first_token, now)
        existing = self.find_all([claim.id for claim in claims]) if inserted < len(claims) else {}
        for token, claim in enumerate(claims, start=first_token):
            record = existing.get(claim.id)
            if record is None or record.token == token:  # this claim's own row, inserted just now
                claim.result = Lease(claim.operation, token, now + claim.lease)
            elif claimable(claim.operation, record):  # expired, released, or its lease has lapsed
                claim.result = self.take_over(record, claim, token)
            else:  # running, settled or held: the caller decides
                claim.result = record

    def insert_running(self, claims: list[ClaimItem], first_token: int, now: float) -> int:
        """Insert a record for each claim that has none, and return their number."""
        rows: list[Row] = [(token, *claim_values(claim)) for token, claim in enumerate(claims, start=first_token)]
        return self.execute(*self.sql.claim.bind(now, rows)).rowcount

    def take_over(self, record: Record, claim: ClaimItem, token: int) -> Lease:
        """Give an existing record to *claim*."""
        columns, lease = taken_over(record, claim, token)
        if lease.attempt == 1:  # the record had expired
            self.execute(self.sql.archive, (record.token,))
        self.change(record, columns)
        return lease

    def settle(self, settles: list[SettleItem]) -> None:
        """Write the outcomes.  An owner that has lost its lease gets Fenced, unless it settled the record before."""
        written = self.execute(*self.sql.settle.bind(self.shift, [item.row for item in settles])).rowcount
        existing = self.find_all([item.id for item in settles]) if written < len(settles) else None
        for item in settles:
            item.result = None
            if existing is not None:
                record = existing.get(item.id)
                if record is None or record.token != item.held.token or state_of(record) != SETTLED:
                    item.result = fenced(item.held)

    # One record

    def apply_verb(self, held: Lease, verb: Verb, changes: Callable[[float], dict[str, Any]]) -> Record:
        """Apply the owner's *verb* to its record, and return the record as it was before.

        Raises Fenced if the lease is lost.  A verb that was applied before changes nothing.
        """
        record = self.find(held.operation.id)
        state = state_of(record)
        after = follows(state, verb)
        if record is None or record.token != held.token or after is None:
            raise fenced(held)
        if state != after or after == RUNNING:
            self.change(record, changes(record.now))
        return record

    def renew(self, held: Lease, lease: float) -> float:
        """Renew the lease, and return the time at which it now ends."""
        return self.apply_verb(held, "renew", lambda now: {"lease_until": now + lease}).now + lease

    def release(self, held: Lease, retention: float) -> None:
        self.apply_verb(held, "release", lambda now: released(now, retention))

    def hold(self, held: Lease, note: str) -> None:
        self.apply_verb(held, "hold", lambda _: {"state": HELD, "note": note})

    def unclaim(self, id: Id, holder: str) -> None:
        """Undo the claim with the name *holder*, if the record is still running under that name."""
        for statement in self.sql.unclaim:
            self.execute(statement, (self.shift, *id, holder))

    def touch(self, record: Record, retention: float) -> None:
        self.execute(self.sql.touch, (self.shift, retention, record.token, *record.id))

    def resolve(self, id: Id, outcome: Outcome | None, retention: float, note: str) -> Record | None:
        """Resolve an unknown outcome, and return the changed record.  Its token grows, so a late owner is fenced."""
        record = self.find(id)
        state = state_of(record)
        if record is None or follows(state, "resolve" if outcome is None else "settle_as") is None:
            raise not_resolvable(state)
        token, now = self.next_token()
        changes = released(now, retention) if outcome is None else settled(outcome, now, retention)
        self.change(record, {"token": token, "note": note, **changes})
        return self.find(id)

    def delete(self, id: Id) -> bool:
        """Delete the record, and return whether there was one.  The purge removes expired ones, because it archives."""
        record = self.find(id)
        state = state_of(record)
        if state == RUNNING:
            raise not_deletable()
        if record is None or state == "absent":
            return False
        self.execute(self.sql.delete, (record.token,))
        return True

    def purge(self, most: int) -> int:
        """Remove up to *most* expired records, and return their number."""
        _, now = self.next_token()
        self.execute(self.sql.archive_expired, (now, most))
        return self.execute(self.sql.delete_expired, (now, most)).rowcount

    def sweep(self, most: int) -> int:
        """Remove the oldest expired records, up to *most* or twice as many if one is overdue.  Return their number."""
        row = self.execute(self.sql.oldest_expired, (self.shift,)).fetchone()
        if row is None:
            return 0
        expired_at, now = row
        parameters = (now, most if now - expired_at < OVERDUE else 2 * most)
        self.execute(self.sql.archive_expired, parameters)
        return self.execute(self.sql.delete_expired, parameters).rowcount

    def find_all(self, ids: Iterable[Id]) -> dict[Id, Record]:
        """Return the records of *ids*; an id without a record is left out."""
        rows = self.execute(*self.sql.look.bind(self.shift, list(ids)))
        return {row[:2]: as_record(row) for row in rows}

    def find(self, id: Id) -> Record | None:
        row = self.execute(self.sql.look.single, (self.shift, *id)).fetchone()
        return None if row is None else as_record(row)

    def next_token(self) -> tuple[int, float]:
        """Return the first token that was never given, and the store's clock."""
        [(token, now)] = self.execute(self.sql.next_token, (self.shift,))
        return token, now

    def change(self, record: Record, columns: dict[str, Any]) -> None:
        self.execute(self.sql.change(columns), (*columns.values(), record.token))


def as_record(row: Row) -> Record:
    """Return the record in *row*.  An outcome that cannot be decoded becomes a tombstone."""
    outcome, note = row[OUTCOME], row[NOTE]
    if outcome is not None:
        try:
            outcome = decode_outcome(outcome)
        except (msgspec.MsgspecError, TypeError, ValueError):
            outcome, note = Outcome("tombstone"), UNREADABLE
    fields: Row = (*row[:OUTCOME], outcome, row[HASH], note, row[REQUEST] or b"")
    return Record(*fields)


def claimable(operation: Operation, record: Record) -> bool:
    """Whether the record may be claimed: it has expired, or it is free and has the same fingerprint."""
    state = state_of(record)
    return follows(state, "claim") is not None and (state == "absent" or record.fingerprint == operation.fingerprint)


def taken_over(record: Record, claim: ClaimItem, token: int) -> tuple[dict[str, Any], Lease]:
    """Return the columns that give the record to *claim*, and the lease.  An expired record restarts at attempt 1."""
    operation, state = claim.operation, state_of(record)
    attempts, created_at = (1, record.now) if state == "absent" else (record.attempts + 1, record.created_at)
    until = record.now + claim.lease
    columns = {"token": token, "state": RUNNING, **BLANK, "lapsed": int(state == "lapsed")}
    columns |= {"name": operation.name, "fingerprint": operation.fingerprint, "holder": claim.holder}
    columns |= {"attempts": attempts, "created_at": created_at, "lease_until": until}
    if claim.request or state == "absent":
        columns["request"] = claim.request or None
    return columns, Lease(operation, token, until, attempts, lapsed=state == "lapsed")


def bad_value_error(item: Item, error: Exception) -> OncemoreError:
    """Return the error for an item whose values SQLite cannot store."""
    if isinstance(item, ClaimItem) and isinstance(error, UnicodeError):
        return invalid_names()
    return as_store_error(error, "SQLite")


def invalid_names() -> InvalidKey:
    return InvalidKey("The operation's names cannot be stored: they contain lone surrogates; send valid Unicode text")


def settled(outcome: Outcome, now: float, retention: float) -> dict[str, Any]:
    """Return the changes that make a record settled."""
    times = {"settled_at": now, "accessed_at": now, "expires_at": now + retention}
    columns = {"status": outcome.status, "outcome": encode_outcome(outcome), "response_hash": outcome.digest()}
    return {"state": SETTLED, **times, **columns, "request": None}


def released(now: float, retention: float) -> dict[str, Any]:
    """Return the changes that make a record released."""
    return {"state": RELEASED, "expires_at": now + retention}
