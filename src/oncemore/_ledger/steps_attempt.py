"""`effect = "steps"`: the operation is performed under a lease, and after a crash the next attempt continues.

An operation that is left unfinished after its first step stays running, but its lease is ended.  So its caller's next
attempt, or the completer, can claim it without waiting.
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
from .uniqueness import replay_unique, screen, unique_operation, unique_policy, unique_unknown, untag
from .values import decode, encode


class StepsAttempt(LeaseAttempt):
    """One try at an operation in steps: it performs or continues, then settles.

    `fail` may return an answer: the outcome of the attempt that took over from a late owner, or the failure after which all
    steps were undone.
    """

    steps: Steps
    too_old = False  # whether it was left unfinished for so long that its checkpoints may be gone

    def claim(self, deadline: float | None) -> Plan[Lease | Record]:
        """Claim, and store the request for a completer.  One that an earlier attempt has stored stays, with its deadline."""
        store = self.ledger.store
        record = yield from store.find(self.operation.scope, self.operation.key)
        if record is not None and record.state == "settled":
            return record
        if record is not None and record.request and self.operation.same(record.fingerprint):
            self.request = record.request  # send it again, because the record may be deleted before this claim
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
        """Check for twins and old keys, load the steps of earlier attempts, and claim the unique record."""
        if self.lease.lapsed:
            self.ledger.emit("lapsed", self.operation, token=self.lease.token, attempt=self.lease.attempt)
        if self.policy.suspect != "off" or self.policy.late != "run":
            known = yield from screen(self.ledger, self.ledger.store, self.op, self.policy)
            if known is not None:
                return known
        try:
            yield from self._load_steps()
            return None if self.operation.unique is None else (yield from self.claim_unique())
        except GeneratorExit:
            raise
        except BaseException as error:
            return (yield from self._leave_after(error, forget=isinstance(error, Refusal)))

    def _load_steps(self) -> Plan[None]:
        """Load the steps.  Hold an operation that is too old, because its checkpoints may be gone."""
        try:
            deadline = yield from self.steps.load()
            if self.lease.attempt > 1:
                self.op.deadline = deadline
        except UnknownOutcome as error:
            self.too_old = True
            raise (yield from self._hold(error.detail)) from error

    def claim_unique(self) -> Plan[Answer | None]:
        """Claim the unique record.

        It stays this key's until its operation is finished, because only this key knows its steps.
        """
        operation, policy, claimant = (
            unique_operation(self.operation, self.policy),
            unique_policy(self.policy),
            self.operation.id,
        )
        while True:
            found = yield from self.ledger.claim(operation, policy, self.policy.lease / 2, encode(claimant))
            if isinstance(found, Record):
                if (yield from self.steps.has_mark()):
                    # This key failed and was undone, which freed the record for another key.  Go on, to meet the mark.
                    return None
                return (yield from self._replay_unique(found))
            if found.operation.fingerprint in ("", operation.fingerprint):
                yield self._take_unique(found, policy).renewal
                return None
            yield from self._free_or_refuse(found, policy)

    def _free_or_refuse(self, lease: Lease, policy: Policy) -> Plan[None]:
        """Free a record that belongs to another key's unfinished operation if a person has resolved that one; else raise.

        The other key's scope and key are the stored request of the unique record.
        """
        store = self.ledger.store
        record = yield from store.find(*lease.operation.id)
        if record is None or not record.request:  # deleted meanwhile, so this lease is lost
            raise fenced(lease)
        scope, key = decode(record.request)
        other = yield from store.find(scope, key)
        if other is None or other.state in ("settled", "released"):
            yield from end_unique(store, lease, policy, None if other is None else other.outcome, scope)
            return
        yield from self.ledger.lapse(lease)
        if other.state == "held":
            raise unique_unknown(self.operation.unique)
        raise InProgress(f"{self.operation.unique!r} is unfinished under another key; retry later", retry_after=5.0)

    def _replay_unique(self, record: Record) -> Plan[Answer]:
        """Return the answer of the settled unique record: another key's, or this key's own if it crashed after settling it."""
        owner, outcome = untag(record.outcome)
        own = record.fingerprint == unique_operation(self.operation, self.policy).fingerprint
        if own and owner == self.operation.scope:
            return Answer(outcome, "replayed", attempt=self.op.attempt)
        answer = replay_unique(record, self.op, self.policy)
        yield from self.steps.check_end(final=self.keeps(answer.outcome))
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
            yield from self.steps.check_end(final=keeps)
        except GeneratorExit:
            raise
        except BaseException as error:
            return (yield from self._leave_after(error))
        return (yield from self._finish(answer, keeps=keeps))

    def _finish(self, answer: Answer | None, *, keeps: bool) -> Plan[Answer]:
        """Record the answer if the policy *keeps* it, and undo the steps after a failure.

        *answer* is None if the steps must be undone, or if a successor has the answer.
        """
        try:
            if self.steps.lost is not None:  # a late owner, also if its performer caught the Fenced
                return (yield from self.ledger.answer_of_successor(self.operation, self.policy, self.steps.lost))
            if answer is None or self.steps.failed_for_good or (keeps and self._has_failed_for_good(answer)):
                answer = yield from self._undo(answer)
            elif not keeps:
                yield from self._leave()
                return msgspec.structs.replace(answer, how="released")
            return (yield from self._settle_both(answer))
        finally:
            self.stop()

    def _leave_after(self, error: BaseException, *, forget: bool = False) -> Plan[Answer]:
        """End the attempt after *error*.  Raise it, unless the operation has an answer nevertheless."""
        if self.too_old:  # also if it could not be held: the next attempt finds it too old again
            self.stop()
            raise error
        if self.steps.lost or self.steps.failed_for_good or (self.operation.giving_up and may_give_up(error)):
            return (yield from self._finish(None, keeps=False))
        yield from self._leave(forget=forget)
        raise error

    def _settle_both(self, answer: Answer) -> Plan[Answer]:
        """Settle the unique record, then the operation's own."""
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
        """Leave the operation unfinished, so that the next attempt continues.  If no step was begun, release it."""
        self.stop()
        try:
            taken = yield from self.steps.any_begun()
            if taken:
                yield from self.ledger.lapse(self.lease)
            else:
                retention = 0.0 if forget and self.lease.attempt == 1 else self.policy.ttl
                yield from self.ledger.release(self.lease, retention=retention)
            yield from self._leave_unique(free=not taken)
        except (Fenced, *STORE_FAILURES) as error:  # the lease lapses by itself, or another attempt has it
            self.ledger.emit("failed", self.operation, token=self.lease.token, code=error.code)

    def _leave_unique(self, *, free: bool) -> Plan[None]:
        """Stop holding the unique record.  If it is *free*, other keys perform; else they learn that this key is unfinished."""
        if free or self.policy.on_unique == "serialize":
            yield from self._end_unique_claim(None)
        elif self.unique is not None:
            yield from self.ledger.lapse(self.unique.lease)

    # Failing for good

    def _has_failed_for_good(self, answer: Answer) -> bool:
        """Whether the answer is a failure, and there are steps to undo or a late owner may still take steps."""
        failed = answer.outcome.kind == "error" or answer.outcome.status >= 400
        return failed and bool(self.steps.undos or self.op.attempt > 1)

    def _undo(self, answer: Answer | None) -> Plan[Answer]:
        """Undo the steps that were taken, last one first, and return the failure.  Hold the operation if it was given up."""
        steps = self.steps
        try:
            if not steps.failed_for_good:
                yield from steps.fail_for_good(None if answer is None else answer.outcome)
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
            with suppress(Fenced, *STORE_FAILURES):  # the lease of the unique record lapses by itself
                yield from self._leave_unique(free=False)
            raise held from error
        if steps.failure is None:
            yield from self._end_unique_claim(None)
            doubt = f"; but {steps.step_in_doubt!r} was begun, and may have taken effect" if steps.step_in_doubt else ""
            raise (yield from self._hold(f"given up after {self.op.attempt} attempts, and undone{doubt}"))
        if answer is None or answer.outcome is not steps.failure:  # an earlier attempt's failure counts
            return Answer(steps.failure, "replayed")
        return answer

    def _hold(self, note: str) -> Plan[UnknownOutcome]:
        self.stop()
        yield from self.ledger.hold(self.lease, note)
        return UnknownOutcome(f"The operation cannot be finished without a decision: {note}")

    def keeps(self, outcome: Outcome) -> bool:
        """Whether the outcome is final.  If it is in doubt, it is not: the next attempt continues with that step."""
        return not self.doubts(outcome) and super().keeps(outcome)

    def is_success(self, error: ProviderDuplicate) -> bool:
        """Never, because the performer was left between two steps."""
        return False


def may_give_up(error: BaseException) -> bool:
    """Whether the last attempt has failed: it was not interrupted, and neither lost its lease nor the store."""
    return isinstance(error, Exception) and not isinstance(error, Fenced | StoreError)
