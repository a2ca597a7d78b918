"""The algorithm: claim; if it is yours, perform and settle; if not, replay, wait or refuse."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec

from .._contract.policy import Policy
from .._runtime.clock import SYSTEM, Clock
from .._runtime.plan import Plan, arun, run
from ..errors import ConfigurationError, Fenced, OncemoreError, Refusal, StoreError
from .cache import Cache
from .connect import connect
from .context import Op
from .decisions import Answer, check, in_progress, is_over, keeps, replay, unknown
from .encrypted import SealedStore, Sealing
from .events import Event, EventKind, Observer, log, tell_all
from .heartbeat import Beat, Heartbeat, Perform
from .ledger import Ledger
from .model import Lease, Operation, Outcome, Record
from .steps_attempt import stepped
from .store import Store
from .transaction_attempt import transacted
from .uniqueness import screen, unique
from .unknown import take_over, vanish
from .values import error_outcome, value_outcome

# The first look after a wait; each further one waits twice as long, up to the store's own limit.
FIRST_POLL = 0.02

Performer = Callable[[Op], Any]  # gives an Outcome or any other value, or a coroutine of it


class Guard(Ledger):
    """Lets each operation happen once.

    *store* is a URL, a store, or the user's own pool or engine, whose transactions the effects can then join.  *policy* is
    for callers who bring none.  With a *seal*, outcomes are encrypted in the store: see `oncemore.encryption`.
    """

    def __init__(
        self,
        store: str | Store | object,
        *,
        policy: Policy | None = None,
        observers: Sequence[Observer] = (),
        seal: Sealing | None = None,
        cache: int = 32 * 1024 * 1024,
        clock: Clock = SYSTEM,
    ) -> None:
        if not isinstance(policy, Policy | None):
            raise ConfigurationError(f"policy is a {type(policy).__name__}: make a Policy, as in Policy(ttl='7d')")
        inner = cast("Store", store) if hasattr(store, "claim") else connect(store)
        self.store: Store = inner if seal is None else cast("Store", SealedStore(inner, seal))
        self.policy = policy or Policy()
        self.observers = tuple(observers)
        self.clock = clock
        self.cache = Cache(clock, most=cache)
        self.store.wakeups.subscribe(self.cache.drop)
        # Not in `close`: a guard may be used again after it, and one that nobody closed must not leave its cache behind.
        weakref.finalize(self, self.store.wakeups.unsubscribe, self.cache.drop).atexit = False
        self.heart = Heartbeat(self._renew, clock)

    def run(
        self, operation: Operation, perform: Performer, *, policy: Policy | None = None, wait: float | None = None
    ) -> Answer:
        """The operation's answer; *perform* is called only where nobody has performed it yet."""
        return run(self.guarded(operation, perform, policy or self.policy, wait))

    async def arun(
        self, operation: Operation, perform: Performer, *, policy: Policy | None = None, wait: float | None = None
    ) -> Answer:
        """As `run`, for a *perform* that may be awaited."""
        return await arun(self.guarded(operation, perform, policy or self.policy, wait))

    def guarded(
        self, operation: Operation, perform: Performer, policy: Policy, wait: float | None = None
    ) -> Plan[Answer]:
        """The plan behind `run` and `arun`; *wait* can only shorten the policy's own."""
        known = self.known(operation, policy)
        if known is not None:
            return known
        if policy.effect == "transaction":
            return (yield from transacted(self, operation, perform, policy, wait))
        deadline = None if wait is None else self.clock.time() + wait
        try:
            found = yield from self.store.claim(operation, lease=policy.lease)
            if not isinstance(found, Lease):
                found = yield from self._stopped(found, operation, policy, wait)
            if isinstance(found, Lease):
                if policy.effect == "steps":
                    return (yield from stepped(self, found, perform, policy, deadline))
                return (yield from self.own(found, perform, policy, deadline=deadline))
            answer = yield from self.repeat(found, policy)
        except OncemoreError as error:
            self._refused(operation, error)
            raise
        if self.observers:
            self.tell("replayed", operation, status=answer.outcome.status)
        return answer

    def known(self, operation: Operation, policy: Policy) -> Answer | None:
        """The answer to a repeated operation, where this process remembers it: no store is asked."""
        kept = self.cache.get(operation.id) if policy.ttl_from == "creation" else None
        if kept is None:
            return None
        try:
            check(operation, kept.fingerprint)
            answer = replay(kept.outcome, policy, expires_at=kept.expires_at)
        except OncemoreError as error:
            self._refused(operation, error)
            raise
        if self.observers:
            self.tell("replayed", operation, status=answer.outcome.status)
        return answer

    # Getting a turn

    def turn(self, operation: Operation, policy: Policy, wait: float | None = None) -> Plan[Lease | Record]:
        """A lease, or the settled record; what is running is waited for, and everything else refused."""
        found = yield from self.store.claim(operation, lease=policy.lease)
        return found if isinstance(found, Lease) else (yield from self._stopped(found, operation, policy, wait))

    def _stopped(
        self, record: Record, operation: Operation, policy: Policy, wait: float | None
    ) -> Plan[Lease | Record]:
        """As `turn`, for a claim that met a *record*."""
        found = yield from self._judge(record, operation, policy)
        if isinstance(found, Lease) or found.state == "settled":
            return found
        limit = policy.wait if wait is None else min(policy.wait, wait)
        if policy.in_flight != "wait" or limit <= 0:
            raise in_progress(found)
        self.tell("waiting", operation, token=found.token)
        return (yield from self._wait(operation, policy, self.clock.monotonic() + limit))

    def _wait(self, operation: Operation, policy: Policy, ends: float) -> Plan[Lease | Record]:
        """Wait for the running one to end; where it fails, this caller gets the lease."""
        delay = FIRST_POLL
        with self.store.wakeups.waiting(operation.id) as waiter:
            while True:  # the store is asked after the waiter is known, so that no notification is missed
                found = yield from self.store.claim(operation, lease=policy.lease)
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
        """What a claim that met the record *found* comes to: a lease, or that record, settled or running."""
        check(operation, found.fingerprint)
        if is_over(found):  # free, but fingerprinted by an older algorithm or secret: take it over under its own
            former = msgspec.structs.replace(operation, fingerprint=found.fingerprint)
            again = yield from self.store.claim(former, lease=policy.lease)
            return again if isinstance(again, Lease) else (yield from self._judge(again, operation, policy))
        if found.state == "held":
            raise unknown(found)
        return found

    def repeat(self, record: Record, policy: Policy) -> Plan[Answer]:
        """The answer to a repeated operation, from its settled record."""
        outcome = record.outcome or Outcome("tombstone")
        if policy.ttl_from == "access":
            yield from self.store.touch(record, retention=policy.ttl)
        else:
            self.cache.put(
                record.id, record.fingerprint, outcome, remaining=record.remaining, expires_at=record.expires_at
            )
        return replay(outcome, policy, expires_at=record.expires_at)

    # Having it

    def own(
        self,
        lease: Lease,
        perform: Performer,
        policy: Policy,
        *,
        beats: tuple[Beat, ...] = (),
        then: Callable[[Outcome], Outcome] | None = None,
        deadline: float | None = None,
    ) -> Plan[Answer]:
        """Perform and settle.  *beats* are leases to keep alive besides; *then* changes the outcome before it is kept."""
        op = Op(lease, deadline=deadline)
        known: Answer | None = None
        if lease.lapsed:
            self.tell("lapsed", lease.operation, token=lease.token, attempt=lease.attempt)
            known = yield from take_over(self, op, policy)
        elif lease.attempt == 1 and (policy.suspect != "off" or policy.late != "run"):
            known = yield from self._screen(op, policy)
        if known is None:
            known = yield from self._perform(op, perform, policy, beats)
        if then is not None:
            known = msgspec.structs.replace(known, outcome=then(known.outcome))
        if keeps(policy, known.outcome):
            return (yield from self.settle(op, known, policy))
        yield from self.give_back(lease, policy)
        return msgspec.structs.replace(known, how="released")

    def _screen(self, op: Op, policy: Policy) -> Plan[Answer | None]:
        try:
            return (yield from screen(self, self.store, op, policy))
        except GeneratorExit:
            raise
        except BaseException:
            yield from self.give_back(op.lease, policy, forget=True)
            raise

    def _perform(self, op: Op, perform: Performer, policy: Policy, beats: tuple[Beat, ...]) -> Plan[Answer]:
        lease = op.lease
        if self.observers:
            former = "lapsed" if lease.lapsed else ""
            self.tell("claimed", lease.operation, token=lease.token, attempt=lease.attempt, from_state=former)
        beats = (self.heart.beat(lease, policy.lease), *beats)
        try:
            if lease.operation.unique is not None:
                return (yield from unique(self, op, perform, policy, beats))
            return (yield from self._call(op, perform, policy, beats))
        except GeneratorExit:
            raise
        except BaseException as error:
            own = beats[0]
            if not own.begun or (isinstance(error, Refusal) and not own.tried):  # before anything happened
                yield from self.give_back(lease, policy, forget=lease.attempt == 1)
            elif isinstance(error, Exception):
                yield from self.give_back(lease, policy)
            elif not own.lost:
                yield from vanish(self, lease, policy, error)
            raise

    def _call(self, op: Op, perform: Performer, policy: Policy, beats: tuple[Beat, ...]) -> Plan[Answer]:
        """What the performer itself gives or raises; the ledger's own refusals never pass for it."""
        for beat in beats:
            beat.begun = True
        try:
            value = yield Perform(self.heart, beats, perform, op)
        except policy.errors as error:
            return Answer(error_outcome(error), "stored", None, op.lease.attempt, error)
        outcome = value if isinstance(value, Outcome) else value_outcome(value)
        return Answer(outcome, "stored", None, op.lease.attempt, value)

    def settle(self, op: Op, answer: Answer, policy: Policy) -> Plan[Answer]:
        """Make the outcome durable, and only then the caller's."""
        lease, operation, outcome = op.lease, op.lease.operation, answer.outcome
        try:
            yield from self.store.settle(
                lease, outcome, retention=policy.ttl, audit=policy.expired == "keep", note=op.note
            )
        except Fenced as error:
            self.tell("fenced", operation, token=lease.token, code=error.code)
            return (yield from self._after_all(operation, policy, error))
        except StoreError as error:  # it happened, and the caller must know; the record stays running until it lapses
            self.tell("unstored", operation, token=lease.token, code=error.code, detail=error.detail)
            return msgspec.structs.replace(answer, how="unstored")
        except Exception as error:
            return (yield from self._unwritable(op, answer, policy, error))
        expires_at = self.clock.time() + policy.ttl  # for the caller to read; the store's own clock is what counts
        if policy.ttl_from == "creation":
            self.cache.put(operation.id, operation.fingerprint, outcome, remaining=policy.ttl, expires_at=expires_at)
        if self.observers:
            self.tell("settled", operation, token=lease.token, attempt=lease.attempt, status=outcome.status)
        return Answer(outcome, answer.how, expires_at, answer.attempt, answer.value)

    def _unwritable(self, op: Op, answer: Answer, policy: Policy, error: Exception) -> Plan[Answer]:
        """No store can write the outcome down, such as a header that is no plain text: that it happened is kept all the same."""
        if answer.outcome.kind == "tombstone":
            raise error
        log.error("%s %r: the outcome cannot be stored, only that it happened", *op.operation.id, exc_info=error)
        tombstone = Outcome("tombstone", body=repr(error).encode("utf-8", "backslashreplace"))
        kept = yield from self.settle(op, msgspec.structs.replace(answer, outcome=tombstone), policy)
        return kept if kept.outcome is not tombstone else msgspec.structs.replace(answer, how="unstored")

    def _after_all(self, operation: Operation, policy: Policy, error: Fenced) -> Plan[Answer]:
        """A late owner answers with what the one who took over has settled, where it has."""
        record = yield from self.store.find(operation.scope, operation.key)
        if record is None or record.state != "settled" or not operation.same(record.fingerprint):
            raise error
        return (yield from self.repeat(record, policy))

    def give_back(self, lease: Lease, policy: Policy, *, forget: bool = False) -> Plan[None]:
        """Release the lease, so that the next claim performs; where that fails, it lapses.

        The record remembers what the key stands for, unless nothing was done that it could stand for (*forget*).
        """
        try:
            yield from self.store.release(lease, retention=0.0 if forget else policy.ttl)
        except (Fenced, StoreError) as error:
            self.tell("failed", lease.operation, token=lease.token, code=error.code)
        else:
            self.tell("released", lease.operation, token=lease.token, attempt=lease.attempt)

    def _renew(self, beat: Beat) -> Plan[None]:
        lease = beat.lease
        try:
            yield from self.store.renew(lease, lease=beat.seconds)
        except Fenced as error:
            beat.lost = True
            if not beat.over:  # else it is its own settling that it met; where it is not, that is told as fenced itself
                self.tell("fenced", lease.operation, token=lease.token, code=error.code)
        except StoreError as error:  # the next beat tries again; there are two more before the lease is over
            self.tell("failed", lease.operation, token=lease.token, code=error.code)
        else:
            self.tell("renewed", lease.operation, token=lease.token, attempt=lease.attempt)

    def _refused(self, operation: Operation, error: OncemoreError) -> None:
        self.tell("failed" if isinstance(error, StoreError) else "refused", operation, code=error.code)

    def tell(self, kind: EventKind, operation: Operation, **facts: Any) -> None:
        """Show the transition to the observers, if there are any."""
        if self.observers:
            tell_all(self.observers, Event(kind=kind, operation=operation, **facts))

    def close(self) -> None:
        self.heart.close()
        super().close()

    async def aclose(self) -> None:
        self.heart.close()
        await super().aclose()


def check_guard(guard: object) -> Guard:
    """The guard; a ConfigurationError for what only should have become one, such as its URL."""
    if not isinstance(guard, Guard):
        raise ConfigurationError(f"guard is a {type(guard).__name__}: make a Guard, as in Guard('sqlite:///once.db')")
    return guard
