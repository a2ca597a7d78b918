"""Takeovers after a crash: hold, retry or resolve."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from oncemore import Answer, Guard, Op, Outcome, Policy, Resolution
from oncemore._runtime.plan import run
from oncemore.errors import ConfigurationError, Fenced, NotResolvable, UnknownOutcome
from oncemore.testing.clock import Clock

from .stepping import elsewhere
from .test_guard import CREATED, OPERATION, Effect, Failing, kinds


def vanished(guard: Guard) -> None:
    """Someone claimed the operation and was never heard of again."""
    run(guard.store.claim(OPERATION, lease=30))
    Clock(guard.store).advance(31)


def test_hold_refuses_until_someone_decides_that_it_happened(guard, call, events) -> None:
    vanished(guard)
    effect = Effect()
    for _ in range(2):
        with pytest.raises(UnknownOutcome):
            call(guard, OPERATION, effect)
    assert effect.count == 0
    assert "held" in kinds(events)
    record = guard.resolve(*OPERATION.id, Resolution.settled(CREATED), note="seen at the provider")
    assert (record.state, record.note) == ("settled", "seen at the provider")
    assert call(guard, OPERATION, effect).outcome == CREATED
    assert effect.count == 0


async def test_hold_refuses_until_resolved_as_not_happened(guard) -> None:
    vanished(guard)
    effect = Effect()
    with pytest.raises(UnknownOutcome):
        await guard.arun(OPERATION, effect)
    await guard.aresolve(*OPERATION.id, Resolution.released())
    assert (await guard.arun(OPERATION, effect)).how == "stored"


def test_to_resolve_is_to_decide(guard) -> None:
    vanished(guard)
    with pytest.raises(ConfigurationError):
        guard.resolve(*OPERATION.id, Resolution.unknown())
    guard.resolve(*OPERATION.id, Resolution.settled(CREATED))
    with pytest.raises(NotResolvable):
        guard.resolve(*OPERATION.id, Resolution.released())


def test_the_refusal_says_why_it_is_held(guard, call) -> None:
    run(guard.store.hold(run(guard.store.claim(OPERATION, lease=30)), note="ticket 7"))
    with pytest.raises(UnknownOutcome, match="ticket 7"):
        call(guard, OPERATION, Effect())


def test_retry_performs_again(guard, call, events) -> None:
    vanished(guard)
    answer = call(guard, OPERATION, Effect(), policy=Policy(on_unknown="retry"))
    assert (answer.how, answer.attempt) == ("stored", 2)
    assert kinds(events)[0] == "lapsed"


def test_a_resolver_that_knows_answers_for_the_operation(guard, call) -> None:
    """The function is asked with the running operation, so that it can derive the provider's key."""
    vanished(guard)
    asked: list[str] = []

    def resolver(op: Op) -> Resolution:
        asked.append(op.derive("charge"))
        return Resolution.settled(CREATED)

    effect = Effect()
    answer = call(guard, OPERATION, effect, policy=Policy(on_unknown="resolve", resolver=resolver))
    assert (answer.outcome, answer.how, effect.count) == (CREATED, "replayed", 0)
    assert guard.find(*OPERATION.id).note == "resolved: it had happened"
    assert len(asked) == 1


def test_resolver_that_says_released_lets_it_run(guard, call) -> None:
    vanished(guard)
    effect = Effect()
    policy = Policy(on_unknown="resolve", resolver=lambda op: Resolution.released())
    assert call(guard, OPERATION, effect, policy=policy).how == "stored"
    assert effect.count == 1


@pytest.mark.parametrize("answer", [Resolution.unknown(), OSError("the provider is down")])
def test_a_resolver_that_cannot_tell_is_asked_again(guard, call, answer) -> None:
    vanished(guard)
    answers = Effect([answer, answer, Resolution.settled(CREATED)])
    policy = Policy(on_unknown="resolve", resolver=answers)
    effect = Effect()
    for _ in range(2):
        with pytest.raises(UnknownOutcome) as refused:
            call(guard, OPERATION, effect, policy=policy)
        assert refused.value.retry_after
    assert call(guard, OPERATION, effect, policy=policy).outcome == CREATED
    assert (effect.count, answers.count) == (0, 3)


