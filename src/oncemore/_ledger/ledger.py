"""The store, together with the parts that a process has beside it: cache, heartbeat, observers."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from typing import Any

import msgspec

from .._contract.policy import Policy
from .._runtime.clock import TimeSource
from .._runtime.forks import reset_in_child
from .._runtime.heartbeat import Heartbeat, Renewal
from .._runtime.plan import Plan
from .._runtime.wakeups import Id
from ..errors import ConfigurationError, CorruptRecord, Fenced, OncemoreError, StoreError
from .decisions import Answer, check, in_progress, is_free, outcome_unknown, replay
from .events import Event, EventKind, Observer, log, tell_all
from .model import UNREADABLE, Lease, Operation, Outcome, Record
from .store import STORE_FAILURES, Store
from .values import NOTHING, value_or_error

# The first wait in seconds; each further one is twice as long, up to the store's `poll`.
FIRST_POLL = 0.02


class Ledger:
    """The store's verbs as attempts use them: with waiting, caching and events.

    *store*, *clock* and *observers* are read at each use, so that a test may replace them.
    """

    def __init__(self, store: Store, clock: TimeSource, observers: tuple[Observer, ...], cache: int) -> None:
        self.store = store
        self.clock = clock
        self.observers = observers
        self.cache = Cache(clock, most=cache)
        self.heartbeat = Heartbeat(self._renew, clock)
        store.wakeups.subscribe(self.cache.drop)
        # Not in `close`: a guard may be used again after it, and a guard that was never closed must be unsubscribed too.
        weakref.finalize(self, store.wakeups.unsubscribe, self.cache.drop).atexit = False

    # Claiming

    def claim(
        self, operation: Operation, policy: Policy, wait: float | None = None, request: bytes = b""
    ) -> Plan[Lease | Record]:
        """Claim the operation: return its lease, or its settled record.

        Waits if it is running; raises if it is held or of another request.
        """
        found = yield from self.store.claim(operation, lease=policy.lease, request=request)
        if isinstance(found, Lease):
            return found
        return (yield from self.wait_for(found, operation, policy, wait, request))

    def wait_for(
        self, record: Record, operation: Operation, policy: Policy, wait: float | None, request: bytes = b""
    ) -> Plan[Lease | Record]:
        """Wait for the end of the running attempt that *record* belongs to, as long as the policy and *wait* allow.

        Returns the settled record, or a lease if the attempt has ended without an outcome.
        """
        found = yield from self._judge(record, operation, policy)
        if isinstance(found, Lease) or found.state == "settled":
            return found
        limit = policy.wait if wait is None else min(policy.wait, wait)
        if policy.in_flight != "wait" or limit <= 0:
            raise in_progress(found)
        self.emit("waiting", operation, token=found.token)
        ends, delay = self.clock.monotonic() + limit, FIRST_POLL
        with self.store.wakeups.waiting(operation.id) as waiter:
            while True:  # register the waiter before asking the store, so that no wake-up is missed
                found = yield from self.store.claim(operation, lease=policy.lease, request=request)
                if not isinstance(found, Lease):
                    found = yield from self._judge(found, operation, policy)
                if isinstance(found, Lease) or found.state == "settled":
                    return found
                left = ends - self.clock.monotonic()
                if left <= 0:
                    raise in_progress(found)
                yield from self.store.watch(found)
                yield waiter.wait(min(delay, left, max(found.lease_until - found.now, FIRST_POLL)))
                delay = min(delay * 2, self.store.poll)

    def _judge(self, found: Record, operation: Operation, policy: Policy) -> Plan[Lease | Record]:
        """Return the record that a claim met, if it is settled or running; or a lease on it, if it is free.

        Raises if the record is held, or of another request.
        """
        check(operation, found.fingerprint)
        if is_free(found):  # free, but with an older fingerprint of the same request: claim with the stored one
            former = msgspec.structs.replace(operation, fingerprint=found.fingerprint)
            again = yield from self.store.claim(former, lease=policy.lease)
            return again if isinstance(again, Lease) else (yield from self._judge(again, operation, policy))
        if found.state == "held":
            raise outcome_unknown(found.key, found.note)
        return found

    # Replaying

    def replay(self, record: Record, operation: Operation, policy: Policy) -> Plan[Answer]:
        """Return the answer to a duplicate, from the settled record."""
        answer = yield from self._repeat(record, policy)
        if self.observers:
            self.emit("replayed", operation, status=answer.outcome.status, tier=record.tier)
        return answer

    def _repeat(self, record: Record, policy: Policy) -> Plan[Answer]:
        outcome = record.outcome or Outcome("tombstone")
        if record.note == UNREADABLE:
            damaged = Operation(*record.id, name=record.name)
            self.emit("failed", damaged, code=CorruptRecord.code, detail="The stored outcome cannot be read")
        if policy.ttl_from == "access":
            yield from self.store.touch(record, retention=policy.ttl)
        else:
            self.cache.put(
                record.id, record.fingerprint, outcome, remaining=record.remaining, expires_at=record.expires_at
            )
        return replay(outcome, policy, expires_at=record.expires_at)

    def valued(self, operation: Operation, policy: Policy, answer: Answer) -> Answer:
        """Return the answer with its value, read from the outcome if necessary.  Raises CorruptRecord, and emits an event."""
        if answer.value is not None or answer.outcome == NOTHING:
            return answer
        value = self.value_of(operation, policy, answer.outcome)
        return Answer(answer.outcome, answer.how, answer.expires_at, answer.attempt, value)

    def value_of(self, operation: Operation, policy: Policy, outcome: Outcome) -> Any:
        """Return the value or the error in a stored outcome; the value of a response is the outcome itself."""
        if outcome.kind == "response":
            return outcome
        try:
            return value_or_error(outcome, policy.errors, policy.types)
        except CorruptRecord as error:
            self.emit("failed", operation, code=error.code, detail=error.detail)
            raise

    def answer_of_successor(self, operation: Operation, policy: Policy, error: Fenced) -> Plan[Answer]:
        """Return the outcome of the attempt that took over from a late owner.  Raise *error* if it has not settled."""
        record = yield from self.store.find(operation.scope, operation.key)
        if record is None or record.state != "settled" or not operation.same(record.fingerprint):
            raise error
        return (yield from self._repeat(record, policy))

    # Ending

    def settle_failed(self, lease: Lease, answer: Answer, policy: Policy, note: str, error: Exception) -> Plan[Answer]:
        """Return the answer for the caller after *error* has prevented a settle.

        If the attempt was too slow, its successor's outcome is the answer.  If the store cannot write, the caller still gets
        its own outcome, "unstored", because the effect has happened; the record lapses, and its outcome is then unknown.
        """
        operation = lease.operation
        if isinstance(error, Fenced):
            self.emit("fenced", operation, token=lease.token, code=error.code)
            return (yield from self.answer_of_successor(operation, policy, error))
        if isinstance(error, STORE_FAILURES):
            self.emit("unstored", operation, token=lease.token, code=error.code, detail=error.detail)
            return msgspec.structs.replace(answer, how="unstored")
        return (yield from self._settle_as_tombstone(lease, answer, policy, note, error))

    def _settle_as_tombstone(
        self, lease: Lease, answer: Answer, policy: Policy, note: str, error: Exception
    ) -> Plan[Answer]:
        """Settle a tombstone, because the store cannot encode the outcome (such as a header with a wrong type)."""
        log.error(
            "%s %r: the outcome cannot be stored, only that it happened; duplicates get OutcomeNotKept",
            *lease.operation.id,
            exc_info=error,
        )
        # The caller of a function may read the reason; the client of an HTTP response must not.
        reason = "" if answer.outcome.kind == "response" else repr(error)
        tombstone = Outcome("tombstone", body=reason.encode("utf-8", "backslashreplace"))
        try:
            audit = policy.expired == "keep"
            yield from self.store.settle(lease, tombstone, retention=policy.ttl, audit=audit, note=note)
        except (Fenced, *STORE_FAILURES) as again:
            return (yield from self.settle_failed(lease, answer, policy, note, again))
        self.emit("settled", lease.operation, token=lease.token, attempt=lease.attempt, status=0)
        return msgspec.structs.replace(answer, how="unstored")

    def release(self, lease: Lease, *, retention: float) -> Plan[None]:
        """Release the lease, so that the next claim performs.  If that fails, the lease lapses.

        The record keeps the fingerprint for *retention* seconds.  With 0, the key runs as new.
        """
        try:
            yield from self.store.release(lease, retention=retention)
        except (Fenced, *STORE_FAILURES) as error:
            self.emit("failed", lease.operation, token=lease.token, code=error.code)
        else:
            self.emit("released", lease.operation, token=lease.token, attempt=lease.attempt)

    def hold(self, lease: Lease, note: str) -> Plan[None]:
        """Hold the operation until a person or a program resolves it."""
        yield from self.store.hold(lease, note=note[:500])
        self.emit("held", lease.operation, token=lease.token, detail=note)

    def lapse(self, lease: Lease) -> Plan[None]:
        """End the lease now, with the outcome unknown.  If that fails, the lease lapses by itself later."""
        try:
            yield from self.store.renew(lease, lease=0.0)
        except (Fenced, *STORE_FAILURES) as error:
            self.emit("failed", lease.operation, token=lease.token, code=error.code)
        else:
            self.store.wakeups.notify(lease.operation.id)

    def _renew(self, renewal: Renewal) -> Plan[None]:
        lease: Lease = renewal.lease
        try:
            yield from self.store.renew(lease, lease=renewal.seconds)
        except Fenced as error:
            renewal.lost = True
            if not renewal.stopped:  # else this attempt has settled meanwhile
                self.emit("fenced", lease.operation, token=lease.token, code=error.code)
        except STORE_FAILURES as error:
            renewal.due = 0.0  # try again at the next tick
            self.emit("failed", lease.operation, token=lease.token, code=error.code)
        else:
            self.emit("renewed", lease.operation, token=lease.token, attempt=lease.attempt)

    # Observers

    def refused(self, operation: Operation, error: BaseException) -> None:
        """Show the observers that the caller got *error* instead of an outcome, if it is one of oncemore's errors."""
        if self.observers and isinstance(error, OncemoreError):
            if isinstance(error, StoreError):  # includes CorruptRecord
                self.emit("failed", operation, code=error.code, detail=error.detail)
            else:
                self.emit("refused", operation, code=error.code)

    def emit(self, kind: EventKind, operation: Operation, **facts: Any) -> None:
        """Show a transition to the observers, if there are any."""
        if self.observers:
            tell_all(self.observers, Event(kind=kind, operation=operation, **facts))


