"""`effect = "steps"`: the operation is performed under a lease, and after a crash the next attempt continues.

An operation that is left unfinished after its first step stays running, with its lease ended: the next attempt of its caller
claims it at once, and so does the completer.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec

from .._contract.policy import Policy
from .._runtime.heartbeat import Renewal
from .._runtime.plan import Plan
from ..errors import Fenced, InProgress, OncemoreError, ProviderDuplicate, Refusal, StoreError, UnknownOutcome
from .attempt import LeaseAttempt, end_unique
from .context import Op
from .decisions import Answer, fenced
from .model import Lease, Outcome, Record
from .steps import Steps, pack_request
from .store import STORE_FAILURES
from .uniqueness import done_before, inner_operation, inner_policy, screen, unique_unknown, untagged
from .values import decode, encode


class StepsAttempt(LeaseAttempt):
    """One try at an operation in steps: it performs, or continues, and settles.

    `fail` may return an answer: that of the attempt that took over from a late owner, or the failure after which all steps
    were undone.
    """

    steps: Steps
    too_old = False  # left unfinished for so long that its checkpoints may be gone

    def claim(self, deadline: float | None) -> Plan[Lease | Record]:
        """Claim, and keep the request for a completer.  If an earlier attempt has kept its own, that stays, and its deadline."""
        store = self.ledger.store
        record = yield from store.find(self.operation.scope, self.operation.key)
        if record is not None and record.state == "settled":
            return record
        if record is not None and record.request and self.operation.same(record.fingerprint):
            self.request = record.request  # sent again, because the record may be forgotten before this claim gets it
        else:
            self.request = pack_request(self.operation, deadline, self.policy.types)
        return (yield from store.claim(self.operation, lease=self.policy.lease, request=self.request))

    def take(self, lease: Lease, deadline: float | None) -> None:
        self.lease = lease
        self.renewal = Renewal(self.ledger.heartbeat, lease, self.policy.lease)
        self.steps = Steps(self.ledger, lease, self.policy, self.renewal)
        self.op = Op(lease, steps=self.steps, deadline=deadline)

    def is_ordinary(self) -> bool:
        return False

    def prepare(self) -> Plan[Answer | None]:
        """Look for twins, find the checkpoints of earlier attempts, and claim what must happen once whatever the key."""
        if self.lease.lapsed:
            self.ledger.emit("lapsed", self.operation, token=self.lease.token, attempt=self.lease.attempt)
        if self.policy.suspect != "off" or self.policy.late != "run":
            known = yield from screen(self.ledger, self.ledger.store, self.op, self.policy)
            if known is not None:
                return known
        try:
            yield from self._open()
            return None if self.operation.unique is None else (yield from self.claim_unique())
        except GeneratorExit:
            raise
        except BaseException as error:
            return (yield from self._leave_after(error, forget=isinstance(error, Refusal)))

    def _open(self) -> Plan[None]:
        """Find the checkpoints.  An operation that was left for too long is held: nobody can continue or repeat it."""
        try:
            deadline = yield from self.steps.open()
            if self.lease.attempt > 1:
                self.op.deadline = deadline
        except UnknownOutcome as error:
            self.too_old = True
            raise (yield from self._hold(error.detail)) from error

    def claim_unique(self) -> Plan[Answer | None]:
        """A second claim, kept by this key until it is finished: no other key can continue an unfinished operation."""
        inner, policy, claimant = (
            inner_operation(self.operation, self.policy),
            inner_policy(self.policy),
            self.operation.id,
        )
        while True:
            found = yield from self.ledger.claim(inner, policy, self.policy.lease / 2, encode(claimant))
            if isinstance(found, Record):
                if (yield from self.steps.was_closed()):
                    # It failed and was undone, and so made way for another key: only that is left to be said here.
                    return None
                return (yield from self._done_before(found))
            if found.operation.fingerprint in ("", inner.fingerprint):
                yield self._take_unique(found, policy).renewal
                return None
            yield from self._end_turn(found, policy)

    def _end_turn(self, lease: Lease, policy: Policy) -> Plan[None]:
        """Another key has left this unfinished.  If a person has decided about that key since, end its turn; else refuse.

        The claim of the other key kept its scope and key in the record's request.
        """
        store = self.ledger.store
        record = yield from store.find(*lease.operation.id)
        if record is None or not record.request:  # deleted meanwhile: this lease is worth nothing any more
            raise fenced(lease)
        scope, key = decode(record.request)
        other = yield from store.find(scope, key)
        if other is None or other.state in ("settled", "released"):
            yield from end_unique(store, lease, policy, None if other is None else other.outcome, scope)
            return
        yield from self.ledger.lapse(lease)
        if other.state == "held":
            raise unique_unknown(self.operation.unique)
        raise InProgress(f"{self.operation.unique!r} is unfinished, under another key", retry_after=5.0)

    def _done_before(self, record: Record) -> Plan[Answer]:
        """The answer if it was done by another key, or by an earlier attempt that came no further than to say so there."""
        owner, outcome = untagged(record.outcome)
        own = record.fingerprint == inner_operation(self.operation, self.policy).fingerprint
        if own and owner == self.operation.scope:
            return Answer(outcome, "replayed", attempt=self.op.attempt)
        answer = done_before(record, self.op, self.policy)
        yield from self.steps.ended(final=self.keeps(answer.outcome))
        return answer

    # The ends

    def settle(self, outcome: Outcome, value: Any = None) -> Plan[Answer]:
        self.ended = True
        return self._reported(self._settle(Answer(outcome, "stored", None, self.lease.attempt, value)))

    def end(self, answer: Answer) -> Plan[Answer]:
        self.ended = True
        return self._reported(self._finish(answer, keeps=self.keeps(answer.outcome)))

    def fail(self, error: BaseException) -> Plan[Answer | None]:
        if self.ended:
            return None
        self.ended = True
        try:
            return (yield from self._reported(self._leave_after(error, forget=isinstance(error, Refusal))))
        except BaseException as raised:
            if raised is not error:
                raise
            return None

    def release(self) -> Plan[None]:
        if not self.ended:
            yield from self._leave()

    def withdraw(self, error: BaseException | None = None) -> Plan[None]:
        if not self.ended:
            yield from self._leave(forget=True)
            if error is not None:
                self.refused(error)

    def _reported(self, plan: Plan[Answer]) -> Plan[Answer]:
        try:
            return (yield from plan)
        except OncemoreError as error:
            self.refused(error)
            raise
        finally:
            self.stop()

    def _settle(self, answer: Answer) -> Plan[Answer]:
        keeps = self.keeps(answer.outcome)
        try:
            yield from self.steps.ended(final=keeps)
        except GeneratorExit:
            raise
        except BaseException as error:
            return (yield from self._leave_after(error))
        return (yield from self._finish(answer, keeps=keeps))

    def _finish(self, answer: Answer | None, *, keeps: bool) -> Plan[Answer]:
        """Record the answer, if the policy *keeps* it; None if there is none because all is to be undone, or another's."""
        try:
            if self.steps.lost is not None:  # a late owner, also one that went on regardless
                return (yield from self.ledger.answer_of_successor(self.operation, self.policy, self.steps.lost))
            if answer is None or self.steps.closed or (keeps and self._has_failed_for_good(answer)):
                answer = yield from self._undo(answer)
            elif not keeps:
                yield from self._leave()
                return msgspec.structs.replace(answer, how="released")
            return (yield from self._settle_both(answer))
        finally:
            self.stop()

    def _leave_after(self, error: BaseException, *, forget: bool = False) -> Plan[Answer]:
        """End an attempt that *error* has ended: raise it, unless the operation has an answer all the same."""
        if self.too_old:  # also if it could not be held: then its lease lapses, and it is found too old again
            self.stop()
            raise error
        if self.steps.lost or self.steps.closed or (self.operation.giving_up and may_give_up(error)):
            return (yield from self._finish(None, keeps=False))
        yield from self._leave(forget=forget)
        raise error

    def _settle_both(self, answer: Answer) -> Plan[Answer]:
        """Settle what is unique, then the operation itself."""
        self.stop()
        try:
            yield from self._end_unique_claim(answer.outcome)
        except (Fenced, *STORE_FAILURES):
            yield from self._leave()
            raise
        return (yield from self.record(answer))

    def _end_unique_claim(self, outcome: Outcome | None) -> Plan[None]:
        if self.unique is not None:
            unique = self.unique
            yield from end_unique(self.ledger.store, unique.lease, unique.policy, outcome, self.operation.scope)

    def _leave(self, *, forget: bool = False) -> Plan[None]:
        """Leave the operation unfinished: the next attempt continues.  If no step was begun, it begins anew."""
        self.stop()
        try:
            taken = yield from self.steps.any_taken()
            if taken:
                yield from self.ledger.lapse(self.lease)
            else:
                retention = 0.0 if forget and self.lease.attempt == 1 else self.policy.ttl
                yield from self.ledger.release(self.lease, retention=retention)
            yield from self._leave_unique(free=not taken)
        except (Fenced, *STORE_FAILURES) as error:  # then the lease lapses by itself, or is another's
            self.ledger.emit("failed", self.operation, token=self.lease.token, code=error.code)

    def _leave_unique(self, *, free: bool) -> Plan[None]:
        """Let other keys ask at once: they perform if the way is *free*, and otherwise learn that this key is unfinished."""
        if free or self.policy.on_unique == "serialize":
            yield from self._end_unique_claim(None)
        elif self.unique is not None:
            yield from self.ledger.lapse(self.unique.lease)

    # Failing for good

    def _has_failed_for_good(self, answer: Answer) -> bool:
        """Whether it is a failure, and there are steps to undo, or an earlier attempt that must be kept from going on."""
        failed = answer.outcome.kind == "error" or answer.outcome.status >= 400
        return failed and bool(self.steps.undos or self.op.attempt > 1)

    def _undo(self, answer: Answer | None) -> Plan[Answer]:
        """Undo the steps that were taken, the last one first.  Then the failure is the answer, or the operation is held."""
        steps = self.steps
        try:
            if not steps.closed:
                yield from steps.close(None if answer is None else answer.outcome)
            while steps.undos:
                yield from steps.perform(*steps.undos[-1])
                steps.undos.pop()
        except GeneratorExit:
            raise
        except BaseException as error:
            if not may_give_up(error):
                yield from self._leave()
                raise
            where = f"the undoing of {steps.undos[-1][0].name.removeprefix('undo:')!r}" if steps.undos else "the end"
            held = yield from self._hold(f"{where} failed: {error!r}")
            with suppress(Fenced, *STORE_FAILURES):  # then its lease lapses by itself
                yield from self._leave_unique(free=False)
            raise held from error
        if steps.failure is None:
            yield from self._end_unique_claim(None)
            doubt = f"; but {steps.doubt!r} was begun, and may have taken effect" if steps.doubt else ""
            raise (yield from self._hold(f"given up after {self.op.attempt} attempts, and undone{doubt}"))
        if answer is None or answer.outcome is not steps.failure:  # an earlier attempt's failure is what counts
            return Answer(steps.failure, "replayed")
        return answer

    def _hold(self, note: str) -> Plan[UnknownOutcome]:
        self.stop()
        yield from self.ledger.hold(self.lease, note)
        return UnknownOutcome(f"The operation cannot be finished without a decision: {note}")

    def keeps(self, outcome: Outcome) -> bool:
        """Whether the outcome is final.  One that is in doubt is not: the next attempt goes on with the step in question."""
        return not self.doubts(outcome) and super().keeps(outcome)

    def is_success(self, error: ProviderDuplicate) -> bool:
        """Never: the operation was left between two steps."""
        return False


def may_give_up(error: BaseException) -> bool:
    """Whether the last attempt has failed, rather than been cut off."""
    return isinstance(error, Exception) and not isinstance(error, Fenced | StoreError)
