"""Steps: an operation split into parts, each of them an operation of its own in the same ledger.

The n-th step is the operation `<key>:<epoch>:<n>`; its fingerprint is the step's name.  A settled step is a checkpoint: its
value is given, and nothing runs.  Any other is claimed and performed like any operation, a database step in a transaction,
every other under a lease.  So a step has one performer at a time, and needs no table of its own.
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
    """Ends the performer of an operation that has failed for good: its steps are being undone."""


class Steps:
    """The steps of one attempt at an operation, from `open` to the performer's end."""

    def __init__(self, ledger: Ledger, lease: Lease, policy: Policy, renewal: Renewal) -> None:
        self.ledger = ledger
        self.lease = lease
        self.operation = lease.operation
        self.policy = policy
        self.renewal = renewal
        self.epoch = ""  # when the record began, by the store's clock: another one under the same key has other steps
        self.begun = 0  # the number of the last step that was asked for
        self.names: set[str] = set()  # of all that were
        self.done = 0  # how many are checkpointed; always the first ones
        self.under_way = ""  # the name of the step that is running
        self.failed = ""  # the name of the step that ended without a checkpoint
        self.undos: list[tuple[Step, Any]] = []
        self.closed = False  # it has failed for good, in this attempt or an earlier one
        self.failure: Outcome | None = None  # and this is its outcome; None if it was given up
        self.doubt = ""  # the name of a step that was begun, has no checkpoint, and may have taken effect
        self.lost: Fenced | None = None
        self._renewed = ledger.clock.monotonic()
        self._ahead = 0.0  # how much later it is by the store's clock

    # Before the first step

    def open(self) -> Plan[float | None]:
        """Find the operation's own record, which names its steps; the deadline that an earlier attempt kept in it, if any."""
        record = yield from self.ledger.store.find(self.operation.scope, self.operation.key)
        if record is None or record.token != self.lease.token:
            raise self._fence(fenced(self.lease))
        self.epoch = f"{record.created_at:.6f}"
        self._ahead = record.now - self.ledger.clock.monotonic()
        if self.lease.attempt == 1:
            return None
        is_old = record.now - record.created_at > UNFINISHED
        if is_old and (self.lease.lapsed or (yield from self.any_taken())):  # a missing step would be taken again
            raise UnknownOutcome("It was left unfinished for so long that its checkpoints may be gone; resolve it")
        # Only the deadline is read, so a class that the request names may have another name by now.
        deadline: float | None = unpack_request(record.request, None)["deadline"]
        return deadline

    def named(self, number: int | str, name: str) -> Operation:
        """The operation of step *number*."""
        key = join(self.operation.key, self.epoch, str(number))
        return Operation(f"step|{self.operation.scope}", key, name, f"{self.operation.name}/{name}")

    # A step

    def step(
        self, name: str, function: Callable[..., Any], undo: Callable[..., Any] | None, **settings: Any
    ) -> Plan[Any]:
        """The plan of the next step, with the settings of `Op.step`.  Its number is taken now, also if it is awaited later."""
        again = name in self.names
        step = Step(self._next(name), name, function, **settings, again=again)
        back = None if undo is None else Step(f"{step.number}u", f"undo:{name}", undo, again=again, undoes=True)
        return self._take(step, back)

    def _next(self, name: str) -> int:
        if not name:
            raise ConfigurationError("a step needs a name, which tells it from the others: op.step('charge', ...)")
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

    def _take(self, step: Step, back: Step | None) -> Plan[Any]:
        try:
            yield from self._stop_if_given_up(step)
            answer = yield from self.perform(step)
            self._stop_if_closed(answer.outcome)
        except BaseException:  # it has no checkpoint, so no other step may follow it
            self.failed = step.name
            raise
        finally:
            self.under_way = ""
        self.done += 1
        value, policy = answer.value, step.naming(self.policy)
        if answer.how != "stored":
            value = value_or_error(answer.outcome, policy.errors, policy.types)
        if answer.outcome.kind == "error":
            raise value
        if back is not None:
            self.undos.append((back, value))
        return value

    def perform(self, step: Step, value: Any = None) -> Plan[Answer]:
        """The step's answer: from its checkpoint, or by performing it as often as its retry allows."""
        operation = self.named(step.number, step.name)
        key = derive(self.operation, step.label)
        policy = step.policy(step_policy(step.naming(self.policy), step.effect), key)
        if self.lease.attempt > 1 and policy.on_unknown != "retry":
            record = yield from self.ledger.store.find(*operation.id)
            if record is not None and is_unset_mark(record):
                policy = dataclasses.replace(policy, on_unknown="retry")
        delays = iter(step.retry.delays())
        while True:
            yield from self.check_owner()
            called = Called(step, key, value)
            kind = TransactionAttempt if step.effect == "transaction" else LeaseAttempt
            try:
                answer = yield from kind(self.ledger, operation, policy).perform(called)
            except PayloadMismatch as error:
                if called.began:  # the function raised it
                    raise
                raise (yield from self._changed(operation, step)) from error
            except Exception as error:
                held = policy.on_unknown == "hold" and policy.doubts(error)
                delay = next(delays, None) if wants(step.retry, error) and not held else None
                if delay is None:
                    raise
                yield Sleep(delay)
            else:
                return kept(answer, step.name)

    def _changed(self, operation: Operation, step: Step) -> Plan[StepsChanged]:
        record = yield from self.ledger.store.find(*operation.id)
        was = repr(record.fingerprint) if record is not None else "another one"
        return StepsChanged(
            f"step {step.number} was {was} and is now {step.name!r}: operations that began under the old code must take "
            "the same steps in the same order; add new steps at the end, or give the operation a new name"
        )

    def sleep(self, name: str, seconds: float | str) -> Plan[None]:
        """The plan of a step that lets time pass: by the store's clock, and counted from the first attempt."""
        length = duration(seconds)
        if length > UNFINISHED:
            raise ConfigurationError(
                f"step {name!r} sleeps for {length:g} s; an operation may be unfinished for 30 days"
            )
        return self._sleep(self.step(name, lambda: self._now() + length, None, retry=ONCE))

    def _sleep(self, step: Plan[float]) -> Plan[None]:
        left = (yield from step) - self._now()  # the checkpoint is the time at which to wake up
        if left > 0:
            yield Sleep(left)

    def _now(self) -> float:
        """The time by the store's clock."""
        return self._ahead + self.ledger.clock.monotonic()

    # Late owners

    def check_owner(self) -> Plan[None]:
        """Raise Fenced if another attempt has taken over.  The store is asked if a third of the lease has passed since."""
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

    def ended(self, *, final: bool) -> Plan[None]:
        """Refuse an end that did not wait for a step, and a *final* one that leaves out a step of an earlier attempt."""
        if self.under_way:
            raise ConfigurationError(f"step {self.under_way!r} was never awaited: write await op.step(...)")
        if self.lease.attempt == 1 or self.closed or self.failed or not final:
            return
        record = yield from self.ledger.store.find(*self.named(self.done + 1, "").id)
        if record is None or is_unset_mark(record):
            return
        if is_closed(record.outcome):
            self._close(record.outcome)
            return
        raise StepsChanged(
            f"the operation ended after {self.done} steps, and an earlier attempt had begun step {self.done + 1}, "
            f"{record.fingerprint!r}: operations that began under the old code must take the same steps"
        )

    def any_taken(self) -> Plan[bool]:
        """Whether this attempt or an earlier one has begun a step."""
        if self.begun or self.lease.attempt == 1:
            return self.begun > 0
        if not self.epoch:  # `open` failed, so nobody knows
            return True
        return (yield from self.ledger.store.find(*self.named(1, "").id)) is not None

    # Failing for good

    def was_closed(self) -> Plan[bool]:
        """Whether an earlier attempt has failed for good: then its mark stands behind the last of its steps."""
        number = 0
        while self.lease.attempt > 1:
            number += 1
            record = yield from self.ledger.store.find(*self.named(number, "").id)
            if record is None or is_closed(record.outcome):
                return record is not None
        return False

    def close(self, failure: Outcome | None) -> Plan[None]:
        """Mark that no attempt takes another step: from here on, the steps that were taken are undone.

        The mark stands in the place of the next step.  So a late owner that is about to take that step finds the mark, or
        has taken it before.  The mark also keeps the outcome, so that another attempt can continue the undoing.
        """
        yield from self.check_owner()
        policy = step_policy(self.policy, "lease")
        found = yield from self.ledger.claim(self.named(self.done + 1, ""), policy)
        if isinstance(found, Lease):
            body = b"" if failure is None else encode_outcome(failure)
            mark = Outcome("value", headers=(CLOSED, (DOUBT, self.doubt)), body=body)
            yield from self.ledger.store.settle(found, mark, retention=policy.ttl)
            self.closed, self.failure = True, failure
        elif is_closed(found.outcome):
            self._close(found.outcome)
        else:
            raise StepsChanged(
                f"the operation failed after {self.done} steps, and an earlier attempt had finished step {self.done + 1}, "
                f"{found.fingerprint!r}: operations that began under the old code must take the same steps"
            )

    def _close(self, mark: Outcome) -> None:
        self.closed = True
        self.failure = decode_outcome(mark.body) if mark.body else None
        self.doubt = dict(mark.headers).get(DOUBT, "")

    def _stop_if_closed(self, outcome: Outcome) -> None:
        if is_closed(outcome):
            self._close(outcome)
            raise Undone("The operation has failed for good, and its steps are being undone")

    def _stop_if_given_up(self, step: Step) -> Plan[None]:
        """In the last attempt no step is begun: it runs only to find the steps that must be undone."""
        if self.operation.giving_up:
            record = yield from self.ledger.store.find(*self.named(step.number, "").id)
            if record is None or record.state != "settled":
                self.doubt = "" if record is None or is_unset_mark(record) else step.name
                yield from self.close(None)
                raise Undone("The operation is given up, and its steps are being undone")


