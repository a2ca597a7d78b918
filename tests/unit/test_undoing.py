"""An operation that fails for good undoes its steps, the last one first, and each of them once."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import Any

import msgspec
import pytest

from oncemore import Guard, Op, Operation, Outcome, Resolution
from oncemore._ledger.attempt import Perform
from oncemore._runtime.plan import run
from oncemore.errors import ConfigurationError, Fenced, StoreError, UnknownOutcome

from .stepping import ASKED, POLICY, Broken, Caller, Performing, Shop, take


@pytest.fixture
def call(runner: asyncio.Runner | None) -> Caller:
    return Caller(runner)


UNDONE = ["undo charge done", "undo reserve done"]


def another_process(guard: Guard) -> Guard:
    return Guard(guard.store)


def test_an_error_that_is_the_outcome_undoes_in_reverse(guard: Guard, call: Caller) -> None:
    shop = Shop("after charge", error=LookupError)
    answer = call(guard, shop.pay)
    assert isinstance(answer.value, LookupError)
    assert shop.log == ["reserve", "charge", *UNDONE]
    again = call(another_process(guard), shop.pay)
    assert (again.how, again.outcome) == ("replayed", answer.outcome)
    assert shop.log == ["reserve", "charge", *UNDONE]


def test_a_response_that_is_a_final_failure_undoes(guard: Guard, call: Caller) -> None:
    shop = Shop()

    def respond(op: Op) -> Performing:
        yield from shop.pay(op)
        return Outcome("response", 422, body=b"no")

    assert call(guard, respond).outcome.status == 422
    assert shop.log == ["reserve", "charge", "ship", *UNDONE]
    assert call(another_process(guard), respond).outcome.body == b"no"


def test_a_failure_that_may_pass_undoes_nothing(guard: Guard, call: Caller) -> None:
    shop = Shop("after charge")
    with pytest.raises(RuntimeError):
        call(guard, shop.pay)
    assert shop.log == ["reserve", "charge"]


def test_a_step_that_failed_is_not_undone(guard: Guard, call: Caller) -> None:
    shop = Shop("charge", error=LookupError)
    call(guard, shop.pay)
    assert shop.log == ["reserve", "charge", "undo reserve done"]


def test_a_failure_without_a_step_costs_nothing(guard: Guard, call: Caller) -> None:
    def declines(op: Op) -> Performing:
        raise LookupError
        yield

    assert isinstance(call(guard, declines).value, LookupError)
    assert guard.stats().settled == 1


def test_an_undo_may_be_any_function_of_the_value(guard: Guard, call: Caller) -> None:
    """Also a built-in one, whose parameters have no names to call them by."""
    stock = ["book"]

    def pay(op: Op) -> Performing:
        yield take(op, "reserve", lambda: stock.pop(), undo=stock.append)
        raise LookupError("declined")

    call(guard, pay)
    assert stock == ["book"]


def test_an_undo_is_tried_again(guard: Guard, call: Caller) -> None:
    shop = Shop("after reserve", "undo reserve done", error=LookupError)

    def pay(op: Op) -> Performing:
        yield take(op, "reserve", lambda: shop.do("reserve"), undo=lambda value: flaky(value))
        shop.may_fail("after reserve")

    def flaky(value: str) -> None:
        shop.error = RuntimeError
        shop.do(f"undo {value}")

    call(guard, pay)
    assert shop.log == ["reserve", "undo reserve done", "undo reserve done"]


@pytest.mark.parametrize("where", UNDONE)
def test_interrupted_undoing_goes_on_with_the_next_undo(guard: Guard, call: Caller, where: str) -> None:
    shop = Shop(where, error=KeyboardInterrupt)
    failing = {"yes"}

    def pay(op: Op) -> Performing:
        yield from shop.pay(op)
        if failing:
            raise LookupError("changed its mind")
        return "not failing any more"

    with pytest.raises(KeyboardInterrupt):
        call(guard, pay)
    failing.clear()
    answer = call(another_process(guard), pay)
    assert (answer.how, answer.outcome.kind) == ("replayed", "error")
    assert sorted(shop.log) == sorted(["reserve", "charge", "ship", *UNDONE, where])
    assert [entry for entry in shop.log[3:] if entry != where] == [entry for entry in UNDONE if entry != where]


def test_undone_failure_is_not_continued_by_the_next_attempt(guard: Guard, call: Caller) -> None:
    """The one that failed was interrupted; the next gets as far as the failure, and is stopped there."""
    shop = Shop("after charge", error=LookupError)
    broken = Broken(guard.store, "settle", "orders.pay")
    call(Guard(broken), shop.pay)  # undone, but the outcome could not be stored
    assert shop.log == ["reserve", "charge", *UNDONE]
    guard.store.shift += 31
    answer = call(another_process(guard), shop.pay)
    assert answer.outcome.kind == "error"
    assert shop.log == ["reserve", "charge", *UNDONE]
    assert guard.find(*ASKED.id).state == "settled"  # type: ignore[union-attr]


def test_a_sleep_is_no_place_to_go_on_either(guard: Guard, call: Caller) -> None:
    shop = Shop("after reserve", error=LookupError)

    def pay(op: Op) -> Performing:
        yield take(op, "reserve", lambda: shop.do("reserve"), undo=lambda value: shop.do(f"undo {value}"))
        shop.may_fail("after reserve")
        yield Sleeping(op)

    call(Guard(Broken(guard.store, "settle", "orders.pay")), pay)
    guard.store.shift += 31
    assert call(another_process(guard), pay).outcome.kind == "error"
    assert shop.log == ["reserve", "undo reserve done"]


class Sleeping:
    def __init__(self, op: Op) -> None:
        self.op = op

    def run(self) -> Any:
        return self.op.sleep("rest", 60)

    def arun(self) -> Any:
        return self.op.sleep("rest", 60)


def test_failing_undo_is_held_and_named(guard: Guard, call: Caller) -> None:
    shop = Shop("after charge", error=LookupError)
    broken = {"undo charge done"}

    def undo(value: str) -> None:
        shop.do(f"undo {value}")
        if f"undo {value}" in broken:
            raise RuntimeError("the provider says no")

    def pay(op: Op) -> Performing:
        yield take(op, "reserve", lambda: shop.do("reserve"), undo=undo)
        yield take(op, "charge", lambda: shop.do("charge"), undo=undo)
        shop.may_fail("after charge")

    with pytest.raises(UnknownOutcome, match=r"the undoing of 'charge' failed: .*the provider says no"):
        call(guard, pay)
    record = guard.find(*ASKED.id)
    assert record is not None
    assert record.state == "held"
    assert "the undoing of 'charge' failed" in record.note
    assert "undo reserve done" not in shop.log  # a later one may build on an earlier one

    broken.clear()
    guard.resolve(*ASKED.id, Resolution.released())
    assert call(another_process(guard), pay).outcome.kind == "error"
    assert shop.log[-2:] == ["undo charge done", "undo reserve done"]


def test_value_of_an_undo_is_dropped(guard: Guard, call: Caller) -> None:
    """A provider's refund is an object of its own kind, which no checkpoint could hold."""
    refunds: list[object] = []

    def refund(value: str) -> object:
        refunds.append(object())
        return refunds[-1]

    async def arefund(value: str) -> object:
        return refund(value)

    def pay(op: Op) -> Performing:
        yield take(op, "charge", lambda: "charged", undo=refund if call.runner is None else arefund)
        raise LookupError("out of stock")

    assert call(guard, pay).outcome.kind == "error"
    assert len(refunds) == 1


