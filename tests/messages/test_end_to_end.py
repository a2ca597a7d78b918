"""From the producer's transaction to the consumer's: each message takes effect once, in order, on a real broker."""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oncemore import Guard, Inbox, Op, Operation, Outbox, Policy
from oncemore.messages import Consumer, Envelope, Relay
from tests.support.brokers import NatsServer


@pytest.fixture(params=["memory", pytest.param("nats", marks=pytest.mark.server)])
def broker_url(request: pytest.FixtureRequest) -> Iterator[str]:
    channel = f"payments{secrets.token_hex(4)}"
    if request.param == "memory":
        yield f"memory://{channel}"
        return
    with NatsServer() as server:
        yield f"{server.url}/{channel}"


def test_message_takes_effect_once_though_it_is_sent_twice(broker_url: str, tmp_path: Path) -> None:
    payments = Guard(f"sqlite:///{tmp_path / 'payments.db'}", policy=Policy(effect="transaction"))
    ledger = Guard(f"sqlite:///{tmp_path / 'ledger.db'}")
    outbox, onward = Outbox(payments, source="payments", keep="1h"), Outbox(ledger, source="ledger")
    with sqlite3.connect(tmp_path / "ledger.db") as connection:
        connection.execute("CREATE TABLE entries (seq INTEGER PRIMARY KEY, refund TEXT, correlation TEXT)")
    connection.close()

    def book(op: Op, envelope: Envelope) -> None:
        values = (envelope.data["id"], envelope.correlationid)
        op.connection.execute("INSERT INTO entries (refund, correlation) VALUES (?, ?)", values)
        onward.add(op, "entry.booked", envelope.data)

    def refund(op: Op) -> None:
        for n in range(3):
            outbox.add(op, "refund.succeeded", {"id": f"{op.key}-{n}"}, subject="account-1")

    payments.run(Operation("c", "k1"), refund)
    payments.run(Operation("c", "k1"), refund)  # a retry of the client: replayed
    relay = Relay(outbox, to=broker_url)
    consumer = Consumer(Inbox(ledger), broker_url, {"refund.*": book})
    assert relay.run_once() == 3
    assert consumer.run_once(wait=10.0) == 3
    outbox.replay("1h")  # as if the relay had died before it could delete the rows
    assert relay.run_once() == 3
    consumer.run_once(wait=0.5)
    assert entries(tmp_path) == [(f"k1-{n}", "k1") for n in range(3)]
    assert [message.envelope.data["id"] for message in onward.list()] == ["k1-0", "k1-1", "k1-2"]
    payments.close()
    ledger.close()


def test_replayed_message_reaches_a_consumer_that_has_lost_its_data(broker_url: str, tmp_path: Path) -> None:
    """The broker must deliver it again even if it still recognises the id."""
    guard = Guard(f"sqlite:///{tmp_path / 'payments.db'}", policy=Policy(effect="transaction"))
    outbox = Outbox(guard, source="payments", keep="1h")
    guard.run(Operation("c", "k1"), lambda op: outbox.add(op, "refund.succeeded", 1))
    relay = Relay(outbox, to=broker_url)
    seen: list[str] = []
    for name in ("before", "after", "later"):
        ledger = Guard(f"sqlite:///{tmp_path / name}.db")
        consumer = Consumer(Inbox(ledger), broker_url, {"*": lambda op, envelope: seen.append(envelope.id)})
        assert relay.run_once() == 1
        assert consumer.run_once(wait=10.0) == 1
        ledger.close()
        outbox.replay("1h")
    assert len(seen) == 3
    assert len(set(seen)) == 1
    guard.close()


def entries(folder: Path) -> list[Any]:
    connection = sqlite3.connect(folder / "ledger.db")
    try:
        return connection.execute("SELECT refund, correlation FROM entries ORDER BY seq").fetchall()
    finally:
        connection.close()