# One step

BORROWED = {"connection", "session"}
GIVEN = {"key", *BORROWED}


BACKOFF = Backoff()


@dataclass(frozen=True, slots=True)
class StepRetry:
    """A number of *attempts*, whatever the error."""

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


EXTERNAL, ONCE = StepRetry(), StepRetry(1)


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
        # The key for the provider is made from this: a second charge under the first one's key would be the first.
        self.label = f"{name}\n{number}" if again else name
        self.undoes = undoes
        self.takes = taken_by(function, name, takes_value=undoes)
        plain = type(function) is FunctionType and "return" not in function.__annotations__
        self.returns = () if plain else annotated_classes(function, "return")
        borrows = any(each.name in BORROWED for each in self.takes)
        self.effect: StepEffect = effect or ("transaction" if borrows else "lease")
        # A transaction that the database refused is run again anyway, and no other failure is cured by time alone.  But an
        # undo that fails has its operation held, which one lost connection must not do.
        usual = ONCE if self.effect == "transaction" and not undoes else EXTERNAL
        self.retry: Retrying = usual if retry is None else StepRetry(retry) if isinstance(retry, int) else retry
        self.on_unknown = on_unknown
        self.resolver = resolver
        self.doubt = doubt
        if self.effect == "lease" and borrows:
            raise ConfigurationError(f"step {name!r} takes a connection, which effect = 'lease' does not have")
        if on_unknown == "resolve" and resolver is None:
            raise ConfigurationError(f"step {name!r}: on_unknown = 'resolve' needs a resolver")

    def naming(self, policy: Policy) -> Policy:
        """Return *policy*, with the classes that the return annotation of the step's function names."""
        new = tuple(kind for kind in self.returns if kind not in policy.types)
        return dataclasses.replace(policy, types=policy.types + new) if new else policy

    def policy(self, policy: Policy, key: str) -> Policy:
        """The policy of steps, with this step's own on_unknown.

        The policy's errors may be the outcome of a step.  An undo that raises one of them has failed.
        """
        if self.undoes:
            return dataclasses.replace(policy, errors=())
        if self.on_unknown == "retry":
            return policy
        resolver = self.resolver
        asks = None if resolver is None else (lambda op: resolver(key))
        doubt = policy.doubt if self.doubt is None else self.doubt
        return dataclasses.replace(policy, on_unknown=self.on_unknown, resolver=asks, doubt=doubt)


