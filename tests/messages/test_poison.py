"""Messages that make others fail, and brokers that are down: only messages at fault become dead letters."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aio_pika
import nats
import pytest
import redis
from aiormq.exceptions import ChannelAccessRefused
from botocore.exceptions import ClientError  # type: ignore[import-untyped]
from confluent_kafka import KafkaError

from oncemore import Guard, Op, Operation, Outbox, Policy
from oncemore.client import Backoff
from oncemore.errors import BrokerError
from oncemore.messages import Envelope, Relay
from oncemore.messages.broker import Broker, BrokerDown, Delivery, connect
from oncemore.messages.brokers import sqs
from tests.support.brokers import MinistackServer
from tests.support.servers import ValkeyServer

QUICK = Backoff(base=0.01, cap=0.01, jitter="none")
PATIENCE = 60.0


@pytest.fixture
def outbox(tmp_path: Path) -> Iterator[Outbox]:
    guard = Guard(f"sqlite:///{tmp_path / 'shop.db'}", policy=Policy(effect="transaction"))
    yield Outbox(guard, source="shop", limit=64 * 1024 * 1024)
    guard.close()


def add(outbox: Outbox, count: int, poison: bytes = b"", headers: int = 0) -> list[str]:
    """Add good messages, and maybe a bad one in the middle.  Return the ids of the good ones."""

    def perform(op: Op) -> list[str]:
        ids = [outbox.add(op, "harmless", n) for n in range(count)]
        if poison or headers:
            outbox.add(op, "poison", poison, id="poison", headers={f"h{n}": "x" * 2000 for n in range(headers)})
        return ids + [outbox.add(op, "harmless", n) for n in range(count)]

    ids: list[str] = outbox.guard.run(Operation("test", secrets.token_hex(8)), perform).value
    return ids


def drain(relay: Relay) -> None:
    """Let the relay work until nothing is pending."""
    ends = time.monotonic() + PATIENCE
    while relay.outbox.stats().pending:
        assert time.monotonic() < ends
        relay.run_once()
        time.sleep(0.02)


def received(broker: Broker, count: int) -> set[str]:
    """Return the ids that a consumer gets."""

    async def receive() -> set[str]:
        subscription = broker.subscribe("inbox")
        await subscription.aopen()
        found: list[Delivery] = []
        while len(found) < count and (some := await subscription.receive(count, 5.0)):
            found += some
            for delivery in some:
                await delivery.ack()
        await subscription.aclose()
        await broker.aclose()
        return {delivery.envelope.id for delivery in found if delivery.envelope is not None}

    return asyncio.run(receive())


# A message that makes the server close the connection: larger than its limit only together with its headers; and headers
# that are larger than a frame.
POISON = {"nats_url": (b"x" * (1024 * 1024 - 100), 0), "rabbit_url": (b"", 100)}


@pytest.mark.parametrize("server", POISON)
def test_message_that_closes_the_connection_harms_no_other(
    outbox: Outbox, server: str, request: pytest.FixtureRequest
) -> None:
    url = f"{request.getfixturevalue(server)}/t{secrets.token_hex(8)}?timeout=5"
    body, headers = POISON[server]
    ids = add(outbox, 10, body, headers)
    drain(Relay(outbox, to=url, attempts=3, backoff=QUICK))
    assert [letter.id for letter in outbox.dead()] == ["poison"]
    assert received(connect(url), len(ids)) == set(ids)


def test_message_too_large_for_its_stream_is_dead_alone(outbox: Outbox, nats_url: str) -> None:
    """The server answers with an error for this message, and stores the rest of the batch."""
    channel = f"t{secrets.token_hex(8)}"
    asyncio.run(add_stream(nats_url, channel, [f"{channel}.>"], max_msg_size=2000))
    ids = add(outbox, 10, b"x" * 3000)
    began = time.monotonic()
    drain(Relay(outbox, to=f"{nats_url}/{channel}?timeout=30", attempts=2, backoff=QUICK))
    assert time.monotonic() - began < 25  # no time-out is waited for
    [letter] = outbox.dead()
    assert (letter.id, "message size exceeds maximum allowed" in letter.error) == ("poison", True)
    assert received(connect(f"{nats_url}/{channel}"), len(ids)) == set(ids)


def test_type_that_the_stream_does_not_take_is_dead_alone(outbox: Outbox, nats_url: str) -> None:
    channel = f"t{secrets.token_hex(8)}"
    asyncio.run(add_stream(nats_url, channel, [f"{channel}.harmless"]))
    ids = add(outbox, 10, b"x")
    drain(Relay(outbox, to=f"{nats_url}/{channel}", attempts=2, backoff=QUICK))
    [letter] = outbox.dead()
    assert (letter.id, f"does not match {channel}.poison" in letter.error) == ("poison", True)
    assert received(connect(f"{nats_url}/{channel}"), len(ids)) == set(ids)


def test_type_that_another_stream_takes_is_dead(outbox: Outbox, nats_url: str) -> None:
    """The other stream would store it, and the channel's consumers would never get it."""
    channel = f"t{secrets.token_hex(8)}"
    asyncio.run(add_stream(nats_url, channel, [f"{channel}.harmless"]))
    asyncio.run(add_stream(nats_url, f"{channel}_other", [f"{channel}.poison"]))
    ids = add(outbox, 3, b"x")
    drain(Relay(outbox, to=f"{nats_url}/{channel}", attempts=2, backoff=QUICK))
    [letter] = outbox.dead()
    assert (letter.id, "expected stream does not match" in letter.error) == ("poison", True)
    assert received(connect(f"{nats_url}/{channel}"), len(ids)) == set(ids)


