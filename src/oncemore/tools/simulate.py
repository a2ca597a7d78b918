"""The simulation behind `oncemore simulate retries`: clients against a server that browns out, under several policies.

It runs the plans of the client itself, not a model of them, in virtual time: only sockets, clock and chance are simulated.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from functools import partial
from typing import Any

from .._runtime.plan import Effect, Plan
from ..client.attempts import World, attempts
from ..client.errors import CircuitOpen
from ..client.hedge import Hedge
from ..client.hosts import Breaker, Budget, Hosts
from ..client.pause import Pause
from ..client.retry import Retry
from ..client.story import Story
from ..client.verdict import Fault, Reply, Verdict, judge_fault, judge_reply
from .simulated import Brownout, Report, SimulatedServer

NEVER = float("inf")
Progress = Callable[[float], None]

PATIENT: dict[str, Any] = {"attempts": 7, "deadline": 10.0, "attempt_timeout": 1.0, "budget": None}
BUDGETED: dict[str, Any] = {**PATIENT, "budget": Budget()}

POLICIES: dict[str, Retry] = {
    "no retries": Retry(**{**PATIENT, "attempts": 1}),
    "no jitter": Retry(**PATIENT, jitter="none"),
    "full jitter": Retry(**PATIENT),
    "+ budget": Retry(**BUDGETED),
    "+ breaker": Retry(**BUDGETED, breaker=Breaker(failures=20, cooldown=2.0)),
    "+ hedging": Retry(**BUDGETED, hedge=0.2),
}

TIMED_OUT = Fault("timeout")
NO_HEADERS: dict[str, str] = {}


class LateError(Exception):
    """The simulated attempt was not answered in time."""


# When, with which reply, or with which error.
Ending = tuple[float, Any, Any]


class Client:
    """One operation of one client: work for the plan, and where the plan stands."""

    __slots__ = ("begun", "limit", "plan", "retry", "served", "story")

    name = "server"
    key: str | None = "key"
    lasts = NEVER
    hedgeable = True
    telling = False

    def __init__(self, retry: Retry, world: World, begun: float) -> None:
        self.retry = retry
        self.begun = begun
        self.limit = 0.0
        self.served = 0
        self.story: Story | None = None
        self.plan: Plan[Reply] = attempts(self, retry, world)

    def attempt(self, number: int, limit: float) -> Effect[Any]:
        self.limit = limit
        return self

    def run(self) -> Any:
        raise AssertionError("carried out by the simulation")

    async def arun(self) -> Any:
        raise AssertionError("carried out by the simulation")

    def judge(self, reply: Reply) -> Verdict:
        return judge_reply(reply, repeatable=True, keyed=True, statuses=self.retry.statuses, now=0.0)

    def judge_error(self, error: Exception) -> Verdict:
        return judge_fault(TIMED_OUT, repeatable=True)

    def resendable(self) -> bool:
        return True

    def discard(self, reply: Reply) -> None:
        return None

    def exhausted(self, story: Story, error: Exception | None) -> Exception | None:
        return error


class Simulation:
    """One policy, carried through; the heap holds what will happen: (when, order, client, result, error)."""

    def __init__(self, name: str, retry: Retry, brownout: Brownout, seed: int, processes: int) -> None:
        self.now = 0.0
        self.retry = retry
        self.brownout = brownout
        self.server = SimulatedServer(brownout)
        seconds = int(brownout.lasts)
        self.report = Report(name, brownout, [0] * seconds, [0] * seconds, [0] * seconds)
        self._chance = random.Random(seed)
        self._worlds = [World(lambda: self.now, self._chance.random, Hosts()) for _ in range(processes)]
        self._replies = {status: Reply(status, NO_HEADERS) for status in (201, 503)}
        self._heap: list[tuple[float, int, Any, Any, Any]] = []
        self._order = 0

    def run(self, progress: Progress) -> Report:
        """What came of it; *progress* is told the part that is done, now and then."""
        arrivals = self.brownout.arrivals(self._chance.random)
        step = max(1, len(arrivals) // 100)
        for number, begun in enumerate(arrivals):
            self._advance(begun)
            self.now = begun
            self.report.asked[int(begun)] += 1
            self._go_on(Client(self.retry, self._worlds[number % len(self._worlds)], begun), None, None)
            if number % step == 0:
                progress(number / len(arrivals))
        self._advance(NEVER)
        progress(1.0)
        return self.report

    def _advance(self, until: float) -> None:
        heap = self._heap
        while heap and heap[0][0] <= until:
            self.now, _, client, result, error = heapq.heappop(heap)
            if isinstance(client, _Twin):
                client.launch(self)
            else:
                self._go_on(client, result, error)

    def later(self, when: float, client: Any, result: Any = None, error: Any = None) -> None:
        """Go on with *client* then."""
        self._order += 1
        heapq.heappush(self._heap, (when, self._order, client, result, error))

    def _go_on(self, client: Client, result: Any, error: Any) -> None:
        """Let the plan take its next step, and put what it asks for into the heap."""
        try:
            effect = client.plan.send(result) if error is None else client.plan.throw(error)
        except StopIteration as end:
            self._end(client, end.value.status)
        except (LateError, CircuitOpen):
            self._end(client, 0)
        else:
            self._carry_out(client, effect)

    def _carry_out(self, client: Client, effect: Any) -> None:
        if type(effect) is Pause:
            self.later(self.now + effect.seconds, client)
        elif type(effect) is Hedge:
            when, result, error = self.send(client)
            if when <= self.now + effect.after:
                self.later(when, client, result, error)
            else:
                self.later(self.now + effect.after, _Twin(client, effect, (when, result, error)))
        else:
            when, result, error = self.send(client)
            self.later(when, client, result, error)

    def send(self, client: Client) -> Ending:
        """When and how an attempt that is sent now will end, as its client sees it."""
        if self.now < self.brownout.lasts:
            self.report.attempts[int(self.now)] += 1
        when, status = self.server.visit(self.now)
        if status < 400:
            client.served += 1
        ends = self.now + client.limit
        return (when, self._replies[status], None) if when <= ends else (ends, None, LateError())

    def _end(self, client: Client, status: int) -> None:
        if 200 <= status < 400:
            self.report.answered[int(client.begun)] += 1
            self.report.latencies.append(self.now - client.begun)
        self.report.repeated += client.served > 1


class _Twin:
    """A hedged attempt whose first copy has not ended yet."""

    __slots__ = ("client", "first", "hedge")

    def __init__(self, client: Client, hedge: Hedge, first: Ending) -> None:
        self.client = client
        self.hedge = hedge
        self.first = first

    def launch(self, simulation: Simulation) -> None:
        """Send the second copy, if it may be sent; the plan goes on when one of them wins."""
        if self.hedge.launch() is None:
            when, result, error = self.first
        else:
            sooner, later = sorted((self.first, simulation.send(self.client)), key=lambda ending: ending[0])
            when, result, error = sooner if self.hedge.wins(sooner[1:]) else later
        simulation.later(when, self.client, result, error)


def compare(
    brownout: Brownout,
    policies: dict[str, Retry],
    *,
    seed: int = 1,
    processes: int = 100,
    progress: Callable[[str, float], None] = lambda name, part: None,
) -> list[Report]:
    """A report for each policy, all under the same arrivals; the same seed gives the same figures."""
    return [
        Simulation(name, retry, brownout, seed, processes).run(partial(progress, name))
        for name, retry in policies.items()
    ]
