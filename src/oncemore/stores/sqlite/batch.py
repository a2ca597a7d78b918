"""One write transaction that carries what many callers ask of the ledger; each gets its own answer."""

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
from .items import Change, Claim, Item, Settle, kept
from .statements import Row, Statements, as_record
from .writer import BAD_VALUES, as_store_error, is_bad_value, is_busy

# How long a key that had been used before is remembered when its lease was granted to a caller that had gone.
USED_BEFORE = 86400.0

# What a record forgets when it is claimed again.
BLANK: dict[str, Any] = {
    "settled_at": None,
    "expires_at": None,
    "accessed_at": None,
    "status": None,
    "outcome": None,
    "response_hash": "",
    "note": "",
    "audit": 0,
}


def fly(connection: sqlite3.Connection, sql: Statements, shift: float, items: list[Item]) -> list[Any]:
    """The answer to each item, after one commit for all."""
    flight = Flight(connection, sql, shift)
    try:
        if len(items) == 1 and flight.carry_alone(items[0]):
            return [items[0].answer]
        connection.execute("BEGIN IMMEDIATE")
        flight.carry_all(items)
        connection.execute("COMMIT")
    except BaseException as error:
        if is_busy(error) and not connection.in_transaction and flight.refuse(items):  # so the lock is not needed
            return [item.answer for item in items]
        for item in items:
            item.answer = None  # what was not committed was not given
        raise
    return [item.answer for item in items]


def apart(items: list[Item]) -> Sequence[list[Item]]:
    """The items in groups, in order, such that no group has two for the same record."""
    if len(items) == 1 or len({item.id for item in items}) == len(items):
        return (items,)
    groups: list[list[Item]] = []
    seen: dict[Id, int] = {}
    for item in items:
        turn = seen[item.id] = seen.get(item.id, -1) + 1
        if turn == len(groups):
            groups.append([])
        groups[turn].append(item)
    return groups


