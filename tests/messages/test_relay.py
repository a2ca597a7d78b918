"""The relay: all messages are sent, in order within a subject, despite failures, late commits and other relays."""

from __future__ import annotations

import asyncio
import collections
import logging
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from oncemore import Guard, Op, Operation, Outbox, Policy
from oncemore._ledger.transactions import Do
from oncemore._runtime.plan import Plan
from oncemore.errors import BrokerError, ConfigurationError
from oncemore.messages import Envelope, Relay
from oncemore.messages.relay import Mode, RelayRun
from oncemore.observe import prometheus
from oncemore.testing.clock import Clock
from tests.messages.places import in_own_transaction
from tests.messages.recording import RecordingBroker
from tests.transactions.shops import Shop

WAIT = 60.0  # the longest that a test waits for something that comes at once on an idle machine


@pytest.fixture(params=["sqlite", *(pytest.param(mode, marks=pytest.mark.server) for mode in ("hold", "lease"))])
def mode(request: pytest.FixtureRequest) -> Mode | None:
    """The relay's mode; None on SQLite."""
    mode: Mode | None = None if request.param == "sqlite" else request.param
    return mode


@pytest.fixture
def url(request: pytest.FixtureRequest, mode: Mode | None, tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'shop.db'}" if mode is None else str(request.getfixturevalue("own_schema"))


@pytest.fixture
def guard(url: str) -> Iterator[Guard]:
    guard = Guard(url, policy=Policy(effect="transaction"))
    yield guard
    guard.close()


@pytest.fixture
def outbox(guard: Guard) -> Outbox:
    return Outbox(guard, source="shop")


numbers = iter(range(10**9))


def add(outbox: Outbox, *messages: tuple[Any, str | None], type: str = "a") -> None:
    """Add messages, each given as data and subject, in one operation."""

    def perform(op: Op) -> None:
        for data, subject in messages:
            outbox.add(op, type, data, subject=subject)

    outbox.guard.run(Operation("test", f"k{next(numbers)}"), perform)


def test_all_messages_are_sent_once_in_order(outbox: Outbox, mode: Mode | None) -> None:
    add(outbox, *((n, f"s{n % 3}" if n % 3 else None) for n in range(100)))
    broker = RecordingBroker()
    relay = Relay(outbox, to=broker, mode=mode, batch=7)
    assert relay.run_once() == 100
    assert relay.run_once() == 0
    assert sorted(broker.data()) == list(range(100))
    assert broker.data("s1") == list(range(1, 100, 3))
    assert broker.data("s2") == list(range(2, 100, 3))
    assert outbox.stats().pending == 0


def test_failing_message_holds_up_only_its_subject(outbox: Outbox, mode: Mode | None) -> None:
    refused = {"s1 first"}
    broker = RecordingBroker(lambda envelope: envelope.data in refused)
    relay = Relay(outbox, to=broker, mode=mode)
    add(outbox, ("s1 first", "s1"), ("s1 second", "s1"), ("s2 first", "s2"), ("no subject", None))
    add(outbox, ("s1 third", "s1"), ("s2 second", "s2"))
    relay.run_once()
    assert sorted(broker.data()) == ["no subject", "s2 first", "s2 second"]
    add(outbox, ("s1 fourth", "s1"), ("s3 first", "s3"))
    relay.run_once()
    assert broker.data("s3") == ["s3 first"]
    assert broker.data("s1") == []
    refused.clear()
    Clock(outbox.guard.store).advance(60)
    relay.run_once()
    assert broker.data("s1") == ["s1 first", "s1 second", "s1 third", "s1 fourth"]


def test_many_followers_of_a_failing_message_delay_no_others(outbox: Outbox, mode: Mode | None) -> None:
    broker = RecordingBroker(lambda envelope: envelope.subject == "bad")
    relay = Relay(outbox, to=broker, mode=mode, batch=10)
    add(outbox, *((n, "bad") for n in range(100)), ("good", "other"), ("free", None))
    relay.run_once()
    assert sorted(broker.data()) == ["free", "good"]


