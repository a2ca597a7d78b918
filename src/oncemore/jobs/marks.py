"""Marks: small records of the same ledger with the progress of a schedule, its pauses and its misses."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

import msgspec

from .._contract.keys import bounded, join
from .._ledger.guard import Guard
from .._ledger.model import Lease, Operation, Record
from .._ledger.store import Filter
from .._ledger.values import NOTHING
from .._runtime.plan import Plan

SCHEDULE = "oncemore.schedule"
MISSED = "oncemore.missed"
FOR_EVER = 3650 * 86400.0
LEASE = 10.0
PAGE = 500


class Missed(msgspec.Struct, frozen=True):
    """A scheduled time that passed without its slot.

    *slot* is the slot's key, or the name of the time if the job has items and no schedule ran.  *why* is "downtime" (no
    schedule ran, or it was paused, and `catch_up` did not apply) or "overlap" (the previous slot was still running).
    """

    job: str
    slot: str
    at: datetime
    why: str


class Marks:
    """Reads and writes the marks of one schedule.  A lost update is harmless: slots checked twice run once."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard

    def reached(self, name: str) -> Plan[float | None]:
        """Return the time until which the ticks of the entry *name* are done, or None if it has never run."""
        record = yield from self.guard.store.find(SCHEDULE, key("reached", name))
        if record is None or not record.request:
            return None
        return float(msgspec.msgpack.decode(record.request))

    def reach(self, name: str, moment: float) -> Plan[None]:
        """Record that the ticks until *moment* are done."""
        mark = Operation(SCHEDULE, key("reached", name), name=SCHEDULE)
        found = yield from self.guard.store.claim(mark, lease=LEASE, request=msgspec.msgpack.encode(float(moment)))
        if isinstance(found, Lease):  # otherwise another process writes the mark at this moment
            yield from self.guard.store.release(found, retention=FOR_EVER)

    def pause(self, job: str) -> Plan[None]:
        found = yield from self.guard.store.claim(Operation(SCHEDULE, key("paused", job), name=SCHEDULE), lease=LEASE)
        if isinstance(found, Lease):
            yield from self.guard.store.settle(found, NOTHING, retention=FOR_EVER)

    def resume(self, job: str) -> Plan[None]:
        yield from self.guard.store.delete(SCHEDULE, key("paused", job))

    def is_paused(self, job: str) -> Plan[bool]:
        return (yield from self.guard.store.find(SCHEDULE, key("paused", job))) is not None

    def miss(self, missed: Missed) -> Plan[None]:
        """Record a missed slot, and tell the observers.  Both are done only once, in one of the processes."""
        mark = Operation(join(MISSED, missed.job), bounded(missed.slot), name=MISSED)
        found = yield from self.guard.store.claim(mark, lease=LEASE)
        if isinstance(found, Lease):
            note = f"{missed.at.timestamp():.0f} {missed.why}"  # not in the outcome, which may be sealed
            yield from self.guard.store.settle(found, NOTHING, retention=FOR_EVER, note=note)
            self.guard.emit("missed", Operation(missed.job, missed.slot, name=missed.job), detail=missed.why)

    def forget_miss(self, job: str, slot: str) -> Plan[None]:
        yield from self.guard.store.delete(join(MISSED, job), bounded(slot))

    def misses(self, job: str) -> Plan[list[Missed]]:
        """Return the misses of a job, the earliest first.  Slots that were run since then are left out."""
        found: list[Missed] = []
        cursor: str | None = None
        while True:
            page = yield from self.guard.store.list(
                Filter(scope=join(MISSED, job), state="settled"), limit=PAGE, cursor=cursor
            )
            for missed in read_misses(job, page.records):
                if (yield from self.guard.store.find(job, missed.slot)) is None:
                    found.append(missed)
            cursor = page.cursor
            if cursor is None:
                return sorted(found, key=lambda missed: (missed.at, missed.slot))


def read_misses(job: str, records: tuple[Record, ...]) -> Iterator[Missed]:
    for record in records:
        at, _, why = record.note.partition(" ")
        yield Missed(job, record.key, datetime.fromtimestamp(int(at), UTC), why)


def key(kind: str, name: str) -> str:
    return bounded(f"{kind}:{name}")
