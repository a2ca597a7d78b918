"""Steps: an operation is split into parts, and each part is an operation of its own in the same ledger.

The n-th step is the operation `<key>:<epoch>:<n>`; its fingerprint is the step's name.  A settled step is a checkpoint: the
next attempt gets its value and calls nothing.  A step that is not settled is claimed and performed like any operation: a
database step in a transaction, every other step under a lease.  So a step has one performer at a time, and steps need no
table of their own.
"""

from __future__ import annotations

import dataclasses
import inspect
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import FunctionType
from typing import Any, TypeGuard

from .._contract.keys import join
from .._contract.policy import Policy, duration
from .._runtime.backoff import Backoff
from .._runtime.heartbeat import Renewal
from .._runtime.plan import Plan, Sleep
from ..errors import (
    ConfigurationError,
    Fenced,
    PayloadMismatch,
    Refusal,
    StepsChanged,
    StoreError,
    UnknownOutcome,
)
from .attempt import LeaseAttempt
from .classes import annotated_classes, classes_by_name
from .context import OnUnknownStep, Op, Retrying, StepEffect, derive
from .decisions import Answer, fenced
from .events import log
from .ledger import Ledger
from .model import Lease, Operation, Outcome, Record, decode_outcome, encode_outcome
from .transaction_attempt import TransactionAttempt
from .values import Types, encode, replayed, to_plain, value_or_error


class Undone(Exception):
    """Raised in the performer of an operation that has failed for good, to end it: its steps are being undone."""


