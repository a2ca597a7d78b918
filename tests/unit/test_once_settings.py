"""`once` at decoration: each function has its own settings, and every mistake is refused before an effect."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from oncemore import Guard, Policy, once
from oncemore._ledger.store import Filter
from oncemore.errors import (
    ConfigurationError,
    Duplicate,
)
from oncemore.testing.clock import Clock


@pytest.fixture
def runs() -> list[Any]:
    """The calls of the functions under test."""
    return []


def test_two_rules_on_one_store_keep_their_own_settings(guard: Guard, runs: list[Any]) -> None:
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


def test_settings_not_given_come_from_the_guard() -> None:
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


@pytest.mark.parametrize("settings", [{"tll": "7d"}, {"ttl": "soon"}])
def test_wrong_setting_is_refused_at_decoration(guard: Guard, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"tll|soon"):
        once(guard, key="k", **settings)


@pytest.mark.parametrize("key", ["{nunber}", "", "{number", "{a}{b}"])
def test_wrong_template_is_refused_at_decoration(guard: Guard, key: str) -> None:
    with pytest.raises(ConfigurationError):
        once(guard, key=key)(lambda number, a, b: None)


@pytest.mark.parametrize(
    ("key", "ttl"), [("{window:7d}", "1d"), ("{date:Europe/Berlin}", "24h"), ("{window:1h}", "5m")]
)
def test_window_longer_than_ttl_is_refused(guard: Guard, key: str, ttl: str) -> None:
    """Once a week, and forgotten after a day, would be once a day."""
    with pytest.raises(ConfigurationError, match="make ttl as long as the window"):
        once(guard, key=f"report:{key}", ttl=ttl)(report)
    once(guard, key=f"report:{key}", ttl="8d")(report)


def report() -> None:
    pass


def test_one_name_to_ignore_needs_no_list(guard: Guard, runs: list[Any]) -> None:
    @once(guard, key="{n}", ignore="mailer")
    def send(n: int, mailer: object) -> None:
        runs.append(n)

    send(1, object())
    send(1, object())
    assert runs == [1]


def test_key_that_is_neither_template_nor_function_is_refused(guard: Guard) -> None:
    with pytest.raises(ConfigurationError, match="5 is not a template: write a text"):
        once(guard, key=5)(test_url_in_the_guards_place_is_told)  # type: ignore[arg-type]


def test_url_in_the_guards_place_is_told() -> None:
    with pytest.raises(ConfigurationError, match="guard is a str: make a Guard"):
        once("sqlite:///once.db", key="x")  # type: ignore[arg-type]


def test_unknown_name_in_ignore_is_told(guard: Guard) -> None:
    with pytest.raises(ConfigurationError, match="ignore names 'sesion', which sum does not take"):
        once(guard, key="k", name="sum", ignore=["sesion"])(lambda a, session: None)


def generator() -> Any:
    yield 1


async def async_generator() -> Any:
    yield 1


@pytest.mark.parametrize("function", [generator, async_generator, functools.partial(generator)])
def test_generator_is_refused(guard: Guard, function: Callable[..., Any]) -> None:
    with pytest.raises(ConfigurationError, match="is a generator"):
        once(guard, key="k", name="g")(function)


@pytest.mark.parametrize("wrapper", [staticmethod, classmethod])
def test_decorator_in_the_wrong_place_is_told(guard: Guard, wrapper: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"Write @once below @{wrapper.__name__}"):
        once(guard, key="k", name="n")(wrapper(lambda cls: None))


class Greeter:
    async def __call__(self, name: str) -> str:
        return f"hello {name}"


@pytest.mark.parametrize(
    "function", [lambda n: n, functools.partial(max, 1), Greeter()], ids=["lambda", "partial", "object"]
)
def test_function_without_a_name_of_its_own_needs_one(guard: Guard, function: Callable[..., Any]) -> None:
    """Two lambdas would share their keys, and one would replay the other's result."""
    with pytest.raises(ConfigurationError, match="give it one by name="):
        once(guard, key="k")(function)


async def test_any_callable_will_do_once_it_has_a_name(guard: Guard) -> None:
    square = once(guard, key="{n}", name="square")(lambda n: n * n)
    greet = once(guard, key="{name}", name="greet")(Greeter())
    assert [square(3), square(3)] == [9, 9]
    assert [await greet("Ada"), await greet("Ada")] == ["hello Ada"] * 2


def test_plain_function_returning_coroutine_is_refused_and_key_stays_free(guard: Guard) -> None:
    async def work() -> str:
        return "done"

    blocking = once(guard, key="k", name="n")(lambda: work())
    with pytest.raises(ConfigurationError, match="use the awaited form"):
        blocking()
    assert once(guard, key="k", name="n")(lambda: "done")() == "done"


def test_decorated_function_still_looks_like_itself(guard: Guard) -> None:
    @once(guard, key="{number}")
    def send(number: int) -> None:
        """Send it."""

    assert (send.__name__, send.__doc__) == ("send", "Send it.")
    assert list(inspect.signature(send).parameters) == ["number"]


@pytest.mark.parametrize("key", ["{order}", "charge", "{selfish.id}"])
def test_method_whose_key_does_not_name_self_is_refused(guard: Guard, key: str) -> None:
    with pytest.raises(ConfigurationError, match=r"charge is a method, and key .* does not name self"):

        class Account:
            @once(guard, key=key)
            def charge(self, order: int, selfish: object = None) -> int:
                return order


def test_methods_of_two_objects_are_two_operations(guard: Guard) -> None:
    class Account:
        def __init__(self, id: int) -> None:
            self.id = id

        @once(guard, key="{self.id}:{order}")
        def by_template(self, order: int) -> int:
            return self.id

        @once(guard, key=lambda self, order: f"{self.id}:{order}")
        def by_function(self, order: int) -> int:
            return self.id

        @once(guard, key="{order}", ignore="self")
        def by_order(self, order: int) -> int:
            return self.id

    for name, results in (("by_template", [1, 2]), ("by_function", [1, 2]), ("by_order", [1, 1])):
        assert [getattr(Account(id), name)(5) for id in (1, 2)] == results
