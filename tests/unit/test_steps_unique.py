"""One payment per order, also in steps: while one key's operation is unfinished, no other key takes the order."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import msgspec
import pytest

from oncemore import Guard, Op, Operation, Outcome, Resolution
from oncemore._ledger.encrypted import StoreWrapper
from oncemore._ledger.values import replayed
from oncemore._runtime.plan import run
from oncemore.errors import Duplicate, Fenced, InProgress, StoreUnavailable, UnknownOutcome

from .stepping import DONE, POLICY, Broken, Caller, Performing, Shop, elsewhere


@pytest.fixture
def call(runner: asyncio.Runner | None) -> Caller:
    return Caller(runner)


def order(key: str) -> Operation:
    return Operation("customer-1", key, key, "orders.pay", unique="order-1")


def test_business_uniqueness_goes_with_steps(guard: Guard, call: Caller) -> None:
    shop = Shop("after charge")
    with pytest.raises(RuntimeError):
        call(guard, shop.pay, order("k1"))
    assert call(guard, shop.pay, order("k1")).value == DONE
    assert call(guard, shop.pay, order("k2")).outcome == call(guard, shop.pay, order("k1")).outcome
    assert shop.log == ["reserve", "charge", "ship"]


def test_unique_record_is_taken_over_after_a_crash(guard: Guard, call: Caller) -> None:
    run(guard.store.claim(Operation("unique|orders.pay", "order-1", name="orders.pay"), lease=0.1))
    assert call(guard, Shop().pay, order("k")).value == DONE


@pytest.mark.parametrize("ends", [RuntimeError, KeyboardInterrupt, None])
def test_unfinished_steps_refuse_other_keys_of_same_order(guard: Guard, call: Caller, ends: Any) -> None:
    """Its charge is made, and only it can go on from there: another key would charge once more."""
    shop = Shop(*["after charge"] * 2, error=ends or RuntimeError)
    with pytest.raises(ends or RuntimeError):
        call(guard if ends else Guard(Broken(guard.store, "renew", "orders.pay")), shop.pay, order("k1"))
    guard.store.shift += 31
    other = Shop()
    for _ in range(2):
        with pytest.raises(InProgress, match="under another key"):
            call(guard, other.pay, order("k2"))
    with pytest.raises(ends or RuntimeError):  # it may fail more than once
        call(guard, shop.pay, order("k1"))
    with pytest.raises(InProgress):
        call(guard, other.pay, order("k2"))
    first = call(guard, shop.pay, order("k1"))
    assert call(guard, other.pay, order("k2")).outcome == first.outcome
    assert (shop.log, other.log) == (["reserve", "charge", "ship"], [])


@pytest.mark.parametrize("on_unique", ["replay", "reject"])
@pytest.mark.parametrize("giving_up", [False, True])
def test_unique_by_crash_before_last_write_is_finished_next(
    guard: Guard, call: Caller, on_unique: Any, giving_up: bool
) -> None:
    """The order is known to be paid, by this very key, and only the key's own record does not say so yet."""
    policy = dataclasses.replace(POLICY, on_unique=on_unique)
    shop = Shop()
    broken = Guard(Broken(guard.store, "settle", "orders.pay"))
    assert call(broken, shop.pay, order("k1"), policy=policy).how == "unstored"
    guard.store.shift += 31
    again = call(guard, shop.pay, msgspec.structs.replace(order("k1"), giving_up=giving_up), policy=policy)
    assert again.how == "replayed"
    assert replayed(again.outcome) == DONE
    assert guard.find(*order("k1").id).state == "settled"  # type: ignore[union-attr]
    assert shop.log == ["reserve", "charge", "ship"]


def test_one_that_took_no_step_leaves_the_order_free(guard: Guard, call: Caller) -> None:
    def fails(op: Op) -> Performing:
        raise RuntimeError("not yet")
        yield

    with pytest.raises(RuntimeError):
        call(guard, fails, order("k1"))
    assert call(guard, Shop().pay, order("k2")).value == DONE


def test_finally_failed_steps_free_the_order_when_undone(guard: Guard, call: Caller) -> None:
    shop = Shop("after charge", error=LookupError)
    assert call(guard, shop.pay, order("k1")).outcome.kind == "error"
    assert shop.log[2:] == ["undo charge done", "undo reserve done"]
    assert call(guard, shop.pay, order("k2")).value == DONE


@pytest.mark.parametrize("giving_up", [False, True])
def test_unique_by_undone_crash_before_last_write_fails_again(guard: Guard, call: Caller, giving_up: bool) -> None:
    """It has made way for another key, and then vanished: its own outcome is its failure, not a decision for a person."""
    shop, other = Shop("after charge", error=LookupError), Shop()
    assert call(Guard(Broken(guard.store, "settle", "orders.pay")), shop.pay, order("k1")).how == "unstored"
    guard.store.shift += 31
    assert call(guard, other.pay, order("k2")).value == DONE
    again = call(guard, shop.pay, msgspec.structs.replace(order("k1"), giving_up=giving_up))
    assert (again.outcome.kind, guard.find(*order("k1").id).state) == ("error", "settled")  # type: ignore[union-attr]
    assert shop.log == ["reserve", "charge", "undo charge done", "undo reserve done"]
    assert call(guard, other.pay, order("k3")).outcome == call(guard, other.pay, order("k2")).outcome


def test_unique_by_crash_before_last_write_is_held(guard: Guard, call: Caller) -> None:
    shop = Shop("after charge")
    with pytest.raises(RuntimeError):
        call(guard, shop.pay, order("k1"))
    last = msgspec.structs.replace(order("k1"), giving_up=True)
    with pytest.raises(StoreUnavailable):
        call(Guard(Broken(guard.store, "hold", "orders.pay")), shop.pay, last)
    guard.store.shift += 31
    assert call(guard, Shop().pay, order("k2")).value == DONE
    with pytest.raises(UnknownOutcome, match="given up after 3 attempts, and undone"):
        call(guard, shop.pay, last)
    assert shop.log == ["reserve", "charge", "undo charge done", "undo reserve done"]


