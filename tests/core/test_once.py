"""`once`: any function happens once per key, and every further call gets the first one's result."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import Any

import pytest

from oncemore import Guard, Outcome, Policy, Resolution, once
from oncemore.core.events import Event
from oncemore.core.plan import run
from oncemore.core.store import Filter
from oncemore.errors import (
    ConfigurationError,
    CorruptRecord,
    Duplicate,
    InvalidKey,
    OutcomeNotKept,
    PayloadMismatch,
    StoreUnavailable,
)
from oncemore.stores.memory import MemoryStore
from oncemore.testing.clock import Clock


@pytest.fixture
def runs() -> list[Any]:
    """What the functions under test have done."""
    return []


class Declined(Exception):
    def __init__(self, card: str, *, code: int) -> None:
        super().__init__(card)
        self.code = code


@dataclasses.dataclass(frozen=True)
class Receipt:
    id: int
    amount: Decimal


FALSY = [[], {}, 0, 0.0, False, "", None, (), b""]


@pytest.mark.parametrize("value", [*FALSY, Receipt(1, Decimal("9.50")), "text", [1, {"a": (2,)}]], ids=repr)
def test_the_second_call_gets_the_firsts_result_as_itself(guard: Guard, runs: list[Any], value: Any) -> None:
    """CASES 30, 16."""

    @once(guard, key="invoice:{number}")
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
async def test_an_async_function_happens_once(guard: Guard, runs: list[Any], value: Any) -> None:
    """CASES 30."""

    @once(guard, key="invoice:{number}")
    async def send(number: int) -> Any:
        await asyncio.sleep(0)
        runs.append(number)
        return value

    assert inspect.iscoroutinefunction(send)
    results = [await send(1), await send(1)]
    assert results == [value] * 2
    assert {type(result) for result in results} == {type(value)}
    assert runs == [1]


def test_ten_threads_at_once_get_one_result(guard: Guard, runs: list[Any]) -> None:
    """CASES 17."""
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


async def test_ten_tasks_at_once_get_one_result(guard: Guard, runs: list[Any]) -> None:
    """CASES 17."""

    @once(guard, key="{number}")
    async def send(number: int) -> int:
        await asyncio.sleep(0.01)
        runs.append(number)
        return len(runs)

    assert await asyncio.gather(*(send(7) for _ in range(10))) == [1] * 10
    assert runs == [7]


# Which calls are the same


def test_positional_and_keyword_calls_and_defaults_are_the_same_call(guard: Guard, runs: list[Any]) -> None:
    """CASES 30."""

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


def test_a_different_payload_under_the_same_key_never_runs(guard: Guard, runs: list[Any]) -> None:
    """CASES 14."""

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


def test_an_argument_without_a_fingerprint_is_told_before_anything_happens(guard: Guard, runs: list[Any]) -> None:
    @once(guard, key="{order}")
    def pay(order: int, session: object) -> None:
        runs.append(order)

    with pytest.raises(ConfigurationError, match="has no fingerprint"):
        pay(1, object())
    assert runs == []


class Account:
    def __init__(self, id: int) -> None:
        self.id = id


def test_a_method_is_keyed_by_what_its_key_says_of_its_object(guard: Guard) -> None:
    class Bank(Account):
        @once(guard, key="{self.id}:{order}")
        def pay(self, order: int) -> tuple[int, int]:
            return self.id, order

        @once(guard, key="{order}")
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


def test_a_key_may_be_made_by_a_function_of_the_same_arguments(guard: Guard, runs: list[Any]) -> None:
    @once(guard, key=lambda order, **_: f"order-{order}")
    def pay(order: int, amount: int = 1) -> int:
        runs.append(order)
        return len(runs)

    assert pay(1) == pay(order=1) == pay(1, amount=1) == 1
    assert pay.operation(1).key == "order-1"  # type: ignore[attr-defined]


@pytest.mark.parametrize("bad", ["", " ", None, 7, "x" * 256, "a\nb", "\ud800"], ids=repr)
def test_a_function_that_makes_a_bad_key_is_told_and_nothing_happens(guard: Guard, runs: list[Any], bad: Any) -> None:
    """CASES 3."""

    @once(guard, key=lambda: bad)
    def work() -> None:
        runs.append(1)

    with pytest.raises(InvalidKey):
        work()
    assert runs == []


def test_two_functions_never_share_a_key_unless_they_share_a_name(guard: Guard) -> None:
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


def test_a_time_window_in_the_key_is_by_the_guards_clock(runs: list[Any]) -> None:
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


def test_a_call_can_be_looked_up_without_making_it(guard: Guard, runs: list[Any]) -> None:
    """CASES 32."""

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


# Settings


def test_two_rules_on_one_store_keep_their_own_settings(guard: Guard, runs: list[Any]) -> None:
    """CASES 30."""

    @once(guard, key="{n}", ttl="1h")
    def short(n: int) -> None:
        runs.append("short")

    @once(guard, key="{n}", ttl="7d", on_duplicate="reject")
    def long(n: int) -> None:
        runs.append("long")

    short(1)
    long(1)
    guard.cache = Guard("memory://").cache
    Clock(guard.store).advance(2 * 3600)
    short(1)
    with pytest.raises(Duplicate):
        long(1)
    assert runs == ["short", "long", "short"]


def test_what_a_rule_does_not_say_is_as_the_guard_says() -> None:
    guard = Guard("memory://", policy=Policy(ttl="2h", on_duplicate="reject"))

    @once(guard, key="{n}", lease="5s")
    def work(n: int) -> None: ...

    work(1)
    (record,) = guard.list(Filter()).records
    assert record.expires_at is not None
    assert record.settled_at is not None
    assert record.expires_at - record.settled_at == pytest.approx(7200)
    with pytest.raises(Duplicate):
        work(1)


@pytest.mark.parametrize(("settings", "error"), [({"tll": "7d"}, TypeError), ({"ttl": "soon"}, ConfigurationError)])
def test_a_wrong_setting_is_told_when_the_function_is_decorated(
    guard: Guard, settings: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error, match=r"tll|soon"):
        once(guard, key="k", **settings)


@pytest.mark.parametrize("key", ["{nunber}", "", "{number", "{a}{b}"])
def test_a_wrong_template_is_told_when_the_function_is_decorated(guard: Guard, key: str) -> None:
    with pytest.raises(ConfigurationError):
        once(guard, key=key)(lambda number, a, b: None)


def test_an_unknown_name_in_ignore_is_told(guard: Guard) -> None:
    with pytest.raises(ConfigurationError, match="ignore names 'sesion', which sum does not take"):
        once(guard, key="k", name="sum", ignore=["sesion"])(lambda a, session: None)


def generator() -> Any:
    yield 1


async def async_generator() -> Any:
    yield 1


@pytest.mark.parametrize("function", [generator, async_generator, functools.partial(generator)])
def test_a_generator_is_refused(guard: Guard, function: Callable[..., Any]) -> None:
    with pytest.raises(ConfigurationError, match="is a generator"):
        once(guard, key="k", name="g")(function)


@pytest.mark.parametrize("wrapper", [staticmethod, classmethod])
def test_a_decorator_in_the_wrong_place_is_told(guard: Guard, wrapper: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"Write @once below @{wrapper.__name__}"):
        once(guard, key="k", name="n")(wrapper(lambda cls: None))


class Greeter:
    async def __call__(self, name: str) -> str:
        return f"hello {name}"


@pytest.mark.parametrize("function", [lambda n: n, functools.partial(max, 1), Greeter()], ids=repr)
def test_a_function_without_a_name_of_its_own_needs_one(guard: Guard, function: Callable[..., Any]) -> None:
    """Two lambdas would share their keys, and one would replay the other's result."""
    with pytest.raises(ConfigurationError, match="give it one by name="):
        once(guard, key="k")(function)