class Called:
    """The performer of a step: calls its function with the parameters it takes, and remembers that it was called."""

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
        return nothing_of(given) if self.step.undoes else given

    def __repr__(self) -> str:  # for error messages
        return f"{self.step.function!r} of step {self.step.name!r}"

    def _given(self, name: str, op: Op) -> Any:
        if name == "connection":
            return op.connection
        if name == "session":
            return op.session()
        return self.key if name == "key" else self.value


def nothing_of(given: Any) -> Any:
    """Drop the value that an undo returns: nobody reads it, and a checkpoint might not be able to hold it."""

    async def ended() -> None:
        await given

    return ended() if hasattr(given, "__await__") else None


def taken_by(function: Callable[..., Any], name: str, *, takes_value: bool) -> tuple[inspect.Parameter, ...]:
    """The parameters that are passed.  Of an undo, the first one with another name gets the step's value."""
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


def wants(retry: Retrying, error: Exception) -> bool:
    """Whether the same step may work in a moment: not if the ledger refuses it, or the code must be changed."""
    if isinstance(error, Refusal | Fenced | ConfigurationError):
        return getattr(error, "retryable", False) and not isinstance(error, Fenced)
    return retry.wants(error)


# Checkpoints

# How long an operation may be unfinished: its checkpoints are kept that much longer than its outcome.
UNFINISHED = 30 * 86400.0
# A larger request is not kept: then only the caller can finish the operation, by a retry.
LARGEST = 1024 * 1024
CLOSED = ("oncemore-closed", "")  # marks the step at which an operation has failed for good
DOUBT = "oncemore-doubt"  # names, in such a mark, the step in its place that was begun, and may have taken effect


