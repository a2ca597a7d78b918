"""One write transaction that carries out the items of many callers; each gets its own result."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..._ledger.decisions import fenced, not_deletable, not_resolvable
from ..._ledger.model import Lease, Operation, Outcome, Record
from ..._ledger.states import HELD, RELEASED, RUNNING, SETTLED, Verb, follows, read
from ..._runtime.clock import SYSTEM
from ..._runtime.wakeups import Id
from ...errors import InvalidKey, OncemoreError
from .items import Change, Claim, Item, Settle, outcome_columns
from .statements import Row, Statements, as_record
from .writer import BAD_VALUES, as_store_error, is_bad_value, is_busy

# Columns that a record loses when it is claimed again.  Its request is not among them.
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


def run_batch(connection: sqlite3.Connection, sql: Statements, shift: float, items: list[Item]) -> list[Any]:
    """Carry out *items* with one commit, and return their results.  If this raises, nothing was committed."""
    batch = Batch(connection, sql, shift)
    try:
        if len(items) == 1 and batch.run_single(items[0]):
            return [items[0].result]
        connection.execute("BEGIN IMMEDIATE")
        batch.run(items)
        connection.execute("COMMIT")
    except BaseException as error:
        # Replays need no lock, so that they are answered while another process writes.
        if is_busy(error) and not connection.in_transaction and batch.find_obstacles(items):
            return [item.result for item in items]
        raise
    return [item.result for item in items]


def split_duplicates(items: list[Item]) -> Sequence[list[Item]]:
    """The items in groups, in order, such that no group has two for the same record."""
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


class Batch:
    """The ledger's verbs in one transaction of *connection*.

    Precondition: the transaction holds the write lock (BEGIN IMMEDIATE), so records read here stay true until COMMIT.
    """

    def __init__(self, connection: sqlite3.Connection, sql: Statements, shift: float) -> None:
        self.execute = connection.execute
        self.sql = sql
        self.shift = shift

    # Many items

    def run(self, items: list[Item]) -> None:
        """Carry out the items together; if the values of one are bad, one by one."""
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
        """Carry out items of which no two are for the same record."""
        if claims := [item for item in items if isinstance(item, Claim)]:
            self.claim(claims)
        if settles := [item for item in items if isinstance(item, Settle)]:
            self.settle(settles)
        if len(claims) + len(settles) < len(items):
            for item in items:
                if isinstance(item, Change):
                    item.result = self.apply(item)

    def run_single(self, item: Item) -> bool:
        """Carry out the item by one statement, which is a transaction of its own; False if that is not possible."""
        try:
            if isinstance(item, Claim):
                item.result = None if item.request else self.claim_new(item.operation, item.lease, item.holder)
                return item.result is not None
            return (
                isinstance(item, Settle) and self.execute(*self.sql.settle.bind(self.shift, [item.row])).rowcount == 1
            )
        except BAD_VALUES as error:
            if not is_bad_value(error):
                raise
            return False

    def run_one_by_one(self, items: list[Item]) -> None:
        """Carry out the items, each in a savepoint; an item with bad values gets an error, and harms no other."""
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
        """Whether all items are claims that an existing record prevents; these records are then the results."""
        claims = [item for item in items if isinstance(item, Claim)]
        existing = self.find_all({item.id for item in claims}) if len(claims) == len(items) else {}
        for claim in claims:
            claim.result = existing.get(claim.id)
            if claim.result is None or claimable(claim.operation, claim.result):
                return False
        return len(claims) == len(items)

    def apply(self, item: Change) -> Any:
        try:
            return item.apply(self)
        except OncemoreError as error:  # raised before anything is written
            return error

    def claim(self, claims: list[Claim]) -> None:
        """Give each claim its lease, or the record that prevents it.

        Guarantee: each token is greater than any that this operation has had before.
        """
        first_token, now = self.next_token()
        inserted = self.insert_running(claims, first_token, now)
        existing = self.find_all([claim.id for claim in claims]) if inserted < len(claims) else {}
        for token, claim in enumerate(claims, start=first_token):
            record = existing.get(claim.id)
            if record is None or record.token == token:  # our own row, inserted just now
                claim.result = Lease(claim.operation, token, now + claim.lease)
                if claim.request:
                    self.execute(self.sql.set_request, (claim.request, token))
            elif claimable(claim.operation, record):  # expired, released, or its lease has lapsed
                claim.result = self.take_over(record, claim, token)
            else:  # running, settled or held: the caller decides
                claim.result = record

    def insert_running(self, claims: list[Claim], first_token: int, now: float) -> int:
        """Insert a record for each claim that has none, and return their number."""
        rows: list[Row] = [
            (token, *claim.id, claim.operation.name, claim.operation.fingerprint, claim.holder, claim.lease)
            for token, claim in enumerate(claims, start=first_token)
        ]
        return self.execute(*self.sql.claim.bind(now, rows)).rowcount

    def claim_new(self, operation: Operation, lease: float, holder: str) -> Lease | None:
        """Insert a record by one statement, and return its lease; None if there is a record."""
        names = (*operation.id, operation.name, operation.fingerprint, holder)
        inserted = self.execute(self.sql.claim_one, (self.shift, *names, lease))
        if inserted.rowcount != 1 or inserted.lastrowid is None:
            return None
        return Lease(operation, inserted.lastrowid, SYSTEM.time() + self.shift + lease)

    def take_over(self, record: Record, claim: Claim, token: int) -> Lease:
        """Give an existing record to *claim*."""
        columns, lease = taken_over(record, claim, token)
        if lease.attempt == 1:  # it has expired
            self.execute(self.sql.archive, (record.token,))
        self.change(record, columns)
        return lease

    def settle(self, settles: list[Settle]) -> None:
        """Write the outcomes.  An owner whose lease is lost gets Fenced, unless it has settled before."""
        written = self.execute(*self.sql.settle.bind(self.shift, [item.row for item in settles])).rowcount
        existing = self.find_all([item.id for item in settles]) if written < len(settles) else None
        for item in settles:
            item.result = None
            if existing is not None:
                record = existing.get(item.id)
                if record is None or record.token != item.held.token or state_of(record) != SETTLED:
                    item.result = fenced(item.held)

    # One record

    def own(self, held: Lease, verb: Verb, changes: Callable[[float], dict[str, Any]]) -> Record:
        """Carry out its owner's *verb* on a record, and return the record as it was before.

        Raises Fenced if the lease is lost.  A verb that was carried out before changes nothing.
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
        """When the lease now ends."""
        return self.own(held, "renew", lambda now: {"lease_until": now + lease}).now + lease

    def release(self, held: Lease, retention: float) -> None:
        self.own(held, "release", lambda now: released(now, retention))

    def hold(self, held: Lease, note: str) -> None:
        self.own(held, "hold", lambda _: {"state": HELD, "note": note})

    def unclaim(self, id: Id, holder: str) -> None:
        """Undo the claim that *holder* names, if the record is still running under it."""
        for statement in self.sql.unclaim:
            self.execute(statement, (self.shift, *id, holder))

    def touch(self, record: Record, retention: float) -> None:
        self.execute(self.sql.touch, (self.shift, retention, record.token, *record.id))

    def resolve(self, id: Id, outcome: Outcome | None, retention: float, note: str) -> Record | None:
        """The record as it was decided; its token grows, so that a holder who comes back after all is fenced."""
        record = self.find(id)
        state = state_of(record)
        if record is None or follows(state, "resolve" if outcome is None else "settle_as") is None:
            raise not_resolvable(state)
        token, now = self.next_token()
        changes = released(now, retention) if outcome is None else settled(outcome, now, retention)
        self.change(record, {"token": token, "note": note, **changes})
        return self.find(id)

    def delete(self, id: Id) -> bool:
        """Whether there was a record; now there is none.  What has expired is left to the purge, which may archive it."""
        record = self.find(id)
        state = state_of(record)
        if state == RUNNING:
            raise not_deletable()
        if record is None or state == "absent":
            return False
        self.execute(self.sql.delete, (record.token,))
        return True

    def purge(self, most: int) -> int:
        """How many expired records were removed."""
        _, now = self.next_token()
        self.execute(self.sql.archive_expired, (now, most))
        return self.execute(self.sql.delete_expired, (now, most)).rowcount

    def find_all(self, ids: Iterable[Id]) -> dict[Id, Record]:
        """The records of those ids that have one."""
        rows = self.execute(*self.sql.look.bind(self.shift, list(ids)))
        return {row[:2]: as_record(row) for row in rows}

    def find(self, id: Id) -> Record | None:
        return self.find_all([id]).get(id)

    def next_token(self) -> tuple[int, float]:
        """The first token that was never given, and the store's clock."""
        [(token, now)] = self.execute(self.sql.next_token, (self.shift,))
        return token, now

    def change(self, record: Record, columns: dict[str, Any]) -> None:
        self.execute(self.sql.change(columns), (*columns.values(), record.token))


