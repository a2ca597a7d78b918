"""`kafka://host1,host2/payments`: Kafka.  The channel is a topic; the subject is the key that chooses the partition."""

from __future__ import annotations

import asyncio
import heapq
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from confluent_kafka import Consumer as KafkaClient
from confluent_kafka import KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from ...errors import BrokerError
from ..broker import PREFETCH, Address, BrokerDown, Delivery, Subscription, UrlBroker, wrap_error
from ..envelope import Envelope, binary, parse_binary

log = logging.getLogger("oncemore.messages")

OPTIONS = {"partitions": 12, "replicas": 0, "sasl": ""}
# The errors for which the message itself is at fault.  All others depend on the cluster and its settings: too few
# brokers, a missing topic, a wrong password, a missing right.
OWN_FAULT = (
    KafkaError.MSG_SIZE_TOO_LARGE,
    KafkaError.RECORD_LIST_TOO_LARGE,
    KafkaError.INVALID_MSG,
    KafkaError.INVALID_MSG_SIZE,
    KafkaError.INVALID_RECORD,
    KafkaError.INVALID_TIMESTAMP,
    KafkaError.UNSUPPORTED_FOR_MESSAGE_FORMAT,
    KafkaError.POLICY_VIOLATION,
)
# A consumer has joined or left the group, so Kafka assigns the partitions again.
REBALANCES = (KafkaError.REBALANCE_IN_PROGRESS, KafkaError.ILLEGAL_GENERATION, KafkaError.UNKNOWN_MEMBER_ID)
POLL = 0.1  # seconds; librdkafka must be polled often, even if there is no room for messages


class KafkaBroker(UrlBroker):
    """A topic, written by an idempotent producer with `acks=all`.

    Kafka recognises repetitions by the same producer, but not by another one after a crash.  *settings* are
    librdkafka's, with `_` for `.`: `connect(url, linger_ms=50)`.
    """

    def __init__(self, address: Address, settings: Mapping[str, Any]) -> None:
        super().__init__(address, {name.replace("_", "."): value for name, value in settings.items()})
        self._producer: Producer | None = None

    def configuration(self) -> dict[str, Any]:
        """Return the settings that producer and consumer share."""
        address, options = self.address, self.address.options
        shared: dict[str, Any] = {
            "bootstrap.servers": ",".join(f"{host}:{port}" for host, port in address.host_and_port(9092)),
            "client.id": "oncemore",
            "logger": log,
        }
        encrypted = address.tls() is not None
        if encrypted:
            files = {
                "ssl.ca.location": "tls_ca",
                "ssl.certificate.location": "tls_cert",
                "ssl.key.location": "tls_key",
            }
            shared |= {name: options[option] for name, option in files.items() if options[option]}
        if address.username:
            shared |= {
                "sasl.mechanism": options["sasl"] or "PLAIN",
                "sasl.username": address.username,
                "sasl.password": address.password,
            }
        if address.username or encrypted:
            login = "SASL_" if address.username else ""
            shared["security.protocol"] = login + ("SSL" if encrypted else "PLAINTEXT")
        return {**shared, **self.settings}

    async def aopen(self) -> None:
        if self._producer is not None:
            return
        producer = Producer(
            {
                "enable.idempotence": True,
                "acks": "all",
                "linger.ms": 5,
                "message.timeout.ms": int(self.timeout * 1000),
                **self.configuration(),
            }
        )
        try:
            await asyncio.to_thread(self._find_or_create, producer)
        except KafkaException as error:
            raise wrap_error(self, f"Looking for the topic {self.channel!r} of", error) from error
        self._producer = producer

    def _find_or_create(self, client: Producer) -> None:
        topic = client.list_topics(self.channel, self.timeout).topics[self.channel]
        if topic.error is None:
            return
        if topic.error.code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
            raise KafkaException(topic.error)
        options = self.address.options
        if not options["create"]:
            raise BrokerError(f"{self.url}: there is no topic {self.channel!r}, and the URL says create=false")
        replicas = options["replicas"] or -1  # -1: the cluster's default
        new = NewTopic(self.channel, options["partitions"], replicas)
        try:
            AdminClient(self.configuration()).create_topics([new], request_timeout=self.timeout)[self.channel].result()
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise

    async def aclose(self) -> None:
        if self._producer is not None:
            producer, self._producer = self._producer, None
            await asyncio.to_thread(producer.flush, 1.0)

    async def send(self, envelopes: Sequence[Envelope]) -> Sequence[Exception | None]:
        results: list[Exception | None] = [
            BrokerDown(f"{self.url} did not confirm the message within {self.timeout:g} s") for _ in envelopes
        ]
        await asyncio.to_thread(self._publish, envelopes, results)
        return results

    def _publish(self, envelopes: Sequence[Envelope], results: list[Exception | None]) -> None:
        producer = self._producer
        assert producer is not None
        for number, envelope in enumerate(envelopes):
            headers, body = binary(envelope, "ce_")
            fields: list[tuple[str, str | bytes | None]] = [(name, value.encode()) for name, value in headers.items()]
            key = envelope.subject.encode() if envelope.subject else None
            try:
                try:
                    producer.produce(self.channel, body, key, headers=fields, on_delivery=self._into(results, number))
                except BufferError:  # the local queue is full: wait until the broker has confirmed it
                    producer.flush(self.timeout)
                    producer.produce(self.channel, body, key, headers=fields, on_delivery=self._into(results, number))
            except (KafkaException, BufferError) as error:
                results[number] = wrap_error(self, f"Publishing {envelope.id} to", error)
        producer.flush(self.timeout + 1.0)

    def _into(self, results: list[Exception | None], number: int) -> Callable[[Any, Message], None]:
        """Return the function that librdkafka calls with the result of a message."""

        def report(error: KafkaError | None, message: Message) -> None:
            if error is None:
                results[number] = None
                return
            wrapped = wrap_error(self, "Publishing to", KafkaException(error))
            results[number] = wrapped if error.code() in OWN_FAULT else BrokerDown(wrapped.detail)

        return report

    def subscribe(self, group: str, *, prefetch: int = PREFETCH) -> Subscription:
        return KafkaSubscription(self, group, prefetch)


