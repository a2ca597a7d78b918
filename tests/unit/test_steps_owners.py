"""The owners of steps: late owners are fenced, and a crashed owner's unknown outcome is resolved."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import Any

import pytest

from oncemore import Guard, Op, Policy, Resolution
from oncemore._ledger.attempt import Perform
from oncemore._ledger.events import Event
from oncemore._runtime.plan import run
from oncemore.errors import (
    Fenced,
    ProviderDuplicate,
    UnknownOutcome,
)

from .stepping import ASKED, POLICY, Caller, Performing, Shop, elsewhere, take


@pytest.fixture
def call(runner: asyncio.Runner | None) -> Caller:
    return Caller(runner)


def test_late_owners_next_step_is_refused_and_successor_answers(call: Caller) -> None:
    guard = Guard("memory://")
    policy = dataclasses.replace(POLICY, lease=0.3)
    late, other = Shop(), Shop()
    caught: list[BaseException] = []

    def frozen(op: Op) -> Performing:
        yield take(op, "reserve", lambda: late.do("reserve"))
        guard.store.shift += 10
        elsewhere(lambda: Guard(guard.store).run(ASKED, lambda op: run(other.pay(op)), policy=policy))
        time.sleep(0.15)
        try:
            yield take(op, "charge", lambda: late.do("charge"))
        except Fenced as error:
            caught.append(error)
            yield take(op, "ship", lambda: late.do("ship"))

    answer = call(guard, frozen, policy=policy)
    assert answer.how == "replayed"
    assert len(caught) == 1
    assert (late.log, other.log) == (["reserve"], ["charge", "ship"])


def test_a_late_owner_that_goes_on_regardless_changes_nothing() -> None:
    events: list[Event] = []
    guard = Guard("memory://", observers=[events.append])
    policy = dataclasses.replace(POLICY, lease=0.3)

    def frozen(op: Op) -> Any:
        op.step("reserve", lambda: "a")
        guard.store.shift += 10
        with pytest.raises(RuntimeError):
            Guard(guard.store).run(ASKED, lambda op: run(Shop("after reserve").pay(op)), policy=policy)
        time.sleep(0.15)
        with pytest.raises(Fenced):
            op.step("charge", lambda: "b")
        return "mine"

    with pytest.raises(Fenced):
        guard.run(ASKED, frozen, policy=policy)
    assert "fenced" in [event.kind for event in events]
    assert guard.find(*ASKED.id).state == "running"  # type: ignore[union-attr]


def test_owner_fenced_before_its_first_step_is_refused(guard: Guard, call: Caller) -> None:
    class Hasty:
        """A store on which someone else resolves each claimed operation at once."""

        def __init__(self) -> None:
            self.inner = guard.store

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def find(self, scope: str, key: str) -> Any:
            return None
            yield

    with pytest.raises(Fenced):
        call(Guard(Hasty()), Shop().pay)


def test_the_lease_is_kept_while_steps_run(call: Caller) -> None:
    guard = Guard("memory://")
    shop = Shop()

    def slowly(name: str) -> str:
        time.sleep(0.2)
        return shop.do(name)

    def slow(op: Op) -> Performing:
        for name in ("a", "b", "c"):
            yield take(op, name, lambda name=name: slowly(name))

    call(guard, slow, policy=dataclasses.replace(POLICY, lease=0.3))
    assert shop.log == ["a", "b", "c"]
    assert guard.find(*ASKED.id).attempts == 1  # type: ignore[union-attr]


# ── A holder that vanished in a step


def vanished(guard: Guard, call: Caller, **options: Any) -> Any:
    """A performer of one step, in which its first holder vanished without a trace."""
    log: list[str] = []

    def perform(op: Op) -> Performing:
        return (yield take(op, "charge", lambda key: log.append(key) or "charged now", **options))

    first = Guard(guard.store, policy=dataclasses.replace(POLICY, lease=0.05))
    attempt = first.new_attempt(ASKED, first.policy)

    def hangs(key: str) -> None:
        raise SystemExit  # never reached: the step's plan is left in the middle

    run(attempt.begin())
    attempt.drop()  # as its process does when it dies: nothing is renewed any more
    op = attempt.op
    assert op.steps is not None
    step = op.steps.step("charge", hangs, None)
    effect = next(step)
    while not isinstance(effect, Perform):
        effect = step.send(effect.run())
    first.heartbeat.close()
    VANISHED.append((attempt, step))  # not closed: a process that is killed closes nothing
    time.sleep(0.1)
    return perform, log, op.derive("charge")


VANISHED: list[Any] = []


def test_unknown_step_is_sent_again_with_same_key(guard: Guard, call: Caller) -> None:
    perform, log, key = vanished(guard, call)
    assert call(guard, perform).value == "charged now"
    assert log == [key]


def test_a_resolver_is_asked_with_the_derived_key(guard: Guard, call: Caller) -> None:
    asked: list[str] = []

    def resolver(key: str) -> Resolution:
        asked.append(key)
        return Resolution.settled("charged before")

    perform, log, key = vanished(guard, call, resolver=resolver)
    assert call(guard, perform).value == "charged before"
    assert (log, asked) == ([], [key])


def test_step_with_unknown_outcome_may_be_held(guard: Guard, call: Caller) -> None:
    perform, log, _ = vanished(guard, call, on_unknown="hold")
    for _ in range(2):
        with pytest.raises(UnknownOutcome):
            call(guard, perform)
    [held] = [record for record in guard.list().records if record.state == "held"]
    guard.resolve(held.scope, held.key, Resolution.settled("charged, says the bank"))
    assert call(guard, perform).value == "charged, says the bank"
    assert log == []


# ── A provider that has done it already


def test_a_providers_existing_result_is_the_steps_value(guard: Guard, call: Caller) -> None:
    def charge(key: str) -> str:
        raise ProviderDuplicate("done before", result={"receipt": key})

    def pay(op: Op) -> Performing:
        return (yield take(op, "charge", charge))

    answer = call(guard, pay)
    assert answer.value["receipt"].startswith("om_")


def test_a_providers_existing_result_is_the_operations_outcome(guard: Guard, call: Caller) -> None:
    def duplicate(op: Op) -> Performing:
        raise ProviderDuplicate("done before", result="receipt")
        yield

    policy = Policy(errors=(Exception,))  # that it was done is a success, whichever errors are outcomes
    assert call(guard, duplicate, policy=policy).value == "receipt"
    guard.cache.drop(ASKED.id)
    assert call(guard, duplicate, policy=policy).how == "replayed"


def test_a_duplicate_without_a_result_is_raised(guard: Guard, call: Caller) -> None:
    def duplicate(op: Op) -> Performing:
        raise ProviderDuplicate
        yield

    with pytest.raises(ProviderDuplicate):
        call(guard, duplicate, policy=Policy())
