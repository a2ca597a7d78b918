"""The inbox on every driver: the row and the effect in one transaction."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import pytest

from oncemore import Guard, Inbox, Operation, Outcome, Policy
from oncemore._ledger.context import Op
from oncemore._ledger.encrypted import StoreWrapper
from oncemore._ledger.model import Lease
from oncemore._ledger.store import Filter
from oncemore._ledger.values import replayed
from oncemore._runtime.plan import Sleep, arun, run
from oncemore.errors import (
    ConfigurationError,
    InvalidKey,
    NotFound,
    NotResolvable,
    PayloadMismatch,
    StoreError,
    UnknownOutcome,
    WrongState,
)
from oncemore.messages.inbox import DEAD, Received, packed
from oncemore.testing.clock import Clock

from .conftest import on_each_kind
from .shops import Shop

Handling = Callable[[Op, Any], Generator[Any, Any, Any]]
EVENT = {"type": "refund.succeeded", "amount": "10.00"}


class Booked(NamedTuple):
    amount: str


on_two_kinds = pytest.mark.parametrize(
    "shop", ["sqlite3", pytest.param("psycopg-async", marks=pytest.mark.server)], indirect=True
)


async def deliver(shop: Shop, inbox: Inbox, handler: Handling, payload: Any = EVENT, **more: Any) -> Received:
    if shop.sync:
        return await asyncio.to_thread(
            inbox.handle, "ev_001", "payments", payload, lambda op, body: run(handler(op, body)), **more
        )
    async with shop.around():
        return await inbox.ahandle("ev_001", "payments", payload, lambda op, body: arun(handler(op, body)), **more)


def booking(shop: Shop, seconds: float = 0.0) -> Handling:
    def handle(op: Op, payload: Any) -> Generator[Any, Any, Any]:
        yield shop.insert(op, op.key)
        yield Sleep(seconds)
        return {"booked": payload["amount"]}

    return handle


def broken(shop: Shop, error: Exception | None = None) -> Handling:
    def handle(op: Op, payload: Any) -> Generator[Any, Any, Any]:
        yield shop.insert(op, op.key)
        raise error or RuntimeError("cannot be handled")

    return handle


async def test_repeated_event_is_acknowledged_with_the_first_result(shop: Shop) -> None:
    """The first delivery is processed, the second one replayed."""
    inbox = Inbox(shop.guard)
    first = await deliver(shop, inbox, booking(shop))
    again = await deliver(shop, inbox, booking(shop))
    assert (first.how, first.value) == ("processed", {"booked": "10.00"})
    assert (again.how, again.value) == ("duplicate", {"booked": "10.00"})
    assert shop.refunds() == ["ev_001"]


async def test_ten_concurrent_deliveries_have_one_effect(shop: Shop) -> None:
    inbox = Inbox(shop.guard)
    received = await asyncio.gather(*(deliver(shop, inbox, booking(shop, 0.1)) for _ in range(10)))
    assert sorted(each.how for each in received) == ["duplicate"] * 9 + ["processed"]
    assert shop.refunds() == ["ev_001"]


async def test_the_same_id_with_another_payload_is_flagged(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    inbox = Inbox(shop.guard)
    await deliver(shop, inbox, booking(shop))
    flagged = await deliver(shop, inbox, booking(shop), {**EVENT, "amount": "99.00"})
    assert flagged.how == "flagged"
    assert "another payload" in caplog.text
    assert shop.refunds() == ["ev_001"]
    await deliver(shop, inbox, booking(shop), {**EVENT, "amount": "77.00"})
    for page in (await inbox.aflagged("payments"), await asyncio.to_thread(inbox.flagged, "payments")):
        [kept] = page.records  # the first of the other payloads, for somebody to look at
        assert (kept.key, replayed(kept.outcome)["amount"]) == ("ev_001", "99.00")  # type: ignore[arg-type]
    assert (await inbox.aflagged("orders")).records == ()


async def test_same_id_from_another_source_is_another_event(shop: Shop) -> None:
    inbox = Inbox(shop.guard)
    assert inbox.operation("ev_001", "payments", EVENT).id != inbox.operation("ev_001", "orders", EVENT).id


async def test_an_event_whose_handler_fails_is_not_processed(shop: Shop) -> None:
    inbox = Inbox(shop.guard)
    with pytest.raises(RuntimeError):
        await deliver(shop, inbox, broken(shop))
    assert shop.refunds() == []
    received = await deliver(shop, inbox, booking(shop))
    assert (received.how, received.attempt) == ("processed", 2)


async def test_event_failing_too_often_is_dead_until_requeued(shop: Shop) -> None:
    inbox = Inbox(shop.guard, attempts=2)
    for _ in range(2):  # a requeued one has as many attempts as a new one
        with pytest.raises(RuntimeError):
            await deliver(shop, inbox, broken(shop))
        assert (await deliver(shop, inbox, broken(shop))).how == "dead"
        assert (await deliver(shop, inbox, booking(shop))).how == "dead"
        [letter] = (await inbox.adead("payments")).records
        assert letter.key == "ev_001"
        assert "cannot be handled" in letter.note
        await inbox.arequeue("ev_001", "payments")
    assert (await deliver(shop, inbox, booking(shop))).how == "processed"
    assert shop.refunds() == ["ev_001"]


async def test_deliveries_that_killed_their_process_are_counted(shop: Shop) -> None:
    inbox = Inbox(shop.guard, attempts=3)
    assert (await deliver(shop, inbox, booking(shop), delivery=4)).how == "dead"
    assert shop.refunds() == []
    await arun_in(shop, inbox)
    assert (await deliver(shop, inbox, booking(shop))).how == "processed"
    assert (await deliver(shop, inbox, booking(shop), delivery=9)).how == "duplicate"


async def arun_in(shop: Shop, inbox: Inbox) -> None:
    """Do the same with the sync methods, on a thread."""
    assert [record.key for record in (await asyncio.to_thread(inbox.dead, "payments")).records] == ["ev_001"]
    await asyncio.to_thread(inbox.requeue, "ev_001", "payments")


async def test_event_that_comes_too_early_never_becomes_dead(shop: Shop) -> None:
    """Events may arrive out of order.  The sender's next delivery finds the expected state."""
    inbox = Inbox(shop.guard, attempts=1)
    for _ in range(3):
        with pytest.raises(WrongState):
            await deliver(shop, inbox, broken(shop, WrongState("'p1' is 'authorized'; 'refund' needs 'captured'")))
    assert (await deliver(shop, inbox, booking(shop))).how == "processed"


