"""Unfinished operations are finished from their stored requests, by any completer that finds them."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import msgspec
import pytest

from oncemore import Guard, Op, Operation, Policy
from oncemore._ledger.completer import Completer, Tally
from oncemore._ledger.context import current_operation
from oncemore._runtime.backoff import Backoff
from oncemore._runtime.plan import Plan, arun, run
from oncemore.errors import ConfigurationError, Duplicate, StoreUnavailable, UnknownOutcome

from .stepping import ASKED, POLICY, Caller, Performing, Shop, take

NO_PAUSE = Backoff(base=0.0, cap=0.0)


@pytest.fixture
def call(runner: asyncio.Runner | None) -> Caller:
    return Caller(runner)


def asked(key: str = "k", request: Any = "the request") -> Operation:
    return Operation("customer-1", key, "same", "orders.pay", request=lambda: request)


def leave(guard: Guard, call: Caller, shop: Shop, operation: Operation | None = None) -> None:
    with pytest.raises(RuntimeError):
        call(guard, shop.pay, operation or asked())


class Round:
    """A completer of a shop's, and its rounds."""

    def __init__(self, guard: Guard, call: Caller, perform: Any, **options: Any) -> None:
        self.call = call
        self.requests: list[Any] = []
        options = {"policy": POLICY, "pace": NO_PAUSE, **options}
        self.completer = Completer(Guard(guard.store), {"orders.pay": self._perform(perform)}, **options)

    def _perform(self, perform: Any) -> Any:
        def performer(op: Op, request: Any) -> Any:
            self.requests.append(request)
            return run(perform(op)) if self.call.runner is None else arun(perform(op))

        return performer

    def __call__(self) -> Tally:
        if self.call.runner is None:
            return self.completer.run_once()
        return self.call.runner.run(self.completer.arun_once())


def test_completer_resumes_after_last_checkpoint_with_kept_request(guard: Guard, call: Caller) -> None:
    shop = Shop("after charge")
    leave(guard, call, shop)
    round = Round(guard, call, shop.pay)
    assert round() == Tally(completed=1)
    assert shop.log == ["reserve", "charge", "ship"]
    assert round.requests == ["the request"]
    assert call(guard, shop.pay, asked()).how == "replayed"
    assert round() == Tally()


def test_completer_leaves_running_settled_and_other_levels_alone(guard: Guard, call: Caller) -> None:
    run(guard.store.claim(asked("running"), lease=30))
    run(guard.store.claim(asked("a lease"), lease=0))
    call(guard, Shop().pay, asked("settled"))
    shop = Shop()
    assert Round(guard, call, shop.pay)() == Tally(unreadable=1)
    assert shop.log == []


def test_completer_leaves_operation_without_request_alone(guard: Guard, call: Caller) -> None:
    """Its holder vanished between the claim and the first note of it: nothing has happened."""
    lease = run(guard.store.claim(asked(), lease=0))
    record = guard.find(*asked().id)
    assert record is not None
    zero = Operation("step|customer-1", f"k:{record.created_at:.6f}:0", "request")
    run(guard.store.claim(zero, lease=0))
    assert lease
    assert Round(guard, call, Shop().pay)() == Tally(unreadable=1)


def test_one_that_fails_does_not_stop_the_others(guard: Guard, call: Caller) -> None:
    for key in ("a", "b", "c"):
        leave(guard, call, Shop("after charge"), asked(key))

    def perform(op: Op) -> Performing:
        if op.key == "b":
            raise RuntimeError("still no luck")
        return (yield from Shop().pay(op))

    ends: list[tuple[str, str]] = []
    round = Round(guard, call, perform, progress=lambda record, end: ends.append((record.key, end)))
    assert round() == Tally(completed=2, failing=1)
    assert sorted(ends) == [("a", "completed"), ("b", "failing"), ("c", "completed")]
    assert round() == Tally(failing=1)


def test_completer_runs_no_more_than_its_limit_side_by_side(guard: Guard, call: Caller) -> None:
    for number in range(9):
        leave(guard, call, Shop("after charge"), asked(str(number)))
    now, most = 0, 0
    lock = threading.Lock()

    class Rest:
        def run(self) -> None:
            time.sleep(0.03)

        def arun(self) -> Any:
            return asyncio.sleep(0.03)

    def perform(op: Op) -> Performing:
        nonlocal now, most
        with lock:
            now, most = now + 1, max(most, now + 1)
        yield Rest()
        with lock:
            now -= 1
        return (yield from Shop().pay(op))

    assert Round(guard, call, perform, at_once=3)() == Tally(completed=9)
    assert most == 3


