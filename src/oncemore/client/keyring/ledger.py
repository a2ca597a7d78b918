"""The keyring in a ledger: any store keeps keys and request bytes, for many machines, and a lease tells who is at work.

Two records stand for one operation.  The *run* is claimed for as long as it is under way: its lease is renewed while the
process lives, and lapses when it dies.  The *letter* keeps the request.  The first byte is sent when both are durable.
"""

from __future__ import annotations

import secrets
from contextlib import suppress
from typing import TypeVar

from msgspec.structs import replace

from ..._ledger.decisions import is_over
from ..._ledger.model import Lease, Operation, Outcome, Record
from ..._ledger.store import Filter, Store
from ..._runtime.plan import Plan
from ...errors import ConfigurationError, CorruptRecord, Fenced, Refusal, StoreError
from ..effects import FinishDespiteCancel
from ..errors import KeyringError
from ..story import log
from . import RETENTION
from .entry import Entry, State, check_reuse, is_sendable
from .letters import FOREVER, RUN, Letters, encode, give_back, opened, run_of
from .runs import Runs

# So long after its process died, an operation can be resumed; it is renewed three times in that span.
LEASE = 15.0

TOLD = "its caller was told that the outcome is unknown"
TOO_OLD = "the server may have forgotten the key"
UNREADABLE = "what is to be sent cannot be read"

T = TypeVar("T")


class Turn:
    """A run that may begin: its lease, and its letter, which may still have to be *written*."""

    __slots__ = ("lease", "letter", "written")

    def __init__(self, lease: Lease, letter: Entry, *, written: bool) -> None:
        self.lease = lease
        self.letter = letter
        self.written = written