def test_undo_failing_like_a_step_is_not_finished(guard: Guard, call: Caller) -> None:
    """The errors of the policy are outcomes of the operation; that a refund was declined is none of an undo."""
    shop = Shop("after charge", *["undo charge done"] * 3, error=LookupError)
    with pytest.raises(UnknownOutcome, match=r"the undoing of 'charge' failed: LookupError"):
        call(guard, shop.pay)
    assert shop.log == ["reserve", "charge", *["undo charge done"] * 3]
    guard.resolve(*ASKED.id, Resolution.released())
    assert call(another_process(guard), shop.pay).outcome.kind == "error"
    assert shop.log[-2:] == UNDONE


def test_store_down_while_undoing_leaves_it_to_the_next(guard: Guard, call: Caller) -> None:
    shop = Shop("after charge", error=LookupError)
    with pytest.raises(StoreError):
        call(Guard(Broken(guard.store, "settle", "orders.pay/undo:charge")), shop.pay)
    guard.store.shift += 31
    assert call(another_process(guard), shop.pay).outcome.kind == "error"
    assert shop.log == ["reserve", "charge", "undo charge done", "undo charge done", "undo reserve done"]


def test_late_owner_does_not_undo_its_successors_steps() -> None:
    guard = Guard("memory://")
    policy = dataclasses.replace(POLICY, lease=0.3)
    late, other = Shop("after charge", error=LookupError), Shop()

    def frozen(op: Op) -> Any:
        run(freeze(op))

    def freeze(op: Op) -> Performing:
        yield take(op, "reserve", lambda: late.do("reserve"), undo=lambda value: late.do("undo"))
        guard.store.shift += 10
        Guard(guard.store).run(ASKED, lambda op: run(other.pay(op)), policy=policy)
        time.sleep(0.15)
        raise LookupError("late")

    with pytest.raises(Fenced):
        guard.run(ASKED, frozen, policy=policy)
    assert late.log == ["reserve"]
    assert guard.find(*ASKED.id).outcome.kind == "value"  # type: ignore[union-attr]