async def test_any_callable_will_do_once_it_has_a_name(guard: Guard) -> None:
    square = once(guard, key="{n}", name="square")(lambda n: n * n)
    greet = once(guard, key="{name}", name="greet")(Greeter())
    assert [square(3), square(3)] == [9, 9]
    assert [await greet("Ada"), await greet("Ada")] == ["hello Ada"] * 2


def test_a_plain_function_that_makes_a_coroutine_is_told_and_the_key_stays_free(guard: Guard) -> None:
    async def work() -> str:
        return "done"

    blocking = once(guard, key="k", name="n")(lambda: work())
    with pytest.raises(ConfigurationError, match="use the awaited form"):
        blocking()
    assert once(guard, key="k", name="n")(lambda: "done")() == "done"


def test_the_decorated_function_still_looks_like_itself(guard: Guard) -> None:
    @once(guard, key="{number}")
    def send(number: int) -> None:
        """Send it."""

    assert (send.__name__, send.__doc__) == ("send", "Send it.")
    assert list(inspect.signature(send).parameters) == ["number"]


# Errors


def test_a_chosen_error_is_raised_again_as_itself(guard: Guard, runs: list[Any]) -> None:
    """CASES 30."""

    @once(guard, key="{order}", errors=(Declined,))
    def pay(order: int) -> None:
        runs.append(order)
        raise Declined("4242", code=51)

    for _ in range(3):
        with pytest.raises(Declined) as caught:
            pay(1)
        assert (caught.value.args, caught.value.code) == (("4242",), 51)
    assert runs == [1]


