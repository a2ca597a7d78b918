"""One try at an operation: claimed, then settled or failed.  The caller performs between the two."""

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
from .uniqueness import done_before, inner_operation, inner_policy, screen, tag, untagged
from .values import error_outcome, value_outcome

Performer = Callable[[Op], Any]  # gives an Outcome or any other value, or a coroutine of it

# Not final: the caller can remove the cause without changing the request, or the server may answer otherwise soon.
UNSETTLED_STATUSES = frozenset({401, 403, 408, 425, 429})


def is_final(outcome: Outcome, policy: Policy) -> bool:
    """Whether *outcome* is kept and replayed, rather than released for another attempt."""
    if callable(policy.keep):
        try:
            return policy.keep(outcome)
        except Exception:  # it happened, so it must not happen again
            log.exception("The rule's keep function failed; the outcome is kept")
            return True
    if outcome.status == 0:  # of a function: its errors are failures, its values are not
        return policy.keep != "success" or outcome.kind != "error"
    if policy.keep == "success":
        return 200 <= outcome.status < 300
    return outcome.status not in UNSETTLED_STATUSES and (outcome.status < 500 or policy.keep == "all")


def end_unique(
    records: Store | Transaction, lease: Lease, policy: Policy, outcome: Outcome | None, owner: str
) -> Plan[None]:
    """End the claim of a unique record: a success answers every other key; anything else leaves the way free."""
    if outcome is not None and is_final(outcome, policy):
        yield from records.settle(lease, tag(outcome, owner), retention=policy.ttl)
    else:
        yield from records.release(lease, retention=0.0)


