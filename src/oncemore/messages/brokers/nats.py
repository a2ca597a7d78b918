"""`nats://host/payments`: NATS JetStream.  The channel is a stream; envelopes are published to `payments.<type>`."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import nats
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js import JetStreamContext, api
from nats.js.errors import APIError, NotFoundError

from ...errors import BrokerError, ConfigurationError
from ..broker import (
    PREFETCH,
    VISIBILITY,
    Address,
    BrokerDown,
    Delivery,
    Subscription,
    UrlBroker,
    deduplication_id,
    send_answer,
    wrap_error,
)
from ..envelope import Envelope, binary, parse_binary

OPTIONS = {"visibility": VISIBILITY, "window": 120.0, "replicas": 0, "credentials": "", "token": ""}
PING = 10  # seconds; after two unanswered pings the connection is lost
LOOK = 0.2  # seconds between two checks of the connection
IN_FLIGHT = 4000  # publishes that wait for their acknowledgement
UNFIT = re.compile(r"[^0-9A-Za-z_=-]+")  # not allowed in the names of streams and consumers
UNFIT_SUBJECT = re.compile(r"[^\x21-\x7e]+|[*>]|^\.|\.$|\.(?=\.)")
PULL_EXPIRED = ("404", "408")
NO_RESPONDERS = "503"


class PublishProblem(msgspec.Struct):
    """The reason why the server has not stored a message."""

    code: int = 0
    err_code: int = 0
    description: str = ""


class PublishAnswer(msgspec.Struct):
    """The part of the server's answer to a message that matters here."""

    error: PublishProblem | None = None


decode_answer = msgspec.json.Decoder(PublishAnswer).decode


@lru_cache(4096)
def subject_of(channel: str, type: str) -> str:
    """Return the NATS subject for a type of event."""
    return f"{channel}.{UNFIT_SUBJECT.sub('_', type)}"


def covers(pattern: str, subject: str) -> bool:
    """Whether the *pattern* matches the subject: `*` stands for one part, a final `>` for all further parts."""
    wanted, given = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        wanted, given = wanted[:-1], given[: len(wanted) - 1] if len(given) >= len(wanted) else []
    return len(wanted) == len(given) and all(part in ("*", its) for part, its in zip(wanted, given, strict=True))