class Partition:
    """The unacknowledged offsets of a partition, from which the offset to commit follows.

    Kafka counts no deliveries.  So each commit has a note: how often the message at the committed offset was delivered.
    """

    def __init__(self, start: int, delivered: int) -> None:
        self.start = start
        self.delivered = delivered
        self.next = start
        self.open: list[int] = []  # a heap of the offsets that were delivered and cannot be committed yet
        self.done: set[int] = set()  # the offsets in `open` that are acknowledged

    @property
    def unfinished(self) -> int:
        return len(self.open) - len(self.done)

    @property
    def untouched(self) -> bool:
        """Whether no message was delivered since the partition was assigned."""
        return self.next == self.start

    def take(self, offset: int) -> int:
        """Record a delivery, and return its count."""
        if self.untouched:
            self.delivered += 1
            count = self.delivered
        else:
            count = 1
        heapq.heappush(self.open, offset)
        self.next = max(self.next, offset + 1)
        return count

    def finish(self, offset: int) -> int | None:
        """Record an acknowledgement.  Return the offset to commit, or None if it has not changed."""
        self.done.add(offset)
        moved = False
        while self.open and self.open[0] in self.done:
            self.done.discard(heapq.heappop(self.open))
            moved = True
        return (self.open[0] if self.open else self.next) if moved else None


