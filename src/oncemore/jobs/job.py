"""The decorator `job`: a function runs once per slot, even if many processes call it many times."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Literal, ParamSpec, TypeVar, cast
from zoneinfo import ZoneInfo

from .._contract.keys import check_name
from .._contract.policy import Policy, duration
from .._contract.templates import Field, Scheduled, Template
from .._ledger.attempt import Performer
from .._ledger.context import Op
from .._ledger.decisions import Answer
from .._ledger.events import log
from .._ledger.guard import Guard, check_guard
from .._ledger.model import Lease, Operation, Record
from .._ledger.once import Once
from .._ledger.steps import pack_request
from .._runtime.backoff import Backoff
from .._runtime.plan import Plan, arun, run
from ..errors import ConfigurationError, InProgress, NotResolvable, OncemoreError, UnknownOutcome

P = ParamSpec("P")
T = TypeVar("T")

YEAR = 366 * 86400.0
# The pause before a failed slot is tried again, counted from the end of its last attempt.
BACKOFF = Backoff(base=1.0, factor=8.0, cap=600.0, jitter="none")
FAILED = "failed"  # the note of a slot that is listed as failed begins with this

SlotEnd = Literal["completed", "conflict", "retrying", "failed", "held"]


def job(
    guard: Guard,
    *,
    slot: str | Callable[..., str] = "",
    name: str = "",
    ignore: Sequence[str] = (),
    attempts: int = 4,
    within: float | str = 3600.0,
    backoff: Backoff = BACKOFF,
    **settings: Any,
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator: the function runs once per slot, and every further call gets the first one's result.

    The slot is the operation's key, and the job's name is its scope.  A call by hand tries once.  If a slot has failed,
    or its process was killed, every running `Schedule` that has the job tries it again.

    Args:
        guard: Where the slots are recorded.
        slot: A template over the function's parameters and the scheduled time, `"{date:America/New_York}:{user}"`, or a
            function of the same arguments.  `{date}` and `{window:1h}` use the scheduled time; a call by hand uses the
            current time.  A `date` argument overrides both.  The default is the schedule's name for the time, and all
            parameters.
        name: The job's name, which is the scope of its slots.  The default is the function's name with its module.
        ignore: Parameters that are neither compared nor stored, such as a session.
        attempts: How many times a slot is tried before it is listed as failed.
        within: How long after its first attempt a slot may be tried again.
        backoff: How long to wait between two attempts.
        settings: The settings of `Policy`, as for `once`.  A result is kept for a year unless `ttl` says otherwise.  A
            killed slot runs again (`on_unknown="retry"`, unless there is a `resolver` or `doubt`).  If the attempt
            may have taken effect, use `effect="transaction"`, `effect="steps"` or a resolver.
    """
    policy = job_policy(check_guard(guard).policy, settings)
    if type(attempts) is not int or attempts < 1:
        raise ConfigurationError(f"attempts = {attempts!r}: a slot is tried once at least")

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        made: Job[P, T] = Job(guard, function, slot or default_slot(function), name, ignore, policy)
        made.attempts, made.within, made.backoff = attempts, duration(within), backoff
        return made.wrapped()

    return decorate


def job_policy(policy: Policy, settings: Mapping[str, Any]) -> Policy:
    """Return the guard's policy with a job's defaults and the settings."""
    defaults: dict[str, Any] = {"ttl": max(policy.ttl, YEAR)}
    if policy.on_unknown == "hold" and not (policy.doubt or settings.get("doubt")):
        defaults["on_unknown"] = "resolve" if settings.get("resolver") else "retry"
    return policy.but(**{**defaults, **settings})


def default_slot(function: Callable[..., Any]) -> str:
    """Return the template that names the scheduled time and every parameter."""
    names = [name for name in inspect.signature(function).parameters if name not in ("date", "timezone", "self", "cls")]
    return ":".join(["{tick}", *(f"{{{name}}}" for name in names)])


