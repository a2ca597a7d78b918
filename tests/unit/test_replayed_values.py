"""`guard.run(...).value` is the same whether the operation was performed now or before."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from oncemore import Guard, Inbox, Op, Operation, Outcome, Policy
from oncemore._ledger.events import Event
from oncemore._runtime.plan import run
from oncemore.errors import CorruptRecord, OutcomeNotKept

ASKED = Operation("customer-1", "k", "same", "payments.create")
CREATED = Outcome("response", 201, (), b"made")
CORRUPT = Outcome("value", body=b"\xc1")


@dataclasses.dataclass(frozen=True)
class Receipt:
    id: int


class Declined(Exception):
    pass


@pytest.mark.parametrize("value", ["receipt", 0, None, {"a": (1,)}, CREATED], ids=repr)
def test_replayed_value_is_the_performers(guard: Guard, call: Any, value: Any) -> None:
    first, second, third = [call(guard, ASKED, lambda op: value) for _ in range(3)]
    assert [answer.how for answer in (first, second, third)] == ["stored", "replayed", "replayed"]
    assert first.value == second.value == third.value == value
    assert type(second.value) is type(value)


def test_replayed_value_is_of_the_class_that_is_named(guard: Guard) -> None:
    def pay(op: Op) -> Receipt:
        return Receipt(7)

    def pay_untyped(op: Op) -> object:
        return Receipt(8)

    def pay_twice(op: Op) -> dict[str, Receipt]:
        return {"one": Receipt(9)}

    typed = Policy(types=(Receipt,))
    for key, perform, policy in (
        ("a", pay, None),
        ("b", pay_untyped, typed),
        ("c", pay_twice, None),
        ("d", pay, typed),
    ):
        first, second = [guard.run(Operation("s", key), perform, policy=policy).value for _ in range(2)]
        assert first == second


async def test_awaited_value_is_of_the_class_that_is_named(guard: Guard) -> None:
    async def pay(op: Op) -> Receipt:
        return Receipt(7)

    first = await guard.arun(ASKED, pay)
    assert first.value.id == (await guard.arun(ASKED, pay)).value.id == 7


def test_replayed_error_is_the_value(guard: Guard, call: Any) -> None:
    def decline(op: Op) -> None:
        raise Declined("insufficient funds")

    for how in ("stored", "replayed"):
        answer = call(guard, ASKED, decline, policy=Policy(errors=(Declined,)))
        assert (answer.how, type(answer.value), answer.value.args) == (how, Declined, ("insufficient funds",))
    with pytest.raises(OutcomeNotKept, match="add it to `errors`"):
        call(guard, ASKED, decline)


def test_duplicate_answered_ok_has_no_value(guard: Guard, call: Any) -> None:
    policy = Policy(on_duplicate="ok")
    assert [call(guard, ASKED, lambda op: "receipt", policy=policy).value for _ in range(2)] == ["receipt", None]


# A corrupt record is an event


def corrupted(guard: Guard, operation: Operation) -> None:
    run(guard.store.settle(run(guard.store.claim(operation, lease=30)), CORRUPT, retention=60))


def told(events: list[Event]) -> tuple[str, str, bool]:
    return events[-1].kind, events[-1].code, "cannot be read" in events[-1].detail


def test_corrupt_record_is_an_event_of_guard_and_inbox(guard: Guard, call: Any, events: list[Event]) -> None:
    corrupted(guard, ASKED)
    for policy in (Policy(), Policy(errors=(Exception,))):
        with pytest.raises(CorruptRecord):
            call(guard, ASKED, lambda op: pytest.fail("performed"), policy=policy)
        assert told(events) == ("failed", CorruptRecord.code, True)
    events.clear()
    inbox = Inbox(guard, effect="lease", errors=(Exception,))
    corrupted(guard, inbox.operation("ev_1", "payments", {}))
    received = inbox.handle("ev_1", "payments", {}, lambda op, payload: pytest.fail("handled"))
    assert (received.how, received.value) == ("duplicate", None)  # it was handled, and its sender need not repeat it
    assert [event.kind for event in events[-2:]] == ["failed", "received"]
    assert told(events[:-1]) == ("failed", CorruptRecord.code, True)


def test_record_that_the_store_cannot_read_is_an_event(guard: Guard, events: list[Event]) -> None:
    class Corrupt:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def claim(self, *args: Any, **options: Any) -> Any:
            raise CorruptRecord("The record cannot be read: it was sealed with another key")

    guard.store = Corrupt(guard.store)  # type: ignore[assignment]
    with pytest.raises(CorruptRecord):
        guard.run(ASKED, lambda op: pytest.fail("performed"))
    assert told(events) == ("failed", CorruptRecord.code, True)