def test_poison_is_dead_after_its_attempts_and_followers_proceed(outbox: Outbox, mode: Mode | None) -> None:
    broker = RecordingBroker(lambda envelope: envelope.data == "poison")
    relay = Relay(outbox, to=broker, mode=mode, attempts=3)
    add(outbox, ("poison", "s"), ("follower", "s"))
    for attempt in (1, 2):
        relay.run_once()
        (message, _) = outbox.list()
        assert (message.attempts, message.error) == (attempt, "ValueError: a is refused")
        relay.run_once()  # not due again
        assert outbox.list()[0].attempts == attempt
        Clock(outbox.guard.store).advance(60)
    relay.run_once()
    assert [letter.envelope.data for letter in outbox.dead()] == ["poison"]
    assert outbox.dead()[0].attempts == 3
    assert broker.data() == ["follower"]


def test_strict_relay_holds_the_followers_of_a_dead_letter(outbox: Outbox, mode: Mode | None) -> None:
    refused = {"poison"}
    broker = RecordingBroker(lambda envelope: envelope.data in refused)
    relay = Relay(outbox, to=broker, mode=mode, attempts=1, strict=True)
    add(outbox, ("poison", "s"), ("follower", "s"), ("other", "t"))
    relay.run_once()
    relay.run_once()
    assert broker.data() == ["other"]
    refused.clear()
    outbox.requeue(outbox.dead()[0].id)
    relay.run_once()
    assert broker.data("s") == ["poison", "follower"]


def test_retry_that_is_due_later_comes_before_its_followers(outbox: Outbox, mode: Mode | None) -> None:
    refused = {0}
    broker = RecordingBroker(lambda envelope: envelope.data in refused)
    relay = Relay(outbox, to=broker, mode=mode, batch=2)
    add(outbox, *((n, "s") for n in range(6)))
    relay.run_once()
    refused.clear()
    Clock(outbox.guard.store).advance(60)  # now all are due, the followers for longer
    relay.run_once()
    assert broker.data() == [0, 1, 2, 3, 4, 5]


def test_broker_that_is_down_counts_no_attempts(outbox: Outbox, mode: Mode | None) -> None:
    broker = RecordingBroker()
    relay = Relay(outbox, to=broker, mode=mode, attempts=1)
    add(outbox, (1, "s"), (2, None))
    broker.down = True
    for _ in range(3):
        with pytest.raises(BrokerError, match="cannot be reached"):
            relay.run_once()
    assert [message.attempts for message in outbox.list()] == [0, 0]
    broker.down = False
    assert relay.run_once() == 2


def test_broker_that_goes_down_between_two_messages(outbox: Outbox, mode: Mode | None) -> None:
    class GoesDown(RecordingBroker):
        async def publish(self, envelopes: Any) -> Any:
            results = await super().publish(envelopes)
            self.down = True
            return results

    broker = GoesDown()
    relay = Relay(outbox, to=broker, mode=mode, attempts=1)
    add(outbox, *((n, "s") for n in range(3)))
    for n in range(2):
        with pytest.raises(BrokerError, match="cannot be reached"):
            relay.run_once()
        assert broker.data() == list(range(n + 1))
        broker.down = False
    assert relay.run_once() == 1
    assert broker.data() == [0, 1, 2]


def test_type_chooses_the_broker_and_the_first_match_wins(outbox: Outbox, mode: Mode | None) -> None:
    refunds, others = RecordingBroker(), RecordingBroker()
    relay = Relay(outbox, to={"refund.*": refunds, "*.created": others, "refund.lost": others}, mode=mode)
    for type in ("refund.created", "refund.item.created", "user.created", "refund.lost", "user.deleted"):
        add(outbox, (type, None), type=type)
    relay.run_once()
    assert sorted(refunds.data()) == ["refund.created", "refund.item.created", "refund.lost"]
    assert others.data() == ["user.created"]
    (letter,) = outbox.dead()
    assert letter.type == "user.deleted"
    assert letter.error == "No broker is for messages of type 'user.deleted': see the relay's to="