class LedgerKeyring:
    """A keyring in *store*.  One that was opened for the keyring alone (*own_store*) is also purged and closed by it."""

    def __init__(
        self, store: Store, *, lease: float = LEASE, retention: float = RETENTION, own_store: bool = False
    ) -> None:
        if lease <= 0:
            raise ConfigurationError(f"lease={lease:g}s of the keyring: a living process would lose what it is at")
        self.store = store
        self.lease = lease
        self.retention = retention
        self._own_store = own_store
        self._letters = Letters(store)
        self._runs = Runs(store, lease)

    # The verbs

    def claim(self, entry: Entry, *, oldest: float) -> Plan[Entry]:
        return (yield from self._told(self._claim(entry, oldest)))

    def settle(self, entry: Entry, status: int) -> Plan[None]:
        run = yield from self._runs.end(entry)
        if run is not None:
            done = encode(replace(run.letter, state="settled", status=status, body=None))
            settling = self.store.settle(run.lease, Outcome("value", status, body=done), retention=self.retention)
            if (yield from self._unless_taken(settling)):
                yield from self._letters.drop(run.lease.operation)

    def leave(self, entry: Entry) -> Plan[None]:
        run = yield from self._runs.end(entry)
        if run is not None:
            yield from self._unless_taken(self.store.hold(run.lease, note=TOLD))

    def forget(self, entry: Entry) -> Plan[None]:
        run = yield from self._runs.end(entry)
        if run is None:
            yield from self._told(self._forget_idle(entry))
        elif (yield from self._unless_taken(self.store.release(run.lease, retention=0.0))):
            yield from self._letters.drop(run.lease.operation)

    def _forget_idle(self, entry: Entry) -> Plan[None]:
        for operation in (run_of(entry), run_of(entry, beside=True)):
            letter = yield from self._letters.read(operation)
            if letter is not None and letter.token == entry.token and (yield from self._letters.delete(operation)):
                yield from self._letters.drop(operation)

    def pending(self) -> Plan[list[Entry]]:
        return (yield from self._told(self._pending()))

    def adopt(self, *, opened: bool = False) -> Plan[list[Entry]]:
        adopted: list[Entry] = []
        try:
            yield from self._told(self._adopt_all(opened, adopted))
        except GeneratorExit:
            raise
        except BaseException:
            yield FinishDespiteCancel(self._release_all(adopted))
            raise
        return sorted(adopted, key=lambda entry: entry.created_at)

    def release(self, entry: Entry) -> Plan[None]:
        try:  # one that was interrupted lapses, as it did before
            yield from self.leave(entry) if entry.state == "open" else self._runs.end(entry)
        except StoreError as error:
            log.info("A claim on the keyring could not be given back, and lapses: %s", error)

    def _release_all(self, adopted: list[Entry]) -> Plan[None]:
        for entry in adopted:
            yield from self.release(entry)

    def close(self) -> None:
        """End the threads and connections; what is at work here lapses."""
        self._runs.close()
        if self._own_store:
            self.store.close()

    async def aclose(self) -> None:
        """As `close`, for what belongs to the running event loop too."""
        self._runs.close()
        if self._own_store:
            await self.store.aclose()

    # Claiming

    def _claim(self, entry: Entry, oldest: float) -> Plan[Entry]:
        run = self._runs.take_adopted(entry)
        if run is not None:
            if is_sendable(run.letter, entry, oldest):
                return replace(entry, created_at=run.letter.created_at)
            yield from self.leave(entry)
            return run.letter
        turn = yield from self._turn(entry, oldest)
        if isinstance(turn, Entry):
            return turn
        try:
            if not turn.written:
                yield from self._letters.write(turn.lease.operation, turn.letter)
        except GeneratorExit:
            raise
        except BaseException:
            yield FinishDespiteCancel(self._runs.give_back(turn.lease))
            raise
        yield from self._runs.begin(turn.lease, turn.letter, entry.token)
        return replace(entry, created_at=turn.letter.created_at)

    def _turn(self, entry: Entry, oldest: float) -> Plan[Turn | Entry]:
        """The right to send; or the known entry, where that is too old to be sent."""
        operation = run_of(entry)
        while True:
            found = yield from self.store.claim(operation, lease=self.lease)
            if isinstance(found, Lease):
                return (yield from self._continued(found, entry, oldest))
            check_reuse(replace(entry, fingerprint=found.fingerprint), entry)
            if is_over(found):  # free, but under another fingerprint of the same request
                operation = replace(operation, fingerprint=found.fingerprint)
                continue
            known = opened(found) or (yield from self._letters.read(operation)) or entry
            if not is_sendable(known, entry, oldest):
                return known
            if found.state != "held":
                return (yield from self._beside(entry, known))
            yield from self._reopen(found)

    def _continued(self, lease: Lease, entry: Entry, oldest: float) -> Plan[Turn | Entry]:
        """A new run, or one that goes on where another was interrupted."""
        known = None
        if lease.lapsed or lease.attempt > 1:
            known = yield from self._letters.read(lease.operation)
        if known is None:
            return Turn(lease, entry, written=False)
        if is_sendable(known, entry, oldest):
            return Turn(lease, known, written=True)
        yield from self._unless_taken(self.store.hold(lease, note=TOO_OLD))
        return known

    def _beside(self, entry: Entry, known: Entry) -> Plan[Turn]:
        """A run beside one that is at work elsewhere or has its answer, with a record and a letter of its own."""
        lease = yield from self.store.claim(run_of(entry, beside=True), lease=self.lease)
        if isinstance(lease, Record):
            raise KeyringError(f"{entry.scope}: this run of key {entry.key} is under way already; nothing was sent")
        return Turn(lease, replace(entry, created_at=known.created_at), written=False)

    def _told(self, plan: Plan[T]) -> Plan[T]:
        """What *plan* gives; a store that fails is told of as the keyring."""
        try:
            return (yield from plan)
        except StoreError as error:
            raise KeyringError(f"The keyring {self.store.url} failed: {error}") from error

    def _unless_taken(self, plan: Plan[None]) -> Plan[bool]:
        """Carry out *plan*, unless another process took over meanwhile: then the rest is its business."""
        try:
            yield from plan
        except Fenced as error:
            log.info("Another process has taken over: %s", error)
            return False
        return True

    # Being left behind

    def _idle(self, *, opened: bool) -> Plan[list[Record]]:
        """The runs whose process is gone and, with *opened*, those whose callers were told."""
        found = yield from self._letters.all(Filter(name=RUN, state="running", lapsed=True))
        if opened:  # "released" lasts from being reopened to being claimed again
            found += yield from self._letters.all(Filter(name=RUN, state="held"))
            found += yield from self._letters.all(Filter(name=RUN, state="released"))
        return found

    def _pending(self) -> Plan[list[Entry]]:
        found = []
        for record in (yield from self._idle(opened=True)):
            letter = yield from self._letter(Operation(*record.id))
            if isinstance(letter, Entry):
                found.append(replace(letter, state=state_of(record)))
        return sorted(found, key=lambda entry: entry.created_at)

    def _letter(self, run: Operation) -> Plan[Entry | CorruptRecord | None]:
        """The run's letter; one that cannot be read is told of, and must not keep the others from being sent."""
        try:
            return (yield from self._letters.read(run))
        except CorruptRecord as error:
            log.error("%s, key %s, cannot be resumed: %s", run.scope, run.key, error)
            return error

    def _adopt_all(self, opened: bool, adopted: list[Entry]) -> Plan[None]:
        yield from self._letters.sweep(self.retention)
        if self._own_store:
            yield from self.store.purge()
        for record in (yield from self._idle(opened=opened)):
            entry = yield from self._adopt(record)
            if entry is not None:
                adopted.append(entry)

    def _adopt(self, record: Record) -> Plan[Entry | None]:
        if record.state == "held":
            yield from self._reopen(record)
        operation = Operation(record.scope, record.key, record.fingerprint, RUN)
        lease = yield from self.store.claim(operation, lease=self.lease)
        if isinstance(lease, Record):
            return None  # another process was quicker
        letter = yield from self._letter(operation)
        if isinstance(letter, CorruptRecord):
            yield from self._unless_taken(self.store.hold(lease, note=UNREADABLE))
            return None
        if letter is None:
            yield from give_back(self.store, lease)
            return None
        token = secrets.randbits(62)
        yield from self._runs.begin(lease, letter, token, adopted=True)
        return replace(letter, state=state_of(record), token=token)

    def _reopen(self, record: Record) -> Plan[None]:
        """Make a held run claimable, unless another process was quicker."""
        with suppress(Refusal):
            yield from self.store.resolve(*record.id, None, retention=FOREVER, note="continued")


def state_of(run: Record) -> State:
    """How far an idle run came."""
    return "sending" if run.state == "running" else "open"
