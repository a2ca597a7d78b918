"""Consumers and brokers are killed: nothing is lost, and each message has one effect."""

from __future__ import annotations

import asyncio
import secrets
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nats
import pytest

from oncemore import Guard, Inbox, Op
from oncemore.messages import Consumer, Envelope
from oncemore.messages.broker import Broker, connect
from tests.support.brokers import NatsCluster, NatsServer, RabbitServer
from tests.support.processes import Program
from tests.support.servers import Server, ValkeyServer

pytestmark = pytest.mark.chaos

PATIENCE = 60.0
CONSUMING = Path(__file__).with_name("consuming.py")


class Bookings:
    """The database of a consumer."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "ledger.db"
        with sqlite3.connect(self.path) as database:
            database.execute("CREATE TABLE bookings (event TEXT, number INTEGER)")

    def read(self) -> list[int]:
        with sqlite3.connect(self.path, timeout=30) as database:
            return [number for (number,) in database.execute("SELECT number FROM bookings ORDER BY rowid")]

    def consumer(self, url: str) -> Consumer:
        inbox = Inbox(Guard(f"sqlite:///{self.path}"), lease=2)
        return Consumer(inbox, url, {"refund.*": book})


def book(op: Op, envelope: Envelope) -> None:
    op.connection.execute("INSERT INTO bookings VALUES (?, ?)", (envelope.id, envelope.data["number"]))


@pytest.fixture
def bookings(tmp_path: Path) -> Bookings:
    return Bookings(tmp_path)


def refund(number: int) -> Envelope:
    return Envelope("refund.succeeded", {"number": number}, id=f"ev_{number}", source="payments", subject="rf_1")


async def publish_all(broker: Broker, envelopes: list[Envelope]) -> None:
    """Publish until the broker has confirmed each message, as a relay does."""
    ends = time.monotonic() + PATIENCE
    while envelopes:
        assert time.monotonic() < ends, "the broker does not come back"
        results = await broker.publish(envelopes)
        envelopes = [each for each, result in zip(envelopes, results, strict=True) if result is not None]
        if envelopes:
            await asyncio.sleep(0.1)


def send(url: str, envelopes: list[Envelope]) -> None:
    async def publish() -> None:
        broker = connect(url)
        await publish_all(broker, envelopes)
        await broker.aclose()

    asyncio.run(publish())


async def until(holds: Callable[[], object]) -> None:
    ends = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < ends, "waited too long"
        await asyncio.sleep(0.05)


def run_killed(bookings: Bookings, url: str, point: str) -> int:
    """Run a consumer in a process until it kills itself, and return its exit code."""
    with Program([sys.executable, str(CONSUMING), str(bookings.path), url, point]) as program:
        try:
            return program.wait(PATIENCE)
        finally:
            program.kill()


async def finish(bookings: Bookings, url: str, numbers: list[int]) -> None:
    """Run a consumer until all have been booked and nothing is left at the broker."""
    consumer = bookings.consumer(url)
    task = asyncio.create_task(consumer.arun())
    try:
        await until(lambda: sorted(bookings.read()) == numbers)
        consumer.stop()
        await asyncio.wait_for(task, PATIENCE)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture(params=["nats_url", "rabbit_url", "valkey_url"])
def url(request: pytest.FixtureRequest) -> str:
    channel = f"t{secrets.token_hex(8)}"
    server: str = request.getfixturevalue(request.param)
    if request.param == "rabbit_url":
        return f"{server}/{channel}"
    return f"{server.replace('redis://', 'redis+stream://')}/{channel}?visibility=2"


@pytest.mark.server
@pytest.mark.parametrize("point", ["after claim", "after effect", "before commit", "after commit", "after ack"])
def test_killed_consumer_leaves_each_effect_once(bookings: Bookings, url: str, point: str) -> None:
    send(url, [refund(n) for n in range(3)])
    assert run_killed(bookings, url, point) == -signal.SIGKILL
    assert bookings.read() == ([0] if point in ("after commit", "after ack") else [])
    asyncio.run(finish(bookings, url, [0, 1, 2]))
    assert Consumer(bookings.consumer(url).inbox, url, {"*": book}).run_once(3.0) == 0  # the queue is empty


@pytest.mark.server
def test_sigterm_lets_the_running_handler_finish(bookings: Bookings, nats_url: str) -> None:
    url = f"{nats_url}/t{secrets.token_hex(8)}?visibility=2"
    send(url, [refund(n) for n in range(3)])
    command = [sys.executable, str(CONSUMING), str(bookings.path), url, "slow"]
    with Program(command, stdout=subprocess.PIPE) as program:
        try:
            assert program.stdout is not None
            assert program.stdout.readline() == "begun\n"
            program.send_signal(signal.SIGTERM)
            assert program.wait(PATIENCE) == 0
            assert program.stdout.read() == "stopped\n"
        finally:
            program.kill()
    assert bookings.read() == [0]
    assert bookings.consumer(url).run_once() == 2  # the others were given back at once


@pytest.fixture(params=["own_nats", "own_rabbit", "own_valkey"])
def own_server(request: pytest.FixtureRequest) -> Server:
    server: Server = request.getfixturevalue(request.param)
    return server


@pytest.mark.server
async def test_broker_killed_and_restarted_loses_nothing(bookings: Bookings, own_server: Server) -> None:
    assert isinstance(own_server, NatsServer | RabbitServer | ValkeyServer)
    visibility = "" if isinstance(own_server, RabbitServer) else "&visibility=2"
    url = f"{own_server.url.replace('redis://', 'redis+stream://')}/payments?timeout=3{visibility}"
    broker, consumer = connect(url), bookings.consumer(url)
    task = asyncio.create_task(consumer.arun())
    try:
        await publish_all(broker, [refund(n) for n in range(50)])
        await until(lambda: len(bookings.read()) > 5)
        if isinstance(own_server, RabbitServer):
            await asyncio.sleep(3)  # its registry of quorum queues is written to disk now and then
        await asyncio.to_thread(own_server.crash)
        late = asyncio.create_task(publish_all(broker, [refund(n) for n in range(50, 100)]))
        await asyncio.sleep(1)
        await asyncio.to_thread(own_server.start)
        await late
        await until(lambda: sorted(bookings.read()) == list(range(100)))
        consumer.stop()
        await asyncio.wait_for(task, PATIENCE)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await broker.aclose()
    assert sorted(bookings.read()) == list(range(100))


@pytest.mark.server
async def test_nats_cluster_without_its_leader_goes_on(bookings: Bookings, own_nats_cluster: NatsCluster) -> None:
    url = f"{own_nats_cluster.url}/payments?visibility=2"
    broker, consumer = connect(url), bookings.consumer(url)
    await publish_all(broker, [refund(n) for n in range(50)])
    task = asyncio.create_task(consumer.arun())
    try:
        client = await nats.connect(own_nats_cluster.url.split(","))
        info: Any = await client.jetstream().stream_info("payments")
        await client.close()
        assert info.config.num_replicas == 3
        await asyncio.to_thread(own_nats_cluster.node(info.cluster.leader).crash)
        await publish_all(broker, [refund(n) for n in range(50, 100)])
        await until(lambda: sorted(bookings.read()) == list(range(100)))
    finally:
        consumer.stop()
        await asyncio.wait([task], timeout=PATIENCE)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await broker.aclose()
