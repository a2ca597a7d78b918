"""The functions and settings that a step may have, its sleep, and the stored request."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from typing import Any

import msgspec
import pytest

from oncemore import Guard, Op, Operation, Outcome
from oncemore._ledger.attempt import Perform
from oncemore._ledger.events import Event
from oncemore._ledger.steps import unpack_request
from oncemore._runtime.plan import Call, run
from oncemore.errors import ConfigurationError, StoreError

from .stepping import ASKED, DONE, POLICY, Broken, Caller, Performing, Shop, steps_of, take


@dataclasses.dataclass
class Order:
    number: int


@pytest.fixture
def call(runner: asyncio.Runner | None) -> Caller:
    return Caller(runner)


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
        ({"function": print, "retry": 0}, "the number of attempts, 1 or more"),
    ],
)
def test_impossible_step_is_refused_before_the_claim(guard: Guard, options: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        guard.run(ASKED, lambda op: op.step("charge", **options), policy=POLICY)


def test_function_without_a_signature_gets_no_arguments(guard: Guard) -> None:
    assert guard.run(ASKED, lambda op: op.step("dict", dict), policy=POLICY).value == {}


def test_step_result_that_cannot_be_stored_is_refused(guard: Guard, call: Caller) -> None:
    def perform(op: Op) -> Performing:
        yield take(op, "lock", object)

    with pytest.raises(ConfigurationError, match="'lock' returned a value that cannot be stored"):
        call(guard, perform)


def test_async_step_of_blocking_performer_is_a_clear_error(guard: Guard) -> None:
    async def charge() -> None: ...

    with pytest.raises(ConfigurationError, match=r"step 'charge'.* is async"):
        guard.run(ASKED, lambda op: op.step("charge", charge), policy=POLICY)


async def test_async_performer_may_take_sync_and_async_steps() -> None:
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


def test_sleep_ends_at_its_time_across_attempts(guard: Guard, call: Caller) -> None:
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


async def test_next_attempt_sleeps_the_rest_of_a_sleep() -> None:
    guard = Guard("memory://", policy=POLICY)

    async def perform(op: Op) -> int:
        await op.sleep("wait", 60)
        return op.attempt

    first = asyncio.create_task(guard.arun(ASKED, perform))
    await asyncio.sleep(0.1)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    guard.store.shift += 59.5  # type: ignore[attr-defined]
    began = time.monotonic()
    assert (await asyncio.wait_for(guard.arun(ASKED, perform), 30)).value == 2
    assert time.monotonic() - began >= 0.2


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


# ── With the other settings


def test_what_is_not_kept_is_gone_on_with(guard: Guard, call: Caller) -> None:
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


def test_a_checkpoint_that_cannot_be_stored_ends_the_attempt(call: Caller) -> None:
    guard = Guard("memory://")
    shop = Shop()
    broken = Broken(guard.store, "settle", "orders.pay/charge")
    with pytest.raises(StoreError, match="'charge' was performed, but its checkpoint"):
        call(Guard(broken), shop.pay)
    assert shop.log == ["reserve", "charge"]


def test_store_down_at_the_end_leaves_steps_to_lapse(call: Caller, events: list[Event]) -> None:
    guard = Guard("memory://")
    broken = Broken(guard.store, "renew", "orders.pay")
    with pytest.raises(RuntimeError):
        call(Guard(broken, observers=[events.append]), Shop("after charge").pay)
    assert events[-1].kind == "failed"
    assert guard.find(*ASKED.id).state == "running"  # type: ignore[union-attr]


def test_steps_that_cannot_be_loaded_leave_the_record_unchanged(guard: Guard, call: Caller) -> None:
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
    effect = next(plan)
    while not isinstance(effect, Perform):
        effect = plan.send(effect.run())
    plan.close()
    assert steps_of(guard) == []


@pytest.mark.parametrize(
    ("request_of", "kept"), [(lambda: {"amount": 7}, {"amount": 7}), (lambda: "x" * 2_000_000, None), (object, None)]
)
def test_request_is_kept_until_settled_unless_too_large_or_strange(
    guard: Guard, call: Caller, request_of: Any, kept: Any
) -> None:
    asked = Operation("s", "k", "f", "orders.pay", unique="order-1", request=request_of)
    with pytest.raises(RuntimeError):
        call(guard, Shop("after charge").pay, asked, wait=5.0)
    for _ in range(2):  # a later attempt leaves what the first has kept
        record = guard.find(*asked.id)
        assert record is not None
        found = unpack_request(record.request, ())
        assert (found["request"], found["unique"]) == (kept, "order-1")
        assert found["deadline"] is not None
        with pytest.raises(RuntimeError):
            call(guard, Shop("after ship").pay, msgspec.structs.replace(asked, request=lambda: "another"), wait=500.0)
        assert unpack_request(guard.find(*asked.id).request, ()) == found  # type: ignore[union-attr]
    call(guard, Shop().pay, asked)
    assert guard.find(*asked.id).request == b""  # type: ignore[union-attr]


def test_request_that_cannot_be_stored_is_logged(guard: Guard, caplog: pytest.LogCaptureFixture) -> None:
    asked = msgspec.structs.replace(ASKED, request=lambda: {"session": object()})
    attempt = guard.new_attempt(asked, POLICY)
    run(attempt.begin())
    run(attempt.release())
    (message,) = (record.getMessage() for record in caplog.records)
    assert message.startswith(
        "orders.pay: only the caller can finish it after a crash, because its request cannot be stored: A"
    )


def test_caller_continues_though_class_of_kept_request_is_gone(guard: Guard, call: Caller) -> None:
    shop, asked = Shop("after charge"), msgspec.structs.replace(ASKED, request=lambda: Order(7))
    with pytest.raises(RuntimeError):
        call(guard, shop.pay, asked, policy=dataclasses.replace(POLICY, types=(Order,)))
    assert call(guard, shop.pay, asked).value == DONE
    assert shop.log == ["reserve", "charge", "ship"]


def test_waiter_taking_over_forgotten_claim_keeps_its_request(guard: Guard) -> None:
    lease = run(guard.store.claim(ASKED, lease=30))
    threading.Timer(0.05, lambda: run(guard.store.release(lease, retention=0.0))).start()
    asked = msgspec.structs.replace(ASKED, request=lambda: "what was asked")
    attempt = guard.new_attempt(asked, POLICY)
    run(attempt.begin())
    record = guard.find(*ASKED.id)
    assert record is not None
    assert unpack_request(record.request, ())["request"] == "what was asked"
    run(attempt.release())