class Steps:
    """The steps of one attempt at an operation, from `load` to the performer's end."""

    def __init__(self, ledger: Ledger, lease: Lease, policy: Policy, renewal: Renewal) -> None:
        self.ledger = ledger
        self.lease = lease
        self.operation = lease.operation
        self.policy = policy
        self.renewal = renewal
        self.epoch = ""  # the time at which the record began; a later record under the same key has other steps
        self.begun = 0  # the number of the latest step that was begun
        self.names: set[str] = set()  # the names of all steps begun so far
        self.done = 0  # the number of checkpoints: steps 1 to *done* are settled
        self.under_way = ""  # the name of the step that is running
        self.failed_step = ""  # the name of the step that ended without a checkpoint
        self.undos: list[tuple[Step, Any]] = []  # the undo steps of the steps that were taken, and their values
        self.failed_for_good = False  # whether the operation has failed for good, in this attempt or an earlier one
        self.failure: Outcome | None = None  # the outcome of an operation that failed for good; None if it was given up
        self.step_in_doubt = ""  # the name of a step that was begun, has no checkpoint, and may have taken effect
        self.lost: Fenced | None = None  # the error by which this attempt learned that another has taken over
        self._renewed = ledger.clock.monotonic()  # the time of the latest renewal by `check_owner`
        self._ahead = 0.0  # the store's clock minus this process's monotonic clock, in seconds

    # Before the first step

    def load(self) -> Plan[float | None]:
        """Read the epoch from the operation's own record.  Return the deadline that an earlier attempt stored, or None."""
        record = yield from self.ledger.store.find(self.operation.scope, self.operation.key)
        if record is None or record.token != self.lease.token:
            raise self._fence(fenced(self.lease))
        self.epoch = f"{record.created_at:.6f}"
        self._ahead = record.now - self.ledger.clock.monotonic()
        if self.lease.attempt == 1:
            return None
        is_old = record.now - record.created_at > UNFINISHED
        if is_old and (self.lease.lapsed or (yield from self.any_begun())):  # a step without checkpoint would run again
            raise UnknownOutcome("It was left unfinished for so long that its checkpoints may be gone; resolve it")
        # Without classes, because only the deadline is needed, and a class in the request may have been renamed.
        deadline: float | None = unpack_request(record.request, None)["deadline"]
        return deadline

    def operation_of(self, number: int | str, name: str) -> Operation:
        """Return the operation of step *number*."""
        key = join(self.operation.key, self.epoch, str(number))
        return Operation(f"step|{self.operation.scope}", key, name, f"{self.operation.name}/{name}")

    # A step

    def step(
        self, name: str, function: Callable[..., Any], undo: Callable[..., Any] | None, **settings: Any
    ) -> Plan[Any]:
        """Return the plan of the next step, with the settings of `Op.step`.  The step gets its number now, before it runs."""
        again = name in self.names
        step = Step(self._next(name), name, function, **settings, again=again)
        undo_step = None if undo is None else Step(f"{step.number}u", f"undo:{name}", undo, again=again, undoes=True)
        return self._take(step, undo_step)

    def _next(self, name: str) -> int:
        if not name:
            raise ConfigurationError("a step needs a name, which tells it from the others: op.step('charge', ...)")
        if self.under_way:
            raise ConfigurationError(
                f"step {name!r} begins, and {self.under_way!r} has not ended: await each step before the next"
            )
        if self.failed_step:
            raise ConfigurationError(
                f"step {name!r} comes after {self.failed_step!r} has failed, and the next attempt would begin with "
                f"{self.failed_step!r}: let its error end the performer, or name the error in `errors` of the policy"
            )
        self.begun += 1
        self.names.add(name)
        self.under_way = name
        return self.begun

    def _take(self, step: Step, undo_step: Step | None) -> Plan[Any]:
        try:
            yield from self._stop_if_given_up(step)
            answer = yield from self.perform(step)
            self._stop_at_mark(answer.outcome)
        except BaseException:  # the step has no checkpoint, so no other step may follow
            self.failed_step = step.name
            raise
        finally:
            self.under_way = ""
        self.done += 1
        value, policy = answer.value, step.with_types(self.policy)
        if answer.how != "stored":
            value = value_or_error(answer.outcome, policy.errors, policy.types)
        if answer.outcome.kind == "error":
            raise value
        if undo_step is not None:
            self.undos.append((undo_step, value))
        return value

    def perform(self, step: Step, value: Any = None) -> Plan[Answer]:
        """Return the step's answer, from its checkpoint or by performing it, as often as its retry allows.

        *value* is the value of the step that an undo step undoes.
        """
        operation = self.operation_of(step.number, step.name)
        key = derive(self.operation, step.label)
        policy = step.policy(step_policy(step.with_types(self.policy), step.effect), key)
        if self.lease.attempt > 1 and policy.on_unknown != "retry":
            record = yield from self.ledger.store.find(*operation.id)
            if record is not None and is_unsettled_mark(record):
                policy = dataclasses.replace(policy, on_unknown="retry")
        delays = iter(step.retry.delays())
        while True:
            yield from self.check_owner()
            performer = StepPerformer(step, key, value)
            kind = TransactionAttempt if step.effect == "transaction" else LeaseAttempt
            try:
                answer = yield from kind(self.ledger, operation, policy).perform(performer)
            except PayloadMismatch as error:
                if performer.began:  # the step's function has raised it, not the ledger
                    raise
                raise (yield from self._changed(operation, step)) from error
            except Exception as error:
                held = policy.on_unknown == "hold" and policy.doubts(error)
                delay = next(delays, None) if may_retry(step.retry, error) and not held else None
                if delay is None:
                    raise
                yield Sleep(delay)
            else:
                return check_checkpoint(answer, step.name)

    def _changed(self, operation: Operation, step: Step) -> Plan[StepsChanged]:
        record = yield from self.ledger.store.find(*operation.id)
        was = repr(record.fingerprint) if record is not None else "another one"
        return StepsChanged(
            f"step {step.number} was {was} and is now {step.name!r}: operations that began under the old code must take "
            "the same steps in the same order; add new steps at the end, or give the operation a new name"
        )

    def sleep(self, name: str, seconds: float | str) -> Plan[None]:
        """Return the plan of a step that waits until *seconds* after its first attempt, by the store's clock."""
        length = duration(seconds)
        if length > UNFINISHED:
            raise ConfigurationError(
                f"step {name!r} sleeps for {length:g} s, but an operation must be finished within 30 days: sleep for less"
            )
        return self._sleep(self.step(name, lambda: self._now() + length, None, retry=ONCE))

    def _sleep(self, step: Plan[float]) -> Plan[None]:
        left = (yield from step) - self._now()  # the checkpoint is the time at which the sleep ends
        if left > 0:
            yield Sleep(left)

    def _now(self) -> float:
        """Return the time by the store's clock."""
        return self._ahead + self.ledger.clock.monotonic()

    # Late owners

    def check_owner(self) -> Plan[None]:
        """Raise Fenced if another attempt has taken over.  Ask the store, by a renewal, once in a third of the lease."""
        if self.lost is not None or self.renewal.lost:
            raise self._fence(self.lost or fenced(self.lease))
        now = self.ledger.clock.monotonic()
        if now - self._renewed < self.policy.lease / 3:
            return
        try:
            yield from self.ledger.store.renew(self.lease, lease=self.policy.lease)
        except Fenced as error:
            self.ledger.emit("fenced", self.operation, token=self.lease.token, code=error.code)
            raise self._fence(error) from error
        self._renewed = now

    def _fence(self, error: Fenced) -> Fenced:
        self.lost = error
        return error

    # The end

    def check_end(self, *, final: bool) -> Plan[None]:
        """Raise if a step was not awaited, or if a *final* outcome leaves out a step that an earlier attempt has begun."""
        if self.under_way:
            raise ConfigurationError(f"step {self.under_way!r} was never awaited: write await op.step(...)")
        if self.lease.attempt == 1 or self.failed_for_good or self.failed_step or not final:
            return
        record = yield from self.ledger.store.find(*self.operation_of(self.done + 1, "").id)
        if record is None or is_unsettled_mark(record):
            return
        if is_mark(record.outcome):
            self._read_mark(record.outcome)
            return
        raise StepsChanged(
            f"the operation ended after {self.done} steps, and an earlier attempt had begun step {self.done + 1}, "
            f"{record.fingerprint!r}: operations that began under the old code must take the same steps"
        )

    def any_begun(self) -> Plan[bool]:
        """Whether this attempt or an earlier one has begun a step."""
        if self.begun or self.lease.attempt == 1:
            return self.begun > 0
        if not self.epoch:  # `load` failed, so a step may have been begun
            return True
        return (yield from self.ledger.store.find(*self.operation_of(1, "").id)) is not None

    # Failing for good

    def has_mark(self) -> Plan[bool]:
        """Whether an earlier attempt has failed for good: then its mark follows the last of its steps."""
        number = 0
        while self.lease.attempt > 1:
            number += 1
            record = yield from self.ledger.store.find(*self.operation_of(number, "").id)
            if record is None or is_mark(record.outcome):
                return record is not None
        return False

    def fail_for_good(self, failure: Outcome | None) -> Plan[None]:
        """Settle the mark: from now on no attempt takes another step, and the steps that were taken are undone.

        The mark takes the place of the next step.  So a late owner that begins that step meets the mark, unless it has
        taken the step before.  The mark also stores the failure, so that another attempt can go on with undoing.
        """
        yield from self.check_owner()
        policy = step_policy(self.policy, "lease")
        found = yield from self.ledger.claim(self.operation_of(self.done + 1, ""), policy)
        if isinstance(found, Lease):
            body = b"" if failure is None else encode_outcome(failure)
            mark = Outcome("value", headers=(MARK, (DOUBT, self.step_in_doubt)), body=body)
            yield from self.ledger.store.settle(found, mark, retention=policy.ttl)
            self.failed_for_good, self.failure = True, failure
        elif is_mark(found.outcome):
            self._read_mark(found.outcome)
        else:
            raise StepsChanged(
                f"the operation failed after {self.done} steps, and an earlier attempt had finished step {self.done + 1}, "
                f"{found.fingerprint!r}: operations that began under the old code must take the same steps"
            )

    def _read_mark(self, mark: Outcome) -> None:
        self.failed_for_good = True
        self.failure = decode_outcome(mark.body) if mark.body else None
        self.step_in_doubt = dict(mark.headers).get(DOUBT, "")

    def _stop_at_mark(self, outcome: Outcome) -> None:
        if is_mark(outcome):
            self._read_mark(outcome)
            raise Undone("The operation has failed for good, and its steps are being undone")

    def _stop_if_given_up(self, step: Step) -> Plan[None]:
        """Raise Undone at the first step without a checkpoint if this is the last attempt, which only undoes steps."""
        if self.operation.giving_up:
            record = yield from self.ledger.store.find(*self.operation_of(step.number, "").id)
            if record is None or record.state != "settled":
                self.step_in_doubt = "" if record is None or is_unsettled_mark(record) else step.name
                yield from self.fail_for_good(None)
                raise Undone("The operation is given up, and its steps are being undone")


