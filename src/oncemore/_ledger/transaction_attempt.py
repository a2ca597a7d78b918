"""`effect = "transaction"`: the claim, the effect and the outcome commit together, or none of them does.

Nobody else sees the claim before the commit: whoever asks for the same operation meanwhile waits on its row, and then
replays or takes its place.  A crash at any instant rolls everything back, so there is no lease to keep and no doubt.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from .._contract.policy import Policy
from .._runtime.plan import Plan, Sleep
from ..errors import ConfigurationError, OncemoreError, StoreError, StoreUnavailable, UnknownOutcome
from .context import Op
from .decisions import Answer, check, in_progress, is_over, keeps, unknown
from .heartbeat import Perform
from .model import Lease, Operation, Outcome, Record
from .transactions import Again, Lender, Stale, Transaction
from .uniqueness import done_before, inner_operation, inner_policy, screen, tag
from .unknown import take_over
from .values import error_outcome, value_outcome

if TYPE_CHECKING:
    from .guard import Guard

T = TypeVar("T")

# Before the next run of a transaction that the database refused: up to so long, twice as much each time.
FIRST_PAUSE, LONGEST_PAUSE = 0.01, 0.5
# A pool whose connections have died with their server is emptied at once.  What takes longer, or has no end, is no such pool.
MOST_STALE, EMPTYING = 64, 2.0
LOOK = 0.05  # between two looks at an operation that runs under a lease, which no row lock tells of

NO_LENDER = (
    "effect = 'transaction' needs the ledger in the database that the effect is in: give the guard postgresql://, "
    "sqlite:///, a pool or an engine; {url} lends no connection"
)


def transacted(
    guard: Guard, operation: Operation, perform: Callable[[Op], Any], policy: Policy, wait: float | None
) -> Plan[Answer]:
    """The operation's answer; the plan of `Guard.guarded` for this level."""
    lender: Lender | None = guard.store.lender
    if lender is None:
        raise ConfigurationError(NO_LENDER.format(url=guard.store.url))
    return Transacted(guard, lender, operation, perform, policy, wait).answer()


class Decided(Exception):
    """The performer has raised what is the outcome: its effects are rolled back, and another transaction keeps it."""