class NatsBroker(UrlBroker):
    """A JetStream stream, with a file store.  The header `Nats-Msg-Id` lets the server recognise a repeated id."""

    def __init__(self, address: Address, settings: Mapping[str, Any]) -> None:
        if UNFIT.search(address.channel):
            raise ConfigurationError(f"{address.channel!r} cannot name a NATS stream: use letters, digits, _ and -")
        super().__init__(address, settings)
        self._client: Client | None = None
        self.stream: JetStreamContext = None  # type: ignore[assignment]  # until it is open
        self._subjects: list[str] = []  # the subjects that the stream stores
        self._answers = ""  # the server answers on this subject, with the number of the message appended
        self._numbers = itertools.count()
        self._waiting: dict[str, tuple[str, asyncio.Future[Exception | None]]] = {}  # by number: the message's subject

    async def aopen(self) -> None:
        if self.connects:
            return
        await self.aclose()
        client = await self.connected()
        self.stream = client.jetstream(timeout=self.timeout)
        try:
            await self._find_or_create()
            self._answers, self._waiting = client.new_inbox(), {}
            await client.subscribe(f"{self._answers}.*", cb=self._take_answer)
        except BaseException as error:
            await client.close()
            if not isinstance(error, NatsError):
                raise
            raise wrap_error(self, "The connection to", error) from error
        self._client = client

    async def connected(self) -> Client:
        """Connect to the first host that answers, in random order.

        The driver must not reconnect by itself: relays and consumers do, so they know that messages may be lost.
        """
        address, options = self.address, self.address.options
        login: dict[str, Any] = {"user": address.username, "password": address.password} if address.username else {}
        if options["credentials"]:
            login["user_credentials"] = options["credentials"]
        if options["token"]:
            login["token"] = options["token"]
        tls = address.tls()
        scheme = "tls" if tls else "nats"
        known: dict[str, Any] = {
            "name": f"oncemore {self.channel}",
            "tls": tls,
            "allow_reconnect": False,
            "ping_interval": PING,
            "error_cb": ignore_errors,
            **login,
            **self.settings,
        }
        hosts = address.host_and_port(4222)
        random.shuffle(hosts)
        caught: BaseException | None = None
        for host, port in hosts:
            try:
                return await asyncio.wait_for(nats.connect(f"{scheme}://{host}:{port}", **known), self.timeout)
            except (NatsError, OSError, TimeoutError) as error:
                caught = error
        assert caught is not None
        raise wrap_error(self, "The connection to", caught) from caught

    async def _find_or_create(self) -> None:
        try:
            try:
                info = await self.stream.stream_info(self.channel)
            except NotFoundError:
                if not self.address.options["create"]:
                    raise BrokerError(
                        f"{self.url}: there is no stream {self.channel!r}, and the URL says create=false"
                    ) from None
                info = await self.stream.add_stream(self._configuration())
        except (NatsError, APIError, TimeoutError) as error:
            raise wrap_error(self, f"Looking for the stream {self.channel!r} of", error) from error
        self.window = info.config.duplicate_window
        self._subjects = info.config.subjects or []

    def _configuration(self) -> api.StreamConfig:
        options = self.address.options
        return api.StreamConfig(
            name=self.channel,
            subjects=[f"{self.channel}.>"],
            storage=api.StorageType.FILE,
            # With three, one server may fail.  A single server can have only one.
            num_replicas=options["replicas"] or (3 if len(self.address.hosts) >= 3 else 1),
            duplicate_window=options["window"],
        )

    async def aclose(self) -> None:
        if self._client is not None:
            client, self._client = self._client, None
            await client.close()

    async def send(self, envelopes: Sequence[Envelope]) -> Sequence[Exception | None]:
        results: list[Exception | None] = []
        for first in range(0, len(envelopes), IN_FLIGHT):
            sent = [await self._send(envelope) for envelope in envelopes[first : first + IN_FLIGHT]]
            await self._wait({each for each in sent if isinstance(each, asyncio.Future)})
            results += map(self._result, sent)
            self._waiting.clear()
        return results

    async def _wait(self, waiting: set[asyncio.Future[Exception | None]]) -> None:
        """Wait for the acknowledgements while connected.  The driver does not wake waiters when the connection ends."""
        ends = time.monotonic() + self.timeout
        while waiting and self.connects and (left := ends - time.monotonic()) > 0:
            _, waiting = await asyncio.wait(waiting, timeout=min(left, LOOK))

    @property
    def connects(self) -> bool:
        """Whether the connection is open."""
        return self._client is not None and self._client.is_connected

    async def _send(self, envelope: Envelope) -> asyncio.Future[Exception | None] | Exception:
        """Send the envelope, and return a future of the acknowledgement: the server's error, or None.

        The driver's own `publish_async` never ends if the answer is an error.
        """
        if self._client is None or not self.connects:  # the driver would keep it and send it later, maybe out of order
            return BrokerError(f"{self.url} is not connected")
        headers, body = binary(envelope, "ce-", quoted=True)
        headers[api.Header.MSG_ID.value] = deduplication_id(envelope, self.channel)
        headers[api.Header.EXPECTED_STREAM.value] = self.channel  # another stream may have the same subject
        number, subject = str(next(self._numbers)), subject_of(self.channel, envelope.type)
        answer: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self._waiting[number] = subject, answer
        try:
            await self._client.publish(subject, body, f"{self._answers}.{number}", headers)
        except (NatsError, OSError, TimeoutError) as error:
            return wrap_error(self, f"Publishing {envelope.id} to", error)
        return answer

    async def _take_answer(self, message: Msg) -> None:
        """Set the result of the message's future."""
        subject, waiting = self._waiting.pop(message.subject.rpartition(".")[2], ("", None))
        if waiting is not None and not waiting.done():
            waiting.set_result(self._error_in(message, subject))

    def _error_in(self, message: Msg, subject: str) -> Exception | None:
        """Return the error in the server's answer to a message, or None."""
        if (message.headers or {}).get("Status") == NO_RESPONDERS:
            if any(covers(pattern, subject) for pattern in self._subjects):
                return BrokerDown(
                    f"{self.url}: the stream {self.channel!r} does not answer; it may have lost its leader"
                )
            return BrokerError(
                f"{self.url}: the stream stores {', '.join(self._subjects)}, which does not match {subject}"
            )
        error = decode_answer(message.data).error
        if error is None:
            return None
        detail = f"Publishing to {self.url} failed: {error.description} (error {error.err_code})"
        # 5xx: the stream is full, or has lost its leader.
        return BrokerDown(detail) if error.code >= 500 else BrokerError(detail)

    def _result(self, sent: asyncio.Future[Exception | None] | Exception) -> Exception | None:
        if isinstance(sent, Exception):
            return sent
        if sent.done():
            return sent.result()
        if not self.connects:  # maybe because of this message, or of another one in the batch
            return BrokerError(f"{self.url} has lost the connection before it confirmed the message")
        return BrokerDown(f"{self.url} did not confirm the message within {self.timeout:g} s")

    def subscribe(self, group: str, *, prefetch: int = PREFETCH) -> Subscription:
        return NatsSubscription(self, group, prefetch)


async def ignore_errors(error: Exception) -> None:
    """Do nothing.  The driver calls this for each connection error; its default logs a traceback."""