def test_all_pages_are_read(guard: Guard, call: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oncemore._ledger.completer.PAGE", 2)
    for number in range(5):
        leave(guard, call, Shop("after charge"), asked(str(number)))
    assert Round(guard, call, Shop().pay)().completed == 5


def test_each_attempt_is_given_more_time_than_the_last(guard: Guard, call: Caller) -> None:
    leave(guard, call, Shop("after charge"))
    round = Round(guard, call, Shop(*["ship"] * 99).pay, pace=Backoff(base=10, cap=600, jitter="none"))
    assert round() == Tally()
    guard.store.shift += 11
    assert round() == Tally(failing=1)
    guard.store.shift += 11
    assert round() == Tally()
    guard.store.shift += 11
    assert round() == Tally(failing=1)


def test_completer_undoes_and_holds_after_last_attempt(guard: Guard, call: Caller) -> None:
    shop = Shop("after charge", *["ship"] * 99)
    leave(guard, call, shop)
    round = Round(guard, call, shop.pay, attempts=3)
    assert [round(), round(), round()] == [Tally(failing=1), Tally(failing=1), Tally(held=1)]
    assert [entry for entry in shop.log if entry != "ship"] == [
        "reserve",
        "charge",
        "undo charge done",
        "undo reserve done",
    ]
    assert shop.log.count("ship") == 6  # three tries in each of two attempts; the last one tries nothing new
    record = guard.find(*asked().id)
    assert record is not None
    assert record.note == "given up after 4 attempts, and undone; but 'ship' was begun, and may have taken effect"
    with pytest.raises(UnknownOutcome, match="given up"):
        call(guard, shop.pay, asked())


def test_a_last_attempt_with_nothing_left_to_do_completes_it(guard: Guard, call: Caller) -> None:
    shop = Shop("after ship")
    leave(guard, call, shop)
    assert Round(guard, call, shop.pay, attempts=1)() == Tally(completed=1)
    assert shop.log == ["reserve", "charge", "ship"]


def test_last_attempt_failing_between_steps_is_given_up(guard: Guard, call: Caller) -> None:
    shop = Shop("after charge", "after charge")
    leave(guard, call, shop)
    assert Round(guard, call, shop.pay, attempts=1)() == Tally(held=1)
    assert shop.log == ["reserve", "charge", "undo charge done", "undo reserve done"]
    assert guard.find(*asked().id).note == "given up after 2 attempts, and undone"  # type: ignore[union-attr]


def test_a_doubt_outlives_an_interrupted_undoing(guard: Guard, call: Caller) -> None:
    shop = Shop("after reserve", "charge", "undo reserve done", error=KeyboardInterrupt)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            call(guard, shop.pay, asked())
    last = msgspec.structs.replace(asked(), giving_up=True)
    with pytest.raises(KeyboardInterrupt):
        call(guard, shop.pay, last)
    with pytest.raises(UnknownOutcome, match="'charge' was begun, and may have taken effect"):
        call(Guard(guard.store), shop.pay, last)
    assert shop.log == ["reserve", "charge", "undo reserve done", "undo reserve done"]


def test_a_last_attempt_that_takes_other_steps_undoes_nothing(guard: Guard, call: Caller) -> None:
    leave(guard, call, Shop("after charge"))
    shop = Shop()

    def changed(op: Op) -> Performing:
        yield take(op, "reserve", lambda: None, undo=lambda value: shop.do("undo"))
        raise RuntimeError("a new check")

    assert Round(guard, call, changed, attempts=1)() == Tally(held=1)
    record = guard.find(*asked().id)
    assert record is not None
    assert "failed after 1 steps, and an earlier attempt had finished step 2, 'charge'" in record.note
    assert shop.log == []


def test_a_failure_that_is_already_being_undone_is_finished(guard: Guard, call: Caller) -> None:
    shop = Shop("undo reserve done", error=KeyboardInterrupt)

    def pay(op: Op) -> Performing:
        yield from shop.pay(op)
        raise LookupError("out of stock")

    with pytest.raises(KeyboardInterrupt):
        call(guard, pay, asked())
    assert Round(guard, call, pay, attempts=1)() == Tally(completed=1)
    assert guard.find(*asked().id).outcome.kind == "error"  # type: ignore[union-attr]


def test_last_attempt_may_find_an_unfinished_sleep(guard: Guard, call: Caller) -> None:
    leave(guard, call, Shop("after reserve"))
    shop = Shop()

    def dozes(op: Op) -> Performing:
        yield take(op, "reserve", lambda: None, undo=lambda value: shop.do("undo"))
        op_sleep = op.sleep("doze", 1)
        if hasattr(op_sleep, "__await__"):
            yield Awaited(op_sleep)

    assert Round(guard, call, dozes, attempts=1)() == Tally(held=1)
    assert shop.log == ["undo"]


class Awaited:
    def __init__(self, awaitable: Any) -> None:
        self.awaitable = awaitable

    def arun(self) -> Any:
        return self.awaitable


def test_operation_deleted_meanwhile_counts_as_completed(guard: Guard, call: Caller) -> None:
    leave(guard, call, Shop("after charge"))

    def deletes(op: Op) -> Performing:
        guard.store.shift += 31
        guard.delete(*asked().id)
        guard.store.shift -= 31
        raise RuntimeError
        yield

    assert Round(guard, call, deletes)() == Tally(completed=1)


def test_store_failure_leaves_operation_for_the_next_round(guard: Guard, call: Caller) -> None:
    leave(guard, call, Shop("after charge"))
    round = Round(guard, call, Shop().pay)

    def down(*args: Any) -> Any:
        raise StoreUnavailable
        yield

    round.completer.guard.store = Down(guard.store, down)  # type: ignore[assignment]
    assert round() == Tally(failing=1)


class Down:
    def __init__(self, inner: Any, find: Any) -> None:
        self.inner = inner
        self.find = find

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def test_what_must_be_unique_stays_so(guard: Guard, call: Caller) -> None:
    """Another key for the same order is not let in because a completer has finished the first one."""

    def order(key: str) -> Operation:
        return Operation("customer-1", key, key, "orders.pay", unique="order-1", request=lambda: "the request")

    shop = Shop("after charge")
    leave(guard, call, shop, order("k1"))
    assert Round(guard, call, shop.pay)() == Tally(completed=1)
    first = guard.find("customer-1", "k1")
    assert first is not None
    assert call(guard, shop.pay, order("k2")).outcome == first.outcome
    assert shop.log == ["reserve", "charge", "ship"]


def test_outside_of_an_operation_there_is_no_current_one() -> None:
    with pytest.raises(ConfigurationError, match="No operation is running"):
        current_operation()


# ── As a loop


def test_it_goes_round_until_it_is_stopped(guard: Guard) -> None:
    call = Caller(None)
    stop = threading.Event()
    leave(guard, call, Shop("after charge"))
    round = Round(guard, call, Shop().pay, every=0.01, progress=lambda record, end: stop.set())
    round.completer.run(stop)
    assert guard.find(*asked().id).state == "settled"  # type: ignore[union-attr]


def test_a_store_that_is_down_does_not_end_it(guard: Guard) -> None:
    stop = threading.Event()
    looks: list[int] = []

    def down(*args: Any, **options: Any) -> Any:
        looks.append(1)
        if len(looks) == 3:
            stop.set()
        raise StoreUnavailable
        yield

    completer = Completer(guard, {"orders.pay": lambda op, request: None}, policy=POLICY, every=0.01)
    completer.guard.store.list = down  # type: ignore[method-assign]
    completer.run(stop)
    assert len(looks) == 3


def test_a_completer_without_a_policy_has_the_guards() -> None:
    guard = Guard("memory://", policy=POLICY)
    assert Completer(guard, {"orders.pay": lambda op, request: None}).policy is POLICY
    assert ASKED.request is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attempts": 0}, "attempts = 0"),
        ({"at_once": 0}, "at_once = 0"),
        ({"every": -1.0}, "every = -1"),
        ({"policy": Policy()}, "effect = 'steps'"),
    ],
)
def test_a_completer_that_could_do_no_good_is_refused(guard: Guard, options: dict[str, Any], message: str) -> None:
    """Under another level's policy, unfinished operations would be held; with at_once = 0, none would ever begin."""
    with pytest.raises(ConfigurationError, match=message):
        Completer(guard, {"orders.pay": lambda op, request: None}, **{"policy": POLICY, **options})