# The cache: settled outcomes do not change until they expire, so a replay need not ask the store.

# The seconds that an outcome stays in the cache.  An operator in another process may delete its record, and not every store
# sends a message then.
LONGEST = 60.0
# The bytes of an entry beside its packed outcome: its share of the dictionary, the tuple of its id, and two string headers.
PER_ENTRY = 250


class Cached(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A settled outcome; this process may replay it until *until*, by its own clock."""

    fingerprint: str
    outcome: Outcome
    until: float
    expires_at: float | None


pack = msgspec.msgpack.Encoder().encode
unpack = msgspec.msgpack.Decoder(Cached).decode


class Cache:
    """The latest outcomes, at most *most* bytes.  It uses a monotonic clock, so setting the date changes nothing.

    Outcomes are packed, because the garbage collector does not visit bytes, and because objects that stay behind from each
    request make the next requests slower.
    """

    def __init__(self, clock: TimeSource, *, most: int = 32 * 1024 * 1024) -> None:
        if type(most) is not int or most < 0:
            raise ConfigurationError(f"cache = {most!r} is not a size: write a whole number of bytes, or 0 for none")
        self._monotonic = clock.monotonic
        self._most = most
        self._reset()
        reset_in_child(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()  # for changes; a lookup needs none
        self._entries: OrderedDict[Id, bytes] = OrderedDict()  # a plain dict is slow to find its oldest entry
        self._size = 0

    def get(self, id: Id) -> Cached | None:
        """Return the outcome of the operation *id*, if it is known and has not expired."""
        packed = self._entries.get(id)
        if packed is None:
            return None
        try:
            kept = unpack(packed)
        except msgspec.ValidationError:  # the performer's outcome has a member of a wrong type: leave it to the store
            return None
        if kept.until <= self._monotonic():
            self.drop(id)
            return None
        return kept

    def put(self, id: Id, fingerprint: str, outcome: Outcome, *, remaining: float, expires_at: float | None) -> None:
        """Remember *outcome* for as long as the store keeps it, or for a minute, whichever is shorter."""
        until = self._monotonic() + (remaining if remaining < LONGEST else LONGEST)
        try:
            packed = pack((fingerprint, outcome, until, expires_at))
        except (TypeError, ValueError, OverflowError):  # a member has a wrong type or size, such as a status of 2**70
            self.drop(id)
            return
        size = _size_of(id, packed)
        with self._lock:
            self._remove(id)  # also if the new outcome is too large, because the old one is no longer true
            if size <= self._most // 16:  # a larger one would push out too many others
                self._entries[id] = packed
                self._size += size
            while self._size > self._most:
                self._remove(next(iter(self._entries)))

    def drop(self, id: Id | None) -> None:
        """Forget the operation *id*.  None forgets all, because a message about any of them may have been missed."""
        with self._lock:
            if id is None:
                self._entries.clear()
                self._size = 0
            else:
                self._remove(id)

    def _remove(self, id: Id) -> None:
        packed = self._entries.pop(id, None)
        if packed is not None:
            self._size -= _size_of(id, packed)


def _size_of(id: Id, packed: bytes) -> int:
    scope, key = id
    return len(scope) + len(key) + len(packed) + PER_ENTRY
