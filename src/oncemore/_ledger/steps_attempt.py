"""`effect = "steps"`: the operation is performed under a lease, and whoever comes after a crash goes on behind the last step.

What is left unfinished after the first step stays running, with its lease over: its caller's next attempt claims it at
once, and so does the completer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from .._contract.policy import Policy
from .._runtime.plan import Plan
from ..errors import Fenced, InProgress, Refusal, StoreError, UnknownOutcome
from .context import Op
from .decisions import Answer, keeps
from .driven import Driven
from .heartbeat import Beat, Perform
from .model import Lease, Outcome, Record
from .steps import Steps
from .uniqueness import done_before, inner_operation, inner_policy, tag, untagged
from .unknown import lapse
from .values import error_outcome, value_outcome

if TYPE_CHECKING:
    from .guard import Guard


def stepped(
    guard: Guard, lease: Lease, perform: Callable[[Op], Any], policy: Policy, deadline: float | None = None
) -> Plan[Answer]:
    """Perform, or go on, and settle: the plan of `Guard.own` for this level."""
    return (yield from Stepped(guard, lease, perform, policy).answer(deadline))


class Stepped:
    """One attempt at an operation in steps."""

    def __init__(self, guard: Guard, lease: Lease, perform: Callable[[Op], Any], policy: Policy) -> None:
        self.guard = guard
        self.lease = lease
        self.operation = lease.operation
        self.perform = perform
        self.policy = policy
        self.steps = Steps(guard, lease, policy)
        self.op = Op(lease, steps=self.steps)
        self.turn: Lease | None = None  # on what must happen once whatever the key
        self.too_old = False  # for anybody to know what was done

    def answer(self, deadline: float | None) -> Plan[Answer]:
        lease, policy, known = self.lease, self.policy, None
        if lease.lapsed:
            self.guard.tell("lapsed", self.operation, token=lease.token, attempt=lease.attempt)
        elif lease.attempt == 1 and (policy.suspect != "off" or policy.late != "run"):
            known = yield from self.guard._screen(self.op, policy)
        if known is not None:
            return (yield from self._settled(known))
        former = "lapsed" if lease.lapsed else ""
        self.guard.tell("claimed", self.operation, token=lease.token, attempt=lease.attempt, from_state=former)
        answer = yield from self._performed(deadline)
        if self.steps.lost is not None:  # a late owner, also one that went on regardless
            return (yield from self.guard._after_all(self.operation, policy, self.steps.lost))
        if answer is None or self.steps.closed or self._failed_for_good(answer):
            return (yield from self._undone(answer))
        if keeps(policy, answer.outcome):
            return (yield from self._settled(answer))
        yield from self._leave()
        return msgspec.structs.replace(answer, how="released")

    def _performed(self, deadline: float | None) -> Plan[Answer | None]:
        """What the performer gives; None where it gave nothing, because all is to be undone, or another's."""
        try:
            self.op.deadline = yield from self._opened(deadline)
            return (yield from self._called())
        except GeneratorExit:
            raise
        except BaseException as error:
            if self.too_old:  # also where it could not be held: then its lease lapses, and it is found too old again
                raise
            if self.steps.lost or self.steps.closed or (self.operation.giving_up and may_give_up(error)):
                return None
            yield from self._leave(forget=isinstance(error, Refusal))
            raise

    def _opened(self, deadline: float | None) -> Plan[float | None]:
        """The first caller's deadline; what was left for too long is held: nobody can go on with it, nor begin anew."""
        try:
            return (yield from self.steps.open(deadline))
        except UnknownOutcome as error:
            self.too_old = True
            raise (yield from self._held(error.detail)) from error

    def _called(self) -> Plan[Answer]:
        beats: tuple[Beat, ...] = (self.steps.beat,)
        if self.operation.unique is not None:
            found = yield from self._turn()
            if isinstance(found, Lease):
                self.turn = found
                beats = (*beats, self.guard.heart.beat(found, self.policy.lease))
            elif not (yield from self.steps.was_closed()):
                return (yield from self._done(found))
            # else it has failed and was undone, and so made way for another key: what is left is to say so here
        try:
            value = yield Perform(self.guard.heart, beats, self.perform, self.op)
        except self.policy.errors as error:
            outcome = error_outcome(error, self.policy.types)
            return (yield from self._ended(Answer(outcome, "stored", attempt=self.op.attempt, value=error)))
        outcome = value if isinstance(value, Outcome) else value_outcome(value, self.policy.types)
        return (yield from self._ended(Answer(outcome, "stored", attempt=self.op.attempt, value=value)))

    def _ended(self, answer: Answer) -> Plan[Answer]:
        yield from self.steps.ended(final=keeps(self.policy, answer.outcome))
        return answer

    def _done(self, record: Record) -> Plan[Answer]:
        """The answer where it was done: by another key, or by a former attempt that came no further than to say so there."""
        owner, outcome = untagged(record.outcome)
        own = record.fingerprint == inner_operation(self.operation, self.policy).fingerprint
        if own and owner == self.operation.scope:
            return Answer(outcome, "replayed", attempt=self.op.attempt)
        return (yield from self._ended(done_before(record, self.op, self.policy)))

    def _turn(self) -> Plan[Lease | Record]:
        """A second lease, on what must happen once whatever the key, or the record of the one that has done it."""
        inner = inner_operation(self.operation, self.policy)
        found = yield from self.guard.turn(inner, inner_policy(self.policy), wait=self.policy.lease / 2)
        if isinstance(found, Lease) and found.operation.fingerprint not in ("", inner.fingerprint):
            yield from lapse(self.guard, found)
            raise InProgress(f"{self.operation.unique!r} is unfinished, under another key", retry_after=5.0)
        return found

    def _settled(self, answer: Answer) -> Plan[Answer]:
        try:
            yield from self._end_turn(answer.outcome)
        except (Fenced, StoreError):
            yield from self._leave()
            raise
        return (yield from self.guard.settle(self.op, answer, self.policy))

    def _end_turn(self, outcome: Outcome | None) -> Plan[None]:
        """A success is everyone's answer; anything else leaves the way free for another key."""
        if self.turn is None:
            return
        under = inner_policy(self.policy)
        if outcome is None or not keeps(under, outcome):
            yield from self.guard.store.release(self.turn, retention=0.0)
        else:
            yield from self.guard.store.settle(self.turn, tag(outcome, self.operation.scope), retention=under.ttl)

    def _leave(self, *, forget: bool = False) -> Plan[None]:
        """Unfinished: whoever comes next goes on.  Where no step was begun, the next one begins anew."""
        try:
            taken = yield from self.steps.any_taken()
            if taken:
                yield from lapse(self.guard, self.lease)
            else:
                yield from self.guard.give_back(self.lease, self.policy, forget=forget and self.lease.attempt == 1)
            if not taken or self.policy.on_unique == "serialize":
                yield from self._end_turn(None)
            elif self.turn is not None:
                yield from lapse(self.guard, self.turn)
        except (Fenced, StoreError) as error:  # then it lapses by itself, or is another's
            self.guard.tell("failed", self.operation, token=self.lease.token, code=error.code)

    # Failing for good

    def _failed_for_good(self, answer: Answer) -> bool:
        """Whether it is a failure, and there is anything to undo, or a former attempt that must be kept from going on."""
        failed = answer.outcome.kind == "error" or answer.outcome.status >= 400
        return failed and bool(self.steps.undos or self.op.attempt > 1) and keeps(self.policy, answer.outcome)

    def _undone(self, answer: Answer | None) -> Plan[Answer]:
        """Undo the steps that were taken, the last one first; then the failure is the outcome, or it is held."""
        steps = self.steps
        try:
            if not steps.closed:
                yield from steps.close(None if answer is None else answer.outcome)
            while steps.undos:
                yield Driven(partial(steps.perform, *steps.undos[-1]), self.guard.heart, steps.beat)
                steps.undos.pop()
        except GeneratorExit:
            raise
        except BaseException as error:
            if not may_give_up(error):
                yield from self._leave()
                raise
            where = f"the undoing of {steps.undos[-1][0].name.removeprefix('undo:')!r}" if steps.undos else "the end"
            raise (yield from self._held(f"{where} failed: {error!r}")) from error
        if steps.failure is None:
            yield from self._end_turn(None)
            doubt = f"; but {steps.doubt!r} was begun, and may have taken effect" if steps.doubt else ""
            raise (yield from self._held(f"given up after {self.op.attempt} attempts, and undone{doubt}"))
        if answer is None or answer.outcome is not steps.failure:  # a former attempt's failure is what counts
            answer = Answer(steps.failure, "replayed")
        return (yield from self._settled(answer))

    def _held(self, note: str) -> Plan[UnknownOutcome]:
        yield from self.guard.store.hold(self.lease, note=note[:500])
        self.guard.tell("held", self.operation, token=self.lease.token, detail=note)
        return UnknownOutcome(f"The operation cannot be finished without a decision: {note}")


def may_give_up(error: BaseException) -> bool:
    """Whether the last attempt has failed, rather than been cut off."""
    return isinstance(error, Exception) and not isinstance(error, Fenced | StoreError)
