"""An operation in steps goes on behind its last checkpoint, and never takes a step twice that is checkpointed."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import pytest

from oncemore import Guard, Op, Operation, Outcome, Policy, Resolution, Retry
from oncemore.core.events import Event
from oncemore.core.plan import Call, run
from oncemore.errors import (
    ConfigurationError,
    Fenced,
    InvalidPayload,
    PayloadMismatch,
    ProviderDuplicate,
    StepsChanged,
    StoreError,
    UnknownOutcome,
)

from .stepping import ASKED, POLICY, Broken, Caller, Performing, Shop, elsewhere, take


@pytest.fixture(params=["sync", "async"])
def call(request: pytest.FixtureRequest) -> Iterator[Caller]:
    if request.param == "sync":
        yield Caller(None)
    else:
        with asyncio.Runner() as runner:
            yield Caller(runner)


DONE = ["reserve done", "charge done", "ship done"]


def steps_of(guard: Guard) -> list[tuple[str, str]]:
    """Each step in the ledger, by name, with its state."""
    records = guard.list().records
    return [(record.name, record.state) for record in records if record.scope.startswith("step|")]


def test_each_step_is_taken_once_and_the_performers_answer_is_the_outcome(guard: Guard, call: Caller) -> None:
    shop = Shop()
    assert call(guard, shop.pay).value == DONE
    assert call(guard, shop.pay).how == "replayed"
    guard.cache.drop(ASKED.id)
    assert call(guard, shop.pay).how == "replayed"
    assert shop.log == ["reserve", "charge", "ship"]
    assert steps_of(guard) == [(f"orders.pay/{name}", "settled") for name in ("request", "reserve", "charge", "ship")]


@pytest.mark.parametrize(
    ("where", "log"),
    [
        ("reserve", ["reserve", "reserve", "charge", "ship"]),
        ("after reserve", ["reserve", "charge", "ship"]),
        ("charge", ["reserve", "charge", "charge", "ship"]),
        ("after charge", ["reserve", "charge", "ship"]),
        ("ship", ["reserve", "charge", "ship", "ship"]),
        ("after ship", ["reserve", "charge", "ship"]),
    ],
)
def test_the_next_attempt_goes_on_behind_the_last_checkpoint(guard: Guard, call: Caller, where: str, log: Any) -> None:
    """CASES 25.  An interruption is what a performer cannot tell of; nothing is retried within the attempt."""
    shop = Shop(where, error=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        call(guard, shop.pay)
    guard.cache.drop(ASKED.id)
    answer = call(guard, shop.pay)
    assert (answer.value, answer.attempt) == (DONE, 2)
    assert shop.log == log


def test_a_failure_leaves_it_unfinished_for_whoever_comes_next(guard: Guard, call: Caller) -> None:
    with pytest.raises(RuntimeError):
        call(guard, Shop("after reserve").pay)
    record = guard.find(*ASKED.id)
    assert record is not None
    assert (record.state, record.lease_until <= record.now) == ("running", True)


def test_a_failure_before_the_first_step_leaves_nothing_to_finish(guard: Guard, call: Caller) -> None:
    def fails(op: Op) -> Performing:
        raise RuntimeError
        yield

    for _ in range(2):
        with pytest.raises(RuntimeError):
            call(guard, fails)
        assert guard.find(*ASKED.id).state == "released"  # type: ignore[union-attr]


def test_a_refusal_before_the_first_step_leaves_no_trace(guard: Guard, call: Caller) -> None:
    def refuses(op: Op) -> Performing:
        raise InvalidPayload("no")
        yield

    with pytest.raises(InvalidPayload):
        call(guard, refuses)
    assert guard.find(*ASKED.id) is None


def test_a_refusal_after_a_step_does_not_forget_it(guard: Guard, call: Caller) -> None:
    shop = Shop()

    def refuses(op: Op) -> Performing:
        yield take(op, "reserve", lambda: shop.do("reserve"))
        raise InvalidPayload("no")

    with pytest.raises(InvalidPayload):
        call(guard, refuses)
    call(guard, shop.pay)
    assert shop.log == ["reserve", "charge", "ship"]


def test_another_request_cannot_have_the_key_meanwhile(guard: Guard, call: Caller) -> None:
    """CASES 14."""
    with pytest.raises(RuntimeError):
        call(guard, Shop("after reserve").pay)
    with pytest.raises(PayloadMismatch):
        call(guard, Shop().pay, Operation("customer-1", "k", "other", "orders.pay"))


def test_an_external_step_gets_the_same_key_on_every_attempt_and_another_for_its_undoing(
    guard: Guard, call: Caller
) -> None:
    shop = Shop("charge", "after charge")
    for _ in range(2):
        with pytest.raises(RuntimeError):
            call(guard, shop.pay)
    shop.fails, shop.error = ["after charge"], LookupError
    call(guard, shop.pay)
    charge, again, undo = shop.keys
    assert charge == again
    assert charge.startswith("om_")
    assert undo not in (charge, "k")


def test_an_external_step_is_tried_again_by_its_retry(guard: Guard, call: Caller) -> None:
    shop = Shop("ship", "ship")
    assert call(guard, shop.pay).value == DONE
    assert shop.log == ["reserve", "charge", "ship", "ship", "ship"]


@pytest.mark.parametrize(("retry", "calls"), [(1, 1), (2, 2), (None, 3), (Retry(attempts=3, base=0), 1)])
def test_a_retry_says_how_often_and_for_what(guard: Guard, call: Caller, retry: Any, calls: int) -> None:
    """The last one is a client's, which does not want to see this error again."""
    shop = Shop(*["charge"] * 9)

    def pay(op: Op) -> Performing:
        yield take(op, "charge", lambda: shop.do("charge"), retry=retry)

    with pytest.raises(RuntimeError):
        call(guard, pay)
    assert len(shop.log) == calls