@on_two_kinds
@pytest.mark.parametrize("effect", ["transaction", "lease"])
async def test_refusals_between_failures_are_not_counted(shop: Shop, effect: Any) -> None:
    """An event that came too early nine times and then failed once has failed once."""
    inbox = Inbox(shop.guard, attempts=2, effect=effect)

    def failing(error: Exception) -> Handling:
        def handle(op: Op, payload: Any) -> Generator[Any, Any, Any]:
            yield Sleep(0)
            raise error

        return handle

    for error in (WrongState("too early"), RuntimeError("broken"), WrongState("too early"), WrongState("too early")):
        with pytest.raises(type(error)):
            await deliver(shop, inbox, failing(error))
    assert (await deliver(shop, inbox, failing(RuntimeError("broken")))).how == "dead"


@on_two_kinds
async def test_requeued_event_given_up_by_broker_has_all_attempts(shop: Shop) -> None:
    inbox = Inbox(shop.guard, attempts=3)
    with pytest.raises(RuntimeError):
        await deliver(shop, inbox, broken(shop))
    assert (await deliver(shop, inbox, broken(shop), delivery=4)).how == "dead"
    await inbox.arequeue("ev_001", "payments")
    for _ in range(2):
        with pytest.raises(RuntimeError):
            await deliver(shop, inbox, broken(shop))
    assert (await deliver(shop, inbox, broken(shop))).how == "dead"


@on_two_kinds
async def test_requeued_event_half_marked_dead_has_all_attempts(shop: Shop) -> None:
    """The process died after the hold, and before it had removed the count of failures."""
    inbox = Inbox(shop.guard, attempts=2)
    operation = inbox.operation("ev_001", "payments", EVENT)
    with pytest.raises(RuntimeError):
        await deliver(shop, inbox, broken(shop))
    lease = await arun(shop.guard.store.claim(operation, lease=30.0))
    assert isinstance(lease, Lease)
    await arun(shop.guard.store.hold(lease, note=f"{DEAD}: broken"))
    await inbox.arequeue("ev_001", "payments")
    with pytest.raises(RuntimeError):
        await deliver(shop, inbox, broken(shop))


