"""Requests, kept in a ledger: each is a letter, settled at once, whose outcome is the request itself."""

from __future__ import annotations

import msgspec

from ..._ledger.model import Lease, Operation, Outcome, Record
from ..._ledger.store import Filter, Store
from ..._runtime.plan import Plan
from ...errors import CorruptRecord, Fenced, Refusal, StoreError
from ..errors import KeyringError
from ..story import log
from .entry import Entry

RUN, LETTER = "oncemore.keyring", "oncemore.keyring.letter"

# A letter is written under its run's lease, so its own protects nothing, and must be over before anyone looks.
BRIEF = 1.0
# A run without a letter counts as never sent, so a letter must not expire before its run has ended: a hundred years.
FOREVER = 100 * 365 * 86400.0

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Entry).decode


def run_of(entry: Entry, *, beside: bool = False) -> Operation:
    """The name of a run in the ledger: the entry's own, or one that no other run can have."""
    key = f"{entry.key} {entry.token:x}" if beside else entry.key
    return Operation(f"{RUN} {entry.scope}", key, entry.fingerprint, RUN)


def letter_of(run: Operation) -> Operation:
    """The name of a run's letter."""
    return Operation(LETTER + run.scope.removeprefix(RUN), run.key, name=LETTER)


class Letters:
    """The letters in *store*."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def write(self, run: Operation, entry: Entry) -> Plan[None]:
        """Write the letter of a new run, over one that was left by a run which sent nothing."""
        letter = letter_of(run)
        lease = yield from self.store.claim(letter, lease=BRIEF)
        if isinstance(lease, Record):
            yield from self.delete(letter)
            lease = yield from self.store.claim(letter, lease=BRIEF)
        if isinstance(lease, Record):
            raise KeyringError(f"{entry.scope}: key {entry.key} is being written down by another; nothing was sent")
        yield from self.store.settle(lease, Outcome("value", body=encode(entry)), retention=FOREVER)

    def read(self, run: Operation) -> Plan[Entry | None]:
        """What is to be sent; None where the run has sent nothing, for it has no letter yet."""
        found = yield from self.store.find(*letter_of(run).id)
        return None if found is None else opened(found)

    def drop(self, run: Operation) -> Plan[None]:
        """Delete the letter of a run that has ended."""
        yield from self.delete(letter_of(run))

    def delete(self, operation: Operation) -> Plan[bool]:
        """Whether the record is gone; it is not where someone is at work on it."""
        try:
            yield from self.store.delete(*operation.id)
        except Refusal:
            return False
        return True

    def sweep(self, age: float) -> Plan[None]:
        """Delete the letters, older than *age*, of runs that ended while their process died: nobody else would."""
        for record in (yield from self.all(Filter(name=LETTER, state="settled"))):
            if record.now - (record.settled_at or record.now) > age:
                run = Operation(RUN + record.scope.removeprefix(LETTER), record.key, name=RUN)
                yield from self._sweep(run)

    def _sweep(self, run: Operation) -> Plan[None]:
        known = yield from self.store.find(*run.id)
        if known is None:  # under a lease of our own, so that no new run begins to write meanwhile
            lease = yield from self.store.claim(run, lease=BRIEF)
            if isinstance(lease, Lease):
                yield from self.drop(run)
                yield from give_back(self.store, lease)
        elif known.state == "settled":
            yield from self.drop(run)

    def all(self, where: Filter) -> Plan[list[Record]]:
        """Every record that *where* asks for, page after page."""
        page = yield from self.store.list(where)
        found = list(page.records)
        while page.cursor is not None:
            page = yield from self.store.list(where, cursor=page.cursor)
            found.extend(page.records)
        return found


def opened(record: Record) -> Entry | None:
    """The entry in a settled record."""
    if record.state != "settled" or record.outcome is None:
        return None
    try:
        return decode(record.outcome.body)
    except msgspec.MsgspecError as error:
        raise CorruptRecord(f"What is to be sent under {record.key!r} cannot be read; was it sealed?") from error


def give_back(store: Store, lease: Lease) -> Plan[bool]:
    """Whether a run that has sent nothing is free again; where the store fails, it lapses."""
    try:
        yield from store.release(lease, retention=0.0)
    except StoreError as error:
        log.info("A claim on the keyring could not be given back, and lapses: %s", error)
        return False
    except Fenced:  # by whoever has it now
        pass
    return True
