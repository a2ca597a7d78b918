"""Functions in steps are finished with the arguments they were called with, or not touched at all."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from typing import Any

import pytest

from oncemore import Guard, once
from oncemore._ledger.completer import Completer, Tally
from oncemore._ledger.context import current_operation
from oncemore._runtime.backoff import Backoff

from .stepping import Shop

NO_PAUSE = Backoff(base=0.0, cap=0.0)


def test_function_is_completed_with_its_original_arguments(guard: Guard) -> None:
    shop = Shop("after")
    calls: list[Any] = []

    @once(guard, key="order:{order}", effect="steps", ignore=("mailer",))
    def pay(order: int, *items: str, mailer: object = None, **more: int) -> Any:
        op = current_operation()
        op.step("charge", lambda: shop.do("charge"))
        calls.append((order, items, mailer, more))
        shop.may_fail("after")
        return [order, items]

    with pytest.raises(RuntimeError):
        pay(7, "a", "b", mailer=object(), size=3)
    completer = Completer(guard, {pay.operation(7).name: pay}, pace=NO_PAUSE)  # type: ignore[attr-defined]
    assert completer.run_once() == Tally(completed=1)
    assert calls[1] == (7, ("a", "b"), None, {"size": 3})
    assert pay(7, "a", "b", size=3) == [7, ("a", "b")]
    assert shop.log == ["charge"]


@dataclasses.dataclass
class Order:
    number: int


@dataclasses.dataclass
class Charge:
    order: Order


def test_function_is_finished_with_objects_that_its_annotations_name(guard: Guard) -> None:
    """The kept argument, and the result of a step, are of classes that only annotations name."""
    shop, charges = Shop("after"), []

    def charge() -> Charge:
        shop.do("charge")
        return Charge(Order(7))

    @once(guard, key="order:{order.number}", effect="steps", name="pay")
    def pay(order: Order) -> int:
        charges.append(current_operation().step("charge", charge))
        shop.may_fail("after")
        return order.number

    with pytest.raises(RuntimeError):
        pay(Order(7))
    assert Completer(guard, {"pay": pay}, pace=NO_PAUSE).run_once() == Tally(completed=1)
    assert charges == [Charge(Order(7))] * 2
    assert pay(Order(7)) == 7
    assert shop.log == ["charge"]


async def test_an_async_function_is_finished_too(guard: Guard) -> None:
    shop = Shop("after")

    @once(guard, key="order:{order}", effect="steps", name="pay")
    async def pay(order: int) -> Any:
        await current_operation().step("charge", lambda: shop.do("charge"))
        shop.may_fail("after")
        return order

    with pytest.raises(RuntimeError):
        await pay(7)
    assert await Completer(guard, {"pay": pay}, pace=NO_PAUSE).arun_once() == Tally(completed=1)
    assert await pay(7) == 7
    assert shop.log == ["charge"]


async def test_blocking_function_is_completed_without_blocking_the_loop(guard: Guard) -> None:
    """`oncemore complete` awaits all performers, also plain functions."""
    shop, threads = Shop("after"), []

    @once(guard, key="order:{order}", effect="steps", name="pay")
    def pay(order: int) -> Any:
        op = current_operation()
        op.step("reserve", lambda: shop.do("reserve"))
        op.step("charge", lambda: shop.do("charge"))
        threads.append(threading.current_thread())
        shop.may_fail("after")
        return order

    with pytest.raises(RuntimeError):
        await asyncio.to_thread(pay, 7)
    assert await Completer(guard, {"pay": pay}, pace=NO_PAUSE).arun_once() == Tally(completed=1)
    assert await asyncio.to_thread(pay, 7) == 7
    assert shop.log == ["reserve", "charge"]
    assert threading.current_thread() not in threads


SHOP = Shop()


def charged() -> None:
    current_operation().step("charge", lambda: SHOP.do("charge"))
    SHOP.may_fail("after")


def as_method(self: object, order: int) -> None:
    charged()


def with_session(order: int, session: object) -> None:
    charged()


def with_amount(order: int, amount: int = 5) -> None:
    charged()


def with_cents(order: int, cents: int = 500) -> None:
    charged()


@pytest.mark.parametrize(
    ("then", "arguments", "later", "what"),
    [
        (as_method, (object(), 7), as_method, "'self'"),
        (with_session, (7, object()), with_session, "'session'"),
        (with_amount, (7,), with_cents, "'amount'"),
    ],
)
def test_function_with_changed_signature_is_not_begun(
    guard: Guard, caplog: pytest.LogCaptureFixture, then: Any, arguments: Any, later: Any, what: str
) -> None:
    """Each call that fails would count as an attempt, until all that was done is undone."""
    SHOP.fails = ["after"]
    ignore = ["session"] if then is with_session else ["self"] if then is as_method else []
    before, after = (
        once(guard, key="{order}", effect="steps", name="pay", ignore=ignore)(each) for each in (then, later)
    )
    with pytest.raises(RuntimeError):
        before(*arguments)
    assert Completer(guard, {"pay": after}, pace=NO_PAUSE).run_once() == Tally(failing=1)
    assert what in caplog.text
    assert guard.find("once:pay", "7").attempts == 1  # type: ignore[union-attr]
