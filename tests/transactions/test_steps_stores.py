"""Operations in steps work on every store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from oncemore import Guard, Op, Operation, Policy
from oncemore._ledger.completer import Completer, Tally
from oncemore._runtime.backoff import Backoff
from oncemore.errors import InProgress, StepsChanged

from .conftest import emptied

ASKED = Operation("customer-1", "k", "same", "orders.pay", request=lambda: {"order": 7})
POLICY = Policy(effect="steps", errors=(LookupError,))


@pytest.fixture(
    params=[
        "memory",
        "sqlite",
        pytest.param("postgres", marks=pytest.mark.server),
        pytest.param("redis", marks=pytest.mark.server),
    ]
)
async def guard(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Guard]:
    if request.param == "postgres":
        url = emptied(request.getfixturevalue("shops_url"))
    elif request.param == "redis":
        prefix = request.getfixturevalue("redis_prefix")
        url = f"{request.getfixturevalue('valkey_url')}?prefix={prefix}"
    else:
        url = {"memory": "memory://", "sqlite": f"sqlite:///{tmp_path / 'once.db'}"}[request.param]
    guard = Guard(url, policy=POLICY)
    yield guard
    await guard.aclose()


class Order:
    def __init__(self, *fails: BaseException) -> None:
        self.log: list[str] = []
        self.fails = list(fails)

    def do(self, what: str) -> str:
        self.log.append(what)
        return what

    async def pay(self, op: Op, request: Any = None) -> Any:
        await op.step("reserve", lambda: self.do("reserve"), undo=lambda value: self.do(f"undo {value}"))
        await op.sleep("breathe", 0.01)
        receipt = await op.step("charge", lambda key: self.do(key), undo=lambda value: self.do("undo charge"))
        if self.fails:
            raise self.fails.pop(0)
        return receipt


async def test_retry_continues_after_the_last_checkpoint(guard: Guard) -> None:
    order = Order(RuntimeError())
    with pytest.raises(RuntimeError):
        await guard.arun(ASKED, order.pay)
    guard.cache = Guard("memory://").cache  # another process
    answer = await guard.arun(ASKED, order.pay)
    assert answer.value == order.log[1]
    assert order.log == ["reserve", order.log[1]]


async def test_completer_finds_and_finishes_the_operation(guard: Guard) -> None:
    order = Order(RuntimeError())
    with pytest.raises(RuntimeError):
        await guard.arun(ASKED, order.pay)
    completer = Completer(guard, {"orders.pay": order.pay}, pace=Backoff(base=0, cap=0))
    assert await completer.arun_once() == Tally(completed=1)
    assert await completer.arun_once() == Tally()
    assert len(order.log) == 2


async def test_failed_operation_is_undone_once(guard: Guard) -> None:
    order = Order(LookupError("declined"))
    assert (await guard.arun(ASKED, order.pay)).outcome.kind == "error"
    guard.cache = Guard("memory://").cache
    assert (await guard.arun(ASKED, order.pay)).how == "replayed"
    assert order.log[2:] == ["undo charge", "undo reserve"]


async def test_changed_steps_are_refused(guard: Guard) -> None:
    with pytest.raises(RuntimeError):
        await guard.arun(ASKED, Order(RuntimeError()).pay)

    async def changed(op: Op) -> None:
        await op.step("bill", lambda: None)

    with pytest.raises(StepsChanged, match="step 1 was 'reserve' and is now 'bill'"):
        await guard.arun(ASKED, changed)


async def test_deleted_operation_starts_again(guard: Guard) -> None:
    order = Order()
    await guard.arun(ASKED, order.pay)
    await guard.adelete(*ASKED.id)
    guard.cache = Guard("memory://").cache
    await guard.arun(ASKED, order.pay)
    assert len(order.log) == 4


async def test_unfinished_unique_order_is_refused_under_other_keys(guard: Guard) -> None:
    first, second = (msgspec.structs.replace(ASKED, key=key, fingerprint=key, unique="order-7") for key in ("k1", "k2"))
    order, other = Order(RuntimeError()), Order()
    with pytest.raises(RuntimeError):
        await guard.arun(first, order.pay)
    for _ in range(2):
        with pytest.raises(InProgress):
            await guard.arun(second, other.pay)
    completer = Completer(guard, {"orders.pay": order.pay}, pace=Backoff(base=0, cap=0))
    assert await completer.arun_once() == Tally(completed=1)
    assert (await guard.arun(second, other.pay)).how == "replayed"
    assert (len(order.log), other.log) == (2, [])


async def test_unique_order_that_failed_for_good_is_free(guard: Guard) -> None:
    first, second = (msgspec.structs.replace(ASKED, key=key, fingerprint=key, unique="order-7") for key in ("k1", "k2"))
    order = Order(LookupError("declined"))
    assert (await guard.arun(first, order.pay)).outcome.kind == "error"
    assert (await guard.arun(second, order.pay)).how == "stored"