# One step

# The parameters by which a function asks for its step's transaction, and all parameters that a step fills by their names.
BORROWED = {"connection", "session"}
GIVEN = {"key", *BORROWED}


BACKOFF = Backoff()


@dataclass(frozen=True, slots=True)
class StepRetry:
    """Allows *attempts* attempts, whatever the error."""

    attempts: int = 3
    backoff: Backoff = BACKOFF

    def __post_init__(self) -> None:
        if type(self.attempts) is not int or self.attempts < 1:
            raise ConfigurationError(f"retry = {self.attempts!r}: write the number of attempts, 1 or more")

    def wants(self, error: Exception, /) -> bool:
        return True

    def delays(self) -> Iterator[float]:
        previous = 0.0
        for retry in range(1, self.attempts):
            previous = self.backoff.delay(retry, random.random(), previous)
            yield previous


THREE_TIMES, ONCE = StepRetry(), StepRetry(1)


class Step:
    """The arguments of one `op.step`, checked before anything is claimed."""

    def __init__(
        self,
        number: int | str,
        name: str,
        function: Callable[..., Any],
        *,
        retry: Retrying | int | None = None,
        effect: StepEffect | None = None,
        on_unknown: OnUnknownStep = "retry",
        resolver: Callable[..., Any] | None = None,
        doubt: tuple[type[Exception], ...] | None = None,
        again: bool = False,
        undoes: bool = False,
    ) -> None:
        self.number = number
        self.name = name
        self.function = function
        # The provider's key is derived from the label.  A second step of the same name needs another key, because under the
        # first one's key the provider would replay the first.
        self.label = f"{name}\n{number}" if again else name
        self.undoes = undoes
        self.takes = parameters_of(function, name, takes_value=undoes)
        plain = type(function) is FunctionType and "return" not in function.__annotations__
        self.returns = () if plain else annotated_classes(function, "return")
        borrows = any(each.name in BORROWED for each in self.takes)
        self.effect: StepEffect = effect or ("transaction" if borrows else "lease")
        # A database step runs once: a refused transaction is run again anyway, and other errors would only repeat.  But an
        # undo is tried again, because its failure holds the operation, which a lost connection must not do.
        usual = ONCE if self.effect == "transaction" and not undoes else THREE_TIMES
        self.retry: Retrying = usual if retry is None else StepRetry(retry) if isinstance(retry, int) else retry
        self.on_unknown = on_unknown
        self.resolver = resolver
        self.doubt = doubt
        if self.effect == "lease" and borrows:
            raise ConfigurationError(f"step {name!r} takes a connection, which effect = 'lease' does not have")
        if on_unknown == "resolve" and resolver is None:
            raise ConfigurationError(f"step {name!r}: on_unknown = 'resolve' needs a resolver")

    def with_types(self, policy: Policy) -> Policy:
        """Return *policy*, with the classes that the return annotation of the step's function names."""
        new = tuple(kind for kind in self.returns if kind not in policy.types)
        return dataclasses.replace(policy, types=policy.types + new) if new else policy

    def policy(self, policy: Policy, key: str) -> Policy:
        """Return *policy* (of all steps), with this step's own on_unknown, resolver and doubt.

        An error in `errors` is an outcome of a step, but the failure of an undo.
        """
        if self.undoes:
            return dataclasses.replace(policy, errors=())
        if self.on_unknown == "retry":
            return policy
        resolver = self.resolver
        asks = None if resolver is None else (lambda op: resolver(key))
        doubt = policy.doubt if self.doubt is None else self.doubt
        return dataclasses.replace(policy, on_unknown=self.on_unknown, resolver=asks, doubt=doubt)


