"""`once` after errors: chosen errors are results, others are not, and an effect never happens twice."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from oncemore import Guard, Outcome, Resolution, once
from oncemore._ledger.events import Event
from oncemore._runtime.plan import run
from oncemore.errors import (
    ConfigurationError,
    CorruptRecord,
    OutcomeNotKept,
    StoreUnavailable,
)
from oncemore.stores.memory import MemoryStore
from oncemore.testing.clock import Clock


@pytest.fixture
def runs() -> list[Any]:
    """The calls of the functions under test."""
    return []


class Declined(Exception):
    def __init__(self, card: str, *, code: int) -> None:
        super().__init__(card)
        self.code = code


def test_chosen_error_is_raised_again_as_itself(guard: Guard, runs: list[Any]) -> None:
    @once(guard, key="{order}", errors=(Declined,))
    def pay(order: int) -> None:
        runs.append(order)
        raise Declined("4242", code=51)

    for _ in range(3):
        with pytest.raises(Declined) as caught:
            pay(1)
        assert (caught.value.args, caught.value.code) == (("4242",), 51)
    assert runs == [1]


async def test_chosen_error_of_an_async_function_is_raised_again(guard: Guard, runs: list[Any]) -> None:
    @once(guard, key="{order}", errors=(ValueError,))
    async def pay(order: int) -> None:
        runs.append(order)
        raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            await pay(1)
    assert runs == [1]


def test_any_other_error_leaves_the_key_free(guard: Guard, runs: list[Any]) -> None:
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


def test_chosen_error_may_be_left_out_by_keep(guard: Guard, runs: list[Any]) -> None:
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
def test_unstorable_result_is_returned_once_and_never_run_again(
    guard: Guard, runs: list[Any], keep: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """And why is told at once, not when somebody asks again."""
    handle = object()

    @once(guard, key="{n}", keep=keep)
    def connect(n: int) -> object:
        runs.append(n)
        return handle

    assert connect(1) is handle
    assert "builtins:object: A object cannot be stored as the result of a guarded function" in caplog.text
    for _ in range(2):
        with pytest.raises(OutcomeNotKept):
            connect(1)
    assert runs == [1]


@dataclasses.dataclass
class Receipt:
    number: int


class Session:
    pass


def test_result_of_unnamed_class_is_returned_once_and_warned_of(
    guard: Guard, runs: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    @once(guard, key="{n}")
    def pay(n: int) -> Any:
        runs.append(n)
        return Receipt(n)

    assert pay(1) == Receipt(1)
    remedy = "name it in the function's return annotation, or write types=(Receipt,)"
    assert remedy in caplog.text
    with pytest.raises(OutcomeNotKept) as caught:
        pay(1)
    assert remedy in caught.value.detail
    assert runs == [1]


def test_annotated_class_that_is_unstorable_is_refused_before_the_effect(guard: Guard, runs: list[Any]) -> None:
    @once(guard, key="{n}")
    def connect(n: int) -> Session | None:
        runs.append(n)
        return Session()

    for _ in range(2):
        with pytest.raises(ConfigurationError, match=r"connect returns a Session, which cannot be stored and replayed"):
            connect(1)
    assert runs == []
    assert not guard.list().records


def test_unstorable_class_in_types_is_refused_before_the_effect(guard: Guard, runs: list[Any]) -> None:
    @once(guard, key="{n}", types=(Session,))
    def connect(n: int) -> Any:
        runs.append(n)

    with pytest.raises(ConfigurationError, match=r"connect returns a Session, which cannot be stored and replayed"):
        connect(1)
    assert runs == []


def test_unstorable_error_is_raised_once_and_never_run_again(guard: Guard, runs: list[Any]) -> None:
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


def test_unreadable_result_is_reported_to_caller_and_observers(
    guard: Guard, events: list[Event], runs: list[Any]
) -> None:
    @once(guard, key="{n}")
    def work(n: int) -> None:
        runs.append(n)

    lease = run(guard.store.claim(work.operation(1), lease=30.0))  # type: ignore[attr-defined]
    run(guard.store.settle(lease, Outcome("value", body=b"\xc1"), retention=60.0))  # type: ignore[arg-type]
    with pytest.raises(CorruptRecord):
        work(1)
    assert [(event.kind, event.code) for event in events][-1] == ("failed", CorruptRecord.code)
    assert runs == []


def test_resolved_result_is_returned_even_if_it_is_unstorable() -> None:
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