def test_what_cannot_be_performed_is_refused(guard: Guard) -> None:
    with pytest.raises(ConfigurationError, match=r"'orders\.pay': .* function"):
        Completer(guard, {"orders.pay": "shop:pay"}, policy=POLICY)  # type: ignore[dict-item]


async def test_steps_request_survives_an_earlier_attempt_that_is_forgotten() -> None:
    guard = Guard("memory://")
    policy = Policy(effect="steps", lease=1.0, wait=3.0)
    begun, requests = asyncio.Event(), []

    def operation() -> Operation:
        return Operation("s", "k", "f", "pay", request=lambda: {"amount": 5})

    async def refuse(op: Any) -> None:
        begun.set()
        await asyncio.sleep(0.2)
        raise Duplicate("not now")

    async def crash(op: Any) -> None:
        await op.step("charge", lambda: 1)
        raise RuntimeError("after the first step")

    async def finish(op: Any, request: Any) -> None:
        requests.append(request)
        await op.step("charge", lambda: 1)

    first = asyncio.create_task(guard.arun(operation(), refuse, policy=policy))
    await begun.wait()
    second = asyncio.create_task(guard.arun(operation(), crash, policy=policy))
    await asyncio.gather(first, second, return_exceptions=True)
    tally = await Completer(guard, {"pay": finish}, policy=policy, pace=NO_PAUSE).arun_once()
    assert (tally.completed, requests) == (1, [{"amount": 5}])


def test_operation_that_its_performer_does_not_claim_is_reported(
    guard: Guard, call: Caller, caplog: pytest.LogCaptureFixture
) -> None:
    """An app does so if its rule has another name now."""

    class Elsewhere:
        def drive(self, operation: Operation, request: Any) -> Plan[Any]:
            return "not claimed"
            yield

    leave(guard, call, Shop("after charge"))
    tally = Completer(Guard(guard.store), {"orders.pay": Elsewhere()}, policy=POLICY, pace=NO_PAUSE).run_once()
    assert (tally.failing, tally.total) == (1, 1)
    assert "its performer did not claim it" in caplog.text
