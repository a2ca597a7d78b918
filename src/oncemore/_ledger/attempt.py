"""One try at an operation: it is claimed, then settled or failed.  The caller performs between the two."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from .._contract.policy import Policy
from .._runtime.heartbeat import Renewal
from .._runtime.plan import Call, Plan
from ..errors import Fenced, OncemoreError, ProviderDuplicate, UnknownOutcome
from .context import Op
from .decisions import Answer, How, Resolution, check, fenced, outcome_unknown, replay
from .events import log
from .ledger import Ledger
from .model import Lease, Operation, Outcome, Record
from .store import STORE_FAILURES, Store
from .transactions import Transaction, unawaited
from .uniqueness import replay_unique, screen, tag, unique_operation, unique_policy, untag
from .values import error_outcome, value_outcome

Performer = Callable[[Op], Any]  # returns an Outcome or any other value, or a coroutine of it

# Not final: the caller can remove the cause without changing the request, or the server may soon answer differently.
UNSETTLED_STATUSES = frozenset({401, 403, 408, 425, 429})


def is_final(outcome: Outcome, policy: Policy) -> bool:
    """Whether *outcome* is kept and replayed, rather than released for another attempt."""
    if callable(policy.keep):
        try:
            return policy.keep(outcome)
        except Exception:  # the effect has happened, so it must not happen again
            log.exception("The rule's keep function failed; the outcome is kept")
            return True
    if outcome.status == 0:  # the outcome of a function: an error is a failure, a value is not
        return policy.keep != "success" or outcome.kind != "error"
    if policy.keep == "success":
        return 200 <= outcome.status < 300
    return outcome.status not in UNSETTLED_STATUSES and (outcome.status < 500 or policy.keep == "all")


def end_unique(
    records: Store | Transaction, lease: Lease, policy: Policy, outcome: Outcome | None, owner: str
) -> Plan[None]:
    """End the claim of a unique record: settle a final outcome, which then answers other keys; else free the record."""
    if outcome is not None and is_final(outcome, policy):
        yield from records.settle(lease, tag(outcome, owner), retention=policy.ttl)
    else:
        yield from records.release(lease, retention=0.0)


class LeaseAttempt:
    """One try at an operation under a lease.  The other levels, transactions and steps, have the same verbs.

    `begin` returns the stored answer, or None if this caller now holds the lease.  In that case a heartbeat keeps the lease
    alive, and the caller performs, with `op` as the running operation.  Then one of four verbs ends the attempt, and returns
    only when the ledger has recorded it.  A later `fail`, `release` or `withdraw` does nothing:

    - `settle(outcome)`: it happened.  Returns the answer for the caller: "stored", "released" if the policy does not keep the
      outcome, "unstored" if the store is down, "replayed" if this caller was too slow and another's outcome counts, or
      "unknown" if the policy's `doubt` names its status.
      For a stream, settle a tombstone before its first byte.
    - `fail(error)`: the performer raised.  After an Exception the next caller performs; after a cancellation, an interrupt or
      an exception in `doubt` the outcome is unknown, and the policy's on_unknown decides.  Returns None, and the caller
      raises *error*, unless an operation in steps has an answer nevertheless.
    - `release()`: it ended without an outcome to be kept, for instance at the end of a stream that is not remembered.  The next
      caller performs.
    - `withdraw(error)`: nothing was performed, because a check refused the request before the application was called, or the
      application redirected it (307, 308).  The claim is given back, and a first attempt is forgotten.

    `settle` and `fail` of a transaction raise `TransactionRefused`, a StoreUnavailable, if the database refused the
    transaction (a deadlock, a serialization failure) or did not say whether it committed.  The same request may be sent
    again: it replays, or performs.
    `drop` is for a caller that cannot ask the ledger any more: the lease is no longer renewed, and lapses.
    """

    lease: Lease
    op: Op
    renewal: Renewal = None  # type: ignore[assignment]  # until the operation is claimed
    unique: LeaseAttempt | None = None  # the attempt that holds the unique record
    request = b""  # the stored request, if the operation may have to be finished without its caller
    in_doubt = False  # whether an earlier attempt has crashed, and it is not known yet if it took effect
    # Whether "it did not happen" is accepted from a resolver.  Not for a unique record last claimed under another key: the
    # provider was asked under that key, which this attempt does not know.
    believes_released = True
    ended = False
    reports = True  # whether observers are told of its refusals

    def __init__(self, ledger: Ledger, operation: Operation, policy: Policy) -> None:
        self.ledger = ledger
        self.operation = operation
        self.policy = policy

    def begin(self, wait: float | None = None) -> Plan[Answer | None]:
        """Claim the operation; wait for a running one, at most *wait* seconds and at most as long as the policy allows."""
        ledger, operation, policy = self.ledger, self.operation, self.policy
        try:
            known = self.cached()
            if known is not None:
                return known
            deadline = None if wait is None else ledger.clock.time() + wait
            found = yield from self.claim(deadline)
            if not isinstance(found, Lease):
                found = yield from ledger.wait_for(found, operation, policy, wait, self.request)
                if isinstance(found, Record):
                    return (yield from ledger.replay(found, operation, policy))
            self.take(found, deadline)
            known = yield from self.start()
        except OncemoreError as error:
            self.refused(error)
            raise
        if known is not None:
            return known if self.ended else (yield from self.end(known))
        if ledger.observers:
            former = "lapsed" if found.lapsed else ""
            ledger.emit("claimed", operation, token=found.token, attempt=found.attempt, from_state=former)
        return None

    def cached(self) -> Answer | None:
        """Return the answer from this process's cache, without asking the store; None if it is not there."""
        ledger, operation, policy = self.ledger, self.operation, self.policy
        kept = ledger.cache.get((operation.scope, operation.key)) if policy.ttl_from == "creation" else None
        if kept is None:
            return None
        check(operation, kept.fingerprint)
        answer = replay(kept.outcome, policy, expires_at=kept.expires_at)
        if ledger.observers:
            ledger.emit("replayed", operation, status=answer.outcome.status, tier="process")
        return answer

    def claim(self, deadline: float | None) -> Plan[Lease | Record]:
        return self.ledger.store.claim(self.operation, lease=self.policy.lease, request=self.request)

    def take(self, lease: Lease, deadline: float | None) -> None:
        """Make the claimed lease this attempt's own."""
        self.lease = lease
        self.in_doubt = lease.lapsed
        self.op = Op(lease, deadline=deadline)
        self.renewal = Renewal(self.ledger.heartbeat, lease, self.policy.lease)

    def start(self) -> Plan[Answer | None]:
        """Renew the lease from now on, and run the checks.  After an error, give the claim back: nothing was performed."""
        try:
            yield self.renewal
            return None if self.is_ordinary() else (yield from self.prepare())
        except GeneratorExit:
            self.drop()
            raise
        except BaseException:
            yield from self.withdraw()
            raise

    def is_ordinary(self) -> bool:
        """Whether the performer can be called without further checks."""
        policy = self.policy
        if policy.suspect != "off" or policy.late != "run":  # first attempts are checked for twins and old keys
            return False
        return not self.lease.lapsed and self.operation.unique is None

    def prepare(self) -> Plan[Answer | None]:
        """Run the policy's checks before the performer.  Return an answer if one of them has it."""
        if self.lease.lapsed:
            known = yield from self._resolve_unknown()
            if known is not None:
                yield from self._claim_resolved_unique()
        else:
            known = yield from screen(self.ledger, self.ledger.store, self.op, self.policy)
        if known is None and self.operation.unique is not None:
            known = yield from self.claim_unique()
        return known

    def _resolve_unknown(self) -> Plan[Answer | None]:
        """Decide about an earlier attempt that crashed: return its answer, or None if this attempt may perform.

        Raises UnknownOutcome if it stays unknown.  The lease is renewed meanwhile: a provider may take longer to answer than
        the lease lasts, and no other caller may ask, and perform, at the same time.
        """
        ledger, lease, policy = self.ledger, self.lease, self.policy
        ledger.emit("lapsed", lease.operation, token=lease.token, attempt=lease.attempt)
        if policy.on_unknown == "hold":
            yield from ledger.hold(lease, "its holder vanished")
            self.stop()
            raise outcome_unknown(lease.operation.key)
        if policy.on_unknown == "resolve":
            resolution = yield from self._ask_resolver()
            ledger.emit("resolved", lease.operation, token=lease.token, detail=resolution.verdict)
            if resolution.outcome is not None:  # stay in doubt until it is recorded
                self.op.note = "resolved: it had happened"
                return Answer(resolution.outcome, "replayed", attempt=lease.attempt)
            yield from ledger.store.renew(lease, lease=policy.lease)  # raises Fenced if the lease was lost meanwhile
        self.in_doubt = False
        return None

    def _ask_resolver(self) -> Plan[Resolution]:
        """Return the resolver's decision.  If it has none, end the lease now, so that the next caller asks again."""
        assert self.policy.resolver is not None, "a policy with on_unknown = 'resolve' has a resolver"
        cause: Exception | None = None
        try:
            resolution: Resolution = yield Call(self.policy.resolver, self.op)
            if resolution.verdict == "settled" or (resolution.verdict == "released" and self.believes_released):
                return resolution
        except Exception as error:
            cause = error
        self.stop()
        yield from self.ledger.lapse(self.lease)
        raise UnknownOutcome(
            "Whether a former attempt took effect is not known yet; retry later", retry_after=5
        ) from cause

    # The unique record

    def claim_unique(self) -> Plan[Answer | None]:
        """Claim the unique record.  Return its answer if the effect has already happened.

        The record belongs to no principal, so its outcome is shown only to the principal that made it.  With
        on_unique = "serialize" operations only take turns: no outcome is kept, and the next one performs.
        """
        ledger, policy = self.ledger, unique_policy(self.policy)
        operation = unique_operation(self.operation, self.policy)
        found = yield from ledger.claim(operation, policy, self.policy.lease / 2)
        if isinstance(found, Record):
            return replay_unique(found, self.op, self.policy)
        unique = self._take_unique(found, policy)
        unique.believes_released = self.lease.lapsed  # else the crashed attempt had another key
        return (yield from unique.start())

    def _take_unique(self, lease: Lease, policy: Policy) -> LeaseAttempt:
        self.unique = LeaseAttempt(self.ledger, lease.operation, policy)
        self.unique.reports = False
        self.unique.take(lease, None)
        return self.unique

    def _claim_resolved_unique(self) -> Plan[None]:
        """If the resolver says "it happened", take the unique record too, so that both are settled."""
        if self.operation.unique is None or self.policy.on_unique == "serialize":
            return
        operation = unique_operation(self.operation, self.policy)
        found = yield from self.ledger.store.claim(operation, lease=self.policy.lease)
        if isinstance(found, Lease):
            self._take_unique(found, unique_policy(self.policy))

    def _end_both(self, unique: LeaseAttempt, answer: Answer) -> Plan[Answer]:
        """Settle the unique record first: after a crash between the two, other keys already see it."""
        owner = self.operation.scope
        try:
            tagged = msgspec.structs.replace(answer, outcome=tag(answer.outcome, owner))
            found = yield from unique.end(tagged)
            by, outcome = untag(found.outcome)
            if by != owner:  # too late: the outcome is of another principal, which took over, and is not shown here
                raise fenced(unique.lease)
        except GeneratorExit:
            raise
        except Exception as error:
            yield from self.ledger.release(self.lease, retention=self.policy.ttl)
            self.refused(error)
            raise
        except BaseException:  # cancelled, but the unique record is written nevertheless: write this record too
            with suppress(OncemoreError):
                yield from self.record(answer)
            raise
        how: How = "replayed" if found.how == "replayed" else "stored"
        return (yield from self.record(Answer(outcome, how, found.expires_at, found.attempt, found.value)))

    # The four ends

    def settle(self, outcome: Outcome, value: Any = None) -> Plan[Answer]:
        """Record the outcome.  *value* is the value or the exception of the performer, for the answer."""
        answer = Answer(outcome, "stored", None, self.lease.attempt, value)
        return self._end_in_doubt(answer) if self.doubts(outcome, value) else self.end(answer)

    def doubts(self, outcome: Outcome | None, value: Any = None) -> bool:
        """Whether the policy's `doubt` names the status of *outcome*, or the exception *value*: the outcome is unknown."""
        if outcome is not None and outcome.status in self.policy.doubt:
            return True
        return isinstance(value, Exception) and self.policy.doubts(value)

    def _end_in_doubt(self, answer: Answer) -> Plan[Answer]:
        """Leave the decision to on_unknown.  This caller still gets its own answer."""
        status, value = answer.outcome.status, answer.value
        cause = f"status {status}" if status in self.policy.doubt else type(value).__name__
        yield from self._mark_unknown(f"in doubt after {cause}")
        return msgspec.structs.replace(answer, how="released" if self.policy.on_unknown == "retry" else "unknown")

    def _mark_unknown(self, why: str) -> Plan[None]:
        """Apply on_unknown now rather than when the lease has lapsed, to the unique record first."""
        ledger, lease, policy = self.ledger, self.lease, self.policy
        self.stop()
        if self.unique is not None:
            yield from self.unique._mark_unknown(why)
        if self.renewal.lost:
            return
        if policy.on_unknown == "retry":
            yield from ledger.release(lease, retention=policy.ttl)
        elif policy.on_unknown == "resolve":
            yield from ledger.lapse(lease)
        else:
            try:
                yield from ledger.hold(lease, why)
            except (Fenced, *STORE_FAILURES) as failure:  # not held: the lease lapses
                ledger.emit("failed", lease.operation, token=lease.token, code=failure.code)

    def end(self, answer: Answer) -> Plan[Answer]:
        """Record an answer, which came from the performer, a resolver or another key."""
        self.stop()
        return self.record(answer) if self.unique is None else self._end_both(self.unique, answer)

    def record(self, answer: Answer) -> Plan[Answer]:
        """Settle this operation's own record, or release it if the policy does not keep the outcome."""
        ledger, lease, policy, outcome = self.ledger, self.lease, self.policy, answer.outcome
        if not self.keeps(outcome):
            yield from ledger.release(lease, retention=policy.ttl)
            return msgspec.structs.replace(answer, how="released")
        audit = policy.expired == "keep"
        try:
            yield from ledger.store.settle(lease, outcome, retention=policy.ttl, audit=audit, note=self.op.note)
        except Exception as error:
            try:
                return (yield from ledger.settle_failed(lease, answer, policy, self.op.note, error))
            except OncemoreError as refusal:
                self.refused(refusal)
                raise
        return self.announce(answer)

    def keeps(self, outcome: Outcome) -> bool:
        """Whether the outcome is final: kept and replayed, rather than released for another attempt."""
        return is_final(outcome, self.policy)

    def announce(self, answer: Answer) -> Answer:
        """After the outcome is durable, put it into the cache and show it to the observers; return the answer."""
        ledger, operation, policy, outcome = self.ledger, self.lease.operation, self.policy, answer.outcome
        expires_at = ledger.clock.time() + policy.ttl  # for the caller's information; the store's clock decides
        if policy.ttl_from == "creation":
            id = (operation.scope, operation.key)
            ledger.cache.put(id, operation.fingerprint, outcome, remaining=policy.ttl, expires_at=expires_at)
        if ledger.observers:
            token, attempt = self.lease.token, self.lease.attempt
            ledger.emit("settled", operation, token=token, attempt=attempt, status=outcome.status)
        return Answer(outcome, answer.how, expires_at, answer.attempt, answer.value)

    def fail(self, error: BaseException) -> Plan[Answer | None]:
        """Record that the performer raised *error*."""
        if self.ended:
            return None
        if self.doubts(None, error):
            yield from self._mark_unknown(f"in doubt after {type(error).__name__}")
        elif isinstance(error, Exception):
            yield from self.release()
        else:
            yield from self._mark_unknown(f"interrupted by {type(error).__name__}")
        self.refused(error)
        return None

    def release(self) -> Plan[None]:
        """Record that there is no outcome; the next caller performs."""
        if self.ended:
            return
        if self.unique is not None:
            yield from self.unique.release()
        self.stop()
        yield from self.ledger.release(self.lease, retention=self.policy.ttl)

    def withdraw(self, error: BaseException | None = None) -> Plan[None]:
        """Give the claim back, because nothing was performed.  *error* is the reason, for the observers."""
        if self.ended:
            return
        if self.unique is not None:
            yield from self.unique.withdraw()
        self.stop()
        if self.in_doubt:  # nothing was decided: the next caller decides, without waiting
            yield from self.ledger.lapse(self.lease)
        else:
            yield from self.ledger.release(self.lease, retention=0.0 if self.lease.attempt == 1 else self.policy.ttl)
        if error is not None:
            self.refused(error)

    def drop(self) -> None:
        """Stop without asking the ledger: the lease lapses."""
        self.stop()

    def stop(self) -> None:
        """Mark the attempt as ended, and stop renewing its leases."""
        self.ended = True
        if self.renewal is not None and not self.renewal.stopped:
            self.renewal.stop()
        if self.unique is not None:
            self.unique.renewal.stop()

    def refused(self, error: BaseException) -> None:
        if self.reports:
            self.ledger.refused(self.operation, error)

    # Performing a function

    def perform(self, performer: Performer, wait: float | None = None) -> Plan[Answer]:
        """Begin, call the performer, and settle or fail."""
        try:
            known = yield from self.begin(wait)
            return known if known is not None else (yield from self.call(performer))
        finally:
            self.drop()  # also if the plan was interrupted or closed: the lease must not be renewed for ever

    def call(self, performer: Performer) -> Plan[Answer]:
        """Call the performer of an attempt that has begun, and settle or fail."""
        try:
            value = yield Perform(performer, self.op)
        except GeneratorExit:
            raise
        except BaseException as error:
            known = yield from self.settle_or_fail(error)
            if known is None:
                raise
            return known
        return (yield from self.settle_value(value))

    def settle_value(self, value: Any) -> Plan[Answer]:
        """Settle the value that the performer has returned."""
        outcome = value if isinstance(value, Outcome) else value_outcome(value, self.policy.types)
        return self.settle(outcome, value)

    def settle_or_fail(self, error: BaseException) -> Plan[Answer | None]:
        """Settle or fail, after the performer has raised *error*.  Return None if the caller must raise it."""
        if isinstance(error, ProviderDuplicate) and self.is_success(error):
            return (yield from self.settle_value(error.result))
        if isinstance(error, self.policy.errors) and not self.doubts(None, error):
            return (yield from self.settle(error_outcome(error, self.policy.types), error))
        return (yield from self.fail(error))

    def is_success(self, error: ProviderDuplicate) -> bool:
        """Whether *error* carries the result of an earlier attempt, as the provider remembers it."""
        return error.has_result


class Perform(Call):
    """Effect: call the performer."""

    __slots__ = ()

    def __init__(self, performer: Performer, op: Op) -> None:
        self.function, self.args = performer, (op,)

    async def arun(self) -> Any:
        op: Op = self.args[0]
        result = self.function(op)
        if hasattr(result, "__await__"):
            return await result
        if op.lent:  # it has used an async connection without awaiting, so its statements were never sent
            raise unawaited(self.function)
        return result
