"""`amqp://host/vhost/payments`: RabbitMQ.  The channel is a topic exchange, with a quorum queue for each group."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import aio_pika
from aio_pika import Exchange
from aio_pika.abc import AbstractConnection, AbstractIncomingMessage
from aiormq.exceptions import (
    AMQPError,
    ChannelAccessRefused,
    ChannelInvalidStateError,
    ChannelNotFoundEntity,
    DeliveryError,
    PublishError,
)

from ...errors import BrokerError
from ..broker import PREFETCH, Address, BrokerDown, Delivery, Subscription, UrlBroker, send_answer, wrap_error
from ..envelope import Envelope, binary, parse_binary
from ..inbox import DEFAULT_NAME

log = logging.getLogger("oncemore.messages")

OPTIONS: dict[str, Any] = {}
ERRORS = (AMQPError, ChannelInvalidStateError, OSError, TimeoutError)
MOST_IN_FLIGHT = 500  # publishes that wait for their confirmation
CLOSING = 5.0  # seconds
LONGEST = 255  # bytes of a routing key or a message id; the headers have the full type and id


class RabbitBroker(UrlBroker):
    """A durable topic exchange, with publisher confirms; the routing key is the envelope's type.

    An exchange stores no messages.  If no queue is bound when the first message comes, the default group's queue, which
    has the exchange's name, is created and bound, and the message is sent again.  RabbitMQ does not recognise repeated
    ids, so consumers need an inbox.
    """

    def __init__(self, address: Address, settings: Mapping[str, Any]) -> None:
        super().__init__(address, settings)
        self._connection: AbstractConnection | None = None
        self.exchange: Exchange = None  # type: ignore[assignment]  # until it is open
        self._binding: asyncio.Future[None] | None = None  # shared by all messages of one `send`

    async def aopen(self) -> None:
        if self._connection is not None and not self._connection.is_closed and not self.exchange.channel.is_closed:
            return
        await self.aclose()
        connection = await self.connected()
        try:
            async with asyncio.timeout(self.timeout):  # a queue that has no leader yet does not answer
                channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
                self.exchange = await self.declared(channel)
                if self.group:  # the queue must get messages that are published before its consumers start
                    await self.queue(channel, self.exchange, self.group)
        except BaseException as error:
            await close(connection)
            if not isinstance(error, ERRORS):
                raise
            raise wrap_error(self, f"Looking for the exchange {self.channel!r} of", error) from error
        self._connection = connection

    async def connected(self) -> AbstractConnection:
        """Connect to the first host that answers."""
        address = self.address
        tls = address.tls()
        error: BaseException | None = None
        for host, port in address.host_and_port(5671 if tls else 5672):
            try:
                connection: AbstractConnection = await aio_pika.connect(
                    host=host,
                    port=port,
                    login=address.username or "guest",
                    password=address.password or "guest",
                    virtualhost=address.space or "/",
                    ssl=tls is not None,
                    ssl_context=tls,
                    timeout=self.timeout,
                    **self.settings,
                )
                return connection
            except ERRORS as caught:
                error = caught
        assert error is not None
        raise wrap_error(self, "The connection to", error) from error

    async def declared(self, channel: Any) -> Exchange:
        """Return the exchange, and create it unless the URL says `create=false`."""
        if not self.address.options["create"]:
            found: Exchange = await channel.get_exchange(self.channel, ensure=True)
            return found
        made: Exchange = await channel.declare_exchange(self.channel, "topic", durable=True)
        return made

    async def queue(self, channel: Any, exchange: Exchange, group: str) -> Any:
        """Return the group's queue.  Create it and bind it to the exchange, unless the URL says `create=false`."""
        name = self.channel if group == DEFAULT_NAME else f"{self.channel}.{group}"
        if not self.address.options["create"]:
            return await channel.get_queue(name, ensure=True)
        queue = await channel.declare_queue(name, durable=True, arguments={"x-queue-type": "quorum"})
        await queue.bind(exchange, "#")
        return queue

    async def aclose(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            await close(connection)

    async def send(self, envelopes: Sequence[Envelope]) -> Sequence[Exception | None]:
        results: list[Exception | None] = []
        self._binding = None
        for first in range(0, len(envelopes), MOST_IN_FLIGHT):
            some = envelopes[first : first + MOST_IN_FLIGHT]
            if len({shorten(envelope.id) for envelope in some}) == len(some):
                results += await asyncio.gather(*map(self._publish, some))
            else:  # the driver needs different ids to tell returned messages apart
                results += [await self._publish(envelope) for envelope in some]
        return results

    async def _publish(self, envelope: Envelope) -> Exception | None:
        headers, body = binary(envelope, "ce-")
        message = aio_pika.Message(
            body,
            headers=dict(headers),
            content_type=headers.pop("content-type", None),
            message_id=shorten(envelope.id),
            delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
        )
        key = shorten(envelope.type)
        try:
            try:
                await self.exchange.publish(message, key, mandatory=True, timeout=self.timeout)
            except PublishError:
                if not self.address.options["create"]:
                    raise
                if self._binding is None:
                    self._binding = asyncio.ensure_future(self._bind_default_queue())
                await self._binding
                await self.exchange.publish(message, key, mandatory=True, timeout=self.timeout)
        except TimeoutError:  # RabbitMQ takes no messages while it has too little memory or disk
            return BrokerDown(f"{self.url} did not confirm the message {envelope.id} within {self.timeout:g} s")
        except PublishError as error:  # no queue is bound to the exchange
            return wrap_error(self, f"Publishing {envelope.id} to", error)
        except (ChannelAccessRefused, DeliveryError) as error:  # a right is missing, or a queue is full or has failed
            return BrokerDown(f"{self.url} does not take the message {envelope.id} now: {error}")
        except (*ERRORS, TypeError, ValueError) as error:  # the last two if AMQP cannot write the message
            return wrap_error(self, f"Publishing {envelope.id} to", error)
        return None

    async def _bind_default_queue(self) -> None:
        log.warning(
            "No queue is bound to the exchange %r yet, so the queue %r keeps its messages for consumers without ?group=. "
            "Start consumers with a group before the first message, or give the relay's URL the same group",
            self.channel,
            self.channel,
        )
        async with asyncio.timeout(self.timeout):
            await self.queue(self.exchange.channel, self.exchange, DEFAULT_NAME)

    def subscribe(self, group: str, *, prefetch: int = PREFETCH) -> Subscription:
        return RabbitSubscription(self, group, prefetch)


def shorten(text: str) -> str:
    return text.encode()[:LONGEST].decode(errors="ignore")


async def close(connection: AbstractConnection) -> None:
    """Close the connection, even if the server does not answer."""
    with suppress(*ERRORS):
        await asyncio.wait_for(connection.close(), CLOSING)


class RabbitSubscription(Subscription):
    """A consumer of the group's queue, on a connection of its own.

    There is no visibility time-out: a delivery is repeated when its connection ends.
    """

    def __init__(self, broker: RabbitBroker, group: str, prefetch: int) -> None:
        self.broker = broker
        self.group = group
        self.prefetch = prefetch
        self.connection: AbstractConnection | None = None
        self.arrived: deque[AbstractIncomingMessage] = deque()
        self.changed = asyncio.Event()
        self.delayed: set[asyncio.Task[None]] = set()

    async def aopen(self) -> None:
        if self.connection is not None:
            return
        broker = self.broker
        connection = await broker.connected()
        try:
            async with asyncio.timeout(broker.timeout):
                channel = await connection.channel(publisher_confirms=False)
                await channel.set_qos(prefetch_count=self.prefetch)
                queue = await broker.queue(channel, await broker.declared(channel), self.group)
                channel.close_callbacks.add(lambda *_: self.changed.set())
                self.tag = await queue.consume(self._take)
                driver: Any = await channel.get_underlay_channel()
                self.queue, self.driver = queue, driver
        except BaseException as error:
            await close(connection)  # or this consumer would still be sent messages, and nothing would read them
            if not isinstance(error, ERRORS):
                raise
            hint = "; the URL says create=false" if isinstance(error, ChannelNotFoundEntity) else ""
            raise wrap_error(broker, f"Subscribing to {self.broker.channel!r}{hint} of", error) from error
        self.channel = channel
        self.connection = connection

    async def _take(self, message: AbstractIncomingMessage) -> None:
        self.arrived.append(message)
        self.changed.set()

    async def receive(self, limit: int, wait: float) -> Sequence[Delivery]:
        await self.aopen()
        if not self.arrived:
            self.changed.clear()
            if self.channel.is_closed:
                raise BrokerError(f"{self.broker.url} has closed the connection")
            if self.tag not in self.driver.consumers:  # the queue was deleted or has failed
                raise BrokerError(f"{self.broker.url} has ended the subscription to the queue {self.queue.name!r}")
            try:
                await asyncio.wait_for(self.changed.wait(), wait)
            except TimeoutError:
                return ()
        if self.channel.is_closed:  # RabbitMQ delivers these messages again
            self.arrived.clear()
            raise BrokerError(f"{self.broker.url} has closed the connection")
        return [RabbitDelivery(self, self.arrived.popleft()) for _ in range(min(limit, len(self.arrived)))]

    async def stop(self) -> None:
        """Cancel the consumer, or RabbitMQ would immediately deliver returned messages here again."""
        if self.connection is None:
            return
        try:
            async with asyncio.timeout(CLOSING):  # the server may not answer
                await self.queue.cancel(self.tag)
            while self.arrived:
                await self.arrived.popleft().nack(requeue=True)
        except ERRORS as error:
            raise wrap_error(self.broker, "Unsubscribing from", error) from error

    async def aclose(self) -> None:
        for task in self.delayed:
            task.cancel()
        if self.connection is not None:
            connection, self.connection = self.connection, None
            await close(connection)


class RabbitDelivery(Delivery):
    __slots__ = ("message", "subscription")

    def __init__(self, subscription: RabbitSubscription, message: AbstractIncomingMessage) -> None:
        before = message.headers.get("x-delivery-count", 1 if message.redelivered else 0)
        super().__init__(
            lambda: parse_binary(headers_of(message), message.body, "ce-"),
            message.body,
            1 + (before if isinstance(before, int) else 0),
        )
        self.subscription = subscription
        self.message = message

    async def ack(self) -> None:
        await send_answer(self.subscription.broker, self.message.ack(), ERRORS)

    async def nack(self, delay: float = 0.0) -> None:
        """Return the message after *delay*.  It stays here until then, because RabbitMQ cannot delay a redelivery."""
        if delay <= 0:
            await send_answer(self.subscription.broker, self.message.nack(requeue=True), ERRORS)
            return
        task = asyncio.create_task(self._nack_later(delay))
        self.subscription.delayed.add(task)
        task.add_done_callback(self.subscription.delayed.discard)

    async def _nack_later(self, delay: float) -> None:
        await asyncio.sleep(delay)
        try:
            await self.nack()
        except BrokerError:  # the connection has ended, so the message is delivered again
            return


def headers_of(message: AbstractIncomingMessage) -> dict[str, str]:
    """Return the headers as text, with the content type, which AMQP keeps apart."""
    headers: dict[str, str] = {}
    for name, value in message.headers.items():
        if isinstance(value, str | int):  # also a bool; other producers may write integers
            headers[name] = value if isinstance(value, str) else str(value).lower()
    if message.content_type:
        headers["content-type"] = message.content_type
    return headers