def test_an_error_that_is_an_outcome_is_checkpointed_too(guard: Guard, call: Caller) -> None:
    shop = Shop("charge", "after", error=LookupError)

    def pay(op: Op) -> Performing:
        try:
            yield take(op, "charge", lambda: shop.do("charge"))
        except LookupError as error:
            yield take(op, "complain", lambda: shop.do("complain"))
            if "after" in shop.fails:
                shop.fails.clear()
                raise RuntimeError from error
            return str(error)

    with pytest.raises(RuntimeError):
        call(guard, pay)
    guard.cache = Guard("memory://").cache
    assert call(guard, pay).value == "charge"
    assert shop.log == ["charge", "complain"]


def test_a_step_after_one_that_failed_is_refused(guard: Guard, call: Caller) -> None:
    """The next attempt would take the failed one again, and might come to another end."""
    shop = Shop("charge")

    def pay(op: Op) -> Performing:
        try:
            yield take(op, "charge", lambda: shop.do("charge"), retry=1)
        except RuntimeError:
            yield take(op, "complain", lambda: shop.do("complain"))

    with pytest.raises(ConfigurationError, match="'complain' comes after 'charge'"):
        call(guard, pay)
    assert shop.log == ["charge"]


def test_a_performer_may_end_well_though_its_last_step_failed(guard: Guard, call: Caller) -> None:
    def pay(op: Op) -> Performing:
        try:
            yield take(op, "mail", lambda: Shop("mail").do("mail"), retry=1)
        except RuntimeError:
            return "without mail"

    assert call(guard, pay).value == "without mail"


# ── Code that has changed


def other(*names: str) -> Any:
    def perform(op: Op) -> Performing:
        for name in names:
            yield take(op, name, lambda: None)
        return "changed"

    return perform


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("reserve", "bill"), "step 2 was 'charge' and is now 'bill'"),
        (("charge", "reserve"), "step 1 was 'reserve' and is now 'charge'"),
        (("reserve",), "ended after 1 steps, and a former attempt had begun step 2, 'charge'"),
        ((), "ended after 0 steps, and a former attempt had begun step 1, 'reserve'"),
    ],
)
def test_changed_steps_are_refused_and_both_are_named(guard: Guard, call: Caller, names: Any, message: str) -> None:
    with pytest.raises(RuntimeError):
        call(guard, Shop("after charge").pay)
    with pytest.raises(StepsChanged, match=message):
        call(guard, other(*names))
    guard.cache = Guard("memory://").cache  # another process
    with pytest.raises(StepsChanged, match=message):
        call(guard, other(*names))
    shop = Shop()
    assert call(guard, shop.pay).value == DONE
    assert shop.log == ["ship"]


def test_a_failure_before_the_steps_that_were_taken_is_a_change_too(guard: Guard, call: Caller) -> None:
    """Otherwise only some of the steps would be undone."""
    with pytest.raises(RuntimeError):
        call(guard, Shop("after charge").pay)

    def stricter(op: Op) -> Performing:
        yield take(op, "reserve", lambda: None)
        raise LookupError("a new check")

    with pytest.raises(StepsChanged, match=r"ended after 1 steps, and a former attempt had begun step 2, 'charge'"):
        call(guard, stricter)


