"""`effect = "transaction"`: the claim, the effect and the outcome commit together, or none of them does.

No other caller sees the claim before the commit: a duplicate waits on its row, and then replays or performs.  A crash at any
moment rolls everything back, so there is no lease to renew, and the outcome is never unknown.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec

from .._contract.policy import Policy
from .._runtime.plan import Plan, Sleep
from ..errors import ConfigurationError, OncemoreError, ProviderDuplicate, StoreUnavailable
from .attempt import LeaseAttempt, Performer, end_unique
from .context import Op
from .decisions import Answer, check, in_progress, is_free, outcome_unknown
from .ledger import Ledger
from .model import Lease, Operation, Outcome, Record
from .transactions import Again, Stale, Transaction
from .uniqueness import replay_unique, screen, unique_operation, unique_policy, unique_unknown

# The longest pause in seconds before a refused transaction is run again: it doubles each time, up to LONGEST_PAUSE.
FIRST_PAUSE, LONGEST_PAUSE = 0.01, 0.5
# After a server restart, all connections of a pool may be dead.  The most that are discarded, and the seconds for it: after
# that, the server counts as down.
MOST_STALE, EMPTYING = 64, 2.0
POLL = 0.05  # seconds between two looks at an operation that runs under a lease, because its end unlocks no row

NO_LENDER = (
    "effect = 'transaction' needs the ledger in the database that the effect is in: give the guard postgresql://, "
    "sqlite:///, a pool or an engine; {url} lends no connection"
)


class TransactionRefused(StoreUnavailable):
    """The database refused the transaction, or did not say whether it committed.

    The same request may be sent again: it replays, or performs.
    """

    def __init__(self, error: BaseException, runs: int = 1) -> None:
        times = f" {runs} times" if runs > 1 else ""
        super().__init__(f"The database refused the transaction{times}: {error}", retry_after=1.0)
        self.cause = error


class TransactionAttempt(LeaseAttempt):
    """One try at an operation in a transaction, which the performer joins by `op.connection` or `op.session()`.

    If the database refuses the claim, `begin` tries again.  If it refuses the transaction after the performer was called,
    `settle` or `fail` raises TransactionRefused; `perform` calls the performer again, at most `policy.reruns` times.
    """

    transaction: Transaction | None = None
    unique_lease: Lease | None = None
    performed = False
    refusal: TransactionRefused | None = None  # raised by this attempt, not by another one that the performer has made

    def __init__(self, ledger: Ledger, operation: Operation, policy: Policy) -> None:
        super().__init__(ledger, operation, policy)
        self.lender = ledger.store.lender
        self.stale_left = MOST_STALE  # the number of dead connections that may still be discarded
        self.refusals = 0  # the number of transactions that the database has refused

    def begin(self, wait: float | None = None) -> Plan[Answer | None]:
        ledger, policy = self.ledger, self.policy
        if self.lender is None:
            raise ConfigurationError(NO_LENDER.format(url=ledger.store.url))
        self.deadline = None if wait is None else ledger.clock.time() + wait
        limit = policy.wait if wait is None else min(wait, policy.wait)
        self.ends = ledger.clock.monotonic() + (limit if policy.in_flight == "wait" else 0.0)
        return (yield from self._begin())

    def _begin(self, *, prepare: bool = True) -> Plan[Answer | None]:
        """Claim in transactions until one succeeds.  Return an answer, or None with the lease and the open transaction."""
        while True:
            try:
                known = self.cached()
                if known is not None:
                    return known
                found = yield from self._open(max(0.0, self.ends - self.ledger.clock.monotonic()))
                if isinstance(found, Lease) and not (found.lapsed and self.policy.on_unknown != "retry"):
                    self.lease = found
                    self.op = Op(found, transaction=self.transaction, deadline=self.deadline)
                    known = (yield from self.prepare()) if prepare else None
                    if known is not None:
                        return (yield from self._commit(known))
                    if self.ledger.observers:
                        self.ledger.emit("claimed", self.operation, token=found.token, attempt=found.attempt)
                    return None
                yield from self._abort()
                known = yield from (self._answer_or_wait(found) if isinstance(found, Record) else self._resolve_doubt())
                if known is not None:
                    return known
            except GeneratorExit:
                self.drop()
                raise
            except BaseException as error:
                yield from self._abort()
                if not self.is_retryable(error):
                    self.refused(error)
                    raise
                yield from self._pause(error)

    def _open(self, wait: float) -> Plan[Lease | Record]:
        """Open a transaction and claim in it.  If a pooled connection is dead, try another one."""
        assert self.lender is not None
        ends = self.ledger.clock.monotonic() + EMPTYING
        while True:
            self.transaction = yield from self.lender.open()
            try:
                lease, request = self.policy.lease, self.request
                return (yield from self.transaction.begin(self.operation, lease=lease, wait=wait, request=request))
            except Stale:
                yield from self._abort()
                if not self._may_try_another(ends):
                    raise

    def _may_try_another(self, ends: float) -> bool:
        """Whether to try another connection after one was found dead."""
        self.stale_left -= 1
        clock = self.ledger.clock
        # Not if the caller has stopped waiting.  But after the performer was called, its failure must be recorded.
        late = not self.performed and self.deadline is not None and clock.time() >= self.deadline
        return self.stale_left > 0 and clock.monotonic() < ends and not late

    # Before the performer is called

    def is_retryable(self, error: BaseException) -> bool:
        """Whether the database refused the transaction, and a second run may succeed."""
        if isinstance(error, TransactionRefused):  # all runs are used up, or it is another attempt's
            return False
        return isinstance(error, Again) or (self.lender is not None and self.lender.again(error))

    def _pause(self, error: BaseException) -> Plan[None]:
        self.refusals += 1
        if self.refusals > self.policy.reruns:
            raise TransactionRefused(error, self.refusals) from error
        yield Sleep(random.uniform(0, min(FIRST_PAUSE * 2**self.refusals, LONGEST_PAUSE)))

    def _answer_or_wait(self, record: Record) -> Plan[Answer | None]:
        """Return the answer to a duplicate; None to claim again, after a pause if the operation is running."""
        check(self.operation, record.fingerprint)
        if is_free(record):  # free, but with an older fingerprint of the same request: claim with the stored one
            self.operation = msgspec.structs.replace(self.operation, fingerprint=record.fingerprint)
            return None
        if record.state == "held":
            raise outcome_unknown(record.key, record.note)
        if record.state == "running":  # under a lease, because another rule chose that level
            left = self.ends - self.ledger.clock.monotonic()
            if left <= 0:
                raise in_progress(record)
            yield Sleep(min(POLL, left))
            return None
        return (yield from self.ledger.replay(record, self.operation, self.policy))

    def _resolve_doubt(self) -> Plan[Answer | None]:
        """Decide about an attempt under a lease that has crashed.  Return its answer, or None to claim again."""
        attempt = LeaseAttempt(self.ledger, self.operation, self.policy)
        attempt.reports = False
        try:
            known = yield from attempt.begin(self.ends - self.ledger.clock.monotonic())
            if known is None:
                yield from attempt.release()
            return known
        finally:
            if not attempt.ended:
                attempt.drop()

    def prepare(self) -> Plan[Answer | None]:
        """Check for twins and old keys, and claim the unique record in the same transaction: its row is the constraint."""
        assert self.transaction is not None
        policy = self.policy
        if policy.suspect != "off" or policy.late != "run":
            known = yield from screen(self.ledger, self.transaction, self.op, policy)
            if known is not None:
                return known
        if self.operation.unique is None:
            return None
        found = yield from self.transaction.claim(unique_operation(self.operation, policy), lease=policy.lease)
        if isinstance(found, Record):
            if found.state == "held":
                raise outcome_unknown(found.key, found.note)
            if found.state != "settled":
                raise in_progress(found)
            return replay_unique(found, self.op, policy)
        if found.lapsed and unique_policy(policy).on_unknown != "retry":
            raise unique_unknown(self.operation.unique)
        self.unique_lease = found
        return None

    # The four ends

    def settle(self, outcome: Outcome, value: Any = None) -> Plan[Answer]:
        answer = Answer(outcome, "stored", None, self.lease.attempt, value)
        self.ended = self.performed = True
        try:
            raised = outcome.kind == "error" and isinstance(value, Exception)
            if raised and self.is_retryable(value):
                raise value
            apart = raised or self._is_refusal(outcome)
            return (yield from self._settle_apart(answer) if apart else self._commit(answer))
        except GeneratorExit:
            self.drop()
            raise
        except BaseException as error:
            yield from self._roll_back(error)
            raise

    def doubts(self, outcome: Outcome | None, value: Any = None) -> bool:
        """Never, because the transaction is either committed or rolled back."""
        return False

    def _is_refusal(self, outcome: Outcome) -> bool:
        """Whether the outcome says that nothing was done, so that its writes are rolled back: on_refusal says so of errors."""
        return outcome.status >= 400 and self.policy.on_refusal == "rollback" and self.keeps(outcome)

    def _settle_apart(self, answer: Answer) -> Plan[Answer]:
        """Roll back the writes of a performer that raised or refused, and settle its outcome in another transaction."""
        note = self.op.note
        yield from self._abort()
        self.unique_lease = None
        known = yield from self._begin(prepare=False)
        return known if known is not None else (yield from self._commit(answer, note))

    def _commit(self, answer: Answer, note: str = "") -> Plan[Answer]:
        """Record the outcome and commit, or roll back if the policy does not keep it."""
        assert self.transaction is not None
        policy, outcome, transaction = self.policy, answer.outcome, self.transaction
        if not self.keeps(outcome):
            yield from self._abort()
            yield from self._write_released()
            return msgspec.structs.replace(answer, how="released")
        if self.unique_lease is not None:
            yield from end_unique(transaction, self.unique_lease, unique_policy(policy), outcome, self.operation.scope)
        audit = policy.expired == "keep"
        yield from transaction.settle(self.lease, outcome, retention=policy.ttl, audit=audit, note=note or self.op.note)
        yield from transaction.commit()
        self.transaction = None
        self.ended = True
        self.ledger.store.wakeups.notify(self.operation.id)
        return self.announce(answer)

    def fail(self, error: BaseException) -> Plan[Answer | None]:
        if not self.ended:
            self.ended = self.performed = True
            yield from self._roll_back(error)
        return None

    def _roll_back(self, error: BaseException) -> Plan[None]:
        """Roll back.  Then write a released record if *error* is an Exception; not after a cancellation.

        Raises TransactionRefused if the database refused the transaction.
        """
        yield from self._abort()
        if self.is_retryable(error):
            self.refusal = TransactionRefused(error)
            raise self.refusal from error
        if isinstance(error, Exception):
            yield from self._write_released()
        self.refused(error)

    def release(self) -> Plan[None]:
        if not self.ended:
            self.ended = self.performed = True
            yield from self._abort()
            yield from self._write_released()

    def withdraw(self, error: BaseException | None = None) -> Plan[None]:
        if not self.ended:
            self.ended = True
            yield from self._abort()
            if error is not None:
                self.refused(error)

    def drop(self) -> None:
        self.ended = True
        if self.transaction is not None:
            transaction, self.transaction = self.transaction, None
            transaction.drop()

    def _abort(self) -> Plan[None]:
        """Roll back and return the connection, if there is one."""
        if self.transaction is not None:
            transaction, self.transaction = self.transaction, None
            yield from transaction.abort()

    # After a rollback

    def _write_released(self) -> Plan[None]:
        """Write a released record, so that another request under the same key is refused though nothing was committed."""
        for _ in range(1 + self.policy.reruns):
            try:
                yield from self._try_write_released()
            except GeneratorExit:
                self.drop()
                raise
            except BaseException as error:
                yield from self._abort()
                if isinstance(error, Again):
                    continue
                if not isinstance(error, OncemoreError):  # else another caller has the key, or the store is down
                    raise
            return

    def _try_write_released(self) -> Plan[None]:
        found = yield from self._open(0.0)
        assert self.transaction is not None
        # The lease has lapsed if the performer committed the transaction, and the claim with it: leave the outcome unknown.
        if isinstance(found, Record) or found.lapsed:
            yield from self._abort()
            return
        yield from self.transaction.release(found, retention=self.policy.ttl)
        yield from self.transaction.commit()
        self.transaction = None
        self.ledger.emit("released", self.operation, token=found.token, attempt=found.attempt)

    # Performing a function

    def perform(self, performer: Performer, wait: float | None = None) -> Plan[Answer]:
        try:
            known = yield from self.begin(wait)
            while known is None:
                try:
                    return (yield from self.call(performer))
                except TransactionRefused as refused:
                    # Another attempt's refusal, or all runs were used up while the performer's error was being settled.
                    if refused is not self.refusal or self.refusals > self.policy.reruns:
                        raise
                    yield from self._pause(refused.cause)
                    self.ended = self.performed = False
                    self.unique_lease = None
                    known = yield from self._begin()
            return known
        finally:
            self.drop()

    def is_success(self, error: ProviderDuplicate) -> bool:
        """Never, because the performer was left in the middle, and its transaction is not committed."""
        return False
