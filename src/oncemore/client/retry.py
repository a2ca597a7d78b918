"""The retry policy: how often, how long, with which pauses, and after which answers and errors."""

from __future__ import annotations

import random as chances
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, overload

from .._contract.policy import Seconds, duration
from .._contract.problems import did_you_mean
from .._runtime.backoff import Backoff, Jitter
from ..errors import ConfigurationError
from .hosts import DEFAULT_BUDGET, Breaker, Budget

if TYPE_CHECKING:

    class OptionalSeconds:
        """For type checkers: a field that is set to seconds, a text such as `"30s"` or None, and read as seconds or None."""

        @overload
        def __get__(self, instance: None, owner: type) -> OptionalSeconds: ...
        @overload
        def __get__(self, instance: object, owner: type) -> float | None: ...
        def __get__(self, instance: object, owner: type) -> Any: ...
        def __set__(self, instance: object, value: float | str | None) -> None: ...
else:
    OptionalSeconds = float

# Request timeout (408), too many requests (429) and server errors: the same request may succeed later.
RETRIED_STATUSES = frozenset({408, 429, *range(500, 600)})

# When a webhook is delivered again: seconds after the first attempt.
WEBHOOK_OFFSETS = (5.0, 30.0, 120.0, 600.0, 1800.0, 3600.0, 21600.0, 43200.0, 86400.0)

# A scheduled attempt begins early by 1 % to 10 % of the gap before it.  This keeps callers apart, and leaves time for
# the answer to the last attempt, which is due at the end of the window.
EARLY, EARLY_SPREAD = 0.01, 0.09