def test_late_owner_finds_its_next_step_closed() -> None:
    """It has been told that the lease is its own, and is frozen before it claims the step."""
    guard = Guard("memory://")
    late, other = Shop(), Shop("after reserve", error=LookupError)

    def frozen(op: Op) -> Any:
        op.step("reserve", lambda: late.do("reserve"), undo=lambda value: late.do("undo"))
        guard.store.shift += 31
        Guard(guard.store).run(ASKED, lambda op: run(other.pay(op)), policy=POLICY)
        return op.step("charge", lambda: late.do("charge"))

    answer = guard.run(ASKED, frozen, policy=POLICY)
    assert answer.outcome.kind == "error"
    assert late.log == ["reserve"]
    assert other.log == ["undo reserve done"]


def test_late_failing_owner_undoes_nothing_twice() -> None:
    guard = Guard("memory://")
    late, other = Shop(), Shop("after reserve", error=LookupError)

    def frozen(op: Op) -> Any:
        op.step("reserve", lambda: late.do("reserve"), undo=lambda value: late.do("undo"))
        guard.store.shift += 31
        Guard(guard.store).run(ASKED, lambda op: run(other.pay(op)), policy=POLICY)
        raise LookupError("late")

    answer = guard.run(ASKED, frozen, policy=POLICY)
    assert (answer.how, answer.outcome.kind) == ("replayed", "error")
    assert b"late" not in answer.outcome.body
    assert (late.log, other.log) == (["reserve"], ["undo reserve done"])


def test_a_plan_that_is_dropped_while_undoing_changes_nothing(guard: Guard) -> None:
    shop = Shop()
    attempt = guard.new_attempt(ASKED, POLICY)
    run(attempt.begin())
    attempt.op.step("reserve", lambda: shop.do("reserve"), undo=lambda value: shop.do("undo"))
    plan = attempt.settle(Outcome("response", 422))
    effect = next(plan)
    while not isinstance(effect, Perform):
        effect = plan.send(effect.run())
    plan.close()
    assert guard.find(*ASKED.id).state == "running"  # type: ignore[union-attr]
    assert shop.log == ["reserve"]


def test_another_keys_failure_is_its_own(guard: Guard, call: Caller) -> None:
    call(guard, Shop("after charge", error=LookupError).pay)
    shop = Shop()
    call(guard, shop.pay, Operation("customer-1", "k2", "same", "orders.pay"))
    assert shop.log == ["reserve", "charge", "ship"]


# A process that dies between the claim and the settling of the mark of a final failure

MARK = "orders.pay/"


def left_unmarked(guard: Guard, call: Caller, perform: Any) -> None:
    """A first attempt that claimed the mark, and then died."""
    with pytest.raises(StoreError):
        call(Guard(Broken(guard.store, "settle", MARK)), perform)
    guard.store.shift += 31


def test_failure_whose_mark_was_not_settled_is_finished(guard: Guard, call: Caller) -> None:
    shop = Shop(*["after charge"] * 2, error=LookupError)
    left_unmarked(guard, call, shop.pay)
    assert isinstance(call(guard, shop.pay).value, LookupError)
    assert shop.log == ["reserve", "charge", *UNDONE]


@pytest.mark.parametrize("on_unknown", ["retry", "hold"])
def test_operation_goes_on_if_its_mark_was_not_settled(guard: Guard, call: Caller, on_unknown: Any) -> None:
    """The step in the place of the mark was never begun, so it is not in doubt."""
    shop = Shop("after reserve", error=LookupError)

    def pay(op: Op) -> Performing:
        yield take(op, "reserve", lambda: shop.do("reserve"), undo=lambda value: shop.do("undo"))
        shop.may_fail("after reserve")
        return (yield take(op, "charge", lambda key: shop.do("charge"), on_unknown=on_unknown))

    left_unmarked(guard, call, pay)
    assert call(guard, pay).value == "charge done"
    assert shop.log == ["reserve", "charge"]


def test_operation_given_up_without_a_settled_mark_is_not_unknown(guard: Guard, call: Caller) -> None:
    shop = Shop("after charge", error=LookupError)
    left_unmarked(guard, call, shop.pay)
    with pytest.raises(UnknownOutcome, match=r"given up after 2 attempts, and undone$"):
        call(guard, shop.pay, msgspec.structs.replace(ASKED, giving_up=True))
    assert shop.log == ["reserve", "charge", *UNDONE]


def test_step_without_a_name_is_refused(guard: Guard, call: Caller) -> None:
    def pay(op: Op) -> Performing:
        return (yield take(op, "", lambda: None))

    with pytest.raises(ConfigurationError, match="a step needs a name"):
        call(guard, pay)
