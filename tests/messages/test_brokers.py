"""The contract of brokers, on each real server."""

from __future__ import annotations

import asyncio
import secrets
from types import SimpleNamespace
from typing import Any

import aio_pika
import nats
import pytest
import redis.asyncio as redis
from confluent_kafka import KafkaError, KafkaException, Producer
from nats.errors import ConnectionClosedError

from oncemore.errors import BrokerError
from oncemore.messages.broker import Broker, BrokerDown, Subscription, connect
from oncemore.messages.brokers import kafka, redis_streams, sqs
from oncemore.messages.brokers.memory import MemoryBroker
from oncemore.testing import BrokerContract
from oncemore.testing.brokers import Make, message, numbers
from tests.support.brokers import MinistackServer


def new_channel() -> str:
    return f"t{secrets.token_hex(8)}"


def makes(url: str) -> Make:
    return lambda: connect(url)


class TestMemory(BrokerContract):
    @pytest.fixture
    def make(self) -> Make:
        return makes(f"memory://{new_channel()}?visibility=2")

    async def put(self, broker: Broker, body: bytes) -> None:
        assert isinstance(broker, MemoryBroker)
        await broker.put(body)


class TestNats(BrokerContract):
    too_large = 1_100_000

    @pytest.fixture
    def make(self, nats_url: str) -> Make:
        return makes(f"{nats_url}/{new_channel()}?visibility=2")

    async def put(self, broker: Broker, body: bytes) -> None:
        client = await nats.connect(broker.url.rpartition("/")[0])
        await client.jetstream().publish(f"{broker.channel}.foreign", body)
        await client.close()


class TestRabbit(BrokerContract):
    @pytest.fixture
    def make(self, rabbit_url: str) -> Make:
        self.url = rabbit_url
        return makes(f"{rabbit_url}/{new_channel()}?group=group-1")  # its queue is there before the first message

    async def put(self, broker: Broker, body: bytes) -> None:
        async with await aio_pika.connect(self.url + "/") as connection:
            exchange = await (await connection.channel()).get_exchange(broker.channel)
            await exchange.publish(aio_pika.Message(body), "foreign")


class TestKafka(BrokerContract):
    too_large = 1_100_000

    @pytest.fixture
    def make(self, kafka_url: str) -> Make:
        self.url = kafka_url
        url = f"{kafka_url}/{new_channel()}"
        # The mock lets nobody join a group that all have left before their sessions have ended.
        return lambda: connect(url, session_timeout_ms=6000, heartbeat_interval_ms=500)

    async def put(self, broker: Broker, body: bytes) -> None:
        producer = Producer({"bootstrap.servers": self.url.removeprefix("kafka://")})
        producer.produce(broker.channel, body, b"rf_1")
        assert producer.flush(30) == 0