@lru_cache(maxsize=256)
def step_policy(policy: Policy, effect: StepEffect) -> Policy:
    """The policy of an operation's steps: the attempt that holds the operation waits for them, and every outcome is kept."""
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


def kept(answer: Answer, name: str) -> Answer:
    """The answer, if it is a checkpoint.  Without one the operation must not go on: the next attempt would repeat the step."""
    if answer.how == "unstored":
        raise StoreError(f"step {name!r} was performed, but its checkpoint could not be stored; retry the operation")
    if answer.outcome.kind == "tombstone":
        why = answer.outcome.body.decode(errors="replace")
        raise ConfigurationError(f"step {name!r} gave what cannot be checkpointed ({why})")
    return answer


def is_closed(outcome: Outcome | None) -> TypeGuard[Outcome]:
    """Whether the outcome is the mark of a final failure.  Its body is the failure, empty if the operation was given up."""
    return outcome is not None and outcome.headers[:1] == (CLOSED,)


def is_unset_mark(record: Record) -> bool:
    """Whether a process died between the claim and the settling of the mark of a final failure: no step was begun here."""
    return record.state != "settled" and not record.fingerprint


def pack_request(operation: Operation, deadline: float | None, types: Types) -> bytes:
    """The part of a claim that a completer needs: the request, if it can be kept, and what the request alone does not tell."""
    request = None if operation.request is None else operation.request()
    kept = {"deadline": deadline, "request": request, "unique": operation.unique}
    try:
        packed: bytes = encode(to_plain(kept, classes_by_name(types)))
        if len(packed) <= LARGEST:
            return packed
    except Exception as reason:
        log.warning(
            "%s: only the caller can finish it after a crash, because its request cannot be kept: %s",
            operation.name,
            reason,
        )
    return encode({**kept, "request": None})


def unpack_request(data: bytes, types: Types | None) -> dict[str, Any]:
    """The parts that `pack_request` kept; no request if a claim kept nothing.  Without *types*, objects are read as dicts."""
    if not data:
        return {"deadline": None, "request": None, "unique": None}
    kept: dict[str, Any] = replayed(Outcome("value", body=data), types=types)
    return kept
