"""Steps: an operation cut into parts, each of them an operation of its own in the same ledger.

The n-th step is the operation `<key>:<life>:<n>` whose fingerprint is the step's name.  A settled one is a checkpoint: its
value is given, and nothing runs.  One that is not is claimed and performed like any operation, a database step in a
transaction, any other under a lease.  So a step has one performer at a time, whoever holds the whole, and needs no table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .._contract.policy import Policy, duration
from .._runtime.plan import Plan, Sleep
from ..errors import ConfigurationError, Fenced, PayloadMismatch, StepsChanged
from .checkpoint import (
    UNFINISHED,
    check_age,
    closed_with,
    closing,
    doubt_of,
    is_closed,
    kept,
    life_of,
    request_outcome,
    result,
    step_operation,
    step_policy,
)
from .context import derive
from .decisions import Answer, fenced
from .model import Lease, Operation, Outcome, Record
from .step import OnUnknownStep, Retrying, Step, StepEffect, wants
from .values import replayed, value_outcome

if TYPE_CHECKING:
    from .guard import Guard

__all__ = ["OnUnknownStep", "Retrying", "Steps", "Undone"]


class Undone(Exception):
    """Ends the performer of an operation that has failed for good: its steps are being undone."""


class Steps:
    """The steps of one attempt at an operation, from `open` to the performer's end."""

    def __init__(self, guard: Guard, lease: Lease, policy: Policy) -> None:
        self.guard = guard
        self.lease = lease
        self.operation = lease.operation
        self.policy = policy
        self.beat = guard.heart.beat(lease, policy.lease)
        self.life = ""  # tells the steps of this record from those of an earlier one under the same key
        self.begun = 0  # the number of the last step that was asked for
        self.names: set[str] = set()  # of all that were
        self.done = 0  # how many are checkpointed; always the first ones
        self.under_way = ""  # the name of the step that was asked for, and has not ended
        self.failed = ""  # the name of the step that ended without a checkpoint
        self.undos: list[tuple[Step, Any]] = []
        self.closed = False  # it has failed for good, in this attempt or a former one
        self.failure: Outcome | None = None  # and this is its outcome; None where it was given up
        self.doubt = ""  # the name of the step that was begun in vain, and may have taken effect all the same
        self.lost: Fenced | None = None
        self._renewed = guard.clock.monotonic()

    # Before the first step

    def open(self, deadline: float | None) -> Plan[float | None]:
        """Write down what was asked, and this *deadline*, as step 0; where a former attempt has, its own is the deadline."""
        record = yield from self.guard.store.find(*self.operation.id)
        if record is None or record.token != self.lease.token:
            raise self._fence(fenced(self.lease))
        self.life = life_of(record)
        if self.lease.lapsed:
            check_age(record)
        found = yield from self.guard.turn(self.named(0, "request"), step_policy(self.policy, "lease"))
        if isinstance(found, Record):
            if (yield from self.any_taken()):  # also where a person has released it
                check_age(found)
            former: float | None = replayed(found.outcome or Outcome("tombstone"), types=self.policy.types)["deadline"]
            return former
        yield from self._settle(found, request_outcome(self.operation, deadline, self.policy.types))
        return deadline

    def named(self, number: int | str, name: str) -> Operation:
        """The operation that step *number* is."""
        return step_operation(self.operation, self.life, number, name)

    # A step

    def step(
        self,
        name: str,
        function: Callable[..., Any],
        undo: Callable[..., Any] | None,
        retry: Retrying | int | None,
        effect: StepEffect | None,
        on_unknown: OnUnknownStep,
        resolver: Callable[..., Any] | None,
    ) -> Plan[Any]:
        """The plan of the next step.  It has its number now, though it may be awaited later."""
        again = name in self.names
        step = Step(self._next(name), name, function, retry, effect, on_unknown, resolver, again=again)
        back = None if undo is None else Step(f"{step.number}u", f"undo:{name}", undo, again=again, undoes=True)
        return self._taken(step, back)

    def _next(self, name: str) -> int:
        if self.under_way:
            raise ConfigurationError(
                f"step {name!r} begins, and {self.under_way!r} has not ended: await each step before the next"
            )
        if self.failed:
            raise ConfigurationError(
                f"step {name!r} comes after {self.failed!r} has failed, which the next attempt would try again; "
                "an error that the operation can live with belongs in `errors` of its policy"
            )
        self.begun += 1
        self.names.add(name)
        self.under_way = name
        return self.begun

    def _taken(self, step: Step, back: Step | None) -> Plan[Any]:
        try:
            yield from self._stop_where_given_up(step)
            answer = yield from self.perform(step)
            self._stop_where_closed(answer.outcome)
        except BaseException:
            self.failed = step.name
            raise
        finally:
            self.under_way = ""
        self.done += 1
        value = result(answer, step.naming(self.policy))
        if back is not None:
            self.undos.append((back, value))
        return value

    def perform(self, step: Step, value: Any = None) -> Plan[Answer]:
        """The step's answer, from its checkpoint or by performing it as often as its retry allows."""
        operation = self.named(step.number, step.name)
        key = derive(self.operation, step.label)
        policy = step.policy(step_policy(step.naming(self.policy), step.effect), key)
        delays = iter(step.retry.delays())
        while True:
            yield from self.ours()
            called = step.called(key, value)
            try:
                answer = yield from self.guard.guarded(operation, called, policy)
            except PayloadMismatch as error:
                if called.began:  # it is the function's own
                    raise
                raise (yield from self._changed(operation, step)) from error
            except Exception as error:
                delay = next(delays, None) if wants(step.retry, error) else None
                if delay is None:
                    raise
                yield Sleep(delay)
            else:
                return kept(answer, step.name)

    def _changed(self, operation: Operation, step: Step) -> Plan[StepsChanged]:
        record = yield from self.guard.store.find(*operation.id)
        was = repr(record.fingerprint) if record is not None else "another one"
        return StepsChanged(
            f"step {step.number} was {was} and is now {step.name!r}: operations that began under the old code must take "
            "the same steps in the same order; add new steps at the end, or give the operation a new name"
        )

    def sleep(self, name: str, seconds: float | str) -> Plan[None]:
        """The plan of the next step, which is to let time pass: by the store's clock, and counted from the first attempt."""
        length = duration(seconds)
        if length > UNFINISHED:
            raise ConfigurationError(
                f"step {name!r} sleeps for {length:g} s; an operation may be unfinished for 30 days"
            )
        return self._slept(Step(self._next(name), name, lambda: None), length)

    def _slept(self, step: Step, length: float) -> Plan[None]:
        try:
            yield from self._stop_where_given_up(step)
            yield from self.ours()
            left = yield from self._left(step, length)
        except BaseException:
            self.failed = step.name
            raise
        finally:
            self.under_way = ""
        self.done += 1
        if left > 0:
            yield Sleep(left)

    def _left(self, step: Step, length: float) -> Plan[float]:
        """How long to sleep yet; the time to wake up at is the checkpoint."""
        operation, policy = self.named(step.number, step.name), step_policy(self.policy, "lease")
        try:
            found = yield from self.guard.turn(operation, policy)
        except PayloadMismatch as error:
            raise (yield from self._changed(operation, step)) from error
        if isinstance(found, Lease):
            now = found.expires_at - policy.lease
            yield from self._settle(found, value_outcome(now + length))
            return length
        outcome = found.outcome or Outcome("tombstone")
        self._stop_where_closed(outcome)
        wake: float = replayed(outcome)
        return wake - found.now

    # Whose it is

    def ours(self) -> Plan[None]:
        """Refuse a late owner.  The store is asked again when it has not been for a third of the lease."""
        if self.lost is not None or self.beat.lost:
            raise self._fence(self.lost or fenced(self.lease))
        now = self.guard.clock.monotonic()
        if now - self._renewed < self.policy.lease / 3:
            return
        try:
            yield from self.guard.store.renew(self.lease, lease=self.policy.lease)
        except Fenced as error:
            self.guard.tell("fenced", self.operation, token=self.lease.token, code=error.code)
            raise self._fence(error) from error
        self._renewed = now

    def _fence(self, error: Fenced) -> Fenced:
        self.lost = error
        return error

    # The end

    def ended(self, *, final: bool) -> Plan[None]:
        """Refuse an end that did not wait for a step, and a *final* one that leaves out what a former attempt has done."""
        if self.under_way:
            raise ConfigurationError(f"step {self.under_way!r} was never awaited")
        if self.lease.attempt == 1 or self.closed or self.failed or not final:
            return
        record = yield from self.guard.store.find(*self.named(self.done + 1, "").id)
        if record is None:
            return
        if is_closed(record.outcome):
            self._close(record.outcome)
            return
        raise StepsChanged(
            f"the operation ended after {self.done} steps, and a former attempt had begun step {self.done + 1}, "
            f"{record.fingerprint!r}: operations that began under the old code must take the same steps"
        )

    def any_taken(self) -> Plan[bool]:
        """Whether this attempt or a former one has begun a step."""
        if self.begun or self.lease.attempt == 1:
            return self.begun > 0
        if not self.life:  # it could not be opened, so nobody knows
            return True
        return (yield from self.guard.store.find(*self.named(1, "").id)) is not None

    # Failing for good

    def was_closed(self) -> Plan[bool]:
        """Whether a former attempt has failed for good: then its mark stands behind the last of its steps."""
        number = 0
        while self.lease.attempt > 1:
            number += 1
            record = yield from self.guard.store.find(*self.named(number, "").id)
            if record is None or is_closed(record.outcome):
                return record is not None
        return False

    def close(self, failure: Outcome | None) -> Plan[None]:
        """Let no attempt, late or later, take another step: what comes next is to undo those that were taken.

        The mark stands where the next step would, so a late owner that is about to take it finds the mark, or has taken it
        before us; and it remembers the outcome, for whoever has to go on from here.
        """
        yield from self.ours()
        found = yield from self.guard.turn(self.named(self.done + 1, ""), step_policy(self.policy, "lease"))
        if isinstance(found, Lease):
            yield from self._settle(found, closing(failure, self.doubt))
            self.closed, self.failure = True, failure
        elif is_closed(found.outcome):
            self._close(found.outcome)
        else:
            raise StepsChanged(
                f"the operation failed after {self.done} steps, and a former attempt had finished step {self.done + 1}, "
                f"{found.fingerprint!r}: operations that began under the old code must take the same steps"
            )

    def _settle(self, lease: Lease, outcome: Outcome) -> Plan[None]:
        yield from self.guard.store.settle(lease, outcome, retention=step_policy(self.policy, "lease").ttl)

    def _close(self, outcome: Outcome | None) -> None:
        self.closed, self.failure, self.doubt = True, closed_with(outcome), doubt_of(outcome)

    def _stop_where_closed(self, outcome: Outcome) -> None:
        if is_closed(outcome):
            self._close(outcome)
            raise Undone("The operation has failed for good, and its steps are being undone")

    def _stop_where_given_up(self, step: Step) -> Plan[None]:
        """In the last attempt nothing new is begun: it is here to find out what there is to undo."""
        if self.operation.giving_up:
            record = yield from self.guard.store.find(*self.named(step.number, "").id)
            if record is None or record.state != "settled":
                self.doubt = "" if record is None else step.name
                yield from self.close(None)
                raise Undone("The operation is given up, and its steps are being undone")
