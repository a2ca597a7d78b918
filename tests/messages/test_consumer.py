"""The consumer: each message is handled once and in order, and none is stuck."""

from __future__ import annotations

import asyncio
import logging
import secrets
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from oncemore import Guard, Inbox, Op
from oncemore._runtime.plan import run
from oncemore.errors import BrokerError, ConfigurationError, StoreUnavailable
from oncemore.messages import Consumer, Envelope
from oncemore.messages.broker import connect
from oncemore.messages.brokers.memory import MemoryBroker, MemorySubscription
from oncemore.messages.envelope import structured
from oncemore.messages.inbox import EventHandler
from oncemore.observe import prometheus

PATIENCE = 30.0


class Service:
    """A service with a table of bookings in SQLite, and a channel in memory."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "ledger.db"
        with sqlite3.connect(self.path) as database:
            database.execute("CREATE TABLE bookings (event TEXT, number INTEGER)")
        self.guard = Guard(f"sqlite:///{self.path}")
        self.url = f"memory://{secrets.token_hex(8)}"
        found = connect(self.url)
        assert isinstance(found, MemoryBroker)
        self.broker = found

    def inbox(self, **settings: Any) -> Inbox:
        return Inbox(self.guard, **settings)

    def publish(self, *envelopes: Envelope) -> None:
        assert set(asyncio.run(self.broker.publish(envelopes))) <= {None}

    def put(self, body: bytes) -> None:
        asyncio.run(self.broker.put(body))

    @property
    def bookings(self) -> list[str]:
        with sqlite3.connect(self.path) as database:
            return [event for (event,) in database.execute("SELECT event FROM bookings ORDER BY rowid")]


@pytest.fixture
def service(tmp_path: Path) -> Service:
    return Service(tmp_path)


def refund(number: int, subject: str | None = None, **data: Any) -> Envelope:
    values: dict[str, Any] = {"id": f"ev_{number}", "source": "payments", "subject": subject}
    return Envelope("refund.succeeded", {"number": number, **data}, **values)


def book(op: Op, envelope: Envelope) -> str:
    op.connection.execute("INSERT INTO bookings VALUES (?, ?)", (envelope.id, envelope.data["number"]))
    return "booked"


@asynccontextmanager
async def running(consumer: Consumer) -> AsyncIterator[None]:
    """Run the consumer during the block, and then stop it as SIGTERM does."""
    task = asyncio.create_task(consumer.arun())
    try:
        yield
        consumer.stop()
        await asyncio.wait_for(task, PATIENCE)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(holds: Callable[[], object]) -> None:
    """Wait until *holds* returns something true."""
    ends = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < ends, "waited too long"
        await asyncio.sleep(0.01)


def test_message_is_handled_once_and_acknowledged(service: Service) -> None:
    service.publish(refund(1), refund(2))
    consumer = Consumer(service.inbox(), service.url, {"refund.succeeded": book})
    assert (consumer.run_once(), consumer.run_once(0.1)) == (2, 0)
    assert sorted(service.bookings) == ["ev_1", "ev_2"]  # without a subject, in any order


def test_message_that_is_sent_twice_has_one_effect(service: Service) -> None:
    url = f"{service.url}?window=0"
    broker = connect(url)
    for _ in range(3):
        asyncio.run(broker.publish([refund(1)]))
    consumer = Consumer(service.inbox(), url, {"refund.*": book})
    assert consumer.run_once() == 3
    assert service.bookings == ["ev_1"]


def test_failed_handler_is_rolled_back_and_called_again(service: Service) -> None:
    service.publish(refund(1))
    attempts: list[int] = []

    def fail_once(op: Op, envelope: Envelope) -> None:
        book(op, envelope)
        attempts.append(op.attempt)
        if len(attempts) == 1:
            raise RuntimeError("not now")

    consumer = Consumer(service.inbox(), service.url, {"*": fail_once})
    assert consumer.run_once() == 0
    assert service.bookings == []

    async def wait() -> None:
        async with running(consumer):
            await until(lambda: service.bookings)

    asyncio.run(wait())
    assert (service.bookings, attempts) == (["ev_1"], [1, 2])


def test_order_of_a_subject_is_kept_while_one_message_fails(service: Service) -> None:
    """Other subjects are handled meanwhile."""
    failing = threading.Event()
    failing.set()

    def handle(op: Op, envelope: Envelope) -> None:
        if envelope.id == "ev_0" and failing.is_set():
            raise RuntimeError("not now")
        book(op, envelope)

    service.publish(*(refund(n, f"subject-{n % 4}") for n in range(20)))
    consumer = Consumer(service.inbox(attempts=100), service.url, {"*": handle}, concurrency=4)

    async def consume() -> None:
        async with running(consumer):
            await until(lambda: len(service.bookings) == 15)
            assert not {"ev_0", "ev_4", "ev_8"} & set(service.bookings)
            failing.clear()
            await until(lambda: len(service.bookings) == 20)

    asyncio.run(consume())
    for subject in range(4):
        mine = [event for event in service.bookings if int(event.removeprefix("ev_")) % 4 == subject]
        assert mine == [f"ev_{n}" for n in range(subject, 20, 4)]


def test_poison_becomes_a_dead_letter_and_followers_proceed(service: Service) -> None:
    told: list[tuple[str, str]] = []

    def handle(op: Op, envelope: Envelope) -> None:
        if envelope.id == "ev_1":
            raise ValueError("poison")
        book(op, envelope)

    inbox = service.inbox(attempts=2)
    consumer = Consumer(
        inbox, service.url, {"*": handle}, on_dead=lambda envelope, why: told.append((envelope.id, why))
    )
    service.publish(refund(1, "same"), refund(2, "same"))

    async def consume() -> None:
        async with running(consumer):
            await until(lambda: service.bookings == ["ev_2"])

    asyncio.run(consume())
    assert told == [("ev_1", "ValueError('poison')")]
    [letter] = inbox.dead("payments").records
    assert (letter.key, "poison" in letter.note) == ("ev_1", True)
    assert Consumer(inbox, service.url, {"*": book}).run_once(0.1) == 0  # nothing is left at the broker


def test_requeued_dead_letter_is_handled_by_a_running_consumer(service: Service) -> None:
    """The handler gets the payload that the letter has kept, under the same id."""

    def fail(op: Op, envelope: Envelope) -> None:
        raise ValueError("poison")

    inbox = service.inbox(attempts=1)
    service.publish(refund(1, "rf_1"), refund(2))
    assert Consumer(inbox, service.url, {"*": fail}).run_once() == 2
    assert inbox.requeue("ev_1", "payments").state == "released"
    seen: list[Envelope] = []

    def keep(op: Op, envelope: Envelope) -> None:
        seen.append(envelope)
        book(op, envelope)

    async def consume() -> None:
        async with running(Consumer(inbox, service.url, {"refund.*": keep})):
            await until(lambda: service.bookings == ["ev_1"])

    asyncio.run(consume())
    assert seen == [refund(1, "rf_1")]
    inbox.requeue("ev_2", "payments")
    assert inbox.run_requeued({"refund.*": keep}) == 1
    assert inbox.run_requeued({"refund.*": keep}) == 0
    assert service.bookings == ["ev_1", "ev_2"]


def test_requeued_letter_that_fails_again_is_dead_again(service: Service) -> None:
    def fail(op: Op, envelope: Envelope) -> None:
        raise ValueError("still poison")

    inbox = service.inbox(attempts=2)
    service.publish(refund(1))
    consumer = Consumer(inbox, service.url, {"*": fail})
    while not inbox.dead("payments").records:
        consumer.run_once(2.0)
    inbox.requeue("ev_1", "payments")
    assert inbox.run_requeued({"*": fail}) == 0
    assert inbox.run_requeued({"*": fail}) == 1
    assert [letter.key for letter in inbox.dead("payments").records] == ["ev_1"]
    assert inbox.run_requeued({"*": fail}) == 0


def test_requeued_letter_waits_for_a_consumer_that_has_a_handler(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    """Consumers with different handlers may share an inbox, and a later release may add a handler."""
    inbox = service.inbox(attempts=1)
    service.publish(refund(1))
    other = Consumer(inbox, service.url, {"order.*": book}, unknown="dead")
    assert other.run_once() == 1
    inbox.requeue("ev_1", "payments")
    other.run_once(0.1)
    assert inbox.run_requeued({"order.*": book}) == 0
    assert "waits: there is no handler for the type 'refund.succeeded'" in caplog.text
    assert (inbox.dead("payments").records, service.bookings) == ((), [])
    Consumer(inbox, service.url, {"refund.*": book}).run_once(0.1)
    assert service.bookings == ["ev_1"]


def test_requeued_letter_of_another_kind_holds_up_no_other(service: Service) -> None:
    """The payload of `inbox.handle` is no envelope, so a consumer leaves it to run_requeued."""

    def fail(op: Op, payload: Any) -> None:
        raise ValueError("poison")

    inbox = service.inbox(attempts=1)
    service.publish(refund(1))
    Consumer(inbox, service.url, {"*": fail}).run_once()
    assert inbox.handle("a", "payments", {"no": "envelope"}, fail).how == "dead"
    for id in ("a", "ev_1"):
        inbox.requeue(id, "payments")
    Consumer(inbox, service.url, {"*": book}).run_once(0.1)
    assert service.bookings == ["ev_1"]
    seen: list[Any] = []
    assert inbox.run_requeued(lambda op, payload: seen.append(payload)) == 1
    assert seen == [{"no": "envelope"}]


def test_requeued_malformed_letter_is_dead_again_with_its_bytes(service: Service) -> None:
    inbox = service.inbox()
    service.put(b"{malformed")
    consumer = Consumer(inbox, service.url, {"*": book})
    assert consumer.run_once() == 1
    [letter] = inbox.dead(service.broker.channel).records
    for _ in range(2):
        inbox.requeue(letter.key, service.broker.channel)
        consumer.run_once(0.1)
        [letter] = inbox.dead(service.broker.channel).records
        assert inbox.kept(letter) == b"{malformed"
        assert "requeued, but The message is not a JSON object" in letter.note


HEAD = b'{"specversion": "1.0", "id": "1", "source": "payments", "type": "refund.succeeded"'
MALFORMED = [
    b"",
    b"not JSON",
    b"\xff\xfe",
    b"[]",
    b"[" * 100_000 + b"]" * 100_000,
    b'{"id": "1"}',
    HEAD.replace(b"1.0", b"0.3") + b"}",
    HEAD + b', "data": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    HEAD + b', "data": 1, "data_base64": "AA=="}',
    HEAD.replace(b'"1",', b'"%s",' % (b"x" * 5000)) + b"}",
    HEAD.replace(b"payments", b"a\\u0000b") + b"}",
    HEAD + b',"subject":"rf_1","time":"0001-01-01T00:00:00+14:00"}',  # before the first day in UTC
]


def test_malformed_messages_become_dead_letters_and_followers_proceed(service: Service) -> None:
    told: list[tuple[Any, str]] = []
    for body in MALFORMED:
        service.put(body)
        service.put(body)  # delivered twice, and still one letter
    service.publish(refund(1))
    inbox = service.inbox()
    consumer = Consumer(inbox, service.url, {"*": book}, on_dead=lambda *both: told.append(both))
    assert consumer.run_once() == 2 * len(MALFORMED) + 1
    assert service.bookings == ["ev_1"]
    letters = inbox.dead(service.broker.channel).records
    assert len(letters) == len(told) == len(MALFORMED)
    assert {envelope for envelope, _ in told} == {None}
    assert all(letter.note.startswith("dead letter: malformed: ") for letter in letters)


def test_message_with_an_id_that_no_ledger_takes_is_malformed(service: Service) -> None:
    service.publish(Envelope("refund.succeeded", 1, id="x" * 300, source="payments"), refund(1))
    inbox = service.inbox()
    assert Consumer(inbox, service.url, {"*": book}).run_once() == 2
    assert service.bookings == ["ev_1"]
    assert len(inbox.dead(service.broker.channel).records) == 1


@pytest.mark.parametrize(("unknown", "dead"), [("ignore", []), ("dead", ["ev_1"])])
def test_type_without_a_handler_is_treated_by_policy(service: Service, unknown: Any, dead: list[str]) -> None:
    service.publish(refund(1))
    inbox = service.inbox()
    assert Consumer(inbox, service.url, {"order.*": book}, unknown=unknown).run_once() == 1
    assert [letter.key for letter in inbox.dead("payments").records] == dead
    assert service.bookings == []


def test_first_matching_pattern_handles_the_message(service: Service) -> None:
    called: list[str] = []

    def remember(name: str) -> EventHandler:
        return lambda op, envelope: called.append(name)

    service.publish(Envelope("refund.item.created", 1, id="a", source="payments"))
    handlers = {"refund": remember("exact"), "refund.*": remember("pattern"), "*": remember("all")}
    Consumer(service.inbox(), service.url, handlers).run_once()
    assert called == ["pattern"]


def test_same_id_with_other_data_is_flagged_and_acknowledged(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"{service.url}?window=0"
    for amount in (1, 2):
        asyncio.run(connect(url).publish([refund(1, amount=amount)]))
    assert Consumer(service.inbox(), url, {"*": book}).run_once() == 2
    assert service.bookings == ["ev_1"]
    assert "another payload" in caplog.text


def test_ignored_member_may_differ_in_a_repetition(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    url = f"{service.url}?window=0"
    for attempt in (1, 2):
        asyncio.run(connect(url).publish([refund(1, attempt=attempt, meta={"try": attempt, "kept": 1})]))
    consumer = Consumer(service.inbox(), url, {"*": book}, ignore=["attempt", "/meta/try"])
    assert consumer.run_once() == 2
    assert service.bookings == ["ev_1"]
    assert "another payload" not in caplog.text


def test_message_in_flight_elsewhere_does_not_block_the_consumer(service: Service) -> None:
    url = f"{service.url}?window=0"
    inbox = service.inbox(effect="lease")
    begun, go_on = threading.Event(), threading.Event()
    seen: list[str] = []

    def slow(op: Op, payload: Any) -> None:
        begun.set()
        assert go_on.wait(PATIENCE)

    def handle(op: Op, envelope: Envelope) -> None:
        seen.append(envelope.id)

    consumer = Consumer(inbox, url, {"*": handle}, concurrency=1)
    operation = consumer.operation(refund(1))
    elsewhere = threading.Thread(target=lambda: run(inbox.received(operation, refund(1), slow, 1)))
    elsewhere.start()
    assert begun.wait(PATIENCE)
    asyncio.run(connect(url).publish([refund(1), refund(2)]))

    async def consume() -> None:
        async with running(consumer):
            await until(lambda: seen == ["ev_2"])
            go_on.set()
            await until(lambda: not service.broker.shared.groups["inbox"])  # both are acknowledged

    asyncio.run(consume())
    elsewhere.join()
    assert seen == ["ev_2"]


def test_visibility_shorter_than_the_lease_is_refused_at_start(service: Service) -> None:
    service.publish(refund(1))
    consumer = Consumer(service.inbox(lease="30s"), f"{service.url}?visibility=10", {"*": book})
    with pytest.raises(ConfigurationError, match=r"again after 10 s, but a lease lasts 30 s.*lease=10"):
        consumer.run_once()
    with pytest.raises(ConfigurationError):
        consumer.run()
    assert service.bookings == []


def test_visibility_is_extended_while_the_handler_runs(service: Service) -> None:
    url = f"{service.url}?visibility=1"
    calls: list[int] = []

    async def slow(op: Op, envelope: Envelope) -> None:
        calls.append(op.attempt)
        await asyncio.sleep(3)

    consumer = Consumer(service.inbox(lease=1, effect="lease"), url, {"*": slow}, concurrency=1)
    service.publish(refund(1), refund(2))  # the second waits in this process for longer than that

    async def consume() -> None:
        async with running(consumer):
            await until(lambda: len(calls) == 2 and not service.broker.shared.groups["inbox"])

    asyncio.run(consume())
    assert calls == [1, 1]


def test_deliveries_that_killed_their_consumer_are_counted(service: Service) -> None:
    """The consumer passes the broker's count to the inbox."""
    service.publish(refund(1))
    inbox = service.inbox(attempts=3)

    async def take_and_die() -> None:
        subscription = service.broker.subscribe("inbox")
        [delivery] = await subscription.receive(1, 1.0)
        await delivery.nack()

    for _ in range(3):
        asyncio.run(take_and_die())
    assert Consumer(inbox, service.url, {"*": book}).run_once() == 1
    assert service.bookings == []
    assert [letter.key for letter in inbox.dead("payments").records] == ["ev_1"]