@on_two_kinds
@pytest.mark.parametrize("delivery", [1, 4])
async def test_process_killed_before_the_hold_leaves_a_dead_letter(shop: Shop, delivery: int) -> None:
    """The process died between the claim and the hold, so the record only shows a lapsed lease."""

    class Killed(BaseException):
        pass

    class Dying(StoreWrapper):
        def hold(self, held: Any, *, note: str = "") -> Any:
            raise Killed

    inbox = Inbox(shop.guard, attempts=3)
    store = shop.guard.store
    for _ in range(2):
        with pytest.raises(RuntimeError):
            await deliver(shop, inbox, broken(shop))
    shop.guard.store = Dying(store)  # type: ignore[assignment]
    with pytest.raises(Killed):
        await deliver(shop, inbox, broken(shop), delivery=delivery)
    shop.guard.store = store
    Clock(store).advance(31)
    assert (await deliver(shop, inbox, booking(shop), delivery=delivery)).how == "dead"
    command_line = Inbox(shop.guard, effect="lease")  # it does not know the inbox's level
    assert [letter.key for letter in (await command_line.adead("payments")).records] == ["ev_001"]
    await command_line.arequeue("ev_001", "payments")
    assert (await deliver(shop, inbox, booking(shop))).how == "processed"
    assert shop.refunds() == ["ev_001"]


def test_misconfigured_inbox_makes_no_dead_letters() -> None:
    """The handler was never called, so the event has all its attempts after the program is corrected."""
    guard = Guard("memory://")
    inbox = Inbox(guard, attempts=2)
    for _ in range(3):
        with pytest.raises(ConfigurationError, match="lends no connection"):
            inbox.handle("ev_001", "payments", EVENT, print)
    assert not guard.list(Filter()).records


async def test_store_errors_are_raised(shop: Shop) -> None:
    inbox = Inbox(shop.guard, attempts=1)
    with pytest.raises(StoreError):
        await deliver(shop, inbox, broken(shop, StoreError("the disk is full")))
    assert (await inbox.adead("payments")).records == ()


def test_lease_inbox_raises_unknown_outcome() -> None:
    guard = Guard("memory://")
    inbox = Inbox(guard, effect="lease")
    operation = inbox.operation("ev_001", "payments", EVENT)
    run(guard.store.hold(run(guard.store.claim(operation, lease=30))))  # type: ignore[arg-type]
    with pytest.raises(UnknownOutcome):
        inbox.handle("ev_001", "payments", EVENT, lambda op, payload: None)


@pytest.mark.parametrize("error", [TimeoutError("the bank has not answered"), UnknownOutcome("nobody knows")])
def test_leased_event_in_doubt_is_held_and_no_dead_letter(error: Exception) -> None:
    guard = Guard("memory://")
    inbox = Inbox(guard, effect="lease", attempts=1, doubt=(TimeoutError,))
    handled: list[Any] = []

    def handle(op: Op, payload: Any) -> None:
        handled.append(payload)
        raise error

    with pytest.raises(type(error), match=error.args[0]):
        inbox.handle("ev_001", "payments", EVENT, handle)
    with pytest.raises(UnknownOutcome, match="broke off"):
        inbox.handle("ev_001", "payments", EVENT, handle)
    assert (handled, inbox.dead("payments").records) == ([EVENT], ())


def test_unknown_outcome_of_last_delivery_is_no_dead_letter() -> None:
    """The process was killed while it handled the event, maybe after the effect, which a requeue might repeat."""
    guard = Guard("memory://")
    inbox = Inbox(guard, effect="lease", attempts=3)
    run(guard.store.claim(inbox.operation("ev_001", "payments", EVENT), lease=30))
    guard.store.shift = 60.0
    for delivery in (4, 5):
        with pytest.raises(UnknownOutcome):
            inbox.handle("ev_001", "payments", EVENT, lambda op, payload: None, delivery=delivery)
    assert inbox.dead("payments").records == ()
    with pytest.raises(NotResolvable):
        inbox.requeue("ev_001", "payments")


def test_an_inbox_that_forgets_sooner_than_its_sender_warns() -> None:
    with pytest.warns(UserWarning, match="handled twice"):
        Inbox(Guard("memory://"), retention="1h", sender_span="24h")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Inbox(Guard("memory://")).policy.ttl == 7 * 86400


@on_two_kinds
async def test_error_that_no_database_can_store_makes_a_dead_letter(shop: Shop) -> None:
    """Otherwise it would be handled, and would fail, for ever."""

    class Strange(Exception):
        def __repr__(self) -> str:
            return "Strange(\ud800, \0)"

    def fail(op: Op, payload: Any) -> Generator[Any, Any, Any]:
        yield shop.insert(op, op.key)
        raise Strange

    inbox = Inbox(shop.guard, attempts=1)
    assert (await deliver(shop, inbox, fail)).how == "dead"
    (letter,) = (await inbox.adead("payments")).records
    assert letter.note == f"{DEAD}: Strange(\\ud800, \\x00)"


