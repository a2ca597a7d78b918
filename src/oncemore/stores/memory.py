"""A ledger in this process's memory, for tests and single processes.  It is lost when the process ends.

It is also the model that the other stores are compared with, so it takes its transitions from `_ledger/states.py`.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import msgspec

from .._ledger.connect import take_options
from .._ledger.decisions import fenced, not_deletable, not_resolvable
from .._ledger.model import Claim, Holder, Lease, Operation, Outcome, Record, state_of
from .._ledger.states import HELD, RELEASED, RUNNING, SETTLED, Verb, follows
from .._ledger.store import Filter, Page, Stats, token_of
from .._runtime.clock import SYSTEM
from .._runtime.forks import reset_in_child
from .._runtime.plan import Plan
from .._runtime.wakeups import Id, Wakeups

P = ParamSpec("P")
T = TypeVar("T")

replace = msgspec.structs.replace

DAY = 86400.0


def connect(url: str) -> MemoryStore:
    """Return a new, empty ledger."""
    take_options(url, {})
    return MemoryStore(url)


def schema(url: str) -> str:
    """Return an empty script, because memory needs no tables."""
    return ""


def as_plan(function: Callable[P, T]) -> Callable[P, Plan[T]]:
    """Make *function* a plan that yields no effects."""

    @wraps(function)
    def plan(*args: P.args, **kwargs: P.kwargs) -> Plan[T]:
        return function(*args, **kwargs)
        yield

    return plan


class MemoryStore:
    """Keeps records in a dictionary, under one lock."""

    poll = 1.0
    lender = None  # memory has no transaction that an effect could join

    def __init__(self, url: str = "memory://") -> None:
        self.url = url
        self.wakeups = Wakeups()
        self.shift = 0.0
        self.holder = Holder()
        self._epoch = SYSTEM.time() - SYSTEM.monotonic()  # the wall clock may be set back; the monotonic one never is
        self._reset()
        reset_in_child(self)
        self._tokens = itertools.count(1)
        self._records: dict[Id, Record] = {}
        self._audited: set[Id] = set()
        self._takeovers: set[Id] = set()  # the records whose latest claim took over a lapsed lease
        self.archive: list[Record] = []

    def _reset(self) -> None:
        self._lock = threading.Lock()

    def _now(self) -> float:
        return self._epoch + SYSTEM.monotonic() + self.shift

    def _state(self, id: Id, now: float) -> tuple[Record | None, str]:
        record = self._records.get(id)
        return record, state_of(record, now)

    # `claim` and `settle` are written as plans, without a decorator, because every operation pays for both.

    def claim(self, operation: Operation, *, lease: float, request: bytes = b"") -> Plan[Lease | Record]:
        id = operation.id
        with self._lock:
            now = self._now()
            record, state = self._state(id, now)
            attempts, created_at = 1, now
            if record is not None and state != "absent":
                if follows(state, "claim") is None or record.fingerprint != operation.fingerprint:
                    return replace(record, now=now)
                attempts, created_at = record.attempts + 1, record.created_at
                request = request or record.request
            elif record is not None:
                self._archive(record)
            token, until = next(self._tokens), now + lease
            names = (*id, operation.name, operation.fingerprint)
            holder = self.holder.next()
            made = self._records[id] = Record(*names, RUNNING, token, holder, attempts, created_at, until, now)
            if request:
                self._records[id] = replace(made, request=request)
            if state == "lapsed":
                self._takeovers.add(id)
            elif self._takeovers:
                self._takeovers.discard(id)
        return Lease(operation, token, until, attempts, state == "lapsed")
        yield

    @as_plan
    def unclaim(self, claims: Sequence[Claim]) -> None:
        for id in (claim.operation.id for claim in claims if self._undo(claim)):
            self.wakeups.notify(id)

    def _undo(self, claim: Claim) -> bool:
        """Put the record back into its state before *claim*.  Return False if the record is no longer this claim's."""
        id = claim.operation.id
        with self._lock:
            now = self._now()
            record = self._records.get(id)
            if record is None or record.state != RUNNING or record.holder != claim.holder:
                return False
            if id in self._takeovers:
                self._records[id] = replace(record, lease_until=now)
            elif record.attempts == 1:
                del self._records[id]
            else:
                self._records[id] = replace(record, state=RELEASED, expires_at=now + DAY)
        return True

    def settle(
        self, held: Lease, outcome: Outcome, *, retention: float, audit: bool = False, note: str = ""
    ) -> Plan[None]:
        id = held.operation.id
        with self._lock:
            now = self._now()
            self._apply_verb(held, "settle", now, note=note, **settled(outcome, now, retention))
            if audit:
                self._audited.add(id)
        self.wakeups.notify(id)
        return
        yield

    def _archive(self, record: Record) -> None:
        """Move an expired record to the archive if its rule keeps it for the audit."""
        if record.id in self._audited:
            self._audited.discard(record.id)
            self.archive.append(record)

    def _apply_verb(self, held: Lease, verb: Verb, now: float, **changes: Any) -> Record:
        """Apply the owner's *verb* and return the record after it.  A verb that was applied before changes nothing.

        Raises Fenced if the lease is lost.
        """
        id = held.operation.id
        record, state = self._state(id, now)
        after = follows(state, verb)
        if record is None or record.token != held.token or after is None:
            raise fenced(held)
        if state == after != RUNNING:
            return record
        changed = self._records[id] = replace(record, **changes)
        return changed

    @as_plan
    def renew(self, held: Lease, *, lease: float) -> Lease:
        with self._lock:
            now = self._now()
            record = self._apply_verb(held, "renew", now, lease_until=now + lease)
        return replace(held, expires_at=record.lease_until)

    @as_plan
    def release(self, held: Lease, *, retention: float) -> None:
        with self._lock:
            now = self._now()
            self._apply_verb(held, "release", now, state=RELEASED, expires_at=now + retention)
        self.wakeups.notify(held.operation.id)

    @as_plan
    def hold(self, held: Lease, *, note: str = "") -> None:
        with self._lock:
            self._apply_verb(held, "hold", self._now(), state=HELD, note=note)
        self.wakeups.notify(held.operation.id)

    @as_plan
    def touch(self, record: Record, *, retention: float) -> None:
        with self._lock:
            now = self._now()
            found, state = self._state(record.id, now)
            if found is not None and state == SETTLED and found.token == record.token:
                self._records[record.id] = replace(found, accessed_at=now, expires_at=now + retention)

    @as_plan
    def watch(self, record: Record) -> None:
        """Do nothing, because every change happens in this process and wakes its waiters."""

    @as_plan
    def find(self, scope: str, key: str) -> Record | None:
        with self._lock:
            now = self._now()
            record, state = self._state((scope, key), now)
            return replace(record, now=now) if record is not None and state != "absent" else None

    @as_plan
    def list(self, where: Filter, *, limit: int = 100, cursor: str | None = None) -> Page:
        after = token_of(cursor)
        with self._lock:
            now = self._now()
            records = [
                replace(record, now=now)
                for record in sorted(self._records.values(), key=lambda record: record.token)
                if record.token > after and self._state(record.id, now)[1] != "absent"
            ]
        found = [record for record in records if where.matches(record)]
        more = str(found[limit - 1].token) if len(found) > limit else None
        return Page(tuple(found[:limit]), more)

    @as_plan
    def resolve(self, scope: str, key: str, outcome: Outcome | None, *, retention: float, note: str = "") -> Record:
        with self._lock:
            now = self._now()
            record, state = self._state((scope, key), now)
            if record is None or follows(state, "resolve" if outcome is None else "settle_as") is None:
                raise not_resolvable(state)
            changes = (
                {"state": RELEASED, "expires_at": now + retention}
                if outcome is None
                else settled(outcome, now, retention)
            )
            record = self._records[record.id] = replace(record, token=next(self._tokens), note=note, now=now, **changes)
        self.wakeups.notify(record.id)
        return record

    @as_plan
    def delete(self, scope: str, key: str) -> bool:
        with self._lock:
            record, state = self._state((scope, key), self._now())
            if state == RUNNING:
                raise not_deletable()
            if record is not None and state == "absent":
                self._archive(record)
            self._records.pop((scope, key), None)
            self._audited.discard((scope, key))
            self._takeovers.discard((scope, key))
        self.wakeups.notify((scope, key))
        return state != "absent"

    @as_plan
    def purge(self, *, batch: int = 1000) -> int:
        with self._lock:
            now = self._now()
            gone = [id for id in self._records if self._state(id, now)[1] == "absent"][:batch]
            for id in gone:
                self._archive(self._records.pop(id))
                self._takeovers.discard(id)
        return len(gone)

    @as_plan
    def stats(self) -> Stats:
        with self._lock:
            now = self._now()
            counts: dict[str, int] = {"archived": len(self.archive)}
            for id, record in self._records.items():
                for name in {record.state, {"absent": "expired"}.get(self._state(id, now)[1], self._state(id, now)[1])}:
                    counts[name] = counts.get(name, 0) + 1
        return Stats(**counts)

    def close(self) -> None:
        """Do nothing: the store has no connections, and its records stay."""

    async def aclose(self) -> None:
        """Do nothing, like `close`."""


def settled(outcome: Outcome, now: float, retention: float) -> dict[str, Any]:
    """Return the changes that make a record settled."""
    return {
        "state": SETTLED,
        "outcome": outcome,
        "request": b"",
        "response_hash": outcome.digest(),
        "settled_at": now,
        "accessed_at": now,
        "expires_at": now + retention,
    }