class LeaseAttempt:
    """One try at an operation under a lease.  The other levels, transactions and steps, have the same verbs.

    `begin` returns the stored answer, or None if this caller now holds the lease: a heartbeat keeps it alive, and the caller
    performs, with `op` as the running operation.  Then one of four verbs ends the attempt.  The first one counts, every later
    one does nothing, and each returns only when the ledger has recorded it:

    - `settle(outcome)`: it happened.  Returns the answer for the caller: "stored", "released" if the policy does not keep the
      outcome, "unstored" if the store is down, "replayed" if this caller was too slow and another's outcome counts, or
      "unknown" if the policy's `doubt` names its status.
      For a stream, settle a tombstone before its first byte.
    - `fail(error)`: the performer raised.  After an Exception the next caller performs; after a cancellation, an interrupt or
      an exception in `doubt` the outcome is unknown, and the policy's on_unknown decides.  Returns an answer only if the
      operation has one all the same (steps); the caller raises *error* otherwise.
    - `release()`: it ended without an outcome to be kept, for instance at the end of a stream that is not remembered.  The next
      caller performs.
    - `withdraw(error)`: nothing was performed.  The claim is given back, and a first attempt is forgotten: after a check
      that refuses the request before the application is called, or when the application redirects it (307, 308).

    `settle` and `fail` of a transaction raise `TransactionRefused`, a StoreUnavailable, if the database refused the
    transaction (a deadlock, a serialization failure): everything is rolled back, and the same request may work next time.
    `drop` is for a caller that cannot ask the ledger any more: the lease is not renewed from then on, and lapses.
    """

    lease: Lease
    op: Op
    renewal: Renewal = None  # type: ignore[assignment]  # until the operation is claimed
    unique: LeaseAttempt | None = None  # the second attempt, at what must happen once whatever the key
    request = b""  # what the claim keeps of the request, if the operation may have to be finished without its caller
    in_doubt = False  # an earlier attempt has crashed, and it is not known yet whether it took effect
    # Whether a resolver is believed if it says that nothing happened.  It is not, if it is asked about a unique part after the
    # attempt of another key: that has asked the provider under a key derived from its own, which is not known here.
    trusts_no = True
    ended = False
    reports = True  # whether observers are told of its refusals

    def __init__(self, ledger: Ledger, operation: Operation, policy: Policy) -> None:
        self.ledger = ledger
        self.operation = operation
        self.policy = policy

    def begin(self, wait: float | None = None) -> Plan[Answer | None]:
        """Claim the operation.  *wait* bounds how long a running one is waited for; it only shortens the policy's own."""
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
        """The answer to a repeated operation, from this process's own memory: the store is not asked."""
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
        """Renew the lease from now on.  If anything goes wrong before the performer is called, the claim is given back."""
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
        """Whether there is nothing to look at before the performer is called."""
        policy = self.policy
        if policy.suspect != "off" or policy.late != "run":  # first attempts are screened for twins and for old keys
            return False
        return not self.lease.lapsed and self.operation.unique is None

    def prepare(self) -> Plan[Answer | None]:
        """Look at what the policy asks for before the performer is called; the answer, if that is known already."""
        if self.lease.lapsed:
            known = yield from self._resolve_unknown()
            if known is not None:
                yield from self._claim_resolved()
        else:
            known = yield from screen(self.ledger, self.ledger.store, self.op, self.policy)
        if known is None and self.operation.unique is not None:
            known = yield from self.claim_unique()
        return known

    def _resolve_unknown(self) -> Plan[Answer | None]:
        """Find out about the earlier attempt: its answer, or None if this attempt may perform.

        Raises UnknownOutcome if nobody can tell.  The lease is renewed meanwhile: a provider may take longer to answer than
        the lease lasts, and no other caller is to ask, and perform, at the same time.
        """
        ledger, lease, policy = self.ledger, self.lease, self.policy
        ledger.emit("lapsed", lease.operation, token=lease.token, attempt=lease.attempt)
        if policy.on_unknown == "hold":
            yield from ledger.hold(lease, "its holder vanished")
            self.stop()
            raise outcome_unknown(lease.operation.key)
        if policy.on_unknown == "resolve":
            resolution = yield from self._ask()
            ledger.emit("resolved", lease.operation, token=lease.token, detail=resolution.verdict)
            if resolution.outcome is not None:  # and this attempt is in doubt until that is recorded
                self.op.note = "resolved: it had happened"
                return Answer(resolution.outcome, "replayed", attempt=lease.attempt)
            yield from ledger.store.renew(lease, lease=policy.lease)  # raises Fenced if the lease was lost meanwhile
        self.in_doubt = False
        return None

    def _ask(self) -> Plan[Resolution]:
        """The resolver's decision.  If it has none, the lease lapses at once, so that the next caller asks anew."""
        assert self.policy.resolver is not None, "a policy with on_unknown = 'resolve' has a resolver"
        cause: Exception | None = None
        try:
            resolution: Resolution = yield Call(self.policy.resolver, self.op)
            if resolution.verdict == "settled" or (resolution.verdict == "released" and self.trusts_no):
                return resolution
        except Exception as error:
            cause = error
        self.stop()
        yield from self.ledger.lapse(self.lease)
        raise UnknownOutcome(
            "Whether a former attempt took effect is not known yet; retry later", retry_after=5
        ) from cause

    # An effect that must happen once whatever the key

    def claim_unique(self) -> Plan[Answer | None]:
        """Claim what must happen once whatever the key; the answer, if it has been done.

        The second record belongs to no principal, so its outcome is shown only to the one that made it.  With
        on_unique = "serialize" operations only take turns: nothing is kept, and the next one performs.
        """
        ledger, under = self.ledger, inner_policy(self.policy)
        inner = inner_operation(self.operation, self.policy)
        found = yield from ledger.claim(inner, under, self.policy.lease / 2)
        if isinstance(found, Record):
            return done_before(found, self.op, self.policy)
        unique = self._take_unique(found, under)
        unique.trusts_no = self.lease.lapsed  # else it was another key that vanished
        return (yield from unique.start())

    def _take_unique(self, lease: Lease, policy: Policy) -> LeaseAttempt:
        self.unique = LeaseAttempt(self.ledger, lease.operation, policy)
        self.unique.reports = False
        self.unique.take(lease, None)
        return self.unique

    def _claim_resolved(self) -> Plan[None]:
        """A resolver has found that the operation happened: then its unique part did, too, and is settled with it."""
        if self.operation.unique is None or self.policy.on_unique == "serialize":
            return
        inner = inner_operation(self.operation, self.policy)
        found = yield from self.ledger.store.claim(inner, lease=self.policy.lease)
        if isinstance(found, Lease):
            self._take_unique(found, inner_policy(self.policy))

    def _end_both(self, unique: LeaseAttempt, answer: Answer) -> Plan[Answer]:
        """Record the unique part first: no record may say that the operation is done before this one does."""
        owner = self.operation.scope
        try:
            tagged = msgspec.structs.replace(answer, outcome=tag(answer.outcome, owner))
            found = yield from unique.end(tagged)
            by, outcome = untagged(found.outcome)
            if by != owner:  # too late: the outcome belongs to the caller that took over, and is not shown to this one
                raise fenced(unique.lease)
        except GeneratorExit:
            raise
        except Exception as error:
            yield from self.ledger.release(self.lease, retention=self.policy.ttl)
            self.refused(error)
            raise
        except BaseException:  # cancelled while it was written, which is done all the same: so write this record, too
            with suppress(OncemoreError):
                yield from self.record(answer)
            raise
        how: How = "replayed" if found.how == "replayed" else "stored"
        return (yield from self.record(Answer(outcome, how, found.expires_at, found.attempt, found.value)))

    # The four ends

    def settle(self, outcome: Outcome, value: Any = None) -> Plan[Answer]:
        """Record the outcome; *value* is what the performer gave or raised, for the answer."""
        answer = Answer(outcome, "stored", None, self.lease.attempt, value)
        return self._end_in_doubt(answer) if self.doubts(outcome, value) else self.end(answer)

    def doubts(self, outcome: Outcome | None, value: Any = None) -> bool:
        """Whether nobody knows if the effect happened: *outcome* has a status, or *value* is an exception, of `doubt`."""
        if outcome is not None and outcome.status in self.policy.doubt:
            return True
        return isinstance(value, Exception) and self.policy.doubts(value)

    def _end_in_doubt(self, answer: Answer) -> Plan[Answer]:
        """Leave the decision to on_unknown; this caller gets its own answer all the same."""
        status, value = answer.outcome.status, answer.value
        cause = f"status {status}" if status in self.policy.doubt else type(value).__name__
        yield from self._mark_unknown(f"in doubt after {cause}")
        return msgspec.structs.replace(answer, how="released" if self.policy.on_unknown == "retry" else "unknown")

    def _mark_unknown(self, why: str) -> Plan[None]:
        """Leave an unknown outcome to on_unknown, as after a crash, but at once.  The unique part comes first."""
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
            except (Fenced, *STORE_FAILURES) as failure:  # then the lease lapses by itself
                ledger.emit("failed", lease.operation, token=lease.token, code=failure.code)

    def end(self, answer: Answer) -> Plan[Answer]:
        """Record an answer: the performer's, a resolver's, or that of another key."""
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
        return self.settled(answer)

    def keeps(self, outcome: Outcome) -> bool:
        """Whether the outcome is final: kept and replayed, rather than released for another attempt."""
        return is_final(outcome, self.policy)

    def settled(self, answer: Answer) -> Answer:
        """The answer, after its outcome has become durable: remembered by this process, and shown to the observers."""
        ledger, operation, policy, outcome = self.ledger, self.lease.operation, self.policy, answer.outcome
        expires_at = ledger.clock.time() + policy.ttl  # for the caller to read; the store's own clock decides
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
        """Record that there is no outcome, and that the next caller may perform."""
        if self.ended:
            return
        if self.unique is not None:
            yield from self.unique.release()
        self.stop()
        yield from self.ledger.release(self.lease, retention=self.policy.ttl)

    def withdraw(self, error: BaseException | None = None) -> Plan[None]:
        """Give the claim back: nothing was performed, because of *error*."""
        if self.ended:
            return
        if self.unique is not None:
            yield from self.unique.withdraw()
        self.stop()
        if self.in_doubt:  # it did not come to a decision: the next caller asks anew, without waiting
            yield from self.ledger.lapse(self.lease)
        else:
            yield from self.ledger.release(self.lease, retention=0.0 if self.lease.attempt == 1 else self.policy.ttl)
        if error is not None:
            self.refused(error)

    def drop(self) -> None:
        """Leave the attempt as it is: its lease lapses."""
        self.stop()

    def stop(self) -> None:
        """The end has begun: nothing else ends the attempt, and its leases are not renewed any more."""
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
            self.drop()  # also if interrupted between two lines, or thrown away: the lease must not be renewed for ever

    def call(self, performer: Performer) -> Plan[Answer]:
        """Call the performer of an attempt that has begun, and settle or fail."""
        try:
            value = yield Perform(performer, self.op)
        except GeneratorExit:
            raise
        except BaseException as error:
            known = yield from self.raised(error)
            if known is None:
                raise
            return known
        return (yield from self.returned(value))

    def returned(self, value: Any) -> Plan[Answer]:
        """Settle the value that the performer has returned."""
        outcome = value if isinstance(value, Outcome) else value_outcome(value, self.policy.types)
        return self.settle(outcome, value)

    def raised(self, error: BaseException) -> Plan[Answer | None]:
        """Settle or fail, after the performer has raised *error*.  None if the caller is to raise it."""
        if isinstance(error, ProviderDuplicate) and self.is_success(error):
            return (yield from self.returned(error.result))
        if isinstance(error, self.policy.errors) and not self.doubts(None, error):
            return (yield from self.settle(error_outcome(error, self.policy.types), error))
        return (yield from self.fail(error))

    def is_success(self, error: ProviderDuplicate) -> bool:
        """Whether the performer has raised the result of an earlier attempt, which its provider remembers."""
        return error.has_result


class Perform(Call):
    """The effect of calling the performer."""

    __slots__ = ()

    def __init__(self, performer: Performer, op: Op) -> None:
        self.function, self.args = performer, (op,)

    async def arun(self) -> Any:
        op: Op = self.args[0]
        result = self.function(op)
        if hasattr(result, "__await__"):
            return await result
        if op.lent:  # the performer awaited nothing, so its statements were never sent
            raise unawaited(self.function)
        return result
