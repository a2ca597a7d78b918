"""The one plan behind every transport, and the function decorator: attempt, judge, pause, attempt."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from .._runtime.plan import Effect, Plan
from .errors import AttemptTimeout, CircuitOpen
from .hosts import HOSTS, Host, Hosts
from .pause import Pause, now
from .retry import Retry
from .story import Attempt, EventKind, Reason, RetryEvent, RetryObserver, Story, tell
from .verdict import Verdict

# Those who were told the same Retry-After should not all come back in the same instant.
WISH_SPREAD = 0.1


class Work(Protocol):
    """Something to be attempted: a request of some library, or a function."""

    name: str  # of the host or the function, in the story and for the budget
    key: str | None
    lasts: float  # seconds from the first attempt after which no other may begin
    telling: bool  # the story is told also of a success at the first attempt
    story: Story | None

    def attempt(self, number: int, limit: float) -> Effect[Any]: ...
    def judge(self, reply: Any) -> Verdict: ...
    def judge_error(self, error: Exception) -> Verdict: ...
    def resendable(self) -> bool: ...
    def discard(self, reply: Any) -> Effect[None] | None: ...
    def exhausted(self, story: Story, error: Exception | None) -> Exception | None: ...


class World:
    """What a plan may know of the outside: a clock, chance, the hosts, and who listens."""

    __slots__ = ("hosts", "now", "observers", "random")

    def __init__(
        self,
        now: Callable[[], float] = now,
        random: Callable[[], float] = random.random,
        hosts: Hosts | None = HOSTS,
        observers: Sequence[RetryObserver] = (),
    ) -> None:
        self.now = now
        self.random = random
        self.hosts = hosts
        self.observers = observers


WORLD = World()


class Course:
    """The state of one run of the plan."""

    __slots__ = (
        "delay",
        "ends",
        "host",
        "number",
        "retry",
        "started",
        "story",
        "was_at_once",
        "work",
        "world",
    )

    def __init__(self, work: Work, retry: Retry, world: World, started: float) -> None:
        self.work = work
        self.retry = retry
        self.world = world
        self.host: Host | None = world.hosts.get(work.name, retry.budget, retry.breaker) if world.hosts else None
        self.started = started
        self.ends = self.started + retry.deadline
        self.number = 1
        self.delay = 0.0
        self.was_at_once = False
        self.story: Story | None = None

    def check_circuit(self, begun: float) -> None:
        """Refuse to begin while the host's circuit is open."""
        if self.host and (wait := self.host.closed_in(begun)):
            story = self.tell_story()
            story.reason = "breaker"
            raise CircuitOpen(f"{story} It closes in {wait:.1f} s.", story=story, retry_after=wait)

    def next_effect(self, begun: float) -> Effect[Any]:
        """The attempt, limited by what is left of the deadline."""
        retry, work = self.retry, self.work
        limit = self.ends - begun
        if retry.attempt_timeout is not None and retry.attempt_timeout < limit:
            limit = retry.attempt_timeout
        return work.attempt(self.number, limit)

    def tell_story(self) -> Story:
        if self.story is None:
            self.work.story = self.story = Story(self.work.name, self.work.key)
        return self.story

    def note(self, verdict: Verdict, begun: float, ended: float) -> None:
        """Put one attempt into the story and on the host's account."""
        if self.host:
            if verdict.blame:
                self.host.failed(ended)
            else:
                self.host.succeeded()
        if self.work.telling or verdict.again or self.number > 1 or verdict.known != "performed":
            attempt = Attempt(self.number, self.delay, ended - begun, verdict)
            self.tell_story().attempts.append(attempt)

    def next_delay(self, verdict: Verdict, now: float) -> float:
        """How long to wait: as the server wishes, or at once, or by the policy's backoff."""
        chance = self.world.random()
        if verdict.after is not None:
            spread = verdict.after * (1 + WISH_SPREAD * chance)
            return spread if now + spread < self.ends else verdict.after
        # "At once" is for the first time; a server that keeps on saying so gets the backoff like any other.
        if verdict.at_once and not self.was_at_once:
            return 0.0
        return self.retry.delay(self.number, chance, previous=self.delay, elapsed=now - self.started)

    def why_stop(self, delay: float, now: float) -> Reason:
        """The reason against another attempt after *delay*; empty if there is none."""
        if self.number >= self.retry.attempts:
            return "attempts"
        if now + delay >= self.ends:
            return "deadline"
        if now + delay >= self.started + self.work.lasts:
            return "key_lifetime"
        if not self.work.resendable():
            return "body"
        if self.host and not self.host.may_retry():
            return "budget"
        return "breaker" if self.host and self.host.is_open(now + delay) else ""

    def proceed(self, verdict: Verdict, delay: float) -> None:
        """Count the next attempt."""
        self.number += 1
        self.delay = delay
        self.was_at_once = verdict.at_once

    def discard(self, reply: Any) -> Plan[None]:
        """Let go of an answer that another attempt will replace."""
        if effect := self.work.discard(reply):
            yield effect

    def end(self, reply: Any, error: Exception | None) -> Any:
        """A final answer is the result; a final error is raised as it came."""
        if error is not None:
            raise error
        if self.number > 1:
            self.tell("recovered")
        return reply

    def give_up(self, reason: Reason, reply: Any, error: Exception | None) -> Any:
        """The last answer, or the error that tells the story."""
        story = self.tell_story()
        story.reason = reason
        self.tell("exhausted")
        if failure := self.work.exhausted(story, error):
            raise failure from error
        return reply

    def tell(self, kind: EventKind, delay: float = 0.0) -> None:
        if self.world.observers:
            tell(self.world.observers, RetryEvent(kind, self.tell_story(), delay))