def test_broker_that_is_down_holds_up_no_other_broker(
    outbox: Outbox, mode: Mode | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its messages are older and more than a batch.  A subject on both brokers stays in order."""
    monkeypatch.setattr("oncemore.messages.relay.AVOIDED", 0.2)
    up, down = RecordingBroker(), RecordingBroker()
    down.down = True
    add(outbox, *((n, None) for n in range(30)), ("first", "s"), type="a")
    add(outbox, *((n, None) for n in range(30)), ("second", "s"), type="b")
    relay = Relay(outbox, to={"a": down, "b": up}, mode=mode, batch=10, attempts=2)
    thread = threading.Thread(target=relay.run)
    thread.start()
    try:
        wait_until(lambda: len(up.stored) >= 30)
        assert sorted(up.data()) == list(range(30))
        assert outbox.stats().dead == 0
        down.down = False
        wait_until(lambda: len(up.stored) + len(down.stored) == 62)
    finally:
        relay.stop()
        thread.join()
    assert (len(down.stored), up.data("s")) == (31, ["second"])
    assert outbox.stats().pending == 0


def test_one_run_passes_over_a_broker_that_is_down(outbox: Outbox, mode: Mode | None) -> None:
    """A run as by cron.  More than a batch of older messages is for the broker that is down."""
    up, down = RecordingBroker(), RecordingBroker()
    down.down = True
    add(outbox, *((n, None) for n in range(30)), type="a")
    relay = Relay(outbox, to={"a": down, "b": up}, mode=mode, batch=10)
    with pytest.raises(BrokerError, match="cannot be reached"):
        relay.run_once()
    add(outbox, *((n, None) for n in range(30)), type="b")
    assert relay.run_once() == 30
    assert sorted(up.data()) == list(range(30))
    assert outbox.stats().pending == 30


@pytest.mark.parametrize("character", ["\ud800", "\0"])
def test_error_that_no_database_can_store_is_kept(outbox: Outbox, mode: Mode | None, character: str) -> None:
    """If storing the error failed, the batch would never be marked as sent, and would be sent for ever."""

    class Raises(RecordingBroker):
        def _store(self, envelope: Envelope) -> Exception | None:
            return ValueError(f"no {character}.") if envelope.data == "bad" else super()._store(envelope)

    broker = Raises()
    add(outbox, ("bad", None), ("good", None))
    assert Relay(outbox, to=broker, mode=mode, attempts=1).run_once() == 1
    assert outbox.stats().pending == 0
    assert outbox.dead()[0].error == "ValueError: no " + {"\0": "\\x00", "\ud800": "\\ud800"}[character] + "."


def test_broker_that_fails_slowly_is_left_alone_for_longer(outbox: Outbox, mode: Mode | None) -> None:
    """A host that does not answer fails by a time-out, and the other brokers must not wait for each."""

    class Unreachable(RecordingBroker):
        opens = 0

        async def aopen(self) -> None:
            self.opens += 1
            await asyncio.sleep(1)
            raise BrokerError("no answer")

    up, down = RecordingBroker(), Unreachable()
    add(outbox, ("lost for now", None), type="a")
    relay = Relay(outbox, to={"a": down, "b": up}, mode=mode)
    thread = threading.Thread(target=relay.run)
    thread.start()
    try:
        for n in range(10):
            add(outbox, (n, None), type="b")
            wait_until(lambda n=n: len(up.stored) == n + 1)  # type: ignore[misc]
        assert down.opens <= 4  # two for each attempt
    finally:
        relay.stop()
        thread.join()


def test_exception_of_a_custom_broker_counts_as_failure(outbox: Outbox, mode: Mode | None) -> None:
    class Raises(RecordingBroker):
        async def publish(self, envelopes: Any) -> Any:
            raise RuntimeError("a bug")

    class Forgets(RecordingBroker):
        async def publish(self, envelopes: Any) -> Any:
            return []

    add(outbox, (1, None))
    with pytest.raises(ConfigurationError, match="0 results for 1 messages"):
        Relay(outbox, to=Forgets(), mode=mode).run_once()
    Relay(outbox, to=Raises(), mode=mode).run_once()
    assert outbox.list()[0].error == "BrokerError: RuntimeError: a bug"


@pytest.mark.parametrize("mode", [None, pytest.param("lease", marks=pytest.mark.server)])  # a lock ends by itself
def test_lease_of_a_dead_relay_is_taken_over(outbox: Outbox, mode: Mode | None) -> None:
    add(outbox, (1, "s"), (2, "s"), (3, None))
    relay = Relay(outbox, to=RecordingBroker(), mode=mode, lease="30s")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RelayRun, "_end_leased", dies)
        with pytest.raises(KeyboardInterrupt):
            relay.run_once()
    broker = RecordingBroker()
    Relay(outbox, to=broker, mode=mode).run_once()
    assert broker.data() == []
    assert {message.attempts for message in outbox.list()} == {1}
    Clock(outbox.guard.store).advance(31)
    Relay(outbox, to=broker, mode=mode).run_once()
    assert broker.data("s") == [1, 2]
    assert len(broker.stored) == 3


async def dies(self: Any, rows: Any, token: str) -> Any:
    """Raise an error as if the process had died after its claim."""
    raise KeyboardInterrupt


def test_eight_relays_send_ten_thousand_rows_once(outbox: Outbox, mode: Mode | None) -> None:
    count = 10_000
    add(outbox, *((n, f"s{n % 100}" if n % 2 else None) for n in range(count)))
    broker = RecordingBroker()
    sent: list[int] = []
    threads = [
        threading.Thread(target=lambda: sent.append(Relay(outbox, to=broker, mode=mode, batch=100).run_once()))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT * 5)
    while outbox.stats().pending:  # a relay ends if the others have claimed the rest
        sent.append(Relay(outbox, to=broker, mode=mode).run_once())
    assert sum(sent) == count
    assert [n for n, times in collections.Counter(broker.data()).items() if times > 1] == []
    assert sorted(broker.data()) == list(range(count))
    for subject in range(1, 100, 2):
        assert broker.data(f"s{subject}") == list(range(subject, count, 100))


def test_running_relay_sends_new_messages_until_stopped(outbox: Outbox, mode: Mode | None) -> None:
    broker = RecordingBroker()
    relay = Relay(outbox, to=broker, mode=mode)
    thread = threading.Thread(target=relay.run)
    thread.start()
    for n in range(5):
        add(outbox, (n, "s"))
        time.sleep(0.02 * n)
    wait_until(lambda: broker.data() == [0, 1, 2, 3, 4])
    relay.stop()
    thread.join(WAIT)
    assert not thread.is_alive()


def test_running_relay_survives_an_outage_of_its_broker(outbox: Outbox, mode: Mode | None) -> None:
    broker = RecordingBroker()
    relay = Relay(outbox, to=broker, mode=mode, attempts=1)
    thread = threading.Thread(target=relay.run)
    thread.start()
    add(outbox, (0, "s"))
    wait_until(lambda: broker.data() == [0])
    broker.down = True
    for n in range(1, 50):
        add(outbox, (n, "s"))
    time.sleep(0.3)
    assert broker.data() == [0]
    broker.down = False
    wait_until(lambda: broker.data() == list(range(50)))
    relay.stop()
    thread.join(WAIT)
    assert outbox.stats().dead == 0


async def test_cancelled_relay_finishes_what_is_under_way(outbox: Outbox, mode: Mode | None) -> None:
    publishing = asyncio.Event()

    class Slow(RecordingBroker):
        async def publish(self, envelopes: Any) -> Any:
            publishing.set()
            await asyncio.sleep(0.2)
            return await super().publish(envelopes)

    broker = Slow()
    await asyncio.to_thread(add, outbox, (1, None))
    task = asyncio.create_task(Relay(outbox, to=broker, mode=mode).arun())
    await asyncio.wait_for(publishing.wait(), WAIT)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert broker.data() == [1]
    assert (await outbox.astats()).pending == 0
    await outbox.guard.aclose()


def test_retry_span_beyond_the_brokers_window_is_logged(
    outbox: Outbox, mode: Mode | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "oncemore.messages"):
        Relay(outbox, to=RecordingBroker(window=120.0), mode=mode)
        assert caplog.records == []
        Relay(outbox, to=RecordingBroker(window=60.0), mode=mode)
    assert "recognises a repeated id for 60 s only" in caplog.text


def test_wrong_arguments_are_refused(outbox: Outbox, mode: Mode | None) -> None:
    broker = RecordingBroker()
    with pytest.raises(ConfigurationError, match="names no broker"):
        Relay(outbox, to={})
    with pytest.raises(ConfigurationError, match="names no broker; known are"):
        Relay(outbox, to="http://x/y")
    with pytest.raises(ConfigurationError, match="choose 'hold' or 'lease'"):
        Relay(outbox, to=broker, mode="both")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="pass an Outbox"):
        Relay("shop", to=broker)  # type: ignore[arg-type]
    for wrong in ({"batch": 0}, {"attempts": 0}, {"lease": "soon"}):
        with pytest.raises(ConfigurationError):
            Relay(outbox, to=broker, **wrong)  # type: ignore[arg-type]


def test_relay_uses_the_sources_name_as_channel(outbox: Outbox) -> None:
    (route,) = Relay(outbox, to="memory://").routes
    assert route[1].channel == "shop"


def test_hold_on_sqlite_is_refused(tmp_path: Path) -> None:
    outbox = Outbox(Guard(f"sqlite:///{tmp_path / 'shop.db'}"), source="shop")
    with pytest.raises(ConfigurationError, match="use 'lease'"):
        Relay(outbox, to=RecordingBroker(), mode="hold")


def test_observers_are_called_for_each_message(url: str, mode: Mode | None) -> None:
    events: list[Any] = []
    guard = Guard(url, policy=Policy(effect="transaction"), observers=[events.append])
    outbox = Outbox(guard, source="shop")
    broker = RecordingBroker(lambda envelope: envelope.data == "bad")
    add(outbox, ("good", None), ("bad", None))
    relay = Relay(outbox, to=broker, mode=mode, attempts=2)
    relay.run_once()
    Clock(guard.store).advance(60)
    relay.run_once()
    told = [(event.kind, event.operation.name) for event in events if event.operation.scope == "outbox|shop"]
    assert told == [("published", "outbox.a"), ("unpublished", "outbox.a"), ("dead", "outbox.a")]
    guard.close()


# On PostgreSQL: transactions that commit late


@pytest.fixture
def table(
    own_schema: str, postgres_url: str
) -> Iterator[tuple[Outbox, psycopg.Connection[Any], psycopg.Connection[Any]]]:
    guard = Guard(own_schema)
    with psycopg.connect(postgres_url) as one, psycopg.connect(postgres_url) as two:
        yield Outbox(guard, source="shop"), one, two
    guard.close()


@pytest.mark.parametrize("claim", ["hold", "lease"])
def test_late_commit_is_sent_first_and_never_skipped(table: Any, claim: Mode) -> None:
    outbox, one, two = table
    broker = RecordingBroker()
    relay = Relay(outbox, to=broker, mode=claim)
    outbox.add(one, "a", "first", subject="s")
    outbox.add(two, "a", "second", subject="s")
    outbox.add(two, "a", "free", subject=None)
    two.commit()
    relay.run_once()
    assert broker.data() == ["free"]
    one.commit()
    relay.run_once()
    assert broker.data() == ["free", "first", "second"]


@pytest.mark.parametrize("claim", ["hold", "lease"])
def test_messages_under_a_lock_keep_the_order_of_adding(table: Any, claim: Mode) -> None:
    """The transaction that began first adds last, because it waits for the other's lock."""
    outbox, one, two = table
    broker = RecordingBroker()
    one.execute("SELECT pg_current_xact_id()")
    outbox.add(two, "a", "second began, first added", subject="s")
    two.commit()
    outbox.add(one, "a", "first began, second added", subject="s")
    one.commit()
    Relay(outbox, to=broker, mode=claim).run_once()
    assert broker.data() == ["second began, first added", "first began, second added"]


def test_long_wait_for_a_transaction_is_shown_in_stats(table: Any) -> None:
    outbox, one, two = table
    one.execute("SELECT pg_current_xact_id()")
    outbox.add(two, "a", 1, subject="s")
    two.commit()
    assert outbox.stats().waiting == 0
    Clock(outbox.guard.store).advance(11)
    assert outbox.stats().waiting == 1
    one.rollback()
    assert outbox.stats().waiting == 0


async def test_long_wait_for_a_transaction_is_logged(
    table: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("oncemore.messages.relay.LOOK_FOR_WAITING", 0.05)
    outbox, one, two = table
    one.execute("SELECT pg_current_xact_id()")
    outbox.add(two, "a", 1, subject="s")
    two.commit()
    Clock(outbox.guard.store).advance(11)
    relay = Relay(outbox, to=RecordingBroker())
    running, ends = asyncio.create_task(relay.arun()), time.monotonic() + WAIT
    while "1 messages of 'shop' have waited for 10 s or more" not in caplog.text:
        assert time.monotonic() < ends
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.2)
    relay.stop()
    await running
    assert caplog.text.count("have waited") == 1  # and then once a minute


def test_row_of_a_restored_dump_does_not_wait(table: Any) -> None:
    """The dumped server's transaction numbers may be larger than any of this server's."""
    outbox, one, two = table
    outbox.add(one, "a", 1, subject="s")
    one.commit()
    statement = "UPDATE {schema}.oncemore_outbox SET xid = '9000000000000'"
    schema = outbox.guard.store.url.rpartition("schema=")[2]
    two.execute(statement.format(schema=schema))
    two.commit()
    broker = RecordingBroker()
    assert Relay(outbox, to=broker).run_once() == 1
    assert outbox.stats().waiting == 0


def test_rolled_back_transaction_is_not_waited_for(table: Any) -> None:
    outbox, one, two = table
    broker = RecordingBroker()
    outbox.add(one, "a", "lost", subject="s")
    outbox.add(two, "a", "kept", subject="s")
    two.commit()
    one.rollback()
    Relay(outbox, to=broker).run_once()
    assert broker.data() == ["kept"]


def test_second_relay_leaves_followers_of_locked_rows(own_schema: str) -> None:
    """While one relay has locked the first row of a subject, another sends other subjects only."""
    guard = Guard(own_schema, policy=Policy(effect="transaction"))
    outbox = Outbox(guard, source="shop")
    add(outbox, *((n, "busy") for n in range(10)), ("other", "free"))
    entered, go_on = threading.Event(), threading.Event()

    class Blocks(RecordingBroker):
        async def publish(self, envelopes: Any) -> Any:
            entered.set()
            await asyncio.to_thread(go_on.wait, WAIT)
            return await super().publish(envelopes)

    first, second = Blocks(), RecordingBroker()
    thread = threading.Thread(target=Relay(outbox, to=first, batch=3).run_once)
    thread.start()
    assert entered.wait(WAIT)
    assert Relay(outbox, to=second, batch=3).run_once() == 1
    assert second.data() == ["other"]
    go_on.set()
    thread.join(WAIT)
    assert first.data() == list(range(10))
    guard.close()


def test_relay_behind_a_pooler_uses_leases(pgbouncer_url: str, postgres_schema: str) -> None:
    mark = "&" if "?" in pgbouncer_url else "?"
    guard = Guard(f"{pgbouncer_url}{mark}schema={postgres_schema}", policy=Policy(effect="transaction"))
    outbox, broker = Outbox(guard, source="shop"), RecordingBroker()
    add(outbox, *((n, "s") for n in range(20)))
    seen: list[int] = []

    def looks(envelope: Envelope) -> bool:
        seen.extend(message.attempts for message in outbox.list(limit=1))
        return False

    broker.fails = looks
    Relay(outbox, to=broker, batch=1).run_once()
    assert broker.data() == list(range(20))
    assert set(seen) == {1}  # counted before it was sent
    guard.close()


def wait_until(condition: Any) -> None:
    ends = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < ends, "waited in vain"
        time.sleep(0.005)


def test_prometheus_shows_what_waits_and_what_was_sent(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    guard = Guard(
        f"sqlite:///{tmp_path / 'shop.db'}",
        policy=Policy(effect="transaction"),
        observers=[prometheus.count_events(registry)],
    )
    outbox = Outbox(guard, source="shop")
    prometheus.watch_outbox(outbox, registry)
    add(outbox, ("good", None), ("bad", None), type="refund.created")
    Clock(guard.store).advance(30)
    assert registry.get_sample_value("outbox_pending", {"source": "shop"}) == 2
    assert (registry.get_sample_value("outbox_oldest_age_seconds", {"source": "shop"}) or 0) >= 30
    Relay(outbox, to=RecordingBroker(lambda envelope: envelope.data == "bad"), attempts=1).run_once()
    assert registry.get_sample_value("outbox_pending", {"source": "shop"}) == 0
    assert registry.get_sample_value("outbox_dead", {"source": "shop"}) == 1
    for outcome in ("published", "dead"):
        labels = {"topic": "refund.created", "outcome": outcome}
        assert registry.get_sample_value("outbox_published_total", labels) == 1
    guard.close()


def test_unreadable_outbox_leaves_the_other_metrics_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()
    guard = Guard(f"sqlite:///{tmp_path / 'shop.db'}", observers=[prometheus.count_events(registry)])
    outbox = Outbox(guard, source="shop")
    prometheus.watch_outbox(outbox, registry)
    guard.run(Operation("s", "k1"), lambda op: None)
    outbox.stats()
    with sqlite3.connect(tmp_path / "shop.db") as database:
        database.execute("DROP TABLE oncemore_outbox")
    assert b"idempotent_created_total" in generate_latest(registry)
    assert "cannot be read for its metrics" in caplog.text
    guard.close()


def test_commit_wakes_relays_of_other_processes(own_schema: str) -> None:
    """Two guards have two listeners, like two processes."""
    producer, other = Guard(own_schema, policy=Policy(effect="transaction")), Guard(own_schema)
    outbox, theirs = Outbox(producer, source="shop"), Outbox(other, source="shop")
    theirs.stats()
    with other.store.wakeups.waiting(theirs.wakeup_id) as waiter:
        theirs.tables.access.listen()
        waiter.wait(WAIT).run()  # until the listener is connected
        began = time.monotonic()
        add(outbox, (1, None))
        waiter.wait(WAIT).run()
        assert time.monotonic() - began < WAIT
    producer.close()
    other.close()


@pytest.mark.parametrize("shop", ["alchemy-pysqlite", "django-sqlite"], indirect=True)
async def test_commit_of_the_users_transaction_wakes_relays(shop: Shop) -> None:
    outbox = Outbox(shop.guard, source="shop")
    woken: list[Any] = []
    shop.guard.store.wakeups.subscribe(woken.append)
    seen: list[bool] = []

    def work(place: Any) -> Plan[None]:
        yield Do(lambda: outbox.add(place, "a") and None, None)
        seen.append(outbox.wakeup_id in woken)

    await in_own_transaction(shop, work, fails=True)
    await in_own_transaction(shop, work)
    assert seen == [False, False]
    assert woken.count(outbox.wakeup_id) == 1
