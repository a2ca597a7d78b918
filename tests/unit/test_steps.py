"""An operation in steps continues after its last checkpoint, and never repeats a step that has one."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import msgspec
import pytest

from oncemore import Guard, Op, Operation, Retry
from oncemore._ledger.context import derive
from oncemore._runtime.plan import Call
from oncemore.errors import (
    ConfigurationError,
    InvalidPayload,
    PayloadMismatch,
    StepsChanged,
    StoreError,
    UnknownOutcome,
)

from .stepping import ASKED, DONE, POLICY, Broken, Caller, Performing, Shop, steps_of, take


@pytest.fixture
def call(runner: asyncio.Runner | None) -> Caller:
    return Caller(runner)


def test_each_step_runs_once_and_result_is_stored(guard: Guard, call: Caller) -> None:
    shop = Shop()
    assert call(guard, shop.pay).value == DONE
    assert call(guard, shop.pay).how == "replayed"
    guard.cache.drop(ASKED.id)
    assert call(guard, shop.pay).how == "replayed"
    assert shop.log == ["reserve", "charge", "ship"]
    assert steps_of(guard) == [(f"orders.pay/{name}", "settled") for name in ("reserve", "charge", "ship")]


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
    """After an interruption nothing is retried within the attempt."""
    shop = Shop(where, error=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        call(guard, shop.pay)
    guard.cache.drop(ASKED.id)
    answer = call(guard, shop.pay)
    assert (answer.value, answer.attempt) == (DONE, 2)
    assert shop.log == log


def test_failure_after_a_step_leaves_operation_unfinished(guard: Guard, call: Caller) -> None:
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
    with pytest.raises(RuntimeError):
        call(guard, Shop("after reserve").pay)
    with pytest.raises(PayloadMismatch):
        call(guard, Shop().pay, Operation("customer-1", "k", "other", "orders.pay"))


def test_external_step_key_is_stable_and_differs_for_undo(guard: Guard, call: Caller) -> None:
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


def test_step_after_a_failed_step_is_refused(guard: Guard, call: Caller) -> None:
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


def test_performer_may_succeed_after_its_last_step_failed(guard: Guard, call: Caller) -> None:
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
        (("reserve",), "ended after 1 steps, and an earlier attempt had begun step 2, 'charge'"),
        ((), "ended after 0 steps, and an earlier attempt had begun step 1, 'reserve'"),
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


def test_failure_before_taken_steps_is_a_change(guard: Guard, call: Caller) -> None:
    """Otherwise only some of the steps would be undone."""
    with pytest.raises(RuntimeError):
        call(guard, Shop("after charge").pay)

    def stricter(op: Op) -> Performing:
        yield take(op, "reserve", lambda: None)
        raise LookupError("a new check")

    with pytest.raises(StepsChanged, match=r"ended after 1 steps, and an earlier attempt had begun step 2, 'charge'"):
        call(guard, stricter)


def test_sleep_in_place_of_a_step_is_a_change(guard: Guard, call: Caller) -> None:
    with pytest.raises(RuntimeError):
        call(guard, Shop("after charge").pay)

    def dozes(op: Op) -> Performing:
        yield Call(lambda: op.sleep("doze", 0))

    with pytest.raises(StepsChanged, match="step 1 was 'reserve' and is now 'doze'"):
        call(guard, dozes)


def test_payload_mismatch_raised_by_a_step_is_not_converted(guard: Guard, call: Caller) -> None:
    def inner() -> None:
        raise PayloadMismatch("of another operation")

    def perform(op: Op) -> Performing:
        yield take(op, "inner", inner)

    with pytest.raises(PayloadMismatch, match="of another operation"):
        call(guard, perform)


def test_a_new_life_of_the_key_has_new_steps(guard: Guard, call: Caller) -> None:
    """After the retention, and after a deletion, the key runs as new."""
    shop = Shop()
    call(guard, shop.pay)
    guard.delete(*ASKED.id)
    call(guard, shop.pay)
    guard.store.shift += POLICY.ttl + 1
    guard.cache.drop(ASKED.id)
    call(guard, shop.pay)
    assert shop.log == ["reserve", "charge", "ship"] * 3


def test_steps_of_one_name_have_different_keys(guard: Guard, call: Caller) -> None:
    """To a provider, a second charge under the first one's key is the first charge."""
    keys: list[str] = []
    fails = [RuntimeError("after the second"), LookupError("out of stock")]

    def pay(op: Op) -> Performing:
        for _ in range(2):
            yield take(op, "charge", lambda key: keys.append(key), undo=lambda value, key: keys.append(key))
        raise fails.pop(0)

    with pytest.raises(RuntimeError):
        call(guard, pay)
    assert call(Guard(guard.store), pay).outcome.kind == "error"
    assert len(keys) == len(set(keys)) == 4
    assert keys[0] == derive(ASKED, "charge")


def test_checkpoints_live_as_long_as_the_operation(guard: Guard, call: Caller) -> None:
    shop = Shop("after charge")
    with pytest.raises(RuntimeError):
        call(guard, shop.pay)
    guard.store.shift += 29 * 86400
    guard.purge()
    guard.cache = Guard("memory://").cache
    assert call(guard, shop.pay).value == DONE
    assert shop.log == ["reserve", "charge", "ship"]


@pytest.mark.parametrize("days", [30.5, 32, 400])
@pytest.mark.parametrize("giving_up", [False, True])
def test_what_was_left_for_too_long_is_not_resumed(guard: Guard, call: Caller, days: float, giving_up: bool) -> None:
    """It is not begun again if its request is gone, and not reported as undone, because its steps are unknown."""
    shop = Shop("after charge")
    with pytest.raises(RuntimeError):
        call(guard, shop.pay)
    guard.store.shift += days * 86400
    guard.purge()
    for _ in range(3):
        with pytest.raises(UnknownOutcome, match="checkpoints may be gone"):
            call(Guard(guard.store), shop.pay, msgspec.structs.replace(ASKED, giving_up=giving_up))
    assert shop.log == ["reserve", "charge"]
    assert guard.find(*ASKED.id).state == "held"  # type: ignore[union-attr]


def test_expired_steps_are_not_restarted_though_hold_fails(guard: Guard, call: Caller) -> None:
    shop = Shop("after charge")
    with pytest.raises(RuntimeError):
        call(guard, shop.pay)
    guard.store.shift += 400 * 86400
    with pytest.raises(StoreError):
        call(Guard(Broken(guard.store, "hold", "orders.pay")), shop.pay)
    guard.store.shift += 31
    with pytest.raises(UnknownOutcome):
        call(Guard(guard.store), shop.pay)
    assert shop.log == ["reserve", "charge"]


def test_failure_before_first_step_may_be_retried_late(guard: Guard, call: Caller) -> None:
    policy = dataclasses.replace(POLICY, ttl="90d")
    shop = Shop()

    def fails(op: Op) -> Performing:
        raise RuntimeError("not yet")
        yield

    with pytest.raises(RuntimeError):
        call(guard, fails, policy=policy)
    guard.store.shift += 40 * 86400
    assert call(Guard(guard.store), shop.pay, policy=policy).value == DONE