def attempts(work: Work, retry: Retry, world: World = WORLD, started: float | None = None) -> Plan[Any]:
    """What came of *work*, after as many attempts as *retry* allows; a last answer is returned, a last error raised.

    The deadline counts from *started*, if that was before now.
    """
    begun = ended = world.now()
    reply, error, made = None, None, False
    if started is None and retry.breaker is None:
        # Mostly the first attempt is also the last, so it is made before there is anything to keep account of.
        try:
            reply = yield work.attempt(1, retry.attempt_limit)
        except Exception as caught:
            error = caught
        ended, made = world.now(), True
        if error is None and (verdict := work.judge(reply)).known == "performed" and not verdict.again:
            welcome(work, retry, world, verdict, ended - begun)
            return reply
    course = Course(work, retry, world, begun if started is None else started)
    while True:
        if not made:
            if begun >= course.ends:  # writing the key down, or the pause, has taken longer than it should
                return course.give_up("deadline", None, error or AttemptTimeout("no time was left for the attempt"))
            if retry.breaker is not None:
                course.check_circuit(begun)
            reply, error = None, None
            try:
                reply = yield course.next_effect(begun)
            except Exception as caught:
                error = caught
            ended = world.now()
        verdict = work.judge(reply) if error is None else work.judge_error(error)
        course.note(verdict, begun, ended)
        if not verdict.again:
            return course.end(reply, error)
        # After the last attempt there is no next one to wait for; a schedule has no time for it either.
        delay = course.next_delay(verdict, ended) if course.number < retry.attempts else 0.0
        if reason := course.why_stop(delay, ended):
            return course.give_up(reason, reply, error)
        course.tell("retrying", delay)
        if reply is not None:
            yield from course.discard(reply)
        if delay:
            yield Pause(delay)
        course.proceed(verdict, delay)
        begun, made = world.now(), False


def welcome(work: Work, retry: Retry, world: World, verdict: Verdict, took: float) -> None:
    """Note a success at the first attempt: on the host's account, and in the story where that is told."""
    if world.hosts:
        world.hosts.succeeded(work.name, retry.budget, retry.breaker)
    if work.telling:
        work.story = Story(work.name, work.key, [Attempt(1, 0.0, took, verdict)])