class Changes(TypedDict, total=False):
    """The fields of `Retry` that a preset may be given in place of its own."""

    attempts: int
    deadline: float | str
    attempt_timeout: float | str | None
    base: float | str
    factor: float
    cap: float | str
    jitter: Jitter
    spread: float | str
    schedule: Iterable[float | str]
    statuses: Iterable[int]
    errors: type[Exception] | Iterable[type[Exception]] | Callable[[Exception], bool]
    key_lifetime: float | str
    budget: Budget | None
    breaker: Breaker | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """When to try again.  Durations are seconds, or text such as `"5m"` that is converted to seconds.

    Args:
        attempts: their number, including the first one.
        deadline: the hard limit for all attempts and pauses together.
        attempt_timeout: the hard limit for one attempt.
        base, factor, cap, jitter, spread: the pauses, see `Backoff`.
        schedule: the times of the retries, counted from the first attempt, in place of a backoff.
        statuses: the statuses of HTTP after which to try again.
        errors: for plain functions, the exceptions after which to try again, in addition to those with
            `retryable = True`; or a function that decides alone.
        key_lifetime: how long the server remembers a key.  Later, it would take a retry for a new operation.
        budget, breaker: limits per host, shared by the process.
    """

    attempts: int = 5
    deadline: Seconds = 10.0  # type: ignore[assignment]
    attempt_timeout: OptionalSeconds = None  # type: ignore[assignment]
    base: Seconds = 0.1  # type: ignore[assignment]
    factor: float = 2.0
    cap: Seconds = 2.0  # type: ignore[assignment]
    jitter: Jitter = "full"
    spread: Seconds = 0.0  # type: ignore[assignment]
    schedule: tuple[float, ...] = ()
    statuses: frozenset[int] = RETRIED_STATUSES
    errors: tuple[type[Exception], ...] | Callable[[Exception], bool] = (ConnectionError, TimeoutError)
    key_lifetime: Seconds = 86400.0  # type: ignore[assignment]
    budget: Budget | None = DEFAULT_BUDGET
    breaker: Breaker | None = None
    backoff: Backoff = field(init=False, repr=False, compare=False)
    # Seconds for which a key may be sent: the last attempt must arrive while the server still knows the key.
    sendable: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        put = partial(object.__setattr__, self)
        for name in ("deadline", "attempt_timeout", "base", "cap", "spread", "key_lifetime"):
            if getattr(self, name) is not None:
                put(name, duration(getattr(self, name)))
        put("schedule", tuple(duration(offset) for offset in self.schedule))
        put("statuses", frozenset(self.statuses))
        if isinstance(self.errors, type):
            put("errors", (self.errors,))
        elif isinstance(self.errors, Iterable):
            put("errors", tuple(self.errors))
        put("backoff", Backoff(**{name: getattr(self, name) for name in ("base", "factor", "cap", "jitter", "spread")}))
        put("sendable", self.key_lifetime - (self.attempt_timeout or self.deadline))
        self._check()

    def _check(self) -> None:
        if isinstance(self.attempts, bool) or not isinstance(self.attempts, int) or self.attempts < 1:
            raise ConfigurationError(
                f"attempts = {self.attempts!r}: write a whole number of 1 or more; the first attempt counts"
            )
        kinds = self.errors if isinstance(self.errors, tuple) else ()
        if not all(isinstance(kind, type) and issubclass(kind, BaseException) for kind in kinds):
            raise ConfigurationError(
                f"errors = {kinds!r}: give exceptions, or a function that says whether to try again"
            )
        if self.deadline <= 0 or self.attempt_timeout == 0 or self.key_lifetime <= 0:
            raise ConfigurationError(
                f"deadline ({self.deadline:g} s), attempt_timeout ({self.attempt_timeout!r}) and key_lifetime "
                f"({self.key_lifetime:g} s) must be longer than 0 s"
            )
        if (self.attempt_timeout or self.deadline) >= self.key_lifetime:
            raise ConfigurationError(
                f"key_lifetime ({self.key_lifetime:g} s) must be longer than one attempt may take "
                f"({self.attempt_timeout or self.deadline:g} s): shorten attempt_timeout or deadline"
            )
        if list(self.schedule) != sorted(self.schedule):
            raise ConfigurationError(
                f"schedule = {self.schedule}: times count from the first attempt, so write them in ascending order"
            )
        if self.schedule and len(self.schedule) < self.attempts - 1:
            raise ConfigurationError(
                f"schedule = {self.schedule}: {self.attempts} attempts need {self.attempts - 1} times"
            )

    def wants(self, error: Exception) -> bool:
        """Whether to call a function again after *error*."""
        if isinstance(self.errors, tuple):
            return isinstance(error, self.errors) or getattr(error, "retryable", False) is True
        return bool(self.errors(error))

    def delay(self, retry: int, chance: float, *, previous: float = 0.0, elapsed: float = 0.0) -> float:
        """Return the pause before retry number *retry*, if *elapsed* seconds have passed since the first attempt began."""
        if not self.schedule:
            return self.backoff.delay(retry, chance, previous)
        due = self.schedule[retry - 1]
        gap = due - (self.schedule[retry - 2] if retry > 1 else 0.0)
        return max(0.0, due - gap * (EARLY + EARLY_SPREAD * chance) - elapsed)

    def delays(self, random: Callable[[], float] = chances.random) -> Iterator[float]:
        """Yield one sample of the pauses between the attempts, as if every attempt failed immediately."""
        previous = elapsed = 0.0
        for retry in range(1, self.attempts):
            previous = self.delay(retry, random(), previous=previous, elapsed=elapsed)
            elapsed += previous
            yield previous

    @classmethod
    def _preset(cls, pace: Changes, changes: Changes) -> Retry:
        """Return the policy with the fields of *pace*, replaced by the fields of *changes*."""
        for name in changes:
            if name not in Changes.__annotations__:
                raise ConfigurationError(
                    f"Retry has no {name!r}{did_you_mean(name, Changes.__annotations__)}: its fields are "
                    f"{', '.join(Changes.__annotations__)}"
                )
        fields: Any = {**pace, **changes}
        return cls(**fields)

    @classmethod
    def playbook(cls, **changes: Unpack[Changes]) -> Retry:
        """Return the default policy: pauses of 100–200, 200–400, 400–800 and 800–1600 ms, within 10 s in all."""
        return cls._preset({}, changes)

    @classmethod
    def user_facing(cls, **changes: Unpack[Changes]) -> Retry:
        """Return a policy for a request that a user waits for: 3 retries within 10 s."""
        return cls._preset({"attempts": 4, "deadline": 10.0}, changes)

    @classmethod
    def background_job(cls, **changes: Unpack[Changes]) -> Retry:
        """Return a policy for work that no user waits for: 5 retries within 5 minutes."""
        pace: Changes = {"attempts": 6, "deadline": 300.0, "attempt_timeout": 60.0, "base": 1.0, "cap": 30.0}
        return cls._preset(pace, changes)

    @classmethod
    def webhook_delivery(cls, **changes: Unpack[Changes]) -> Retry:
        """Return a policy for deliveries: 10 attempts over 24 hours, the retries 5 s to 24 h after the first attempt.

        The last time of the schedule is the end of the window.
        """
        pace: Changes = {"attempts": 10, "deadline": 86400.0, "attempt_timeout": 30.0, "schedule": WEBHOOK_OFFSETS}
        return cls._preset({**pace, "key_lifetime": 7 * 86400.0}, changes)

    @classmethod
    def scheduled_task(cls, **changes: Unpack[Changes]) -> Retry:
        """Return a policy for a task that runs at fixed times: 3 retries within an hour."""
        pace: Changes = {"attempts": 4, "deadline": 3600.0, "attempt_timeout": 600.0, "base": 30.0, "cap": 300.0}
        return cls._preset(pace, changes)

    @classmethod
    def matchmaking(cls, **changes: Unpack[Changes]) -> Retry:
        """Return a policy for matchmaking: 3 retries after 1000·2ⁿ + U(0, 1000) ms, at most 30 s each."""
        pace: Changes = {
            "attempts": 4,
            "deadline": 120.0,
            "base": 1.0,
            "cap": 30.0,
            "jitter": "additive",
            "spread": 1.0,
        }
        return cls._preset(pace, changes)