class KafkaSubscription(Subscription):
    """A member of the group, on a thread of its own.

    A delivery is repeated when its consumer's session ends.  A delivery refused by `nack` stays with this consumer, and
    is delivered again after its delay.  The offset is not committed past it until it is acknowledged.
    """

    def __init__(self, broker: KafkaBroker, group: str, prefetch: int) -> None:
        self.broker = broker
        self.group = group
        self.prefetch = prefetch
        self.thread: threading.Thread | None = None
        self.joined, self.ended = threading.Event(), threading.Event()
        self.acknowledged: queue.SimpleQueue[KafkaDelivery] = queue.SimpleQueue()
        self.arrived: deque[Delivery] = deque()
        self.delayed: list[tuple[float, int, KafkaDelivery]] = []
        self.partitions: dict[int, Partition] = {}
        self.paused = False
        self.error: Exception | None = None

    async def aopen(self) -> None:
        if self.thread is not None:
            return
        await self.broker.aopen()
        self.loop = asyncio.get_running_loop()
        self.changed = asyncio.Event()
        self.client = KafkaClient(
            {
                "group.id": f"{self.broker.channel}.{self.group}",  # the whole cluster shares group names
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                **self.broker.configuration(),
            }
        )
        self.client.subscribe(
            [self.broker.channel], on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost
        )
        self.thread = threading.Thread(target=self._run, name="oncemore-kafka", daemon=True)
        self.thread.start()
        await asyncio.to_thread(self.joined.wait, self.broker.timeout)  # until partitions are assigned, if any

    # On the thread

    def _run(self) -> None:
        try:
            while not self.ended.is_set():
                self._commit()
                room = self.prefetch - sum(each.unfinished for each in self.partitions.values())
                if (room <= 0) != self.paused:  # only on a change, because `resume` fetches again
                    self.paused = room <= 0
                    (self.client.pause if self.paused else self.client.resume)(self.client.assignment())
                self._take(self.client.consume(max(1, min(100, room)), POLL))
            self._commit()
        except Exception as error:
            self.error = wrap_error(self.broker, "Receiving from", error)
        finally:
            self.client.close()
            self.joined.set()
            self._wake()

    def _take(self, messages: Sequence[Message]) -> None:
        first: list[TopicPartition] = []
        deliveries: list[Delivery] = []
        for message in messages:
            error = message.error()
            if error is not None:
                if error.fatal() or not error.retriable():
                    raise KafkaException(error)
                log.warning("%s: %s", self.broker.url, error)
                continue
            number = message.partition() or 0
            partition = self.partitions.get(number)
            if partition is None:  # the partition was revoked meanwhile
                continue
            untouched = partition.untouched
            count = partition.take(message.offset() or 0)
            if untouched:
                first.append(TopicPartition(self.broker.channel, number, partition.start, str(count)))
            deliveries.append(KafkaDelivery(self, message, partition, count))
        if first:  # not on assignment: then a quiet partition would count each rebalance as a delivery
            commit_or_rebalance(self.client, first)
        self.arrived.extend(deliveries)
        if messages:
            self._wake()

    def _wake(self) -> None:
        try:
            self.loop.call_soon_threadsafe(self.changed.set)
        except RuntimeError:  # the loop has ended
            return

    def _commit(self) -> None:
        """Commit the offsets up to which all messages are acknowledged."""
        places: dict[int, TopicPartition] = {}
        after_crash = False
        while True:
            try:
                delivery = self.acknowledged.get_nowait()
            except queue.Empty:
                break
            number, partition = delivery.message.partition() or 0, delivery.partition
            if self.partitions.get(number) is not partition:
                continue  # the partition was revoked, and may belong to another consumer
            offset = partition.finish(delivery.message.offset() or 0)
            if offset is not None:
                places[number] = TopicPartition(self.broker.channel, number, offset, "0")
                after_crash = after_crash or partition.delivered > 1
                partition.delivered = 1
        if places and after_crash:
            # Wait for the commit, or the next crash would be counted for a message that is done.
            commit_or_rebalance(self.client, list(places.values()))
        elif places:
            self.client.commit(offsets=list(places.values()), asynchronous=True)

    def _assigned(self, client: KafkaClient, partitions: list[TopicPartition]) -> None:
        for place in client.committed(partitions, timeout=self.broker.timeout):
            note = place.metadata or ""
            if place.offset < 0:  # the group has never committed
                place.offset = client.get_watermark_offsets(place, timeout=self.broker.timeout)[0]
            self.partitions[place.partition] = Partition(place.offset, int(note) if note.isdecimal() else 0)
        self.paused = False
        client.assign(
            [TopicPartition(each.topic, each.partition, self.partitions[each.partition].start) for each in partitions]
        )
        self.joined.set()

    def _revoked(self, client: KafkaClient, partitions: list[TopicPartition]) -> None:
        self._commit()
        self._lost(client, partitions)

    def _lost(self, client: KafkaClient, partitions: list[TopicPartition]) -> None:
        for place in partitions:
            self.partitions.pop(place.partition, None)

    # On the loop

    async def receive(self, limit: int, wait: float) -> Sequence[Delivery]:
        await self.aopen()
        ends = time.monotonic() + wait
        while True:
            self.changed.clear()
            now = time.monotonic()
            while self.delayed and self.delayed[0][0] <= now:
                self.arrived.append(heapq.heappop(self.delayed)[2])
            if self.arrived:
                return [self.arrived.popleft() for _ in range(min(limit, len(self.arrived)))]
            if self.error is not None:
                raise self.error
            if now >= ends:
                return ()
            due = min(ends, self.delayed[0][0]) if self.delayed else ends
            try:
                await asyncio.wait_for(self.changed.wait(), max(0.001, due - now))
            except TimeoutError:
                continue

    async def aclose(self) -> None:
        if self.thread is not None:
            thread, self.thread = self.thread, None
            self.ended.set()
            await asyncio.to_thread(thread.join)


class KafkaDelivery(Delivery):
    __slots__ = ("message", "partition", "subscription")

    def __init__(self, subscription: KafkaSubscription, message: Message, partition: Partition, count: int) -> None:
        body = message.value() or b""
        super().__init__(lambda: parse_binary(headers_of(message), body, "ce_"), body, count)
        self.subscription = subscription
        self.message = message
        self.partition = partition

    async def ack(self) -> None:
        if self.subscription.thread is None or self.subscription.error is not None:
            raise BrokerError(f"The subscription to {self.subscription.broker.url} is closed")
        self.subscription.acknowledged.put(self)

    async def nack(self, delay: float = 0.0) -> None:
        again = KafkaDelivery(self.subscription, self.message, self.partition, self.count + 1)
        heapq.heappush(self.subscription.delayed, (time.monotonic() + delay, id(again), again))
        self.subscription.changed.set()


def commit_or_rebalance(client: KafkaClient, places: list[TopicPartition]) -> None:
    """Commit and wait.  During a rebalance nothing is committed, and the messages are delivered again."""
    try:
        client.commit(offsets=places, asynchronous=False)
    except KafkaException as error:
        if error.args[0].code() not in REBALANCES:
            raise


def headers_of(message: Message) -> dict[str, str]:
    """Return the headers as text.  Headers that are not UTF-8 are left out, because ours are."""
    headers: dict[str, str] = {}
    for name, value in cast("list[tuple[str, bytes | str | None]]", message.headers() or []):
        try:
            headers[name] = value.decode() if isinstance(value, bytes) else str(value or "")
        except UnicodeDecodeError:
            continue
    return headers