class Flight:
    """The ledger within one transaction of *connection*.  Nobody else writes meanwhile, so what is read stays true."""

    def __init__(self, connection: sqlite3.Connection, sql: Statements, shift: float) -> None:
        self.execute = connection.execute
        self.sql = sql
        self.shift = shift

    # Groups

    def carry_all(self, items: list[Item]) -> None:
        """Answer the items together; where one of them cannot be carried, one by one."""
        try:
            for group in apart(items):
                self.carry(group)
        except BAD_VALUES as error:
            if not is_bad_value(error):
                raise
            self.execute("ROLLBACK")
            self.execute("BEGIN IMMEDIATE")
            self.carry_one_by_one(items)

    def carry(self, items: list[Item]) -> None:
        """Answer the items, of which no two are for the same record."""
        if claims := [item for item in items if isinstance(item, Claim)]:
            self.claim(claims)
        if settles := [item for item in items if isinstance(item, Settle)]:
            self.settle(settles)
        if len(claims) + len(settles) < len(items):
            for item in items:
                if isinstance(item, Change):
                    item.answer = self.apply(item)

    def carry_alone(self, item: Item) -> bool:
        """Whether the item could be answered by one statement, which is a transaction of its own: most are plain."""
        try:
            if isinstance(item, Claim):
                item.answer = self.claim_new(item.operation, item.lease, item.holder)
                return item.answer is not None
            return (
                isinstance(item, Settle) and self.execute(*self.sql.settle.bind(self.shift, [item.row])).rowcount == 1
            )
        except BAD_VALUES as error:
            if not is_bad_value(error):
                raise
            return False

    def carry_one_by_one(self, items: list[Item]) -> None:
        """Answer the items though some cannot be: those get an error each, and harm no other."""
        for item in items:
            self.execute("SAVEPOINT item")
            try:
                self.carry([item])
            except Exception as error:
                if not is_bad_value(error):
                    raise
                self.execute("ROLLBACK TO item")
                item.answer = refusal(item, error)
            self.execute("RELEASE item")

    def refuse(self, items: list[Item]) -> bool:
        """Whether all items are claims that a record stops; then these records are the answers."""
        claims = [item for item in items if isinstance(item, Claim)]
        known = self.look({item.id for item in claims}) if len(claims) == len(items) else {}
        for item in claims:
            item.answer = known.get(item.id)
            if item.answer is None or claimable(item.operation, item.answer):
                return False
        return len(claims) == len(items)

    def apply(self, item: Change) -> Any:
        try:
            return item.apply(self)
        except OncemoreError as error:  # raised before anything is written
            return error

    def claim(self, items: list[Claim]) -> None:
        """Insert the new ones; where a record stands in the way, it is taken over or it is the answer."""
        token, now = self.next_token()
        rows: list[Row] = [
            (n, *item.id, item.operation.name, item.operation.fingerprint, item.holder, item.lease)
            for n, item in enumerate(items, start=token)
        ]
        inserted = self.execute(*self.sql.claim.bind(now, rows)).rowcount
        known = self.look([item.id for item in items]) if inserted < len(items) else {}
        for n, item in enumerate(items, start=token):
            record = known.get(item.id)
            if record is None or record.token == n:
                item.answer = Lease(item.operation, n, now + item.lease)
            else:
                item.answer = self.take(item, record, n)

    def claim_here(self, operation: Operation, lease: float, holder: str) -> Lease | Record:
        """As `claim`, for one alone."""
        found = self.claim_new(operation, lease, holder)
        if found is not None:
            return found
        item = Claim(operation, lease, holder)
        self.claim([item])
        return item.answer  # type: ignore[no-any-return]

    def claim_new(self, operation: Operation, lease: float, holder: str) -> Lease | None:
        """The lease where no record stands in the way, by one statement."""
        names = (*operation.id, operation.name, operation.fingerprint, holder)
        inserted = self.execute(self.sql.claim_one, (self.shift, *names, lease))
        if inserted.rowcount != 1 or inserted.lastrowid is None:
            return None
        return Lease(operation, inserted.lastrowid, SYSTEM.time() + self.shift + lease)

    def take(self, item: Claim, record: Record, token: int) -> Lease | Record:
        """The lease on a record that exists, or the record."""
        operation, state = item.operation, state_of(record)
        if not claimable(operation, record):
            return record
        attempts, created_at = record.attempts + 1, record.created_at
        if state == "absent":
            attempts, created_at = 1, record.now
            self.execute(self.sql.archive, (record.token,))
        until = record.now + item.lease
        names = {"name": operation.name, "fingerprint": operation.fingerprint, "holder": item.holder}
        times = {"attempts": attempts, "created_at": created_at, "lease_until": until}
        self.change(record, {"token": token, "state": RUNNING, **names, **times, **BLANK})
        return Lease(operation, token, until, attempts, lapsed=state == "lapsed")

    def settle(self, items: list[Settle]) -> None:
        """Write the outcomes; where a lease no longer holds, its owner is told, unless it had settled before."""
        written = self.execute(*self.sql.settle.bind(self.shift, [item.row for item in items])).rowcount
        known = self.look([item.id for item in items]) if written < len(items) else None
        for item in items:
            item.answer = None
            if known is not None:
                record = known.get(item.id)
                if record is None or record.token != item.held.token or state_of(record) != SETTLED:
                    item.answer = fenced(item.held)

    # One record

    def own(self, held: Lease, verb: Verb, changes: Callable[[float], dict[str, Any]]) -> Record:
        """The record before its owner's *verb*; anyone else's is refused, and the same said again changes nothing."""
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

    def give_back(self, claim: Item) -> None:
        """Undo a claim: its caller has gone, so the next one may have it."""
        lease = claim.answer
        if not isinstance(lease, Lease):
            return
        if lease.lapsed:  # a former holder's effect is in doubt, and so it must stay
            self.renew(lease, 0.0)
        else:  # a first attempt is forgotten, or the next would not be the first
            self.release(lease, 0.0 if lease.attempt == 1 else USED_BEFORE)

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

    def look(self, ids: Iterable[Id]) -> dict[Id, Record]:
        """The records of those ids that have one."""
        rows = self.execute(*self.sql.look.bind(self.shift, list(ids)))
        return {row[:2]: as_record(row) for row in rows}

    def find(self, id: Id) -> Record | None:
        return self.look([id]).get(id)

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


def refusal(item: Item, error: Exception) -> OncemoreError:
    """What the caller of a bad item is told."""
    if isinstance(item, Claim) and isinstance(error, UnicodeError):
        return InvalidKey("The operation's names cannot be stored: they have characters that are no Unicode text")
    return as_store_error(error, "SQLite")


def settled(outcome: Outcome, now: float, retention: float) -> dict[str, Any]:
    """The changes that make a record settled."""
    times = {"settled_at": now, "accessed_at": now, "expires_at": now + retention}
    return {"state": SETTLED, **times, **kept(outcome)}


def released(now: float, retention: float) -> dict[str, Any]:
    """The changes that make a record released."""
    return {"state": RELEASED, "expires_at": now + retention}