@pytest.mark.parametrize("kind", ["nats", "rabbitmq"])
def test_full_queue_makes_no_dead_letters(outbox: Outbox, kind: str, request: pytest.FixtureRequest) -> None:
    channel, server = (
        f"t{secrets.token_hex(8)}",
        request.getfixturevalue("nats_url" if kind == "nats" else "rabbit_url"),
    )
    if kind == "nats":
        asyncio.run(add_stream(server, channel, [f"{channel}.>"], max_msgs=2, discard="new"))
    else:
        asyncio.run(add_queue(server, channel, {"x-max-length": 2, "x-overflow": "reject-publish"}))
    add(outbox, 4)
    relay = Relay(outbox, to=f"{server}/{channel}?timeout=5", attempts=1)
    with pytest.raises(BrokerDown):
        relay.run_once()
    assert outbox.stats().dead == 0
    assert outbox.stats().pending >= 4


def test_rabbitmq_takes_long_ids_and_refuses_what_it_cannot_write(
    outbox: Outbox, rabbit_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    ids = [
        "é" * 200 + str(n) for n in range(3)
    ]  # longer than the 255 bytes of a message's property, and equal in these

    def perform(op: Op) -> None:
        for id in ids:
            outbox.add(op, "harmless", 1, id=id)
        outbox.add(op, "poison", b"x", id="poison", datacontenttype="x/" + "y" * 300)

    outbox.guard.run(Operation("test", "k"), perform)
    url = f"{rabbit_url}/t{secrets.token_hex(8)}"
    drain(Relay(outbox, to=url, attempts=2, backoff=QUICK))
    assert [letter.id for letter in outbox.dead()] == ["poison"]
    assert received(connect(url), len(ids)) == set(ids)
    assert caplog.text.count("No queue is bound") == 1


@pytest.mark.parametrize(
    ("code", "status", "is_down"),
    [
        ("AccessDenied", 403, True),
        ("ExpiredTokenException", 400, True),
        ("AWS.SimpleQueueService.NonExistentQueue", 400, True),
        ("KmsThrottled", 400, True),
        ("InternalError", 500, True),
        ("AWS.SimpleQueueService.BatchRequestTooLong", 400, False),
        ("InvalidMessageContents", 400, False),
    ],
)
def test_sqs_error_tells_if_the_message_is_at_fault(code: str, status: int, is_down: bool) -> None:
    """Wrong rights or credentials must make no dead letters, because they can be corrected."""
    answer = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    assert sqs.is_for_now(ClientError(answer, "SendMessageBatch")) is is_down


def test_missing_right_on_rabbitmq_is_not_the_messages_fault() -> None:
    class Refusing:
        async def publish(self, *_: Any, **__: Any) -> None:
            raise ChannelAccessRefused("access to exchange 'payments' refused")

    broker: Any = connect("amqp://127.0.0.1/payments")
    broker.exchange = Refusing()
    [error] = asyncio.run(broker.send([Envelope("a", 1, id="1", source="shop")]))
    assert isinstance(error, BrokerDown)


@pytest.mark.parametrize(
    ("code", "is_down"),
    [
        (KafkaError.MSG_SIZE_TOO_LARGE, False),
        (KafkaError.INVALID_RECORD, False),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, True),
        (KafkaError.NOT_ENOUGH_REPLICAS, True),
        (KafkaError._MSG_TIMED_OUT, True),
    ],
)
def test_kafka_error_tells_if_the_message_is_at_fault(code: int, is_down: bool) -> None:
    results: list[Exception | None] = [None]
    broker: Any = connect("kafka://127.0.0.1/payments")
    broker._into(results, 0)(KafkaError(code), None)
    assert isinstance(results[0], BrokerDown) is is_down
    assert isinstance(results[0], BrokerError)