class NatsSubscription(Subscription):
    """A durable pull consumer, on a connection of its own.

    The driver's `fetch` waits for a whole batch, so this class sends the requests for messages itself.
    """

    def __init__(self, broker: NatsBroker, group: str, prefetch: int) -> None:
        self.broker = broker
        self.name = UNFIT.sub("_", group)
        self.prefetch = prefetch
        self.client: Client | None = None
        self.asked = 0  # the number of requested messages that have not come yet
        self.asked_until = 0.0

    async def aopen(self) -> None:
        if self.client is not None:
            return
        broker = self.broker
        await broker.aopen()
        try:
            await self._find_or_create()
            client = await broker.connected()
            try:
                self.inbox = client.new_inbox()
                self.subscription = await client.subscribe(self.inbox)
            except BaseException:
                await client.close()
                raise
        except (NatsError, APIError, TimeoutError) as error:
            raise wrap_error(broker, f"Looking for the consumer {self.name!r} of", error) from error
        self.client = client

    async def _find_or_create(self) -> None:
        broker = self.broker
        try:
            info = await broker.stream.consumer_info(broker.channel, self.name)
        except NotFoundError:
            if not broker.address.options["create"]:
                raise BrokerError(
                    f"{broker.url}: there is no consumer {self.name!r}, and the URL says create=false"
                ) from None
            configuration = api.ConsumerConfig(
                durable_name=self.name,
                ack_policy=api.AckPolicy.EXPLICIT,
                deliver_policy=api.DeliverPolicy.ALL,
                ack_wait=broker.address.options["visibility"],
                max_deliver=-1,
                max_ack_pending=max(1000, 10 * self.prefetch),
            )
            info = await broker.stream.add_consumer(broker.channel, configuration)
        self.visibility = info.config.ack_wait

    async def receive(self, limit: int, wait: float) -> Sequence[Delivery]:
        await self.aopen()
        assert self.client is not None
        ends = time.monotonic() + wait
        if not self.client.is_connected:
            raise BrokerError(f"{self.broker.url} has lost the connection")
        found: list[Delivery] = []
        while not found:
            left = ends - time.monotonic()
            if self.subscription.pending_msgs == 0:
                if left <= 0:
                    break
                await self._ask(limit, max(left, 0.05))
            found = await self._next(limit, max(left, 0.01))
        return found

    async def _ask(self, limit: int, wait: float) -> None:
        """Request messages up to *limit*, less those that are already requested."""
        assert self.client is not None
        now = time.monotonic()
        if now > self.asked_until:
            self.asked = 0
        if self.asked >= limit:
            return
        place = f"$JS.API.CONSUMER.MSG.NEXT.{self.broker.channel}.{self.name}"
        request = {"batch": limit - self.asked, "expires": int(wait * 1e9)}
        try:
            await self.client.publish(place, json.dumps(request).encode(), self.inbox)
        except (NatsError, OSError) as error:
            raise wrap_error(self.broker, "Asking for messages of", error) from error
        self.asked = limit
        self.asked_until = now + wait

    async def _next(self, limit: int, wait: float) -> list[Delivery]:
        """Return the messages that have come.  Waits only for the first."""
        assert self.client is not None
        found: list[Delivery] = []
        while len(found) < limit and (not found or self.subscription.pending_msgs):
            try:
                message = await self.subscription.next_msg(timeout=wait)
            except TimeoutError:
                break
            except NatsError as error:
                raise wrap_error(self.broker, "Receiving from", error) from error
            if message.reply:
                self.asked = max(0, self.asked - 1)
                found.append(NatsDelivery(self, message))
                continue
            self.asked = 0  # a status message: the request has ended
            headers = message.headers or {}
            if headers.get("Status") not in PULL_EXPIRED:  # the consumer was deleted, or its leader has changed
                raise BrokerError(f"{self.broker.url}: the request for messages ended: {headers}")
            break
        return found

    async def stop(self) -> None:
        """Withdraw the request for messages, or the server would deliver returned messages here again."""
        if self.client is not None:
            try:
                waiting = await self._next(self.subscription.pending_msgs, 0.01)
                await self.subscription.unsubscribe()
            except NatsError as error:
                raise wrap_error(self.broker, "Unsubscribing from", error) from error
            for delivery in waiting:
                await delivery.nack()

    async def aclose(self) -> None:
        if self.client is not None:
            client, self.client = self.client, None
            try:
                if client.is_connected:
                    await client.flush(timeout=5)  # send the last acknowledgements
            except (NatsError, OSError, TimeoutError):
                pass
            await client.close()


class NatsDelivery(Delivery):
    __slots__ = ("message", "subscription")

    def __init__(self, subscription: NatsSubscription, message: Msg) -> None:
        super().__init__(
            lambda: parse_binary(message.headers or {}, message.data, "ce-", quoted=True),
            message.data,
            message.metadata.num_delivered,
        )
        self.subscription = subscription
        self.message = message

    async def ack(self) -> None:
        await self._answer(Msg.Ack.Ack)

    async def nack(self, delay: float = 0.0) -> None:
        answer = Msg.Ack.Nak
        if delay > 0:
            answer += b' {"delay": %d}' % int(delay * 1e9)
        await self._answer(answer)

    async def extend(self) -> None:
        await self._answer(Msg.Ack.Progress)

    async def _answer(self, answer: bytes) -> None:
        subscription = self.subscription
        if subscription.client is None:
            raise BrokerError(f"The subscription to {subscription.broker.url} is closed")
        sending = subscription.client.publish(self.message.reply, answer)
        await send_answer(subscription.broker, sending, (NatsError, OSError))
