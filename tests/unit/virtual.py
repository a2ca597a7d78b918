"""The retry loop in virtual time: attempts end when their script says, pauses pass at once, and nothing sleeps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from oncemore.client.attempts import Environment, send_with_retries
from oncemore.client.deadlines import Pause
from oncemore.client.errors import RetriesExhausted
from oncemore.client.hosts import Hosts
from oncemore.client.retry import Retry
from oncemore.client.story import RetryEvent, Story
from oncemore.client.verdict import Fault, HttpReply, Verdict, judge_fault, judge_reply

NEVER = float("inf")


class Broken(Exception):
    """A scripted attempt failed with *fault*."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault


@dataclass
class Step:
    """How one attempt ends: after *takes* seconds, with a status or a fault; a longer one than its limit is cut."""

    takes: float = 0.0
    status: int = 503
    fault: Fault | None = None
    headers: dict[str, str] = field(default_factory=dict)


class Scripted:
    """A request that follows a script; its last step is repeated."""

    def __init__(self, *script: Step, name: str = "host", lasts: float = NEVER, resendable: bool = True) -> None:
        self.script = list(script)
        self.name = name
        self.key: str | None = "key"
        self.lasts = lasts
        self.can_resend = resendable
        self.story: Story | None = None
        self.timeouts: list[float] = []
        self.closed = 0

    def attempt(self, number: int, timeout: float) -> Any:
        self.timeouts.append(timeout)
        return self

    def judge(self, reply: Any, error: Exception | None) -> Verdict:
        if isinstance(error, Broken):
            return judge_fault(error.fault, repeatable=True)
        assert error is None
        return judge_reply(reply, repeatable=True, keyed=True, statuses=Retry().statuses, now=0.0)

    def resendable(self) -> bool:
        return self.can_resend

    def close(self, reply: HttpReply) -> None:
        self.closed += 1

    def failure(self, story: Story, error: Exception | None) -> Exception | None:
        return RetriesExhausted(str(story), story=story) if error else None


class VirtualRun:
    """Drives the retry loop in virtual time."""

    def __init__(self, request: Scripted, policy: Retry, *, hosts: Hosts | None = None, chance: float = 0.5) -> None:
        self.now = 0.0
        self.begun: list[float] = []
        self.pauses: list[float] = []
        self.events: list[RetryEvent] = []
        environment = Environment(lambda: self.now, lambda: chance, hosts or Hosts(), [self.events.append])
        self.request = request
        self.plan = send_with_retries(request, policy, environment)

    def run(self) -> Any:
        effect = next(self.plan)
        try:
            while True:
                if isinstance(effect, Pause):
                    self.pauses.append(effect.seconds)
                    self.now += effect.seconds
                    effect = self.plan.send(None)
                else:
                    effect = self._attempt()
        except StopIteration as end:
            return end.value

    def _attempt(self) -> Any:
        self.begun.append(self.now)
        step = self.request.script.pop(0) if len(self.request.script) > 1 else self.request.script[0]
        if step.takes > self.request.timeouts[-1]:
            self.now += self.request.timeouts[-1]
            return self.plan.throw(Broken(Fault("timeout")))
        self.now += step.takes
        if step.fault:
            return self.plan.throw(Broken(step.fault))
        return self.plan.send(HttpReply(step.status, step.headers))