@pytest.mark.parametrize("attempts", [0, "10"])
def test_inbox_without_attempts_is_refused(attempts: Any) -> None:
    with pytest.raises(ConfigurationError, match="at least 1"):
        Inbox(Guard("memory://"), attempts=attempts)


def test_url_in_place_of_the_guard_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="guard is a str: make a Guard"):
        Inbox("sqlite:///shop.db")  # type: ignore[arg-type]


def test_payload_in_place_of_the_source_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"source is \{.*\}: it must be a text, as in handle\(id, source"):
        Inbox(Guard("memory://")).handle("ev_001", EVENT, "payments", print)  # type: ignore[arg-type]


def test_handlers_own_mismatch_does_not_flag_the_event() -> None:
    """A flagged event is acknowledged, so it would never be handled."""
    guard = Guard("memory://")
    inbox = Inbox(guard, effect="lease")
    guard.run(Operation("invoices", "i1", "one"), lambda op: None)

    def handle(op: Op, payload: Any) -> None:
        guard.run(Operation("invoices", "i1", "another"), lambda op: None)

    with pytest.raises(PayloadMismatch):
        inbox.handle("ev_001", "payments", EVENT, handle)
    assert inbox.handle("ev_001", "payments", EVENT, lambda op, payload: "handled").how == "processed"


@on_each_kind
@pytest.mark.parametrize("settings", [{}, {"on_duplicate": "reject"}, {"on_duplicate": "ok"}])
async def test_repeated_event_with_any_handler_result_is_acknowledged(shop: Shop, settings: dict[str, Any]) -> None:
    inbox = Inbox(shop.guard, **settings)

    def handle(op: Op, payload: Any) -> Generator[Any, Any, Any]:
        yield shop.insert(op, op.key)
        return object()

    hows = [(await deliver(shop, inbox, handle)).how for _ in range(3)]
    assert hows == ["processed", "duplicate", "duplicate"]
    assert shop.refunds() == ["ev_001"]


@on_each_kind
async def test_event_with_stored_error_is_acknowledged_each_time(shop: Shop) -> None:
    inbox = Inbox(shop.guard, errors=(LookupError,))
    received = [await deliver(shop, inbox, broken(shop, LookupError("no such payment"))) for _ in range(3)]
    assert [each.how for each in received] == ["processed", "duplicate", "duplicate"]
    assert [repr(each.value) for each in received] == ["LookupError('no such payment')"] * 3
    assert shop.refunds() == []


@pytest.mark.parametrize("event_id", ["", " ", "a\nb", "a\x00b", "x" * 256, None, 7])
def test_event_without_a_valid_id_is_refused(event_id: Any) -> None:
    """All events without an id would be one event."""
    inbox = Inbox(Guard("memory://"), effect="lease")
    with pytest.raises(InvalidKey):
        inbox.handle(event_id, "payments", EVENT, lambda op, payload: None)


def test_only_dead_letters_are_listed_and_requeued() -> None:
    """Unknown outcomes are held, too, but a person must decide about them, not a loop over dead letters."""
    guard = Guard("memory://")
    inbox = Inbox(guard, effect="lease", attempts=1)

    def handle(op: Op, payload: Any) -> None:
        raise RuntimeError("cannot be handled")

    assert inbox.handle("ev_001", "payments", EVENT, handle).how == "dead"
    unknown = inbox.operation("ev_002", "payments", EVENT)
    run(guard.store.hold(run(guard.store.claim(unknown, lease=30)), note="its holder vanished"))  # type: ignore[arg-type]
    assert [record.key for record in inbox.dead("payments").records] == ["ev_001"]
    with pytest.raises(NotResolvable, match="not a dead letter: nobody knows whether it was handled"):
        inbox.requeue("ev_002", "payments")
    with pytest.raises(NotFound):
        inbox.requeue("ev_003", "payments")
    inbox.requeue("ev_001", "payments")
    with pytest.raises(NotResolvable, match="not a dead letter: it already waits"):
        inbox.requeue("ev_001", "payments")
    assert inbox.handle("ev_001", "payments", EVENT, lambda op, payload: "handled").how == "processed"