def test_ledger_that_is_down_costs_no_attempt(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    service.publish(refund(1))
    inbox = service.inbox(attempts=1)
    consumer = Consumer(inbox, service.url, {"*": book})
    lender = inbox.guard.store.lender
    assert lender is not None
    failures = iter(range(3))
    opened = lender.open

    def fail_first() -> Any:
        if next(failures, None) is not None:
            raise StoreUnavailable("the ledger is down")
        return opened()

    monkeypatch.setattr(type(lender), "open", lambda self: fail_first())

    async def consume() -> None:
        async with running(consumer):
            await until(lambda: service.bookings == ["ev_1"])

    asyncio.run(consume())
    assert inbox.dead("payments").records == ()


def test_stop_finishes_running_handlers_and_gives_back_the_rest(service: Service) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(op: Op, envelope: Envelope) -> None:
        begun.set()
        assert go_on.wait(PATIENCE)
        book(op, envelope)

    service.publish(refund(1), refund(2), refund(3))
    consumer = Consumer(service.inbox(), service.url, {"*": slow}, concurrency=1)

    async def consume() -> None:
        task = asyncio.create_task(consumer.arun())
        await until(begun.is_set)
        consumer.stop()
        await asyncio.sleep(0.2)
        assert not task.done()
        go_on.set()
        await asyncio.wait_for(task, PATIENCE)

    asyncio.run(consume())
    assert service.bookings == ["ev_1"]
    assert Consumer(service.inbox(), service.url, {"*": book}).run_once() == 2  # at once, not after their time-out
    assert service.bookings == ["ev_1", "ev_2", "ev_3"]


def test_stop_finishes_handlers_while_the_broker_is_down(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """If an async handler is cancelled under a lease, an operator must resolve the event."""
    begun, go_on = asyncio.Event(), asyncio.Event()
    seen: list[str] = []
    losses: list[bool] = []

    async def slow(op: Op, envelope: Envelope) -> None:
        begun.set()
        await go_on.wait()
        seen.append(envelope.id)

    async def lose(*_: Any) -> Any:
        losses.append(True)
        raise BrokerError("the connection was lost")

    async def consume() -> None:
        consumer = Consumer(service.inbox(effect="lease"), service.url, {"*": slow})
        task = asyncio.create_task(consumer.arun())
        await asyncio.wait_for(begun.wait(), PATIENCE)
        monkeypatch.setattr(MemorySubscription, "receive", lose)
        monkeypatch.setattr(MemorySubscription, "aopen", lose)
        await until(lambda: len(losses) > 1)  # it tries to connect again
        consumer.stop()
        await asyncio.sleep(0.2)
        assert not task.done()
        go_on.set()
        await asyncio.wait_for(task, PATIENCE)

    service.publish(refund(1))
    asyncio.run(consume())
    assert seen == ["ev_1"]


def test_stop_finishes_a_requeued_letter(service: Service) -> None:
    def fail(op: Op, envelope: Envelope) -> None:
        raise ValueError("poison")

    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slow(op: Op, envelope: Envelope) -> str:
        begun.set()
        await go_on.wait()
        return "handled"

    inbox = service.inbox(effect="lease", attempts=1)
    service.publish(refund(1))
    Consumer(inbox, service.url, {"*": fail}).run_once()
    inbox.requeue("ev_1", "payments")

    async def consume() -> None:
        consumer = Consumer(inbox, service.url, {"*": slow})
        task = asyncio.create_task(consumer.arun())
        await asyncio.wait_for(begun.wait(), PATIENCE)
        consumer.stop()
        await asyncio.sleep(2)  # longer than the consumer waits for messages
        assert not task.done()
        go_on.set()
        await asyncio.wait_for(task, PATIENCE)

    asyncio.run(consume())
    record = service.guard.find(inbox.scope("payments"), "ev_1")
    assert record is not None
    assert record.state == "settled"


def test_no_more_messages_are_taken_than_the_prefetch(service: Service) -> None:
    go_on = threading.Event()

    def slow(op: Op, envelope: Envelope) -> None:
        assert go_on.wait(PATIENCE)

    service.publish(*(refund(n) for n in range(50)))
    consumer = Consumer(service.inbox(), service.url, {"*": slow}, concurrency=2, prefetch=7)

    async def consume() -> None:
        async with running(consumer):
            waiting = service.broker.shared.group("inbox")
            await until(lambda: sum(message.count for message in waiting.values()) == 7)
            await asyncio.sleep(0.3)
            assert sum(message.count for message in waiting.values()) == 7
            go_on.set()
            await until(lambda: not waiting)

    asyncio.run(consume())


def test_on_dead_may_be_async_whatever_the_handler_is(service: Service) -> None:
    told: list[str | None] = []

    async def tell(envelope: Envelope | None, why: str) -> None:
        await asyncio.sleep(0)
        told.append(None if envelope is None else envelope.id)

    def fail(op: Op, envelope: Envelope) -> None:
        raise ValueError("poison")

    async def afail(op: Op, envelope: Envelope) -> None:
        raise ValueError("poison")

    service.publish(refund(1), refund(2))
    service.put(b"{malformed")
    each: tuple[EventHandler, ...] = (fail, afail)
    for handler in each:
        told.clear()
        inbox = service.inbox(name=handler.__name__, attempts=1)
        assert Consumer(inbox, service.url, {"*": handler}, on_dead=tell).run_once() == 3
        assert sorted(map(str, told)) == ["None", "ev_1", "ev_2"]


def test_on_dead_that_raises_changes_nothing(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("the pager is broken")

    service.put(b"not JSON")
    assert Consumer(service.inbox(), service.url, {"*": book}, on_dead=fail).run_once() == 1
    assert "on_dead failed" in caplog.text


def test_two_inboxes_in_one_database_each_handle_the_message(service: Service) -> None:
    service.publish(refund(1))
    for name in ("ledger", "mailer"):
        inbox = service.inbox(name=name)
        assert Consumer(inbox, service.url, {"*": book}).run_once() == 1
    assert service.bookings == ["ev_1", "ev_1"]


def test_group_comes_from_the_url_or_the_inbox(service: Service) -> None:
    assert Consumer(service.inbox(), service.url, {"*": book}).group == "inbox"
    assert Consumer(service.inbox(name="ledger"), service.url, {"*": book}).group == "ledger"
    assert Consumer(service.inbox(name="ledger"), f"{service.url}?group=books", {"*": book}).group == "books"


@pytest.mark.parametrize(
    ("settings", "hint"),
    [
        ({"handlers": {}}, "a function for each type"),
        ({"concurrency": 0}, "concurrency = 0"),
        ({"concurrency": 8, "prefetch": 4}, "prefetch = 4"),
        ({"unknown": "drop"}, "unknown = 'drop'"),
        ({"ignore": ["a.b"]}, "ignore has 'a.b'"),
    ],
)
def test_wrong_settings_are_refused(service: Service, settings: dict[str, Any], hint: str) -> None:
    with pytest.raises(ConfigurationError, match=hint):
        Consumer(**{"inbox": service.inbox(), "broker": service.url, "handlers": {"*": book}, **settings})


def test_ledger_without_transactions_is_refused_at_start() -> None:
    inbox = Inbox(Guard("memory://"))
    with pytest.raises(ConfigurationError, match="lends no connection"):
        Consumer(inbox, "memory://payments", {"*": book})


def test_decorated_handler_handles_each_message_once(service: Service) -> None:
    inbox = service.inbox()

    @inbox.consumer("payments", id=lambda message: message["event"])
    def handle(op: Op, message: dict[str, Any]) -> str:
        op.connection.execute("INSERT INTO bookings VALUES (?, ?)", (message["event"], 1))
        return "booked"

    first, again = handle({"event": "ev_9"}), handle({"event": "ev_9"})
    assert (first.how, again.how, again.value) == ("processed", "duplicate", "booked")
    assert (service.bookings, handle.__name__) == (["ev_9"], "handle")


async def test_decorated_async_handler_reads_id_and_source_of_the_message(service: Service) -> None:
    inbox = service.inbox(effect="lease")
    calls: list[str] = []

    @inbox.consumer()
    async def handle(op: Op, message: Any) -> None:
        calls.append(op.key)

    await handle(refund(1))
    await handle(refund(1))
    await handle({"id": "ev_2", "source": "payments"})
    assert calls == ["ev_1", "ev_2"]
    with pytest.raises(ConfigurationError, match="has no 'id'"):
        await handle({"source": "payments"})


def test_handled_message_is_logged_with_its_correlation_id(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "oncemore.messages")
    values: dict[str, Any] = {"id": "ev_1", "source": "payments", "correlationid": "key-1"}
    service.publish(Envelope("refund.succeeded", {"number": 1}, **values))
    Consumer(service.inbox(), service.url, {"*": book}).run_once()
    assert [record.correlationid for record in caplog.records if hasattr(record, "correlationid")] == ["key-1"]
    assert "ev_1 of payments (correlation key-1): processed" in caplog.text


async def test_cancelled_consumer_finishes_running_handlers(service: Service) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slow(op: Op, envelope: Envelope) -> None:
        begun.set()
        await go_on.wait()
        await op.connection.execute("INSERT INTO bookings VALUES (?, ?)", (envelope.id, envelope.data["number"]))

    await service.broker.publish([refund(1), refund(2)])
    task = asyncio.create_task(Consumer(service.inbox(), service.url, {"*": slow}, concurrency=1).arun())
    await asyncio.wait_for(begun.wait(), PATIENCE)
    task.cancel()
    await asyncio.sleep(0.1)
    assert not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, PATIENCE)
    assert service.bookings == ["ev_1"]
    assert await Consumer(service.inbox(), service.url, {"*": book}).arun_once() == 1  # given back at once
    assert service.bookings == ["ev_1", "ev_2"]


def test_requeued_letters_are_looked_for_after_any_error(
    service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An unexpected error must not end the search."""
    monkeypatch.setattr("oncemore.messages.consumer.REQUEUED", 0.05)
    inbox, looks = service.inbox(), iter(range(2))
    requeued = inbox.requeued

    def fail_first() -> Any:
        if next(looks, None) is not None:
            raise KeyError("unexpected")
        return requeued()

    monkeypatch.setattr(inbox, "requeued", fail_first)
    operation = inbox.operation("ev_1", "payments", "x")
    assert run(inbox.bury(operation, structured(refund(1)), "a test"))
    inbox.requeue("ev_1", "payments")

    async def consume() -> None:
        async with running(Consumer(inbox, service.url, {"*": book})):
            await until(lambda: service.bookings == ["ev_1"])

    asyncio.run(consume())
    assert "could not be handled" in caplog.text


def test_deliveries_are_counted_by_source_and_outcome(service: Service) -> None:
    registry, failures = CollectorRegistry(), {"ev_1": 1, "ev_3": 2}
    guard = Guard(f"sqlite:///{service.path}", observers=[prometheus.count_events(registry)])

    def handle(op: Op, envelope: Envelope) -> None:
        failures[envelope.id] -= 1
        if failures[envelope.id] >= 0:
            raise RuntimeError("not now")

    def count(source: str, outcome: str) -> float | None:
        return registry.get_sample_value("inbox_received_total", {"source": source, "outcome": outcome})

    consumer = Consumer(Inbox(guard, attempts=2), service.url, {"refund.*": handle})
    service.publish(refund(1), refund(3), Envelope("other", 1, id="ev_2", source="payments"))
    service.put(b"no event")

    async def consume() -> None:
        async with running(consumer):
            await until(lambda: count("payments", "processed") and count("payments", "dead"))
            await service.broker.put(structured(refund(1)))
            await service.broker.put(structured(refund(1, changed=True)))
            await until(lambda: count("payments", "duplicate") and count("payments", "flagged"))

    asyncio.run(consume())
    outcomes = ("processed", "failed", "dead", "duplicate", "flagged", "ignored")
    assert [count("payments", outcome) for outcome in outcomes] == [1, 2, 1, 1, 1, 1]
    assert count(service.broker.channel, "malformed") == 1
    guard.close()