class Transacted:
    """One operation, in as many transactions as it takes: one, unless the database refuses it."""

    def __init__(
        self,
        guard: Guard,
        lender: Lender,
        operation: Operation,
        perform: Callable[[Op], Any],
        policy: Policy,
        wait: float | None,
    ) -> None:
        self.guard = guard
        self.lender = lender
        self.operation = operation
        self.perform = perform
        self.policy = policy
        self.deadline = None if wait is None else guard.clock.time() + wait
        limit = policy.wait if wait is None else min(wait, policy.wait)
        self.ends = guard.clock.monotonic() + (limit if policy.in_flight == "wait" else 0.0)
        self.stale = MOST_STALE
        self.performed = False
        self.error: Exception | None = None  # the performer's, where it is the outcome

    def answer(self) -> Plan[Answer]:
        runs = 0
        while True:
            try:
                answer = yield from self._within(self._attempt)
            except Decided:
                continue
            except BaseException as error:
                if not isinstance(error, Again) and not self.lender.again(error):
                    yield from self._failed(error)
                    raise
                runs += 1
                if runs > self.policy.reruns:
                    raise given_up(error, runs) from error
                yield Sleep(random.uniform(0, min(FIRST_PAUSE * 2**runs, LONGEST_PAUSE)))
            else:
                if answer is not None:
                    return answer

    def _within(self, work: Callable[[Transaction], Plan[T]]) -> Plan[T]:
        """What *work* gives, in a transaction of its own; whatever ends it early, the connection is given back."""
        ends = self.guard.clock.monotonic() + EMPTYING
        while True:
            transaction: Transaction = yield from self.lender.open()
            try:
                return (yield from work(transaction))
            except GeneratorExit:
                transaction.drop()
                raise
            except BaseException as error:
                yield from transaction.abort()
                if not isinstance(error, Stale) or not self._another(ends):
                    raise

    def _another(self, ends: float) -> bool:
        """Whether to try another connection, after one was found dead."""
        self.stale -= 1
        clock = self.guard.clock
        # The caller may have stopped waiting; but once it was performed, what came of it is to be noted all the same.
        late = not self.performed and self.deadline is not None and clock.time() >= self.deadline
        return self.stale > 0 and clock.monotonic() < ends and not late

    def _attempt(self, transaction: Transaction) -> Plan[Answer | None]:
        """The answer, committed; None where it is worth another look."""
        left = max(0.0, self.ends - self.guard.clock.monotonic())
        found = yield from transaction.begin(self.operation, lease=self.policy.lease, wait=left)
        if isinstance(found, Record):
            yield from transaction.abort()
            return (yield from self._met(found))
        if found.lapsed and self.policy.on_unknown != "retry":
            yield from transaction.abort()
            return (yield from self._in_doubt())
        op = Op(found, transaction=transaction, deadline=self.deadline)
        if self.guard.observers:
            self.guard.tell("claimed", self.operation, token=found.token, attempt=found.attempt)
        answer = yield from self._performed(transaction, op)
        if not keeps(self.policy, answer.outcome):
            yield from transaction.abort()
            yield from self._remember()
            return msgspec.structs.replace(answer, how="released")
        return (yield from self._commit(transaction, op, answer))

    def _performed(self, transaction: Transaction, op: Op) -> Plan[Answer]:
        policy, known = self.policy, None
        if self.error is not None:
            return Answer(error_outcome(self.error), "stored", attempt=op.attempt, value=self.error)
        if op.attempt == 1 and (policy.suspect != "off" or policy.late != "run"):
            known = yield from screen(self.guard, transaction, op, policy)
        if known is not None:
            return known
        if self.operation.unique is None:
            return (yield from self._call(op))
        return (yield from self._unique(transaction, op))

    def _call(self, op: Op) -> Plan[Answer]:
        """What the performer itself gives or raises; the ledger's own refusals, and the database's, never pass for it."""
        self.performed = True
        try:
            value = yield Perform(self.guard.heart, (), self.perform, op)
        except self.policy.errors as error:
            if self.lender.again(error):
                raise
            self.error = error
            raise Decided from error
        outcome = value if isinstance(value, Outcome) else value_outcome(value)
        return Answer(outcome, "stored", attempt=op.attempt, value=value)

    def _unique(self, transaction: Transaction, op: Op) -> Plan[Answer]:
        """Claim what must happen once whatever the key, in the same transaction: its row is the constraint."""
        inner, under = inner_operation(self.operation, self.policy), inner_policy(self.policy)
        found = yield from transaction.claim(inner, lease=self.policy.lease)
        if isinstance(found, Record):
            if found.state == "held":
                raise unknown(found)
            if found.state != "settled":
                raise in_progress(found)
            return done_before(found, op, self.policy)
        if found.lapsed and under.on_unknown != "retry":
            raise UnknownOutcome(
                f"An attempt at {self.operation.unique!r} under another key ended without a trace; it must be resolved first"
            )
        answer = yield from self._call(op)
        if keeps(under, answer.outcome):
            yield from transaction.settle(found, tag(answer.outcome, self.operation.scope), retention=under.ttl)
        else:
            yield from transaction.release(found, retention=0.0)
        return answer

    def _commit(self, transaction: Transaction, op: Op, answer: Answer) -> Plan[Answer]:
        lease, policy, outcome = op.lease, self.policy, answer.outcome
        yield from transaction.settle(
            lease, outcome, retention=policy.ttl, audit=policy.expired == "keep", note=op.note
        )
        yield from transaction.commit()
        guard = self.guard
        guard.store.wakeups.notify(self.operation.id)
        expires_at = guard.clock.time() + policy.ttl
        if policy.ttl_from == "creation":
            fingerprint = self.operation.fingerprint
            guard.cache.put(self.operation.id, fingerprint, outcome, remaining=policy.ttl, expires_at=expires_at)
        if guard.observers:
            guard.tell("settled", self.operation, token=lease.token, attempt=lease.attempt, status=outcome.status)
        return Answer(outcome, answer.how, expires_at, answer.attempt, answer.value)

    # What stands in the way

    def _met(self, record: Record) -> Plan[Answer | None]:
        """The answer to a repeated operation; None where a record has made way, or may soon."""
        check(self.operation, record.fingerprint)
        if is_over(record):  # free, but fingerprinted by an older algorithm or secret: take it over under its own
            self.operation = msgspec.structs.replace(self.operation, fingerprint=record.fingerprint)
            return None
        if record.state == "held":
            raise unknown(record)
        if record.state == "running":  # under a lease, by a rule that was another one then
            left = self.ends - self.guard.clock.monotonic()
            if left <= 0:
                raise in_progress(record)
            yield Sleep(min(LOOK, left))
            return None
        answer = yield from self.guard.repeat(record, self.policy)
        self.guard.tell("replayed", self.operation, status=answer.outcome.status)
        return answer

    def _in_doubt(self) -> Plan[Answer | None]:
        """A lease has lapsed here, which no transaction has: decide about it as for leases, then come back."""
        found = yield from self.guard.store.claim(self.operation, lease=self.policy.lease)
        if not isinstance(found, Lease):
            return None
        op = Op(found)
        if found.lapsed:
            self.guard.tell("lapsed", self.operation, token=found.token, attempt=found.attempt)
            known = yield from take_over(self.guard, op, self.policy)
            if known is not None:
                return (yield from self.guard.settle(op, known, self.policy))
        yield from self.guard.give_back(found, self.policy)
        return None

    # What is left behind

    def _failed(self, error: BaseException) -> Plan[None]:
        """The performer's own failure is remembered, a refusal that it raised as well; an interruption is not."""
        if self.performed and isinstance(error, Exception):
            yield from self._remember()
        if isinstance(error, OncemoreError):
            self.guard.tell("failed" if isinstance(error, StoreError) else "refused", self.operation, code=error.code)

    def _remember(self) -> Plan[None]:
        """Note what the key stands for, though its effect was rolled back: another request must not have it."""
        for _ in range(1 + self.policy.reruns):
            try:
                yield from self._within(self._note)
            except Again:
                continue
            except OncemoreError:  # then someone else has it already, or nobody can have it now
                pass
            return

    def _note(self, transaction: Transaction) -> Plan[None]:
        found = yield from transaction.begin(self.operation, lease=self.policy.lease, wait=0.0)
        # What the performer has committed itself is in doubt, and stays so.
        if isinstance(found, Record) or found.lapsed:
            yield from transaction.abort()
            return
        yield from transaction.release(found, retention=self.policy.ttl)
        yield from transaction.commit()
        self.guard.tell("released", self.operation, token=found.token, attempt=found.attempt)


def given_up(error: BaseException, runs: int) -> StoreUnavailable:
    return StoreUnavailable(f"The database refused the transaction {runs} times: {error}", retry_after=1.0)
