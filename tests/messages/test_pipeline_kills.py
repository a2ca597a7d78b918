"""Producer, relay, broker or consumer is killed: nothing is lost, and each refund is booked once."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import signal
import sqlite3
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from oncemore import Guard, Inbox, Op, Outbox
from oncemore.messages import Consumer, Envelope, Relay
from tests.messages.pipeline import COUNT, FATAL, new_shop, produce, refund
from tests.support.brokers import RabbitServer
from tests.support.processes import Program
from tests.support.servers import Server

pytestmark = [pytest.mark.chaos, pytest.mark.server]

FULL = os.environ.get("FULL") == "1"
OUTAGE = 30.0 if FULL else 4.0  # seconds
PATIENCE = 90.0
HERE = Path(__file__).parent

# Who is killed, and when: how many refunds are in the shop and in the books at that moment.  A killed relay had taken five.
POINTS = {
    ("producer", "after claim"): (FATAL, 0),
    ("producer", "before commit"): (FATAL, 0),
    ("producer", "after commit"): (FATAL + 1, 0),
    ("relay", "after claim"): (COUNT, 0),
    ("relay", "after publish"): (COUNT, 5),
    ("relay", "after mark"): (COUNT, 5),
    ("consumer", "after effect"): (COUNT, 0),
    ("consumer", "before commit"): (COUNT, 0),
    ("consumer", "after commit"): (COUNT, 1),
    ("consumer", "after ack"): (COUNT, 1),
}
# Without FULL=1, brokers take turns.
BROKERS = ("nats_url", "rabbit_url", "valkey_url")
MATRIX = [
    (broker, *point)
    for n, point in enumerate(POINTS)
    for broker in (BROKERS if FULL or point == ("relay", "after publish") else (BROKERS[n % 3],))
]


class Services:
    """A shop that refunds, and a second service that books the refunds from its messages."""

    def __init__(self, folder: Path, url: str) -> None:
        self.shop, self.books, self.url = folder / "shop.db", folder / "books.db", url
        self.outbox: Outbox = new_shop(str(self.shop))
        with sqlite3.connect(self.books) as database:
            database.execute("CREATE TABLE bookings (event TEXT, number INTEGER)")

    def start(self, role: str, point: str) -> Program:
        script, *arguments = {
            "producer": ("pipeline.py", "producer", str(self.shop), self.url),
            "relay": ("pipeline.py", "relay", str(self.shop), self.url),
            "consumer": ("consuming.py", str(self.books), self.url),
        }[role]
        return Program([sys.executable, str(HERE / script), *arguments, point])

    def relay(self) -> Relay:
        return Relay(self.outbox, to=self.url, lease="1s")

    def consumer(self) -> Consumer:
        return Consumer(Inbox(Guard(f"sqlite:///{self.books}"), lease=2), self.url, {"*": book})

    def refunds(self) -> list[int]:
        return read(self.shop, "SELECT number FROM refunds ORDER BY rowid")

    def bookings(self) -> list[int]:
        return read(self.books, "SELECT number FROM bookings ORDER BY rowid")

    async def finish(self, done: Callable[[], object]) -> None:
        """Run a relay and a consumer until *done*, and until the broker and the outbox are empty."""
        relay, consumer = self.relay(), self.consumer()
        tasks = [asyncio.create_task(relay.arun()), asyncio.create_task(consumer.arun())]
        try:
            await until(lambda: done() and not self.outbox.stats().pending, *tasks)
            relay.stop()
            consumer.stop()
            await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def read(path: Path, query: str) -> list[int]:
    with sqlite3.connect(path, timeout=30) as database:
        return [number for (number,) in database.execute(query)]


def book(op: Op, envelope: Envelope) -> None:
    op.connection.execute("INSERT INTO bookings VALUES (?, ?)", (envelope.id, envelope.data["number"]))


async def until(holds: Callable[[], object], *tasks: asyncio.Task[None]) -> None:
    ends = time.monotonic() + PATIENCE
    while not await asyncio.to_thread(holds):
        assert time.monotonic() < ends, "waited too long"
        assert not any(task.done() for task in tasks)
        await asyncio.sleep(0.05)


def channel_at(server: str, visibility: float = 2) -> str:
    """Return a new channel's URL.  RabbitMQ has no time-out: it repeats a delivery when the connection ends."""
    if server.startswith("amqp"):
        return f"{server}/t{secrets.token_hex(8)}?group=inbox"
    return f"{server.replace('redis://', 'redis+stream://')}/t{secrets.token_hex(8)}?visibility={visibility}"