def test_resolver_longer_than_the_lease_keeps_it(guard, call) -> None:
    """Two who ask the provider one after the other's lease would both hear that nothing happened, and both perform."""
    run(guard.store.claim(OPERATION, lease=0.001))
    time.sleep(0.01)
    effect, began = Effect(), threading.Event()

    def slow(op: Op) -> Resolution:
        began.set()
        time.sleep(1.0)
        return Resolution.released()

    policy = Policy(lease=0.3, on_unknown="resolve", resolver=slow)
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(Guard(guard.store).run, OPERATION, effect, policy=policy)
        assert began.wait(10)
        time.sleep(0.5)
        assert call(guard, OPERATION, effect, policy=policy).how == "replayed"
        assert first.result().how == "stored"
    assert effect.count == 1


async def test_awaited_resolver_longer_than_the_lease_keeps_it(guard) -> None:
    run(guard.store.claim(OPERATION, lease=0.001))
    effect = Effect()

    async def slow(op: Op) -> Resolution:
        await asyncio.sleep(1.0)
        return Resolution.released()

    async def second() -> Answer:
        await asyncio.sleep(0.5)
        return await guard.arun(OPERATION, effect, policy=policy)

    await asyncio.sleep(0.01)
    policy = Policy(lease=0.3, on_unknown="resolve", resolver=slow)
    answers = await asyncio.gather(guard.arun(OPERATION, effect, policy=policy), second())
    assert [answer.how for answer in answers] == ["stored", "replayed"]
    assert effect.count == 1


def test_resolver_frozen_past_its_lease_is_fenced(guard, call) -> None:
    vanished(guard)

    def asleep(op: Op) -> Resolution:
        Clock(guard.store).advance(31)
        assert elsewhere(lambda: Guard(guard.store).run(OPERATION, Effect(), policy=Policy(on_unknown="retry")))
        return Resolution.released()

    effect = Effect()
    with pytest.raises(Fenced):
        call(guard, OPERATION, effect, policy=Policy(on_unknown="resolve", resolver=asleep))
    assert effect.count == 0


def test_resolve_needs_a_resolver() -> None:
    with pytest.raises(ConfigurationError, match="resolver"):
        Policy(on_unknown="resolve")


@pytest.mark.parametrize(("on_unknown", "then"), [("hold", "held"), ("retry", "released"), ("resolve", "running")])
async def test_a_cancelled_performer_is_one_who_vanished(guard, on_unknown, then) -> None:
    """A cancellation during the effect is recorded immediately, so nobody waits for the lease."""
    policy = Policy(on_unknown=on_unknown, resolver=lambda op: Resolution.settled(CREATED))
    inside = asyncio.Event()

    async def forever(op: Op) -> Outcome:
        inside.set()
        await asyncio.sleep(60)
        return CREATED

    task = asyncio.create_task(guard.arun(OPERATION, forever, policy=policy))
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    record = await guard.afind(*OPERATION.id)
    assert record.state == then
    if on_unknown == "resolve":
        assert (await guard.arun(OPERATION, Effect(), policy=policy)).outcome == CREATED


def test_an_interrupted_performer_is_one_who_vanished(guard, events) -> None:
    with pytest.raises(KeyboardInterrupt):
        guard.run(OPERATION, Effect([KeyboardInterrupt()]))
    assert guard.find(*OPERATION.id).note == "interrupted by KeyboardInterrupt"
    guard.store = Failing(guard.store, "hold")
    guard.delete(*OPERATION.id)
    with pytest.raises(KeyboardInterrupt):
        guard.run(OPERATION, Effect([KeyboardInterrupt()]))
    assert events[-1].kind == "failed"


def test_a_plan_that_is_thrown_away_writes_nothing(guard) -> None:
    plan = guard.guarded(OPERATION, Effect(), guard.policy)
    next(plan)
    plan.close()
    assert guard.find(*OPERATION.id).state == "running"