async def test_a_chosen_error_of_an_async_function_is_raised_again(guard: Guard, runs: list[Any]) -> None:
    @once(guard, key="{order}", errors=(ValueError,))
    async def pay(order: int) -> None:
        runs.append(order)
        raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            await pay(1)
    assert runs == [1]


def test_any_other_error_leaves_the_key_free(guard: Guard, runs: list[Any]) -> None:
    """CASES 20."""

    @once(guard, key="{order}", errors=(Declined,))
    def pay(order: int) -> str:
        runs.append(order)
        if len(runs) == 1:
            raise TimeoutError
        return "paid"

    with pytest.raises(TimeoutError):
        pay(1)
    assert [pay(1), pay(1)] == ["paid", "paid"]
    assert runs == [1, 1]


def test_a_chosen_error_may_be_left_out_by_keep(guard: Guard, runs: list[Any]) -> None:
    @once(guard, key="{order}", errors=(Declined,), keep="success")
    def pay(order: int) -> None:
        runs.append(order)
        raise Declined("4242", code=51)

    for _ in range(2):
        with pytest.raises(Declined):
            pay(1)
    assert runs == [1, 1]


# Results that cannot be kept


@pytest.mark.parametrize("keep", ["final", "success", "all"])
def test_an_unstorable_result_is_the_first_callers_and_never_leads_to_a_second_run(
    guard: Guard, runs: list[Any], keep: Any
) -> None:
    """CASES 22, 30."""
    handle = object()

    @once(guard, key="{n}", keep=keep)
    def connect(n: int) -> object:
        runs.append(n)
        return handle

    assert connect(1) is handle
    for _ in range(2):
        with pytest.raises(OutcomeNotKept):
            connect(1)
    assert runs == [1]


def test_an_error_that_cannot_be_stored_is_the_first_callers_and_the_function_does_not_run_again(
    guard: Guard, runs: list[Any]
) -> None:
    @once(guard, key="{n}", errors=(ValueError,))
    def work(n: int) -> None:
        runs.append(n)
        raise ValueError(object())

    with pytest.raises(ValueError, match="object"):
        work(1)
    with pytest.raises(OutcomeNotKept):
        work(1)
    assert runs == [1]


# Records that are not as they should be


def test_an_unreadable_result_is_told_to_the_caller_and_the_observers(
    guard: Guard, events: list[Event], runs: list[Any]
) -> None:
    """CASES 28."""

    @once(guard, key="{n}")
    def work(n: int) -> None:
        runs.append(n)

    lease = run(guard.store.claim(work.operation(1), lease=30.0))  # type: ignore[attr-defined]
    run(guard.store.settle(lease, Outcome("value", body=b"\xc1"), retention=60.0))  # type: ignore[arg-type]
    with pytest.raises(CorruptRecord):
        work(1)
    assert [(event.kind, event.code) for event in events][-1] == ("failed", CorruptRecord.code)
    assert runs == []


def test_a_result_that_a_resolver_knew_is_returned_also_where_it_could_not_be_stored() -> None:
    """CASES 25, 27."""

    class Failing(MemoryStore):
        def settle(self, *args: Any, **options: Any) -> Any:
            raise StoreUnavailable("gone")

    guard = Guard(Failing())

    @once(guard, key="{n}", on_unknown="resolve", resolver=lambda op: Resolution.settled({"id": 5}))
    def work(n: int) -> Any:
        pytest.fail("performed again")

    run(guard.store.claim(work.operation(1), lease=30.0))  # type: ignore[attr-defined]
    Clock(guard.store).advance(60)
    assert work(1) == {"id": 5}