async def test_kafka_subscription_goes_on_after_a_rebalance(kafka_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[bool] = []

    class Rebalancing(kafka.KafkaClient):
        def commit(self, **given: Any) -> Any:
            if not given["asynchronous"] and not refused:
                refused.append(True)
                raise KafkaException(KafkaError(KafkaError.REBALANCE_IN_PROGRESS))
            return super().commit(**given)

    monkeypatch.setattr(kafka, "KafkaClient", Rebalancing)
    broker = connect(f"{kafka_url}/{new_channel()}")
    subscription = broker.subscribe("group-1")
    try:
        assert await broker.publish([message(1)]) == [None]
        [delivery] = await subscription.receive(1, 30)
        assert refused
        assert numbers([delivery]) == [1]
        await delivery.ack()
    finally:
        await subscription.aclose()
        await broker.aclose()


async def test_kafka_rebalances_of_a_quiet_partition_are_not_counted(kafka_url: str) -> None:
    """Each deployment causes rebalances.  If they counted, the next message would be a dead letter without a try."""
    broker = connect(f"{kafka_url}/{new_channel()}?partitions=1", session_timeout_ms=6000, heartbeat_interval_ms=500)
    try:
        for _ in range(2):
            subscription = broker.subscribe("group-1")
            await subscription.aopen()
            await subscription.aclose()
        assert await broker.publish([message(1)]) == [None]
        subscription = broker.subscribe("group-1")
        [delivery] = await subscription.receive(1, 30)
        assert delivery.count == 1
        await subscription.aclose()
    finally:
        await broker.aclose()


async def test_nats_connection_that_ends_while_it_opens_is_an_error(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any error but BrokerError would end the relay or the consumer."""
    clients: list[nats.NATS] = []

    async def end(client: nats.NATS, *_: Any, **__: Any) -> None:
        clients.append(client)
        raise ConnectionClosedError

    broker = connect(f"{nats_url}/{new_channel()}")
    await broker.aopen()
    monkeypatch.setattr(nats.NATS, "subscribe", end)
    with pytest.raises(BrokerError):
        await broker.subscribe("group-1").aopen()
    await broker.aclose()
    with pytest.raises(BrokerError):
        await broker.aopen()
    assert [client.is_closed for client in clients] == [True, True]


async def receive_for_ever(subscription: Subscription) -> None:
    while True:
        await subscription.receive(1, 1.0)


async def test_rabbit_subscription_whose_queue_is_deleted_ends(rabbit_url: str) -> None:
    """RabbitMQ leaves the channel open, so without an error the consumer would wait for ever."""
    broker = connect(f"{rabbit_url}/{new_channel()}?group=group-1")
    subscription = broker.subscribe("group-1")
    await subscription.aopen()
    try:
        async with await aio_pika.connect(rabbit_url + "/") as connection:
            await (await connection.channel()).queue_delete(f"{broker.channel}.group-1")
        with pytest.raises(BrokerError, match="has ended the subscription to the queue"):
            await asyncio.wait_for(receive_for_ever(subscription), 30)
    finally:
        await subscription.aclose()
        await broker.aclose()


async def test_rabbit_queue_that_is_not_bound_in_time_is_down(rabbit_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue whose leader is not elected does not answer; the relay must not wait for ever."""
    broker = connect(f"{rabbit_url}/{new_channel()}?timeout=1")
    await broker.aopen()
    monkeypatch.setattr(broker, "queue", lambda *_: asyncio.sleep(3600))
    try:
        [error] = await asyncio.wait_for(broker.publish([message(1)]), 30)
        assert isinstance(error, BrokerDown)
    finally:
        await broker.aclose()


async def test_rabbit_subscription_that_is_cancelled_while_it_opens_ends(
    rabbit_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it did not end, the queue's messages would go to a consumer that nothing reads."""
    connected: list[Any] = []
    begun = asyncio.Event()
    connect_to = aio_pika.connect

    async def note(**given: Any) -> Any:
        connected.append(await connect_to(**given))
        return connected[-1]

    async def hang(*_: Any) -> None:
        begun.set()
        await asyncio.sleep(3600)

    monkeypatch.setattr(aio_pika, "connect", note)
    broker = connect(f"{rabbit_url}/{new_channel()}")
    monkeypatch.setattr(broker, "declared", hang)
    for opening in (broker, broker.subscribe("group-1")):
        task = asyncio.create_task(opening.aopen())
        await asyncio.wait_for(begun.wait(), 30)
        task.cancel()
        await asyncio.wait([task])
        assert connected.pop().is_closed
        begun.clear()


async def test_redis_sweep_loses_no_message_of_an_idle_consumer(
    valkey_url: str, redis_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A consumer may get a message after the sweep found it idle; removing the consumer would remove the message."""
    monkeypatch.setattr(redis_streams, "GONE", 0.0)
    monkeypatch.setattr(redis_streams, "SWEEP", 0.0)
    look = redis.Redis.xinfo_consumers

    async def deliver(client: Any, consumer: str) -> None:
        await client.xreadgroup("group-1", consumer, {redis_prefix: ">"}, count=1)

    async def look_and_deliver(client: Any, *given: Any) -> Any:
        found = await look(client, *given)
        await deliver(client, "idle")
        return found

    monkeypatch.setattr(redis.Redis, "xinfo_consumers", look_and_deliver)
    client: Any = redis.Redis.from_url(valkey_url)
    broker: Any = connect(f"{valkey_url.replace('redis://', 'redis+stream://')}/{redis_prefix}?visibility=1")
    subscription: Any = broker.subscribe("group-1")
    await subscription.aopen()
    try:
        assert await broker.publish([message(1), message(2)]) == [None, None]
        await deliver(client, "busy")
        await client.xgroup_createconsumer(redis_prefix, "group-1", "idle")
        await asyncio.sleep(0.01)
        await subscription._sweep()
        assert [each["name"] for each in await look(client, redis_prefix, "group-1")] == [b"busy"]
        found: list[int] = []
        while len(found) < 2 and (some := await subscription.receive(1, 10)):
            found += numbers(some)
            await some[0].ack()
        assert sorted(found) == [1, 2]
    finally:
        await subscription.aclose()
        await broker.aclose()
        await client.aclose()


class TestRedisStreams(BrokerContract):
    @pytest.fixture
    def make(self, valkey_url: str, redis_prefix: str) -> Make:
        self.url = valkey_url
        return makes(f"{valkey_url.replace('redis://', 'redis+stream://')}/{redis_prefix}?visibility=2")

    async def put(self, broker: Broker, body: bytes) -> None:
        client: Any = redis.Redis.from_url(self.url)
        await client.xadd(broker.channel, {"event": body})
        await client.aclose()


class TestSqsFifo(BrokerContract):
    has_groups = False
    too_large = 1_100_000
    suffix = ".fifo"

    @pytest.fixture
    def make(self, ministack: MinistackServer) -> Make:
        return makes(f"{ministack.queue_url(new_channel() + self.suffix)}&visibility=2")

    async def put(self, broker: Broker, body: bytes) -> None:
        more: dict[str, str] = {}
        if self.suffix:
            more = {"MessageGroupId": "rf_1", "MessageDeduplicationId": secrets.token_hex(8)}
        sqs: Any = broker
        await sqs.call(sqs.sqs.send_message, QueueUrl=sqs.queue, MessageBody=body.decode(), **more)


async def test_sqs_delay_below_a_second_is_rounded_up() -> None:
    """SQS takes whole seconds.  With 0, a message in progress elsewhere would be delivered again immediately."""
    delays: list[int] = []

    class Told:
        broker: Any = SimpleNamespace(sqs=SimpleNamespace(change_message_visibility=None))

        async def answer(self, function: Any, receipt: str, **more: Any) -> None:
            delays.append(more["VisibilityTimeout"])

    told: Any = Told()
    for delay in (0.0, 0.02, 1.0, 1.5, 1e9):
        await sqs.SqsDelivery(told, {"Body": "{}", "ReceiptHandle": "r"}).nack(delay)
    assert delays == [0, 1, 1, 2, 43_200]


class TestSqsStandard(TestSqsFifo):
    suffix = ""
    keeps_order = False
