"""The retry loop of every transport and of `@retry`: attempt, judge, pause, attempt again."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .._runtime.plan import Effect, Plan
from .deadlines import Pause, now
from .errors import AttemptTimeout, CircuitOpen
from .hosts import HOSTS, Host, Hosts
from .retry import Retry
from .story import Attempt, EventKind, Reason, RetryEvent, RetryObserver, Story, notify
from .verdict import Verdict

# Up to this share is added to the server's Retry-After, so that its clients do not all return at the same moment.
RETRY_AFTER_SPREAD = 0.1


class Retryable(Protocol):
    """A request of some library, or a call of a function, that may be attempted several times."""

    name: str  # the host or the function, for the story, the budget and the breaker
    key: str | None
    # Seconds after the first attempt in which another may begin.  Then the server may have forgotten the key.
    lasts: float
    story: Story | None  # None until an attempt has ended

    def attempt(self, number: int, timeout: float) -> Effect[Any]:
        """Return the effect of one attempt.  Its result is the reply."""
        ...

    def judge(self, reply: Any, error: Exception | None) -> Verdict:
        """Return the verdict on the reply, or on *error* if there is no reply."""
        ...

    def resendable(self) -> bool:
        """Whether the body can be sent again from its beginning."""
        ...

    def close(self, reply: Any) -> Effect[None] | None:
        """Return the effect that closes a reply before the next attempt, or None if there is nothing to close."""
        ...

    def failure(self, story: Story, error: Exception | None) -> Exception | None:
        """Return the error to raise after the last attempt, or None if its reply is the result."""
        ...


@dataclass(frozen=True, slots=True)
class Environment:
    """Everything outside the retry loop: the clock, random numbers, the hosts' budgets and breakers, and the observers."""

    now: Callable[[], float] = now
    random: Callable[[], float] = random.random
    hosts: Hosts | None = HOSTS
    observers: Sequence[RetryObserver] = ()


def send_with_retries(
    request: Retryable, policy: Retry, environment: Environment, started: float | None = None
) -> Plan[Any]:
    """Attempt *request* until its answer is final or *policy* says to stop.  Return the last answer, or raise its error.

    The deadline counts from *started*, or from now by default.
    """
    run = RetryRun(request, policy, environment, started)
    error: Exception | None = None
    while True:
        if reason := run.reason_not_to_begin():
            return run.give_up(reason, None, error or AttemptTimeout("no time was left for the attempt"))
        run.check_circuit_breaker()
        reply, error = None, None
        try:
            reply = yield request.attempt(run.number, run.attempt_timeout())
        except Exception as caught:
            error = caught
        verdict = request.judge(reply, error)
        run.record(verdict)
        if not verdict.again:
            return run.finish(reply, error)
        delay = run.next_delay(verdict)
        if reason := run.reason_to_stop(delay):
            return run.give_up(reason, reply, error)
        run.notify("retrying", delay)
        if reply is not None and (closing := request.close(reply)):
            yield closing
        if delay:
            yield Pause(delay)
        run.begin_next(verdict, delay)


class RetryRun:
    """All attempts of one request: their number, their times and their story.

    *begun* and *ended* are the times of the current attempt.  *delay* is the pause before it, in seconds.
    """

    def __init__(self, request: Retryable, policy: Retry, environment: Environment, started: float | None) -> None:
        self.request = request
        self.policy = policy
        self.environment = environment
        self.begun = self.ended = environment.now()
        self.started = self.begun if started is None else started
        self.ends = self.started + policy.deadline
        self.number = 1
        self.delay = 0.0
        self.was_at_once = False

    @property
    def host(self) -> Host | None:
        hosts, policy = self.environment.hosts, self.policy
        return hosts.get(self.request.name, policy.budget, policy.breaker) if hosts else None

    def story(self) -> Story:
        if self.request.story is None:
            self.request.story = Story(self.request.name, self.request.key)
        return self.request.story

    def check_circuit_breaker(self) -> None:
        """Raise CircuitOpen if the host's circuit is open."""
        if self.policy.breaker is not None and (host := self.host) and (wait := host.admit(self.begun)):
            story = self.story()
            story.reason = "breaker"
            raise CircuitOpen(f"{story} Nothing is sent to this host for {wait:.1f} s.", story=story, retry_after=wait)

    def reason_not_to_begin(self) -> Reason:
        """Return "deadline" or "key_lifetime" if storing the key, or the pause, took too long; otherwise ""."""
        if self.begun >= self.ends:
            return "deadline"
        return "key_lifetime" if self.begun >= self.started + self.request.lasts else ""

    def attempt_timeout(self) -> float:
        """Return the seconds that this attempt may take."""
        left, timeout = self.ends - self.begun, self.policy.attempt_timeout
        return left if timeout is None or left < timeout else timeout

    def record(self, verdict: Verdict) -> None:
        """Add the attempt to the story, and to the host's budget and breaker."""
        self.ended = self.environment.now()
        self.story().attempts.append(Attempt(self.number, self.delay, self.ended - self.begun, verdict))
        if verdict.blame:
            if host := self.host:
                host.failed(self.ended)
        elif hosts := self.environment.hosts:
            hosts.succeeded(self.request.name, self.policy.budget, self.policy.breaker)

    def next_delay(self, verdict: Verdict) -> float:
        """Return the seconds until the next attempt: as the server asks, 0, or the policy's backoff."""
        if self.number >= self.policy.attempts:  # there is no next attempt, and a schedule has no time for it
            return 0.0
        chance = self.environment.random()
        if verdict.after is not None:
            spread = verdict.after * (1 + RETRY_AFTER_SPREAD * chance)
            return spread if self.ended + spread < self.ends else verdict.after
        # Only one immediate retry in a row: if the server asks for another, it gets the backoff.
        if verdict.at_once and not self.was_at_once:
            return 0.0
        return self.policy.delay(self.number, chance, previous=self.delay, elapsed=self.ended - self.started)

    def reason_to_stop(self, delay: float) -> Reason:
        """Return the reason not to try again after *delay*, or "" if there is none."""
        if self.number >= self.policy.attempts:
            return "attempts"
        begins = self.ended + delay
        if begins >= self.ends:
            return "deadline"
        if begins >= self.started + self.request.lasts:
            return "key_lifetime"
        if not self.request.resendable():
            return "body"
        host = self.host
        if host and not host.may_retry():
            return "budget"
        return "breaker" if host and host.is_open(begins) else ""

    def begin_next(self, verdict: Verdict, delay: float) -> None:
        """Count the next attempt, which begins now."""
        self.number += 1
        self.delay = delay
        self.was_at_once = verdict.at_once
        self.begun = self.environment.now()

    def finish(self, reply: Any, error: Exception | None) -> Any:
        """Return a final answer, or raise a final error unchanged."""
        if error is not None:
            raise error
        if self.number > 1:
            self.notify("recovered")
        return reply

    def give_up(self, reason: Reason, reply: Any, error: Exception | None) -> Any:
        """Stop for *reason*: return the last answer, or raise the request's error with the story."""
        story = self.story()
        story.reason = reason
        self.notify("exhausted")
        failure = self.request.failure(story, error)
        if failure is None:
            return reply
        if failure is error:  # an error must not be its own cause, or code that follows the causes would never end
            raise failure
        raise failure from error

    def notify(self, kind: EventKind, delay: float = 0.0) -> None:
        if self.environment.observers:
            notify(self.environment.observers, RetryEvent(kind, self.story(), delay))
