"""`once`: a function runs once per key, and every later call gets the first result."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import threading
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import Any

import pytest

from oncemore import Guard, once
from oncemore.errors import (
    ConfigurationError,
    InvalidKey,
    PayloadMismatch,
)
from oncemore.testing.clock import Clock


@pytest.fixture
def runs() -> list[Any]:
    """The calls of the functions under test."""
    return []


@dataclasses.dataclass(frozen=True)
class Receipt:
    id: int
    amount: Decimal


FALSY = [[], {}, 0, 0.0, False, "", None, (), b""]


@pytest.mark.parametrize("value", [*FALSY, Receipt(1, Decimal("9.50")), "text", [1, {"a": (2,)}]], ids=repr)
def test_second_call_gets_the_firsts_result_as_itself(guard: Guard, runs: list[Any], value: Any) -> None:
    @once(guard, key="invoice:{number}", types=(Receipt,))
    def send(number: int) -> Any:
        runs.append(number)
        return value

    results = [send(1), send(1), send(1)]
    assert results == [value] * 3
    assert {type(result) for result in results} == {type(value)}
    assert runs == [1]
    send(2)
    assert runs == [1, 2]


@pytest.mark.parametrize("value", [*FALSY, Receipt(1, Decimal("9.50"))], ids=repr)
async def test_async_function_happens_once(guard: Guard, runs: list[Any], value: Any) -> None:
    @once(guard, key="invoice:{number}", types=(Receipt,))
    async def send(number: int) -> Any:
        await asyncio.sleep(0)
        runs.append(number)
        return value

    assert inspect.iscoroutinefunction(send)
    results = [await send(1), await send(1)]
    assert results == [value] * 2
    assert {type(result) for result in results} == {type(value)}
    assert runs == [1]


def receipts(number: int) -> dict[str, list[Receipt]] | Later | None:
    return {"receipts": [Receipt(number, Decimal(1))]} if number == 1 else Later(Receipt(number, Decimal(2)))


def test_classes_are_known_from_the_return_annotation(guard: Guard) -> None:
    guarded = once(guard, key="{number}")(receipts)
    for number in (1, 2):
        assert guarded(number) == guarded(number) == receipts(number)


@dataclasses.dataclass(frozen=True)
class Later:
    """Defined below the function that it annotates."""

    receipt: Receipt


def test_ten_concurrent_threads_get_one_result(guard: Guard, runs: list[Any]) -> None:
    together = threading.Barrier(10)

    @once(guard, key="{number}")
    def send(number: int) -> int:
        runs.append(number)
        return len(runs)

    def call(_: int) -> int:
        together.wait()
        return send(7)

    with ThreadPoolExecutor(10) as pool:
        assert list(pool.map(call, range(10))) == [1] * 10
    assert runs == [7]


async def test_ten_concurrent_tasks_get_one_result(guard: Guard, runs: list[Any]) -> None:
    @once(guard, key="{number}")
    async def send(number: int) -> int:
        await asyncio.sleep(0.01)
        runs.append(number)
        return len(runs)

    assert await asyncio.gather(*(send(7) for _ in range(10))) == [1] * 10
    assert runs == [7]


# Which calls are the same


def test_positional_and_keyword_calls_and_defaults_are_the_same_call(guard: Guard, runs: list[Any]) -> None:
    @once(guard, key="{order}:{currency}")
    def pay(order: int, amount: Decimal, currency: str = "EUR", *, express: bool = False) -> int:
        runs.append(order)
        return len(runs)

    calls = [
        pay(1, Decimal(5)),
        pay(1, amount=Decimal("5.00")),
        pay(amount=Decimal(5), order=1),
        pay(1, Decimal(5), "EUR"),
        pay(1, Decimal(5), currency="EUR", express=False),
    ]
    assert calls == [1] * 5
    with pytest.raises(PayloadMismatch):
        pay(1, Decimal(5), express=True)
    with pytest.raises(TypeError, match="order"):
        pay(amount=Decimal(5))  # type: ignore[call-arg]


def test_any_number_of_arguments_are_compared(guard: Guard, runs: list[Any]) -> None:
    @once(guard, key="{job}")
    def start(job: str, /, *args: int, **options: str) -> int:
        runs.append(job)
        return len(runs)

    assert start("a", 1, 2, x="1", y="2") == start("a", 1, 2, y="2", x="1") == 1
    for changed in (lambda: start("a", 1), lambda: start("a", 2, 1, x="1", y="2"), lambda: start("a", 1, 2, x="1")):
        with pytest.raises(PayloadMismatch):
            changed()
    assert start("b") == start("b") == 2


def test_different_payload_under_the_same_key_never_runs(guard: Guard, runs: list[Any]) -> None:
    @once(guard, key="{order}")
    def pay(order: int, amount: int) -> str:
        runs.append(amount)
        return "paid"

    pay(1, 100)
    with pytest.raises(PayloadMismatch):
        pay(1, 999)
    assert runs == [100]
    assert pay(1, 100) == "paid"


def test_ignored_arguments_are_not_compared(guard: Guard) -> None:
    @once(guard, key="{order}", ignore=["session"])
    def pay(order: int, session: object) -> str:
        return "paid"

    assert pay(1, object()) == pay(1, session=object()) == "paid"


def test_argument_without_fingerprint_is_refused_before_the_claim(guard: Guard, runs: list[Any]) -> None:
    @once(guard, key="{order}")
    def pay(order: int, session: object) -> None:
        runs.append(order)

    with pytest.raises(ConfigurationError, match="has no fingerprint"):
        pay(1, object())
    assert runs == []


class Account:
    def __init__(self, id: int) -> None:
        self.id = id


def test_method_key_may_name_attributes_of_its_object(guard: Guard) -> None:
    class Bank(Account):
        @once(guard, key="{self.id}:{order}")
        def pay(self, order: int) -> tuple[int, int]:
            return self.id, order

        @once(guard, key="{order}", ignore=("self",))
        async def apay(self, order: int) -> int:
            return self.id

        @classmethod
        @once(guard, key="{order}")
        def of_class(cls, order: int) -> str:
            return cls.__name__

        @staticmethod
        @once(guard, key="{order}")
        def static(order: int) -> int:
            return order

    assert [Bank(1).pay(5), Bank(1).pay(5), Bank(2).pay(5)] == [(1, 5), (1, 5), (2, 5)]
    assert [asyncio.run(Bank(id).apay(5)) for id in (1, 2)] == [1, 1]
    assert [Bank.of_class(1), Bank.of_class(1), Bank.static(3), Bank(1).static(3)] == ["Bank", "Bank", 3, 3]


def test_key_function_gets_the_same_arguments(guard: Guard, runs: list[Any]) -> None:
    @once(guard, key=lambda order, **_: f"order-{order}")
    def pay(order: int, amount: int = 1) -> int:
        runs.append(order)
        return len(runs)

    assert pay(1) == pay(order=1) == pay(1, amount=1) == 1
    assert pay.operation(1).key == "order-1"  # type: ignore[attr-defined]


@pytest.mark.parametrize("bad", ["", " ", None, 7, "x" * 256, "a\nb", "\ud800"], ids=repr)
def test_key_function_with_bad_key_is_refused_before_the_effect(guard: Guard, runs: list[Any], bad: Any) -> None:
    @once(guard, key=lambda: bad)
    def work() -> None:
        runs.append(1)

    with pytest.raises(InvalidKey):
        work()
    assert runs == []


def test_functions_never_share_keys_unless_they_share_a_name(guard: Guard) -> None:
    @once(guard, key="{n}")
    def first(n: int) -> str:
        return "first"

    @once(guard, key="{n}")
    def second(n: int) -> str:
        return "second"

    @once(guard, key="{n}", name="shared")
    def third(n: int) -> str:
        return "third"

    @once(guard, key="{n}", name="shared")
    def fourth(n: int) -> str:
        return "fourth"

    assert [first(1), second(1), third(1), fourth(1)] == ["first", "second", "third", "third"]


def test_time_window_in_key_moves_with_the_clock_of_tests() -> None:
    guard = Guard("memory://")

    @once(guard, key="{window:1h}")
    def report() -> None: ...

    first = report.operation().key  # type: ignore[attr-defined]
    Clock(guard.store).advance(3600)
    assert report.operation().key != first  # type: ignore[attr-defined]


def test_time_window_in_key_is_by_the_guards_clock(runs: list[Any]) -> None:
    class Dial:
        now = 10_000.0

        def monotonic(self) -> float:
            return self.now

        def time(self) -> float:
            return self.now

    guard = Guard("memory://", clock=Dial())

    @once(guard, key="{window:1h}")
    def report() -> None:
        runs.append(Dial.now)

    report()
    report()
    Dial.now += 3600
    report()
    assert runs == [10_000.0, 13_600.0]


def test_call_can_be_looked_up_without_making_it(guard: Guard, runs: list[Any]) -> None:
    @once(guard, key="invoice:{number}")
    def send(number: int) -> None:
        runs.append(number)

    operation = send.operation(4)  # type: ignore[attr-defined]
    assert guard.find(operation.scope, operation.key) is None
    assert runs == []
    send(4)
    record = guard.find(operation.scope, operation.key)
    assert record is not None
    assert record.name == operation.name == f"{__name__}.{send.__qualname__}"


def test_argument_without_fingerprint_is_named_with_ignore(guard: Guard) -> None:
    @once(guard, key="{number}")
    def send(number: int, session: object) -> None: ...

    with pytest.raises(ConfigurationError, match=r"send cannot compare its argument 'session'.*ignore=\('session',\)"):
        send(1, object())


def test_mismatch_names_the_function_and_the_key(guard: Guard) -> None:
    @once(guard, key="invoice:{number}")
    def send(number: int, amount: int) -> int:
        return amount

    send(7, 100)
    with pytest.raises(
        PayloadMismatch, match=r"send was called before under the key 'invoice:7', with other arguments"
    ):
        send(7, 200)