class Job(Once[P, T]):
    """A guarded function that runs once per slot."""

    decorator = "job"
    prefix = ""
    attempts = 4
    within = 3600.0
    backoff = BACKOFF

    def __init__(
        self,
        guard: Guard,
        function: Callable[P, T],
        slot: str | Callable[..., str],
        name: str,
        ignore: Sequence[str],
        policy: Policy,
    ) -> None:
        super().__init__(guard, function, slot, name, ignore, policy)
        self.keeps_request = True  # a schedule needs the stored request to try a slot again
        self.day = self._day_field()

    def _day_field(self) -> str | None:
        """Return the zone of the template's `{date}` if the function has a parameter `date`; otherwise None."""
        if not isinstance(self.key, Template) or "date" not in self.signature.parameters:
            return None
        fields = [part.text for part in self.key.parts if isinstance(part, Field)]
        return next((text[5:] for text in fields if text.partition(":")[0] == "date"), None)

    @property
    def is_timed(self) -> bool:
        """Whether slots at different times have different names."""
        if not isinstance(self.key, Template):
            return True
        heads = {part.text.partition(":")[0] for part in self.key.parts if isinstance(part, Field)}
        return bool(heads & {"date", "window", "tick"})

    def now(self) -> float:
        """Return the time that decides when jobs are due.  A test's clock moves it together with the store's."""
        return self.guard.clock.time() + self.guard.store.shift

    # From a call to a slot

    def operation(self, *args: P.args, **kwargs: P.kwargs) -> Operation:
        """Return the slot of a call by hand, to look it up in the ledger."""
        return self.slot_of(self.bind(args, kwargs, self.now()), self.now())

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any], moment: float) -> inspect.BoundArguments:
        """Return the arguments of a call.  A `date` of None becomes the slot's, also for a retry on the next day."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        if self.day is not None and bound.arguments["date"] is None:
            zone = ZoneInfo(self.day) if self.day else UTC
            bound.arguments["date"] = datetime.fromtimestamp(moment // 1, zone).date()
        return bound

    def slot_of(self, bound: inspect.BoundArguments, moment: float, scheduled: Scheduled | None = None) -> Operation:
        """Return the slot of these arguments at this time."""
        if isinstance(self.key, Template):
            key = self.key.render(arguments=bound.arguments, now=moment, scheduled=scheduled)
        else:
            key = check_name(self.key(*bound.args, **bound.kwargs), "The result of the slot function")
        return self.named(key, bound.arguments)

    def bind_scheduled(self, item: Sequence[Any], at: float, scheduled: Scheduled) -> inspect.BoundArguments:
        """Return the arguments of a scheduled call: the item first, then `date` and `timezone` if the function takes them."""
        given = {"date": scheduled.date, "timezone": scheduled.zone}
        named = {name: value for name, value in given.items() if name in self.signature.parameters}
        try:
            return self.bind(item, named, at)
        except TypeError as error:
            raise ConfigurationError(f"{self.name} cannot be scheduled: {error}") from None

    def wrapped(self) -> Callable[P, T]:
        """Return the function to call instead."""

        @functools.wraps(self.function)
        async def acall(*args: P.args, **kwargs: P.kwargs) -> Any:
            operation, perform = self._bind_call(args, kwargs)
            return self.result(operation, await arun(self.guarded(operation, perform)))

        @functools.wraps(self.function)
        def call(*args: P.args, **kwargs: P.kwargs) -> Any:
            operation, perform = self._bind_call(args, kwargs)
            return self.result(operation, run(self.guarded(operation, perform)))

        guarded: Any = acall if self.awaited else call
        guarded.operation, guarded.drive, guarded.types, guarded.job = self.operation, self.drive, self.types, self
        return cast("Callable[P, T]", guarded)

    def _bind_call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Operation, Performer]:
        moment = self.now()
        bound = self.bind(args, kwargs, moment)
        return self.slot_of(bound, moment), self.performer(*bound.args, **bound.kwargs)

    # Attempts

    def guarded(self, operation: Operation, perform: Performer) -> Plan[Answer]:
        """Return the plan of a call by hand.  It tries the slot once, even if it is listed as failed."""
        begun: list[Op] = []
        try:
            return (yield from self.attempt(operation, perform, begun=begun))
        except UnknownOutcome:
            if begun or not (yield from self.allow_retry(operation)):
                raise
        return (yield from self.attempt(operation, perform))

    def scheduled(self, operation: Operation, arguments: Mapping[str, Any], delay: float) -> Plan[Answer]:
        """Return the plan of an attempt by a schedule, which does not wait for an attempt of another process."""
        bound = self.bound_again(arguments)
        plan = self.attempt(operation, self.performer(*bound.args, **bound.kwargs), wait=0.0, delay=delay)
        return self.driven(plan)

    def attempt(
        self,
        operation: Operation,
        perform: Performer,
        *,
        wait: float | None = None,
        delay: float = 0.0,
        begun: list[Op] | None = None,
    ) -> Plan[Answer]:
        """Try the slot once.  A failure is counted, and the last one makes it a failed slot."""
        started: list[Op] = [] if begun is None else begun

        @functools.wraps(self.function)
        def performing(op: Op) -> Any:
            started.append(op)
            return perform(op)

        attempt = self.guard.new_attempt(operation, self.policy)
        if self.policy.effect != "steps" and operation.request is not None:  # steps store the request themselves
            attempt.request = pack_request(operation, None, self.policy.types)
        try:
            answer = yield from attempt.perform(performing, wait)
        except InProgress:
            if not started:
                self.report_end(operation, "conflict")
            raise
        except UnknownOutcome:
            if not started:
                self.report_end(operation, "held")
            raise
        except Exception as error:
            if started:  # otherwise nothing was tried: the store is down, or the slot has other arguments
                yield from self._count_failure(operation, error, started[-1].attempt)
            raise
        self.report_end(operation, slot_end(answer), answer.attempt, delay)
        return answer

    def report_end(self, operation: Operation, how: SlotEnd, attempt: int = 0, delay: float = 0.0) -> None:
        """Tell the observers how an attempt has ended."""
        self.guard.emit("slot", operation, detail=how, attempt=attempt, duration=delay)

    def _count_failure(self, operation: Operation, error: Exception, attempt: int) -> Plan[None]:
        """Count the failure of an attempt; the caller raises *error*."""
        how: SlotEnd = "retrying"
        try:
            record = yield from self.guard.store.find(*operation.id)
            if record is not None and self.is_used_up(record) and (yield from self.give_up(operation, repr(error))):
                how = "failed"
        except OncemoreError:  # a schedule finds the slot later
            log.warning("The failure of %s %r could not be counted", *operation.id, exc_info=True)
        self.report_end(operation, how, attempt)

    # Failed slots: held records with a note

    def is_used_up(self, record: Record) -> bool:
        """Whether the slot has had all its attempts, or all its time.

        Always false if a killed attempt may have taken effect: the next attempt asks the resolver, or holds the slot.
        """
        killed = record.state == "running" and record.lease_until <= record.now
        if killed and self.policy.on_unknown != "retry" and self.policy.effect != "steps":
            return False
        used_up = record.attempts >= self.attempts or record.now - record.created_at >= self.within
        return used_up and (killed or record.state == "released")

    def retry_at(self, record: Record) -> float:
        """Return the time at which an unfinished slot is due again, by the store's clock.

        A killed slot is due when its lease has ended.  With effect="steps", a failure ends the lease, too, so the
        pause of the backoff is added.
        """
        pause = self.backoff.step(record.attempts)
        if record.state == "running":
            return record.lease_until + (pause if self.policy.effect == "steps" else 0.0)
        return (record.expires_at or record.now) - self.policy.ttl + pause

    def is_due(self, record: Record) -> bool:
        """Whether a schedule has to try an unfinished slot again, or to list it as failed."""
        return self.is_used_up(record) or record.now >= self.retry_at(record)

    def give_up(self, operation: Operation, why: str) -> Plan[bool]:
        """List the slot as failed, so that only a call by hand tries it again.  Return whether it was listed.

        It is not if another caller has it by now, or if its last attempt may have taken effect: then it is held.
        """
        guard = self.guard
        lease = yield from guard.store.claim(operation, lease=self.policy.lease)
        if not isinstance(lease, Lease):
            return False
        if lease.lapsed and self.policy.on_unknown != "retry" and self.policy.effect != "steps":
            yield from guard.hold(lease, "its holder vanished")  # nobody knows whether it took effect
            return False
        # The claim is not an attempt.  It only makes sure that no other caller has the slot.
        yield from guard.hold(lease, f"{FAILED} after {lease.attempt - 1} attempts: {why}")
        return True

    def allow_retry(self, operation: Operation) -> Plan[bool]:
        """Let a failed slot be tried again.  Return False if it is not listed as failed."""
        record = yield from self.guard.store.find(*operation.id)
        if record is None or not is_failed(record):
            return False
        with suppress(NotResolvable, InProgress):  # another caller was quicker
            yield from self.guard.store.resolve(*operation.id, None, retention=self.policy.ttl)
        return True


def slot_end(answer: Answer) -> SlotEnd:
    """Return how an attempt has ended, by its answer."""
    ends: dict[str, SlotEnd] = {"replayed": "conflict", "released": "retrying", "unknown": "held"}
    return ends.get(answer.how, "completed")


def is_failed(record: Record) -> bool:
    """Whether a held record is listed as failed.  All other held records have an unknown outcome."""
    return record.state == "held" and record.note.startswith(FAILED)


def job_of(function: object) -> Job[Any, Any]:
    """Return the job of a decorated function.  Raises ConfigurationError for any other object."""
    found = getattr(function, "job", None)
    if not isinstance(found, Job):
        raise ConfigurationError(f"{function!r} is no job: decorate the function with @job(guard, slot=...)")
    return found