def test_a_sleep_in_the_place_of_a_step_is_a_change(guard: Guard, call: Caller) -> None:
    with pytest.raises(RuntimeError):
        call(guard, Shop("after charge").pay)

    def dozes(op: Op) -> Performing:
        yield Call(lambda: op.sleep("doze", 0))

    with pytest.raises(StepsChanged, match="step 1 was 'reserve' and is now 'doze'"):
        call(guard, dozes)


def test_a_mismatch_that_is_the_steps_own_passes_as_itself(guard: Guard, call: Caller) -> None:
    def inner() -> None:
        raise PayloadMismatch("of another operation")

    def perform(op: Op) -> Performing:
        yield take(op, "inner", inner)

    with pytest.raises(PayloadMismatch, match="of another operation"):
        call(guard, perform)


def test_a_new_life_of_the_key_has_new_steps(guard: Guard, call: Caller) -> None:
    """CASES 29.  After the retention, and after a deletion, the key runs as new."""
    shop = Shop()
    call(guard, shop.pay)
    guard.delete(*ASKED.id)
    call(guard, shop.pay)
    guard.store.shift += POLICY.ttl + 1
    guard.cache.drop(ASKED.id)
    call(guard, shop.pay)
    assert shop.log == ["reserve", "charge", "ship"] * 3


def test_checkpoints_live_as_long_as_the_operation(guard: Guard, call: Caller) -> None:
    shop = Shop("after charge")
    with pytest.raises(RuntimeError):
        call(guard, shop.pay)
    guard.store.shift += 29 * 86400
    guard.purge()
    guard.cache = Guard("memory://").cache
    assert call(guard, shop.pay).value == DONE
    assert shop.log == ["reserve", "charge", "ship"]


def test_what_was_left_for_too_long_is_not_resumed(guard: Guard, call: Caller) -> None:
    shop = Shop("after charge")
    with pytest.raises(RuntimeError):
        call(guard, shop.pay)
    guard.store.shift += 30.5 * 86400
    with pytest.raises(UnknownOutcome, match="checkpoints may be gone"):
        call(guard, shop.pay)


# ── What a step may be