def check_policy(policy: object) -> Retry:
    """Return *policy*, or the default policy if it is None.  Raise ConfigurationError if it is no Retry."""
    if policy is None:
        return Retry()
    if not isinstance(policy, Retry):
        raise ConfigurationError(
            f"{policy!r} is no policy: give a Retry, such as Retry(attempts=3) or Retry.user_facing()"
        )
    return policy


# For code that uses another library already.


def tenacity_arguments(retry: Retry) -> dict[str, Any]:
    """Return keyword arguments for `tenacity.retry(**…)`: the same errors, delays, attempts and deadline."""

    def wait(state: Any) -> float:
        # tenacity also asks after the last attempt, for which a schedule has no time.
        if state.attempt_number >= retry.attempts:
            return 0.0
        previous = state.next_action.sleep if state.next_action else 0.0
        elapsed = state.seconds_since_start or 0.0
        return retry.delay(state.attempt_number, chances.random(), previous=previous, elapsed=elapsed)

    def stop(state: Any) -> bool:
        if state.attempt_number >= retry.attempts:
            return True
        return bool((state.seconds_since_start or 0.0) + state.upcoming_sleep >= retry.deadline)

    def wanted(state: Any) -> bool:
        error = state.outcome.exception()
        return isinstance(error, Exception) and retry.wants(error)

    return {"wait": wait, "stop": stop, "retry": wanted, "reraise": True}


def stamina_arguments(retry: Retry) -> dict[str, Any]:
    """Return keyword arguments for `stamina.retry(**…)`.  Only the jitters `additive` and `none` are exact there."""
    if retry.schedule:
        raise ConfigurationError("stamina has no schedules: use oncemore's retry, or tenacity_arguments")
    jitter = {"additive": retry.spread, "none": 0.0}.get(retry.jitter, retry.base)
    return {
        "on": retry.wants,
        "attempts": retry.attempts,
        "timeout": retry.deadline,
        "wait_initial": retry.base,
        "wait_max": retry.cap,
        "wait_jitter": jitter,
        "wait_exp_base": retry.factor,
    }