def test_dead_letter_keeps_its_payload_until_it_is_handled() -> None:
    guard = Guard("memory://")
    inbox = Inbox(guard, effect="lease", attempts=1)
    id = inbox.operation("ev_001", "payments", EVENT).id

    def handle(op: Op, payload: Any) -> None:
        assert guard.find(*id).request == b""  # type: ignore[union-attr]  # an ordinary event costs nothing
        raise RuntimeError("cannot be handled")

    assert inbox.handle("ev_001", "payments", EVENT, handle).how == "dead"
    [letter] = inbox.dead("payments").records
    assert replayed(Outcome("value", body=letter.request)) == EVENT
    inbox.requeue("ev_001", "payments")
    assert guard.find(*id).request == letter.request  # type: ignore[union-attr]
    assert inbox.handle("ev_001", "payments", EVENT, lambda op, payload: "handled").how == "processed"
    assert guard.find(*id).request == b""  # type: ignore[union-attr]


def test_payload_of_unknown_type_is_packed_as_nothing() -> None:
    assert packed({"when": object()}, ()) == b""


@on_two_kinds
async def test_large_dead_letter_is_requeued_with_its_payload(shop: Shop) -> None:
    """The broker forgets the message once it is a dead letter."""
    large, seen = {"data": "x" * 3_000_000}, []

    def fail(op: Op, payload: Any) -> Generator[Any, Any, Any]:
        yield shop.insert(op, op.key)
        raise ValueError

    def handle(op: Op, payload: Any) -> None:
        seen.append(payload)

    inbox = Inbox(shop.guard, attempts=1)
    assert (await deliver(shop, inbox, fail, large)).how == "dead"
    await inbox.arequeue("ev_001", "payments")
    assert await inbox.arun_requeued(handle) == 1
    assert seen == [large]


def test_dead_letter_too_large_for_steps_is_not_handled(caplog: pytest.LogCaptureFixture) -> None:
    """Its handler would get None instead of the payload."""

    def fail(op: Op, payload: Any) -> None:
        raise ValueError

    seen: list[Any] = []
    inbox = Inbox(Guard("memory://"), effect="steps", attempts=1)
    assert inbox.handle("ev_001", "payments", "x" * 2_000_000, fail).how == "dead"
    inbox.requeue("ev_001", "payments")
    inbox.run_requeued(lambda op, payload: seen.append(payload))
    assert seen == []
    assert "cannot be handled: its payload was too large for an operation in steps" in caplog.text


@pytest.mark.parametrize(("setting", "message"), [({"ttl": "30d"}, "use retention"), ({"keep": "success"}, "kept")])
def test_inbox_checks_its_retention_and_keeps_every_outcome(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Inbox(Guard("memory://"), **setting)
    errors = Inbox(Guard("memory://", policy=Policy(keep="success")), effect="lease", errors=(LookupError,))
    received = [errors.handle("ev_001", "payments", EVENT, lambda op, payload: {}["x"]).how for _ in range(2)]
    assert received == ["processed", "duplicate"]


def test_stored_error_no_longer_listed_is_acknowledged() -> None:
    guard = Guard("memory://")
    Inbox(guard, effect="lease", errors=(LookupError,)).handle("ev_001", "payments", EVENT, lambda op, payload: {}["x"])
    again = Inbox(guard, effect="lease").handle("ev_001", "payments", EVENT, lambda op, payload: "handled")
    assert (again.how, again.value) == ("duplicate", None)


def test_stored_value_of_a_forgotten_class_is_acknowledged() -> None:
    """The event was handled.  Without an acknowledgement, its sender would repeat it for ever."""
    guard = Guard("memory://")
    former = Inbox(guard, effect="lease", types=(Booked,))
    assert former.handle("ev_001", "payments", EVENT, lambda op, body: Booked("10.00")).how == "processed"
    inbox = Inbox(guard, effect="lease")
    assert inbox.handle("ev_001", "payments", EVENT, lambda op, body: None) == Received("duplicate")


def test_requeued_dead_letter_of_steps_is_handled() -> None:
    inbox = Inbox(Guard("memory://"), effect="steps", attempts=1)

    def fail(op: Any, payload: Any) -> None:
        raise RuntimeError("down")

    def book(op: Any, payload: Any) -> Any:
        return op.step("book", lambda: payload["amount"])

    assert inbox.handle("e1", "stripe", {"amount": 5}, fail).how == "dead"
    inbox.requeue("e1", "stripe")
    assert inbox.handle("e1", "stripe", {"amount": 5}, book).value == 5