def test_given_up_steps_free_the_order_when_undone(guard: Guard, call: Caller) -> None:
    shop = Shop("after charge")
    with pytest.raises(RuntimeError):
        call(guard, shop.pay, order("k1"))
    with pytest.raises(UnknownOutcome, match="given up"):
        call(guard, shop.pay, msgspec.structs.replace(order("k1"), giving_up=True))
    assert shop.log[2:] == ["undo charge done", "undo reserve done"]
    assert call(guard, shop.pay, order("k2")).value == DONE


def test_sleeping_steps_are_finished_after_a_competing_request(guard: Guard, call: Caller) -> None:
    shop = Shop()

    def slow(op: Op) -> Performing:
        done = yield from shop.pay(op)
        if op.attempt == 1:
            guard.store.shift += 31
            with pytest.raises(InProgress):
                elsewhere(lambda: Caller(None)(Guard(guard.store), shop.pay, order("k2")))
        return done

    with pytest.raises(Fenced):
        call(guard, slow, order("k1"))
    assert call(guard, slow, order("k1")).value == DONE
    assert shop.log == ["reserve", "charge", "ship"]


def test_operations_in_turns_do_not_wait_for_unfinished_steps(guard: Guard, call: Caller) -> None:
    policy = dataclasses.replace(POLICY, on_unique="serialize")
    shop = Shop("after charge")
    with pytest.raises(RuntimeError):
        call(guard, shop.pay, order("k1"), policy=policy)
    assert call(guard, shop.pay, order("k2"), policy=policy).value == DONE
    assert call(guard, shop.pay, order("k1"), policy=policy).value == DONE
    assert shop.log == ["reserve", "charge", "reserve", "charge", "ship", "ship"]


def test_dropped_unique_attempt_leaves_the_ledger_consistent(guard: Guard) -> None:
    operation = order("k")
    attempt = guard.new_attempt(operation, POLICY)
    run(attempt.begin())
    assert attempt.op.key == "k"
    attempt.drop()
    assert guard.find(*operation.id).state == "running"  # type: ignore[union-attr]


# After a person has decided


def left_held(guard: Guard, call: Caller) -> None:
    """The undo of the order's first key has failed, so nobody knows whether the order is paid."""
    shop = Shop("after charge", *["undo charge done"] * 3, error=LookupError)
    with pytest.raises(UnknownOutcome, match="undoing of 'charge' failed"):
        call(guard, shop.pay, order("k1"))


def test_other_keys_of_a_held_order_get_unknown_outcome(guard: Guard, call: Caller) -> None:
    left_held(guard, call)
    other = Shop()
    for _ in range(2):
        with pytest.raises(UnknownOutcome, match="'order-1' under another key"):
            call(guard, other.pay, order("k2"))
    assert other.log == []


@pytest.mark.parametrize("on_unique", ["replay", "reject"])
def test_order_resolved_as_done_is_done_for_other_keys(guard: Guard, call: Caller, on_unique: Any) -> None:
    left_held(guard, call)
    guard.resolve(*order("k1").id, Resolution.settled("paid by hand"))
    other, policy = Shop(), dataclasses.replace(POLICY, on_unique=on_unique)
    for _ in range(2):
        if on_unique == "replay":
            assert replayed(call(guard, other.pay, order("k2"), policy=policy).outcome) == "paid by hand"
        else:
            with pytest.raises(Duplicate):
                call(guard, other.pay, order("k2"), policy=policy)
    assert other.log == []


@pytest.mark.parametrize("decision", ["released", "failed", "deleted"])
def test_order_resolved_as_not_done_is_free_for_other_keys(guard: Guard, call: Caller, decision: str) -> None:
    left_held(guard, call)
    if decision == "deleted":
        assert guard.delete(*order("k1").id)
    elif decision == "released":
        guard.resolve(*order("k1").id, Resolution.released())
    else:
        guard.resolve(*order("k1").id, Resolution.settled(Outcome("response", 422)))
    assert call(guard, Shop().pay, order("k2")).value == DONE


def test_order_deleted_while_another_key_looks_is_refused(guard: Guard, call: Caller) -> None:
    left_held(guard, call)
    store = guard.store

    class Deleting(StoreWrapper):
        def find(self, scope: str, key: str) -> Any:
            if scope.startswith("unique|"):
                self.inner.shift += 31
                yield from self.inner.delete(scope, key)
                self.inner.shift -= 31
            return (yield from self.inner.find(scope, key))

    with pytest.raises(Fenced):
        call(Guard(Deleting(store)), Shop().pay, order("k2"))


def test_attempt_without_a_step_fails_as_itself_without_a_store(guard: Guard, call: Caller) -> None:
    """The turn of its key then lapses by itself, and the same key goes on."""

    class Failing(StoreWrapper):
        def release(self, held: Any, *, retention: float) -> Any:
            if held.operation.scope.startswith("unique|"):
                raise StoreUnavailable("down")
            return self.inner.release(held, retention=retention)

    def fails(op: Op) -> Performing:
        raise RuntimeError("before the first step")
        yield

    events: list[str] = []
    observed = Guard(Failing(guard.store), observers=[lambda event: events.append(event.kind)])
    with pytest.raises(RuntimeError):
        call(observed, fails, order("k1"))
    assert events[-2:] == ["released", "failed"]
    guard.store.shift += 31
    assert call(guard, Shop().pay, order("k1")).value == DONE
