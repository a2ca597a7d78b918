"""The outbox: messages commit with the effect, on every driver, under stable ids; and the operator's verbs."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from opentelemetry.sdk.trace import TracerProvider

from oncemore import Guard, Inbox, Op, Operation, Outbox, Policy
from oncemore._ledger.transactions import Do
from oncemore._runtime.plan import Plan
from oncemore.errors import ConfigurationError, InvalidPayload, NotFound, PayloadTooLarge, TransactionEnded
from oncemore.messages import Relay
from oncemore.testing.clock import Clock
from tests.messages.places import in_own_transaction
from tests.messages.recording import RecordingBroker
from tests.transactions.shops import OnEngine, Shop

TRANSACTION = Policy(effect="transaction")


def adding(outbox: Outbox, place: Any, *args: Any, **settings: Any) -> Do[str]:
    return Do(lambda: outbox.add(place, *args, **settings), lambda: outbox.aadd(place, *args, **settings))


async def test_message_commits_with_the_operation(shop: Shop) -> None:
    outbox = Outbox(shop.guard, source="shop")

    def perform(op: Op) -> Plan[str]:
        yield shop.insert(op, "r1")
        return (yield adding(outbox, op, "refund.succeeded", {"id": "r1"}, subject="r1"))  # type: ignore[no-any-return]

    answer = await shop.run(Operation("s", "k1"), perform)
    (message,) = await outbox.alist()
    assert (message.id, message.type, message.subject) == (answer.value, "refund.succeeded", "r1")
    assert message.envelope.data == {"id": "r1"}
    assert (message.envelope.source, message.envelope.correlationid) == ("shop", "k1")


async def test_message_of_failed_operation_never_exists(shop: Shop) -> None:
    outbox = Outbox(shop.guard, source="shop")

    def perform(op: Op) -> Plan[None]:
        yield shop.insert(op, "r1")
        yield adding(outbox, op, "refund.succeeded", {"id": "r1"})
        raise LookupError

    with pytest.raises(LookupError):
        await shop.run(Operation("s", "k1"), perform)
    assert await outbox.alist() == []


async def test_message_commits_with_the_users_transaction(shop: Shop) -> None:
    outbox = Outbox(shop.guard, source="shop")
    for kind in ("connection", "session") if isinstance(shop, OnEngine) else ("connection",):

        def work(place: Any) -> Plan[Any]:
            return (yield adding(outbox, place, "user.created", {"id": 1}, subject=kind, delay="0s"))  # noqa: B023

        await in_own_transaction(shop, work, kind=kind, fails=True)
        id = await in_own_transaction(shop, work, kind=kind)
        (message,) = await outbox.alist(subject=kind)
        assert message.id == id


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.server)])
def guard(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Guard]:
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    if request.param == "postgres":
        url = request.getfixturevalue("own_schema")
    guard = Guard(url, policy=TRANSACTION)
    yield guard
    guard.close()


def add(guard: Guard, outbox: Outbox, *args: Any, key: str = "", **settings: Any) -> str:
    key = key or str(time.monotonic_ns())
    return str(guard.run(Operation("s", key), lambda op: outbox.add(op, *args, **settings)).value)


def test_second_run_of_an_operation_makes_the_same_ids(guard: Guard) -> None:
    outbox, runs = Outbox(guard, source="shop"), list[list[str]]()

    def perform(op: Op) -> None:
        runs.append(
            [
                outbox.add(op, "refund.created", 1),
                outbox.add(op, "refund.created", 2),
                outbox.add(op, "refund.created", 3, subject="r1"),
                outbox.add(op, "refund.settled", 4),
            ]
        )
        if len(runs) == 1:
            raise LookupError

    with pytest.raises(LookupError):
        guard.run(Operation("s", "k1"), perform)
    guard.run(Operation("s", "k1"), perform)
    assert runs[0] == runs[1]
    assert len(set(runs[0])) == 4
    assert [message.id for message in outbox.list()] == runs[1]
    assert [message.envelope.data for message in outbox.list()] == [1, 2, 3, 4]


def test_id_without_an_operation_is_uuid7_in_order(tmp_path: Path) -> None:
    guard = Guard(f"sqlite:///{tmp_path / 'shop.db'}")
    outbox = Outbox(guard, source="shop")
    before = int(time.time() * 1000)
    with sqlite3.connect(tmp_path / "shop.db") as connection:
        ids = [outbox.add(connection, "a") for _ in range(3)]
        own = outbox.add(connection, "a", id="mine")
    connection.close()
    assert own == "mine"
    assert [UUID(id).version for id in ids] == [7, 7, 7]
    assert all(before <= UUID(id).int >> 80 <= time.time() * 1000 for id in ids)
    guard.close()


def test_operation_without_transaction_is_refused(guard: Guard) -> None:
    outbox = Outbox(guard, source="shop")
    with pytest.raises(ConfigurationError, match=r"no transaction .*: say effect = 'transaction'"):
        guard.run(Operation("s", "k"), lambda op: outbox.add(op, "a"), policy=Policy(effect="lease"))
    with pytest.raises(ConfigurationError, match=r"no transaction .*: add it in a step that takes a connection"):
        guard.run(Operation("s", "k2"), lambda op: outbox.add(op, "a"), policy=Policy(effect="steps"))
    assert outbox.list() == []


def test_message_of_a_database_step_commits_with_its_checkpoint(guard: Guard) -> None:
    outbox, told = Outbox(guard, source="shop"), list[str]()

    def tell(connection: Any) -> None:
        told.append(outbox.add(connection, "a"))
        if len(told) == 1:
            raise RuntimeError("the first attempt is rolled back")

    def perform(op: Op) -> None:
        op.step("tell", tell)
        if len(told) == 2:
            told.append("after the step")
            raise RuntimeError("the step stays taken")

    for _ in range(2):
        with pytest.raises(RuntimeError):
            guard.run(Operation("s", "k"), perform, policy=Policy(effect="steps"))
    guard.run(Operation("s", "k"), perform, policy=Policy(effect="steps"))
    assert [message.id for message in outbox.list()] == [told[1]]


def test_id_that_no_inbox_takes_is_refused(guard: Guard) -> None:
    outbox = Outbox(guard, source="shop")
    for id, why in (("x" * 256, "id is too long"), ("a\tb", "id has unprintable"), ("", "id is empty"), (7, "id is 7")):
        with pytest.raises(InvalidPayload, match=f"The message's {why}"):
            guard.run(Operation("s", "k"), lambda op, id=id: outbox.add(op, "a", id=id))  # type: ignore[misc]


def test_key_that_cannot_be_an_attribute_is_left_out(guard: Guard) -> None:
    """Keys made by code may have any characters, and no message must fail because of that."""
    outbox = Outbox(guard, source="shop")
    guard.run(Operation("s", "tab\there"), lambda op: outbox.add(op, "a"))
    guard.run(Operation("s", "plain"), lambda op: outbox.add(op, "a"))
    assert [message.envelope.correlationid for message in outbox.list()] == [None, "plain"]


def test_message_after_the_end_of_the_operation_is_refused(guard: Guard) -> None:
    outbox, ops = Outbox(guard, source="shop"), list[Op]()
    guard.run(Operation("s", "k"), lambda op: ops.append(op))
    with pytest.raises(TransactionEnded, match="The transaction is over"):
        outbox.add(ops[0], "a")
    assert outbox.list() == []


def test_database_step_and_inbox_handler_add_messages(guard: Guard) -> None:
    outbox, inbox = Outbox(guard, source="shop"), Inbox(guard)

    def reserve(connection: Any) -> str:
        return outbox.add(connection, "stock.reserved", {"n": 1})

    steps = Policy(effect="steps")
    guard.run(Operation("s", "k"), lambda op: op.step("reserve", reserve), policy=steps)
    inbox.handle("e1", "other", {}, lambda op, payload: outbox.add(op, "event.seen", payload))
    inbox.handle("e1", "other", {}, lambda op, payload: outbox.add(op, "event.seen", payload))
    assert [message.type for message in outbox.list()] == ["stock.reserved", "event.seen"]


def test_delayed_message_is_sent_when_it_is_due(guard: Guard) -> None:
    outbox, broker = Outbox(guard, source="shop"), RecordingBroker()
    relay = Relay(outbox, to=broker)
    add(guard, outbox, "a", "later", delay="1h", subject="s")
    add(guard, outbox, "a", "at", at=datetime.now(UTC) + timedelta(hours=2), subject="s")
    add(guard, outbox, "a", "now", subject="s")
    relay.run_once()
    assert broker.data() == ["now"]
    assert outbox.stats().pending == 2
    assert outbox.stats().oldest_age == 0
    Clock(guard.store).advance(3700)
    relay.run_once()
    assert broker.data() == ["now", "later"]
    Clock(guard.store).advance(3700)
    relay.run_once()
    assert broker.data() == ["now", "later", "at"]


def test_messages_of_one_operation_keep_their_order_in_any_place(guard: Guard) -> None:
    """Some messages are written with the commit, others before it."""
    outbox = Outbox(guard, source="shop")

    def perform(op: Op) -> None:
        outbox.add(op, "a", 1, subject="s")
        outbox.add(op.connection, "a", 2, subject="s")
        outbox.add(op, "a", 3, subject="s")
        outbox.add(op, "a", 4, subject="s", delay="1s")
        outbox.add(op, "a", 5, subject="s")

    async def aperform(op: Op) -> None:
        await outbox.aadd(op, "a", 6, subject="s")
        await outbox.aadd(op.connection, "a", 7, subject="s")

    guard.run(Operation("s", "k1"), perform)
    asyncio.run(guard.arun(Operation("s", "k2"), aperform))
    assert [message.envelope.data for message in outbox.list()] == [1, 2, 3, 4, 5, 6, 7]


def test_wrong_arguments_of_add_are_refused(guard: Guard) -> None:
    outbox = Outbox(guard, source="shop", limit=1000)
    with pytest.raises(ConfigurationError, match="delay or at"):
        add(guard, outbox, "a", delay=1, at=datetime.now(UTC))
    with pytest.raises(ConfigurationError, match="time zone"):
        add(guard, outbox, "a", at=datetime(2026, 1, 1))
    with pytest.raises(InvalidPayload, match="control characters"):
        add(guard, outbox, "a\nb")
    with pytest.raises(InvalidPayload, match="cannot be the name of a header"):
        add(guard, outbox, "a", headers={"X-Tenant": "acme"})
    with pytest.raises(InvalidPayload, match="cannot be written as JSON"):
        add(guard, outbox, "a", object())
    with pytest.raises(PayloadTooLarge, match="at most 1,000 are allowed"):
        add(guard, outbox, "a", "x" * 1000)
    with pytest.raises(ConfigurationError, match="state = 'lost' is unknown"):
        outbox.list("lost")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="make a Guard"):
        Outbox("sqlite:///x.db", source="shop")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError):
        Outbox(guard, source="")
    assert outbox.list() == []


@pytest.mark.parametrize("url", ["memory://", "redis://127.0.0.1:1/0"])
def test_outbox_on_store_without_tables_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match="the outbox needs"):
        Outbox(Guard(url), source="shop")


def test_any_data_headers_and_unicode_are_kept(guard: Guard) -> None:
    outbox, broker = Outbox(guard, source="shöp"), RecordingBroker()
    values = [None, True, 2**53, 1.5, "ü\x00", [1, {"a": "b"}], b"\x00\xff", {}]
    for value in values:
        add(guard, outbox, "käse", value, subject="Köln", headers={"tenant": "ä", "live": True})
    add(guard, outbox, "nothing")
    Relay(outbox, to=broker).run_once()
    assert broker.data("Köln") == values
    assert {envelope.extensions["tenant"] for envelope in broker.stored if envelope.subject} == {"ä"}
    assert {envelope.source for envelope in broker.stored} == {"shöp"}


def test_message_has_the_trace_context_of_the_current_span(guard: Guard) -> None:
    outbox = Outbox(guard, source="shop")
    with TracerProvider().get_tracer("test").start_as_current_span("request") as span:
        add(guard, outbox, "a")
    context = span.get_span_context()
    (message,) = outbox.list()
    expected = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
    assert message.envelope.traceparent == expected


def test_list_pages_and_filters_messages(guard: Guard) -> None:
    outbox = Outbox(guard, source="shop")
    for n in range(5):
        add(guard, outbox, "refund.item_created" if n % 2 else "refund%created", n)
    first = outbox.list(limit=3)
    rest = outbox.list(limit=3, after=first[-1].seq)
    assert [message.envelope.data for message in (*first, *rest)] == [0, 1, 2, 3, 4]
    assert [message.envelope.data for message in outbox.list(type="refund.*")] == [1, 3]
    assert [message.envelope.data for message in outbox.list(type="refund%created")] == [0, 2, 4]
    assert outbox.list(type="refund_item?created") == []
    assert Outbox(guard, source="other").list() == []


def test_requeue_keeps_the_id_and_place(guard: Guard) -> None:
    refused = {"bad"}
    broker = RecordingBroker(lambda envelope: envelope.data in refused)
    outbox = Outbox(guard, source="shop")
    relay = Relay(outbox, to=broker, attempts=1)
    id = add(guard, outbox, "a", "bad", subject="s")
    add(guard, outbox, "a", "good", subject="s")
    relay.run_once()
    assert broker.data() == ["good"]
    (letter,) = outbox.dead()
    assert (letter.id, letter.attempts, letter.error) == (id, 1, "ValueError: a is refused")
    assert outbox.stats().dead == 1
    with pytest.raises(NotFound, match="no dead letter 'x'"):
        outbox.requeue("x")
    refused.clear()
    outbox.requeue(id)
    relay.run_once()
    assert broker.stored[-1].id == id
    assert (outbox.stats().pending, outbox.stats().dead) == (0, 0)


def test_replay_needs_kept_messages_and_sends_them_again(guard: Guard) -> None:
    outbox, broker = Outbox(guard, source="shop"), RecordingBroker()
    with pytest.raises(ConfigurationError, match="keep='7d'"):
        outbox.replay("1h")
    relay = Relay(outbox, to=broker, keep="7d")
    ids = [add(guard, outbox, type, n, subject="s") for n, type in enumerate(("a.x", "a.y", "b"))]
    relay.run_once()
    assert outbox.stats().sent == 3
    assert [message.id for message in outbox.list("sent")] == ids
    assert outbox.replay(datetime.now(UTC) - timedelta(hours=1), "a.*") == 2
    relay.run_once()
    assert [envelope.id for envelope in broker.stored] == [*ids, ids[0], ids[1]]
    assert outbox.replay("0s") == 0
    assert outbox.purge() == 0
    Clock(guard.store).advance(8 * 86400)
    assert outbox.purge() == 3
    assert outbox.stats().sent == 0


def test_purge_of_dead_letters_needs_an_age(guard: Guard) -> None:
    outbox = Outbox(guard, source="shop")
    add(guard, outbox, "a")
    Relay(outbox, to=RecordingBroker(lambda _: True), attempts=1).run_once()
    with pytest.raises(ConfigurationError, match="how old"):
        outbox.purge(dead=True)
    assert outbox.purge(dead=True, older_than="1h") == 0
    Clock(guard.store).advance(3601)
    assert outbox.purge(dead=True, older_than="1h", batch=1) == 1
    assert outbox.dead() == []


async def test_awaited_methods_do_the_same(guard: Guard) -> None:
    outbox, broker = Outbox(guard, source="shop", keep="1h"), RecordingBroker(lambda envelope: envelope.data == "bad")
    relay = Relay(outbox, to=broker, attempts=1)

    async def perform(op: Op) -> None:
        await outbox.aadd(op, "a", "good")
        await outbox.aadd(op, "a", "bad")

    await guard.arun(Operation("s", "k"), perform)
    assert await relay.arun_once() == 1
    stats = await outbox.astats()
    assert (stats.pending, stats.dead, stats.sent) == (0, 1, 1)
    (letter,) = await outbox.adead()
    await outbox.arequeue(letter.id)
    assert await outbox.areplay("1h") == 1
    assert await outbox.apurge() == 0
    assert len(await outbox.alist()) == 2
    await guard.aclose()


# On psycopg, a message of an operation is written with the commit, unless a savepoint may undo it


@pytest.mark.parametrize(
    "shop", [pytest.param(name, marks=pytest.mark.server) for name in ("psycopg", "pool")], indirect=True
)
async def test_rolled_back_savepoint_removes_its_messages(shop: Shop) -> None:
    outbox = Outbox(shop.guard, source="shop")

    def perform(op: Op) -> Plan[None]:
        outbox.add(op, "a", "before", subject="s")
        with suppress(LookupError), op.connection.transaction():
            outbox.add(op, "a", "inside", subject="s")
            raise LookupError
        with op.connection.transaction():
            outbox.add(op, "a", "inside another", subject="s")
        op.connection.execute("SAVEPOINT one")
        outbox.add(op, "a", "lost", subject="s")
        op.connection.execute("ROLLBACK TO SAVEPOINT one")
        outbox.add(op, "a", "after", subject="s")
        return
        yield

    await shop.run(Operation("s", "k1"), perform)
    assert [message.envelope.data for message in await outbox.alist()] == ["before", "inside another", "after"]


@pytest.mark.parametrize("shop", [pytest.param("psycopg", marks=pytest.mark.server)], indirect=True)
async def test_raw_savepoint_is_noticed_before_the_message(shop: Shop) -> None:
    outbox = Outbox(shop.guard, source="shop")

    def perform(op: Op) -> Plan[None]:
        op.connection.execute(b"savepoint one")
        outbox.add(op, "a", "lost")
        op.connection.cursor().execute("ROLLBACK TO one")
        return
        yield

    await shop.run(Operation("s", "k1"), perform)
    assert await outbox.alist() == []
