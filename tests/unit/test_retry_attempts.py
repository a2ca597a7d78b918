"""The retry loop in virtual time: properties that hold for any policy and any server."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncemore.client.errors import CircuitOpen, RetriesExhausted
from oncemore.client.hosts import MAX_HOSTS, Breaker, Budget, Host, Hosts
from oncemore.client.retry import Retry
from oncemore.client.verdict import Fault
from oncemore.errors import ConfigurationError

from .virtual import Scripted, Step, VirtualRun

OK = Step(status=201)
TIMEOUT = Fault("timeout")

steps = st.builds(
    Step,
    takes=st.floats(0, 30),
    status=st.sampled_from([201, 400, 408, 409, 429, 500, 503]),
    fault=st.sampled_from([None, TIMEOUT, Fault("connection", sent=False)]),
    headers=st.sampled_from([{}, {"Retry-After": "3"}, {"Retry-After": "1000"}]),
)
policies = st.builds(
    Retry,
    attempts=st.integers(1, 8),
    deadline=st.floats(0.1, 100),
    attempt_timeout=st.none() | st.floats(0.1, 50),
    base=st.floats(0, 2),
    cap=st.floats(2, 60),
    jitter=st.sampled_from(["full", "equal", "zero", "decorrelated", "additive", "none"]),
)


@given(st.lists(steps, min_size=1, max_size=8), policies, st.floats(0, 1, exclude_max=True))
def test_the_laws_of_any_run(script: list[Step], retry: Retry, chance: float) -> None:
    work = Scripted(*script)
    virtual = VirtualRun(work, retry, chance=chance)
    with suppress(RetriesExhausted):
        virtual.run()
    assert virtual.now <= retry.deadline + 1e-6  # hard, hanging attempts included
    assert len(virtual.begun) <= retry.attempts
    assert all(limit <= (retry.attempt_timeout or retry.deadline) for limit in work.timeouts)
    assert all(
        begun + limit <= retry.deadline + 1e-6 for begun, limit in zip(virtual.begun, work.timeouts, strict=True)
    )
    told = work.story
    assert told is not None
    assert [attempt.number for attempt in told.attempts] == list(range(1, len(virtual.begun) + 1))
    assert sum(attempt.delay for attempt in told.attempts) == pytest.approx(sum(virtual.pauses))
    again = [attempt.verdict.again for attempt in told.attempts]
    assert all(again[:-1])
    assert again[-1] is bool(told.reason)


@pytest.mark.parametrize(
    ("wish", "waited"), [("2", [2.1]), ("9", [9.0]), ("11", []), ("0", [])], ids=["spread", "squeezed", "beyond", "now"]
)
def test_the_servers_wish_is_met_but_never_beyond_the_deadline(wish: str, waited: list[float]) -> None:
    work = Scripted(Step(headers={"Retry-After": wish}), OK)
    virtual = VirtualRun(work, Retry(deadline=9.3), chance=0.5)
    assert virtual.run().status == (503 if wish == "11" else 201)
    assert virtual.pauses == pytest.approx(waited)


def test_an_answer_that_is_replaced_is_let_go_of() -> None:
    work = Scripted(Step(), Step(fault=TIMEOUT), OK)
    VirtualRun(work, Retry()).run()
    assert work.closed == 1


@pytest.mark.parametrize(
    ("work", "reason"),
    [
        (Scripted(Step(), resendable=False), "body"),
        (Scripted(Step(), lasts=0.05), "key_lifetime"),
        (Scripted(Step(takes=1)), "attempts"),
        (Scripted(Step(takes=9.95)), "deadline"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_story_says_why_it_stopped(work: Scripted, reason: str) -> None:
    VirtualRun(work, Retry(attempts=3)).run()
    assert work.story is not None
    assert work.story.reason == reason


def test_pause_that_outlasts_the_key_is_followed_by_nothing() -> None:
    """The machine was frozen; the server may have forgotten the key meanwhile."""
    work = Scripted(Step(), lasts=60)
    virtual = VirtualRun(work, Retry(attempts=3, deadline=3600))

    def thaw() -> None:
        virtual.now += 100

    work.close = lambda reply: thaw()  # type: ignore[method-assign]
    with pytest.raises(RetriesExhausted):
        virtual.run()
    assert work.story is not None
    assert work.story.reason == "key_lifetime"
    assert virtual.begun == [0]


def test_observers_hear_of_retries_of_recovery_and_of_exhaustion() -> None:
    virtual = VirtualRun(Scripted(Step(), Step(), OK), Retry())
    virtual.run()
    assert [event.kind for event in virtual.events] == ["retrying", "retrying", "recovered"]
    assert [event.delay for event in virtual.events[:2]] == virtual.pauses
    virtual = VirtualRun(Scripted(Step()), Retry(attempts=2))
    virtual.run()
    assert [event.kind for event in virtual.events] == ["retrying", "exhausted"]
    quiet = VirtualRun(Scripted(OK), Retry())
    quiet.run()
    assert quiet.events == []


# The budget and the circuit of a host


def load(hosts: Hosts, retry: Retry, script: list[Step], operations: int) -> list[int]:
    """How many attempts each operation made."""
    made = []
    for _ in range(operations):
        work = Scripted(*script)
        VirtualRun(work, retry, hosts=hosts).run()
        made.append(len(work.timeouts))
    return made


def test_spent_budget_limits_retries_of_failing_server() -> None:
    hosts = Hosts()
    made = load(hosts, Retry(attempts=5, budget=Budget(tokens=20, ratio=0.1)), [Step()], 200)
    assert made[0] == 5
    spent = made[10:]
    assert sum(spent) <= 1.2 * len(spent)


@given(st.lists(st.sampled_from([201, 503]), min_size=1, max_size=200), st.floats(0, 0.2))
def test_retries_are_never_more_than_the_budget_gives(statuses: list[int], ratio: float) -> None:
    """Half of the tokens, and a share of the successes."""
    hosts = Hosts()
    retry = Retry(attempts=2, budget=Budget(tokens=10, ratio=ratio))
    made = [count for status in statuses for count in load(hosts, retry, [Step(status=status)], 1)]
    assert sum(made) - len(made) <= 5 + ratio * len(made) + 1


def test_success_fills_the_budget_again() -> None:
    hosts = Hosts()
    retry = Retry(attempts=5, budget=Budget(tokens=10, ratio=0.1))
    load(hosts, retry, [Step()], 10)
    assert load(hosts, retry, [Step()], 1) == [1]
    load(hosts, retry, [OK], 100)
    assert load(hosts, retry, [Step()], 1) == [5]


def test_budget_is_per_host_and_shared_by_policy() -> None:
    hosts, budget = Hosts(), Budget()
    assert hosts.get("a", budget, None) is hosts.get("a", Budget(), None)
    assert hosts.get("a", budget, None) is not hosts.get("b", budget, None)
    assert hosts.get("a", None, None) is None
    for number in range(MAX_HOSTS + 5):
        hosts.get(f"host-{number}", budget, None)
    assert len(hosts._known) == MAX_HOSTS


def test_refusals_that_are_not_the_hosts_fault_cost_nothing() -> None:
    hosts, budget = Hosts(), Budget(tokens=10)
    load(hosts, Retry(budget=budget), [Step(status=404)], 50)
    host = hosts.get("host", budget, None)
    assert host is not None
    assert host.tokens == 10


def test_an_open_circuit_sends_nothing_until_it_has_cooled_down() -> None:
    hosts = Hosts()
    retry = Retry(attempts=1, breaker=Breaker(failures=3, cooldown=30))
    load(hosts, retry, [Step()], 3)
    with pytest.raises(CircuitOpen) as caught:
        load(hosts, retry, [OK], 1)
    assert caught.value.retry_after == 30
    assert caught.value.story is not None
    assert caught.value.story.known == "not_performed"


def test_one_probe_decides_whether_the_circuit_closes() -> None:
    host = Host(None, Breaker(failures=2, cooldown=10))
    assert host.admit(0) == 0
    host.failed(0)
    host.failed(0)
    assert host.admit(1) == 9
    assert host.is_open(9)
    assert host.admit(11) == 0  # the probe
    assert host.admit(12) == 9  # all others wait for it
    host.failed(12)
    assert host.admit(13) == 9
    assert host.admit(23) == 0
    host.succeeded()
    assert host.admit(24) == 0
    assert not host.is_open(24)


def test_lost_breaker_probe_allows_another_after_cooldown() -> None:
    host = Host(None, Breaker(failures=1, cooldown=10))
    host.failed(0)
    assert host.admit(10) == 0
    assert host.admit(20) == 0


def test_circuit_opening_between_attempts_ends_the_run() -> None:
    work = Scripted(Step(status=502))
    reply = VirtualRun(work, Retry(attempts=5, budget=None, breaker=Breaker(failures=2, cooldown=60))).run()
    assert reply.status == 502
    assert work.story is not None
    assert work.story.reason == "breaker"
    assert len(work.timeouts) == 2


@pytest.mark.parametrize(
    "wrong",
    [lambda: Budget(tokens=0), lambda: Budget(ratio=2), lambda: Breaker(failures=0), lambda: Breaker(cooldown=0)],
)
def test_rules_that_cannot_work_are_refused(wrong: Any) -> None:
    with pytest.raises(ConfigurationError):
        wrong()


def test_exhausted_schedule_gives_up() -> None:
    """After the tenth delivery there is no eleventh to wait for."""
    virtual = VirtualRun(Scripted(Step(fault=Fault("connection"))), Retry.webhook_delivery(budget=None))
    with pytest.raises(RetriesExhausted) as caught:
        virtual.run()
    assert caught.value.story is not None
    assert caught.value.story.reason == "attempts"
    assert len(virtual.begun) == 10
    assert virtual.begun[-1] < 86400