def test_deleted_sqs_queue_is_made_again_and_nothing_is_dead(outbox: Outbox, ministack: MinistackServer) -> None:
    url = ministack.queue_url(f"t{secrets.token_hex(8)}")

    async def send_twice() -> None:
        broker: Any = connect(url)
        relay = Relay(outbox, to=broker, attempts=1)
        running = asyncio.create_task(relay.arun())
        for _ in range(2):
            await asyncio.to_thread(add, outbox, 2)
            while (await outbox.astats()).pending:
                await asyncio.sleep(0.02)
            await broker.call(broker.sqs.delete_queue, QueueUrl=broker.queue)
        relay.stop()
        await running

    asyncio.run(asyncio.wait_for(send_twice(), PATIENCE))
    assert outbox.stats().dead == 0


async def add_stream(url: str, name: str, subjects: list[str], **limits: Any) -> None:
    client = await nats.connect(url)
    await client.jetstream().add_stream(name=name, subjects=subjects, **limits)
    await client.close()


async def add_queue(url: str, name: str, arguments: dict[str, Any]) -> None:
    async with await aio_pika.connect(f"{url}/") as connection:
        channel = await connection.channel()
        queue = await channel.declare_queue(name, durable=True, arguments=arguments)
        await queue.bind(await channel.declare_exchange(name, "topic", durable=True), "#")


def test_broker_without_memory_makes_no_dead_letters(outbox: Outbox, own_valkey: ValkeyServer) -> None:
    url = f"{own_valkey.url.replace('redis://', 'redis+stream://')}/payments"
    ids = add(outbox, 5)
    relay = Relay(outbox, to=url, attempts=2, backoff=QUICK)
    with redis.Redis.from_url(own_valkey.url) as client:
        client.config_set("maxmemory", 1)
        for _ in range(5):
            with pytest.raises(BrokerDown, match="memory"):
                relay.run_once()
        stats = outbox.stats()
        assert (stats.pending, stats.dead) == (len(ids), 0)
        client.config_set("maxmemory", 0)
    assert relay.run_once() == len(ids)


@pytest.mark.parametrize("trouble", ["right", "stream", "type"])
def test_valkey_that_refuses_all_makes_no_dead_letters(outbox: Outbox, own_valkey: ValkeyServer, trouble: str) -> None:
    place, options = f"127.0.0.1:{own_valkey.port}/payments", ""
    with redis.Redis.from_url(own_valkey.url) as client:
        if trouble == "right":
            client.execute_command("ACL", "SETUSER", "bob", "on", ">secret", "~*", "+@all", "-xadd")
            place = f"bob:secret@{place}"
        elif trouble == "stream":
            options = "?create=false"
        else:
            client.set("payments", "no stream")
    add(outbox, 2)
    for _ in range(3):
        with pytest.raises(BrokerDown):
            Relay(outbox, to=f"redis+stream://{place}{options}", attempts=1).run_once()
    assert outbox.stats().dead == 0


@pytest.mark.parametrize("raises", [False, True])
def test_failed_batch_is_halved_to_find_bad_messages(outbox: Outbox, raises: bool) -> None:
    """The broker refuses a whole batch, or raises an error, because of two messages in it."""
    ids = add(outbox, 20)
    guilty = {ids[3], ids[29]}
    stored: list[str] = []

    class Whole:
        url, channel, group, window = "whole://", "whole", "", None

        async def aopen(self) -> None: ...

        async def aclose(self) -> None: ...

        async def publish(self, envelopes: object) -> list[Exception | None]:
            batch = [envelope.id for envelope in envelopes]  # type: ignore[attr-defined]
            if guilty & set(batch):
                if raises:
                    raise TypeError("a message that cannot be written")
                return [BrokerError("refused")] * len(batch)
            stored.extend(batch)
            return [None] * len(batch)

        def subscribe(self, group: str, *, prefetch: int = 1) -> object:
            raise NotImplementedError

    drain(Relay(outbox, to=Whole(), attempts=2, backoff=QUICK))  # type: ignore[arg-type]
    assert sorted(stored) == sorted(set(ids) - guilty)
    assert {letter.id for letter in outbox.dead()} == guilty