def state_of(record: Record | None) -> str:
    """The state as the store's clock sees it."""
    if record is None:
        return "absent"
    expired = record.expires_at is not None and record.expires_at <= record.now
    return read(record.state, expired=expired, lapsed=record.lease_until <= record.now)


def claimable(operation: Operation, record: Record) -> bool:
    """Whether the record may be claimed: it is as good as none, or it is free and of the same request."""
    state = state_of(record)
    return follows(state, "claim") is not None and (state == "absent" or record.fingerprint == operation.fingerprint)


def taken_over(record: Record, claim: Claim, token: int) -> tuple[dict[str, Any], Lease]:
    """The columns that give an existing record to *claim*, and its lease.  An expired record begins with attempt 1 again."""
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
    """The error of an item whose values SQLite cannot take."""
    if isinstance(item, Claim) and isinstance(error, UnicodeError):
        return InvalidKey("The operation's names cannot be stored: they have characters that are no Unicode text")
    return as_store_error(error, "SQLite")


def settled(outcome: Outcome, now: float, retention: float) -> dict[str, Any]:
    """The changes that make a record settled."""
    times = {"settled_at": now, "accessed_at": now, "expires_at": now + retention}
    return {"state": SETTLED, **times, **outcome_columns(outcome), "request": None}


def released(now: float, retention: float) -> dict[str, Any]:
    """The changes that make a record released."""
    return {"state": RELEASED, "expires_at": now + retention}