class StepPerformer:
    """The performer of a step: calls its function with the arguments that it takes, and remembers that it was called."""

    __slots__ = ("began", "key", "step", "value")

    def __init__(self, step: Step, key: str, value: Any) -> None:
        self.step = step
        self.key = key
        self.value = value
        self.began = False

    def __call__(self, op: Op) -> Any:
        self.began = True
        first = [self._given(each.name, op) for each in self.step.takes if each.kind is each.POSITIONAL_ONLY]
        rest = {
            each.name: self._given(each.name, op) for each in self.step.takes if each.kind is not each.POSITIONAL_ONLY
        }
        given = self.step.function(*first, **rest)
        return drop_value(given) if self.step.undoes else given

    def __repr__(self) -> str:  # for error messages
        return f"{self.step.function!r} of step {self.step.name!r}"

    def _given(self, name: str, op: Op) -> Any:
        if name == "connection":
            return op.connection
        if name == "session":
            return op.session()
        return self.key if name == "key" else self.value


def drop_value(given: Any) -> Any:
    """Drop the value that an undo returns, because it is never read, and perhaps cannot be stored."""

    async def ended() -> None:
        await given

    return ended() if hasattr(given, "__await__") else None


def parameters_of(function: Callable[..., Any], name: str, *, takes_value: bool) -> tuple[inspect.Parameter, ...]:
    """Return the parameters that get an argument.  In an undo, the first one with another name gets the step's value."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some built-in functions have no signature
        return ()
    named = [each for each in parameters if each.kind not in VARIADIC]
    others = [each for each in named if each.name not in GIVEN and each.default is each.empty]
    value = others.pop(0) if takes_value and others else None
    if others:
        raise ConfigurationError(
            f"step {name!r}: its function takes {', '.join(each.name for each in others)}; a step is given a connection, "
            "a session or a key, so bind the rest with a lambda or functools.partial"
        )
    return tuple(each for each in named if each.name in GIVEN or each is value)


VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def may_retry(retry: Retrying, error: Exception) -> bool:
    """Whether to try the step again: not if the ledger refuses it for good, or if the code must be changed."""
    if isinstance(error, Refusal | Fenced | ConfigurationError):
        return getattr(error, "retryable", False) and not isinstance(error, Fenced)
    return retry.wants(error)


# Checkpoints

# The seconds that an operation may be unfinished.  Its checkpoints are kept that much longer than its outcome.
UNFINISHED = 30 * 86400.0
# The bytes of the largest request that is stored.  If it is larger, only the caller can finish the operation, by a retry.
LARGEST = 1024 * 1024
MARK = ("oncemore-closed", "")  # the first header of a mark: the operation has failed for good
DOUBT = "oncemore-doubt"  # the header of a mark that names the step in doubt


@lru_cache(maxsize=256)
def step_policy(policy: Policy, effect: StepEffect) -> Policy:
    """Return the policy of an operation's steps: every outcome is kept, and a running step is waited for."""
    return dataclasses.replace(
        policy,
        effect=effect,
        on_unknown="retry",
        keep="all",
        ttl=policy.ttl + UNFINISHED,
        ttl_from="creation",
        expired="delete",
        in_flight="wait",
        wait=2 * policy.lease,
        on_duplicate="replay",
        suspect="off",
        late="run",
    )