@pytest.mark.parametrize(("broker", "role", "point"), MATRIX)
def test_kill_then_restart_books_each_refund_once_in_order(
    broker: str, role: str, point: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    services = Services(tmp_path, channel_at(request.getfixturevalue(broker)))
    if role != "producer":
        produce(services.outbox, "")
    if role == "consumer":
        assert services.relay().run_once() == COUNT
    with services.start(role, point) as program:
        assert program.wait(PATIENCE) == -signal.SIGKILL
    if role == "relay":
        services.consumer().run_once(wait=1.0)
    assert (len(services.refunds()), len(services.bookings())) == POINTS[role, point]
    produce(services.outbox, "")  # the callers ask again
    asyncio.run(services.finish(lambda: len(services.bookings()) >= COUNT))
    assert services.refunds() == list(range(COUNT))
    bookings = services.bookings()
    for subject in (0, 1):
        assert [number for number in bookings if number % 2 == subject] == list(range(subject, COUNT, 2))
    assert services.consumer().run_once(wait=0.5) == 0
    assert services.outbox.stats().dead == 0


@pytest.mark.parametrize("broker", BROKERS)
def test_random_kills_of_all_lose_nothing_and_repeat_nothing(
    broker: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    services = Services(tmp_path, channel_at(request.getfixturevalue(broker)))
    chance = random.Random(18)
    roles = ["producer", "relay", "relay", "consumer", "consumer"]
    running = [services.start(role, "slowly") for role in roles]
    try:
        for _ in range(40 if FULL else 10):
            time.sleep(chance.uniform(0.1, 0.7))
            victim = chance.randrange(len(roles))
            running[victim].kill()
            running[victim].wait(PATIENCE)
            running[victim] = services.start(roles[victim], "slowly")
    finally:
        for program in running:
            program.kill()
            program.wait(PATIENCE)
    refunds = services.refunds()
    assert len(refunds) > 10
    assert refunds == sorted(set(refunds))
    asyncio.run(services.finish(lambda: len(services.bookings()) >= len(refunds)))
    assert sorted(services.bookings()) == refunds
    assert services.outbox.stats().dead == 0


@pytest.fixture(params=["own_nats", "own_rabbit", "own_valkey"])
def own_server(request: pytest.FixtureRequest) -> Server:
    server: Server = request.getfixturevalue(request.param)
    return server


async def test_relay_and_consumer_of_a_frozen_broker_stop_soon(own_server: Server, tmp_path: Path) -> None:
    """A frozen broker keeps connections open and answers nothing.  The next relay sends the remaining messages."""
    services = Services(tmp_path, channel_at(own_server.url) + "&timeout=2")  # type: ignore[attr-defined]
    relay, consumer = services.relay(), services.consumer()
    tasks = [asyncio.create_task(relay.arun()), asyncio.create_task(consumer.arun())]
    await asyncio.to_thread(refund, services.outbox, 1)
    await until(lambda: len(services.bookings()) == 1, *tasks)
    os.kill(own_server.pid, signal.SIGSTOP)
    try:
        await asyncio.to_thread(refund, services.outbox, 2)
        await asyncio.sleep(0.5)
        relay.stop()
        consumer.stop()
        await asyncio.wait_for(asyncio.gather(*tasks), 30)
    finally:
        os.kill(own_server.pid, signal.SIGCONT)
    assert services.outbox.stats().dead == 0
    relay, consumer = services.relay(), services.consumer()
    tasks = [asyncio.create_task(relay.arun()), asyncio.create_task(consumer.arun())]
    await until(lambda: len(services.bookings()) == 2, *tasks)
    relay.stop()
    consumer.stop()
    await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE)


async def test_broker_that_is_down_under_load_loses_nothing(own_server: Server, tmp_path: Path) -> None:
    """The broker is killed under load, and restarted later."""
    services = Services(tmp_path, channel_at(own_server.url) + "&timeout=3")  # type: ignore[attr-defined]
    relay, consumer = services.relay(), services.consumer()
    tasks = [asyncio.create_task(relay.arun()), asyncio.create_task(consumer.arun())]
    produced, stopping = 0, asyncio.Event()

    async def load() -> None:
        nonlocal produced
        while not stopping.is_set():
            await asyncio.to_thread(refund, services.outbox, produced)
            produced += 1
            await asyncio.sleep(0.01)

    loading = asyncio.create_task(load())
    try:
        await until(lambda: len(services.bookings()) > 20, *tasks)
        if isinstance(own_server, RabbitServer):
            await asyncio.sleep(3)  # its registry of quorum queues is written to disk now and then
        await asyncio.to_thread(own_server.crash)
        before = produced
        await asyncio.sleep(OUTAGE)
        assert produced > before  # nobody who refunds waits for the broker
        await asyncio.to_thread(own_server.start)
        await until(lambda: len(services.bookings()) > before + 20, *tasks)
        stopping.set()
        await loading
        await until(lambda: len(services.bookings()) >= produced, *tasks)
        relay.stop()
        consumer.stop()
        await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE)
    finally:
        for task in (loading, *tasks):
            task.cancel()
        await asyncio.gather(loading, *tasks, return_exceptions=True)
    assert sorted(services.bookings()) == services.refunds() == list(range(produced))
    stats = services.outbox.stats()
    assert (stats.pending, stats.dead) == (0, 0)


def test_page_of_message_crashes_has_each_point() -> None:
    page = (HERE.parents[1] / "docs" / "explain" / "message-crashes.md").read_text()
    rows = [tuple(cell.strip() for cell in line.split("|")[1:3]) for line in page.splitlines() if line.startswith("| ")]
    assert rows[1:] == list(POINTS)