def test_a_step_needs_the_level() -> None:
    guard = Guard("memory://")
    for step in (lambda op: op.step("a", print), lambda op: op.sleep("a", 1)):
        with pytest.raises(ConfigurationError, match="effect = 'steps'"):
            guard.run(Operation("s", "k"), step)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"function": lambda order: order}, "takes order"),
        ({"function": lambda connection: None, "effect": "lease"}, "takes a connection"),
        ({"function": print, "on_unknown": "resolve"}, "needs a resolver"),
        ({"function": print, "retry": 0}, "at least the first attempt"),
    ],
)
def test_a_step_that_cannot_be_is_refused_before_anything_happens(guard: Guard, options: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        guard.run(ASKED, lambda op: op.step("charge", **options), policy=POLICY)


def test_functions_that_do_not_tell_what_they_take_take_nothing(guard: Guard) -> None:
    assert guard.run(ASKED, lambda op: op.step("dict", dict), policy=POLICY).value == {}


def test_what_cannot_be_checkpointed_is_told_at_once_rather_than_after_a_crash(guard: Guard, call: Caller) -> None:
    def perform(op: Op) -> Performing:
        yield take(op, "lock", object)

    with pytest.raises(ConfigurationError, match="'lock' gave what cannot be checkpointed"):
        call(guard, perform)


def test_an_async_step_of_a_blocking_performer_says_what_to_do(guard: Guard) -> None:
    async def charge() -> None: ...

    with pytest.raises(ConfigurationError, match=r"step 'charge'.* is async"):
        guard.run(ASKED, lambda op: op.step("charge", charge), policy=POLICY)


async def test_a_step_of_an_async_performer_may_be_async_or_not() -> None:
    async def charge(key: str) -> str:
        await asyncio.sleep(0)
        return key

    async def pay(op: Op) -> Any:
        return [await op.step("charge", charge), await op.step("ship", lambda: "shipped")]

    guard = Guard("memory://", policy=POLICY)
    answer = await guard.arun(ASKED, pay)
    assert answer.value[1] == "shipped"


@pytest.mark.filterwarnings("ignore:coroutine 'arun' was never awaited")
async def test_a_step_that_is_not_awaited_is_told() -> None:
    guard = Guard("memory://", policy=POLICY)
    unawaited: list[Any] = []

    async def forgets(op: Op) -> None:
        unawaited.append(op.step("charge", lambda: None))

    async def hurries(op: Op) -> None:
        await asyncio.gather(op.step("charge", lambda: None), op.step("ship", lambda: None))

    with pytest.raises(ConfigurationError, match="'charge' was never awaited"):
        await guard.arun(ASKED, forgets)
    unawaited[0].close()
    with pytest.raises(ConfigurationError, match="'ship' begins, and 'charge' has not ended"):
        await guard.arun(Operation("s", "2"), hurries)


# ── Time


def test_a_sleep_is_over_when_its_time_has_passed_whoever_slept(guard: Guard, call: Caller) -> None:
    def perform(op: Op) -> Performing:
        yield Call(lambda: op.sleep("settle down", "100ms" if op.attempt == 1 else "9d"))
        if op.attempt == 1:
            raise RuntimeError
        return "rested"

    began = time.monotonic()
    with pytest.raises(RuntimeError):
        call(guard, perform)
    assert time.monotonic() - began >= 0.1
    assert call(guard, perform).value == "rested"


async def test_what_is_left_of_a_sleep_is_slept_by_the_next_attempt() -> None:
    guard = Guard("memory://", policy=POLICY)

    async def perform(op: Op) -> int:
        await op.sleep("wait", 0.6)
        return op.attempt

    began = time.monotonic()
    first = asyncio.create_task(guard.arun(ASKED, perform))
    await asyncio.sleep(0.3)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert (await guard.arun(ASKED, perform)).value == 2
    assert 0.6 <= time.monotonic() - began < 0.88


def test_a_sleep_that_outlasts_the_checkpoints_is_refused(guard: Guard, call: Caller) -> None:
    def perform(op: Op) -> Performing:
        yield Call(lambda: op.sleep("hibernate", "31d"))

    with pytest.raises(ConfigurationError, match="30 days"):
        call(guard, perform)


def test_the_deadline_is_that_of_the_first_attempt(guard: Guard, call: Caller) -> None:
    deadlines: list[float | None] = []

    def perform(op: Op) -> Performing:
        deadlines.append(op.deadline)
        yield take(op, "look", lambda: None)
        if op.attempt == 1:
            raise RuntimeError

    with pytest.raises(RuntimeError):
        call(guard, perform, wait=5)
    call(guard, perform, wait=50)
    first, second = deadlines
    assert first == second
    assert first is not None
    assert abs(first - time.time() - 5) < 4


# ── Owners


def test_a_late_owners_next_step_is_refused_and_it_answers_with_the_successors_outcome(call: Caller) -> None:
    """CASES 24."""
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
    """CASES 24."""
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


def test_an_owner_that_lost_its_operation_before_it_began_is_refused(guard: Guard, call: Caller) -> None:
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
    """CASES 24."""
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
    plan = first.guarded(ASKED, lambda op: op.step("charge", hangs), first.policy)

    def hangs(key: str) -> None:
        raise SystemExit  # never reached: the step's plan is left in the middle

    effect = next(plan)
    op = effect.op  # type: ignore[attr-defined]
    step = op.steps.step("charge", hangs, None, None, None, "retry", None)
    next(step)
    VANISHED.append((plan, step))  # not closed: a process that is killed closes nothing
    time.sleep(0.1)
    return perform, log, op.derive("charge")


VANISHED: list[Any] = []


def test_by_default_the_step_is_sent_again_with_the_same_key(guard: Guard, call: Caller) -> None:
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


def test_a_step_may_be_held_where_nobody_can_tell(guard: Guard, call: Caller) -> None:
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

    policy = Policy()
    assert call(guard, duplicate, policy=policy).value == "receipt"
    guard.cache.drop(ASKED.id)
    assert call(guard, duplicate, policy=policy).how == "replayed"


def test_a_duplicate_without_a_result_is_raised(guard: Guard, call: Caller) -> None:
    def duplicate(op: Op) -> Performing:
        raise ProviderDuplicate
        yield

    with pytest.raises(ProviderDuplicate):
        call(guard, duplicate, policy=Policy())


# ── With the other settings


def test_what_is_not_kept_is_gone_on_with(guard: Guard, call: Caller) -> None:
    """CASES 20."""
    shop = Shop()

    def respond(op: Op) -> Performing:
        yield take(op, "reserve", lambda: shop.do("reserve"))
        return Outcome("response", 503 if op.attempt == 1 else 201)

    assert call(guard, respond).how == "released"
    assert call(guard, respond).outcome.status == 201
    assert shop.log == ["reserve"]


def test_twins_are_suspected_and_answered_as_at_other_levels(guard: Guard, call: Caller) -> None:
    policy = dataclasses.replace(POLICY, suspect="replay")
    shop = Shop()
    first = call(guard, shop.pay, policy=policy)
    twin = call(guard, shop.pay, Operation("customer-1", "k2", "same", "orders.pay"), policy=policy)
    assert twin.outcome == first.outcome
    assert shop.log == ["reserve", "charge", "ship"]


def test_business_uniqueness_goes_with_steps(guard: Guard, call: Caller) -> None:
    def asked(key: str) -> Operation:
        return Operation("customer-1", key, key, "orders.pay", unique="order-1")

    shop = Shop("after charge")
    with pytest.raises(RuntimeError):
        call(guard, shop.pay, asked("k1"))
    assert call(guard, shop.pay, asked("k1")).value == DONE
    assert call(guard, shop.pay, asked("k2")).outcome == call(guard, shop.pay, asked("k1")).outcome
    assert shop.log == ["reserve", "charge", "ship"]


def test_what_must_be_unique_is_taken_over_from_one_that_vanished(guard: Guard, call: Caller) -> None:
    run(guard.store.claim(Operation("unique|orders.pay", "order-1", name="orders.pay"), lease=0.1))
    operation = Operation("customer-1", "k", "f", "orders.pay", unique="order-1")
    assert call(guard, Shop().pay, operation).value == DONE


def test_a_door_that_leaves_a_unique_operation_leaves_the_ledger_in_order(guard: Guard) -> None:
    operation = Operation("customer-1", "k", "f", "orders.pay", unique="order-1")
    plan = guard.guarded(operation, lambda op: None, POLICY)
    effect: Any = next(plan)
    assert effect.op.key == "k"
    plan.close()
    assert guard.find(*operation.id).state == "running"  # type: ignore[union-attr]


def test_a_checkpoint_that_cannot_be_stored_ends_the_attempt(call: Caller) -> None:
    """CASES 27."""
    guard = Guard("memory://")
    shop = Shop()
    broken = Broken(guard.store, "settle", "orders.pay/charge")
    with pytest.raises(StoreError, match="'charge' was performed, but its checkpoint"):
        call(Guard(broken), shop.pay)
    assert shop.log == ["reserve", "charge"]


def test_a_store_that_is_down_at_the_end_leaves_it_to_the_lease(call: Caller, events: list[Event]) -> None:
    guard = Guard("memory://")
    broken = Broken(guard.store, "renew", "orders.pay")
    with pytest.raises(RuntimeError):
        call(Guard(broken, observers=[events.append]), Shop("after charge").pay)
    assert events[-1].kind == "failed"
    assert guard.find(*ASKED.id).state == "running"  # type: ignore[union-attr]


def test_what_could_not_be_opened_is_left_as_it_was(guard: Guard, call: Caller) -> None:
    """CASES 27."""
    with pytest.raises(RuntimeError):
        call(guard, Shop("after charge").pay)

    class Blind:
        def __getattr__(self, name: str) -> Any:
            return getattr(guard.store, name)

        def find(self, *id: str) -> Any:
            raise StoreError("down")
            yield

    with pytest.raises(StoreError):
        call(Guard(Blind()), Shop().pay)
    record = guard.find(*ASKED.id)
    assert record is not None
    assert (record.state, record.lease_until <= record.now) == ("running", True)


def test_a_plan_that_is_dropped_takes_no_further_step(guard: Guard) -> None:
    plan = guard.guarded(ASKED, lambda op: None, POLICY)
    next(plan)
    plan.close()
    assert [name for name, _ in steps_of(guard)] == ["orders.pay/request"]


def test_a_request_that_is_too_large_or_strange_is_not_kept(guard: Guard, call: Caller) -> None:
    for key, request in (("large", lambda: "x" * 2_000_000), ("strange", object)):
        call(guard, Shop().pay, Operation("s", key, "f", "orders.pay", request=request))
    kept = [record.outcome for record in guard.list().records if record.name == "orders.pay/request"]
    assert all(b"request\xc0\xa6unique" in outcome.body for outcome in kept if outcome is not None)
    assert len(kept) == 2