def check_checkpoint(answer: Answer, name: str) -> Answer:
    """Return the answer, or raise if it is no checkpoint: the operation must not go on if the next attempt repeats the step."""
    if answer.how == "unstored":
        raise StoreError(f"step {name!r} was performed, but its checkpoint could not be stored; retry the operation")
    if answer.outcome.kind == "tombstone":
        why = answer.outcome.body.decode(errors="replace")
        raise ConfigurationError(f"step {name!r} returned a value that cannot be stored as its checkpoint: {why}")
    return answer


def is_mark(outcome: Outcome | None) -> TypeGuard[Outcome]:
    """Whether the outcome is a mark: the operation has failed for good.  Its body is the failure; empty if it was given up."""
    return outcome is not None and outcome.headers[:1] == (MARK,)


def is_unsettled_mark(record: Record) -> bool:
    """Whether the record was claimed for a mark that is not settled, because a process died: no step was begun here."""
    return record.state != "settled" and not record.fingerprint


def pack_request(operation: Operation, deadline: float | None, types: Types) -> bytes:
    """Pack the data that a completer needs: the deadline, `unique`, and the request unless it cannot be stored."""
    request = None if operation.request is None else operation.request()
    kept = {"deadline": deadline, "request": request, "unique": operation.unique}
    try:
        packed: bytes = encode(to_plain(kept, classes_by_name(types)))
        if len(packed) <= LARGEST:
            return packed
    except Exception as reason:
        log.warning(
            "%s: only the caller can finish it after a crash, because its request cannot be stored: %s",
            operation.name,
            reason,
        )
    return encode({**kept, "request": None})


def unpack_request(data: bytes, types: Types | None) -> dict[str, Any]:
    """Return the data that `pack_request` packed; None for each if *data* is empty.  Without *types*, objects become dicts."""
    if not data:
        return {"deadline": None, "request": None, "unique": None}
    kept: dict[str, Any] = replayed(Outcome("value", body=data), types=types)
    return kept
