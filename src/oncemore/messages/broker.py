"""The protocol that relays and consumers use message brokers by, and `connect`, which makes a broker from a URL."""

from __future__ import annotations

import importlib
import ssl
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable
from urllib.parse import unquote

from .._ledger.connect import hide_password, naming_extras, take_options
from ..errors import BrokerError, ConfigurationError, InvalidPayload
from .envelope import Envelope

# Each scheme, with its module in brokers/ and its class.  A new broker is one new file and one line here.
BROKERS = {
    "memory": ("memory", "MemoryBroker"),
    "nats": ("nats", "NatsBroker"),
    "amqp": ("rabbitmq", "RabbitBroker"),
    "amqps": ("rabbitmq", "RabbitBroker"),
    "kafka": ("kafka", "KafkaBroker"),
    "redis+stream": ("redis_streams", "RedisStreamBroker"),
    "rediss+stream": ("redis_streams", "RedisStreamBroker"),
    "sqs": ("sqs", "SqsBroker"),
}

WITHOUT_SPACES = ("nats", "kafka", "sqs")  # modules with nothing but the channel in the path of their URLs

PREFETCH = 100  # deliveries that a consumer may have taken and not yet acknowledged
VISIBILITY = 30.0  # seconds; the visibility time-out of subscriptions that we create
TIMEOUT = 10.0  # seconds; a NATS cluster that has lost its leader confirms messages again after five

# Options that every broker's URL may have.
COMMON = {
    "group": "",
    "create": True,
    "timeout": TIMEOUT,
    "tls": False,
    "tls_ca": "",
    "tls_cert": "",
    "tls_key": "",
}


class BrokerDown(BrokerError):
    """The broker stores no messages for now: it cannot be reached, does not answer, is full, or refuses our login.

    A relay then counts no attempt, and tries all messages again until the broker is back.
    """


class Delivery(ABC):
    """One delivery of a message to a consumer, which ends the delivery by `ack` or `nack`.

    Attributes:
        envelope: The message, or None if it is malformed.
        problem: The reason why the message is malformed; empty if it is not.
        raw: The message's body, as the broker has it.
        count: How often the broker has delivered the message, including this time; 1 if the broker does not count.
    """

    __slots__ = ("__weakref__", "count", "envelope", "problem", "raw")

    def __init__(self, parse: Callable[[], Envelope], raw: bytes, count: int = 1) -> None:
        self.envelope: Envelope | None = None
        self.problem, self.raw, self.count = "", raw, count
        try:
            self.envelope = parse()
        except InvalidPayload as error:
            self.problem = error.detail

    @abstractmethod
    async def ack(self) -> None:
        """Acknowledge the message, so that the broker does not deliver it to this group again."""

    @abstractmethod
    async def nack(self, delay: float = 0.0) -> None:
        """Have the message delivered again after *delay* seconds, to any consumer of the group."""

    async def extend(self) -> None:
        """Restart the visibility time-out.  Does nothing if the broker has none."""
        return


class Subscription(ABC):
    """A consumer's connection to a channel, as a member of its group.

    `receive` raises BrokerError if the connection is lost.  Then close the subscription and open a new one: the broker
    repeats unacknowledged deliveries.
    """

    # Seconds after which an unacknowledged delivery is repeated; None if that happens only when the connection ends.
    visibility: float | None = None

    async def aopen(self) -> None:
        """Connect, create a missing channel or group, and set `visibility`."""
        return

    @abstractmethod
    async def receive(self, limit: int, wait: float) -> Sequence[Delivery]:
        """Wait up to *wait* seconds for a delivery, and return at most *limit*; none if the time is up."""

    async def stop(self) -> None:
        """Take no more messages.  Delivered messages can still be acknowledged.  Only `aclose` may follow."""
        return

    @abstractmethod
    async def aclose(self) -> None:
        """Disconnect.  The broker repeats unacknowledged deliveries."""


@runtime_checkable
class Broker(Protocol):
    """One channel of a message broker: a NATS stream, a RabbitMQ exchange, a Kafka topic, a Redis stream, an SQS queue.

    All methods are called on one event loop, between `aopen` and `aclose`.  A broker that was closed can be opened
    again, also on another loop.

    Attributes:
        url: The broker's address, without its password, for logs and error messages.
        channel: The name of the channel.
        group: The name of the consumers' group in the URL; empty if the URL has none.
        window: Seconds for which the broker recognises a repeated id; None if it recognises none, or forgets none.
    """

    url: str
    channel: str
    group: str
    window: float | None

    async def aopen(self) -> None:
        """Connect, and create the channel if it is missing.  Raises BrokerError.  Does nothing if already open."""

    async def aclose(self) -> None:
        """Disconnect.  Does nothing if not open."""

    async def publish(self, envelopes: Sequence[Envelope]) -> Sequence[Exception | None]:
        """Send the envelopes in their order.  Return one result for each: None only if the broker has stored it.

        Errors are returned, not raised; an error that concerns all envelopes is the result of each.  BrokerDown means
        that the message is not at fault.  After a lost connection, the next call connects again.
        """

    def subscribe(self, group: str, *, prefetch: int = PREFETCH) -> Subscription:
        """Return a subscription for one consumer of *group*, with at most *prefetch* unacknowledged deliveries."""


@dataclass(frozen=True)
class Address:
    """The parts of a broker's URL: `scheme://username:password@hosts/space/channel?options`.

    *space* is a virtual host of RabbitMQ, or the number of a Redis database.
    """

    url: str
    scheme: str
    username: str
    password: str
    hosts: tuple[str, ...]
    space: str
    channel: str
    options: Mapping[str, Any]

    def host_and_port(self, default_port: int) -> list[tuple[str, int]]:
        """Return each host with its port."""
        return [host_and_port(host, default_port, self.url) for host in self.hosts or ("127.0.0.1",)]

    def tls(self) -> ssl.SSLContext | None:
        """Return the TLS settings; None if the connection is not encrypted."""
        options = self.options
        if not (options["tls"] or options["tls_ca"] or self.scheme in ("amqps", "rediss+stream")):
            return None
        context = ssl.create_default_context(cafile=options["tls_ca"] or None)
        if options["tls_cert"]:
            context.load_cert_chain(options["tls_cert"], options["tls_key"] or None)
        return context


class UrlBroker(ABC):
    """The base class of the brokers in brokers/, which are made from a URL and the driver's own *settings*."""

    def __init__(self, address: Address, settings: Mapping[str, Any]) -> None:
        self.address = address
        self.settings = settings
        self.url = address.url
        self.channel = address.channel
        self.group: str = address.options["group"]
        self.timeout: float = address.options["timeout"]
        self.window: float | None = address.options.get("window")

    @abstractmethod
    async def aopen(self) -> None: ...

    @abstractmethod
    async def aclose(self) -> None: ...

    async def publish(self, envelopes: Sequence[Envelope]) -> Sequence[Exception | None]:
        """Connect if necessary, and send the envelopes: see `Broker`."""
        try:
            await self.aopen()
        except BrokerError as error:
            return [error] * len(envelopes)
        return await self.send(envelopes)

    @abstractmethod
    async def send(self, envelopes: Sequence[Envelope]) -> Sequence[Exception | None]:
        """Send the envelopes on an open connection, and return one result for each."""

    @abstractmethod
    def subscribe(self, group: str, *, prefetch: int = PREFETCH) -> Subscription: ...


async def send_answer(broker: UrlBroker, answer: Awaitable[object], errors: tuple[type[Exception], ...]) -> None:
    """Await the driver's call that answers a delivery.  Raises BrokerError if it raises one of *errors*."""
    try:
        await answer
    except errors as error:
        raise wrap_error(broker, "Answering a delivery of", error) from error


def parse_address(url: str, known: Mapping[str, Any], channel: str = "") -> Address:
    """Parse a broker's URL.  *known* has the broker's own options; *channel* is used if the URL names none."""
    rest, options = take_options(url, {**COMMON, **known}, "broker")
    base, _, unknown = rest.partition("?")
    if unknown:
        names = ", ".join(sorted({**COMMON, **known}))
        raise ConfigurationError(f"{unknown.partition('=')[0]}= in the broker's URL is unknown; known are {names}")
    scheme, _, place = base.partition("://")
    authority, _, path = place.partition("/")
    login, _, hosts = authority.rpartition("@")
    username, _, password = login.partition(":")
    *space, last = [unquote(part) for part in (path or hosts if scheme == "memory" else path).split("/")]
    if len(space) > 1:
        raise ConfigurationError(
            f"{hide_password(url)!r} has too many parts: write {scheme}://host/channel, "
            f"or {scheme}://host/space/channel; a / inside a name is %2F"
        )
    if not (last or channel):
        raise ConfigurationError(
            f"{hide_password(url)!r} names no channel: add it at the end, as in {scheme}://host/payments"
        )
    return Address(
        url=hide_password(url),
        scheme=scheme.lower(),
        username=unquote(username),
        password=unquote(password),
        hosts=tuple(filter(None, hosts.split(","))),
        space=space[0] if space else "",
        channel=last or channel,
        options=options,
    )


def host_and_port(host: str, default_port: int, url: str) -> tuple[str, int]:
    name, colon, port = host.rpartition(":")
    if not colon or host.endswith("]"):
        return host.strip("[]"), default_port
    if not port.isdecimal():
        raise ConfigurationError(f"{url!r}: the port {port!r} is not a number")
    return name.strip("[]"), int(port)


def connect(url: str | Broker, *, channel: str = "", **settings: Any) -> Broker:
    """Make the broker for *url*, without connecting yet.  If *url* is a broker, return it unchanged.

    *channel* is used if the URL names none.  *settings* are passed to the driver unchanged.
    """
    if not isinstance(url, str):
        if isinstance(url, Broker):
            return url
        raise ConfigurationError(f"{url!r} is not a broker: pass a URL, or an object with the methods of Broker")
    scheme, mark, _ = url.partition("://")
    if not mark or scheme.lower() not in BROKERS:
        known = ", ".join(f"{each}://" for each in BROKERS)
        raise ConfigurationError(f"{hide_password(url)!r} names no broker; known are {known}")
    name, kind = BROKERS[scheme.lower()]
    with naming_extras(f"{scheme}://"):
        module = importlib.import_module(f".brokers.{name}", __package__)
    address = parse_address(url, module.OPTIONS, channel)
    if address.space and name in WITHOUT_SPACES:
        raise ConfigurationError(
            f"{address.url!r}: {scheme}:// takes only a channel after the host: write {scheme}://host/{address.channel}"
        )
    return cast("Broker", getattr(module, kind)(address, settings))


def deduplication_id(envelope: Envelope, channel: str) -> str:
    """Return the id by which a broker recognises a repetition: unique even if several sources share the channel."""
    id = envelope.id if envelope.source == channel else f"{envelope.source}#{envelope.id}"
    return f"{id}#replay-{envelope.replays}" if envelope.replays else id


def wrap_error(broker: Broker, action: str, error: BaseException) -> BrokerError:
    """Return a BrokerError for a driver's *error*: "<action> <url> failed: ..."."""
    detail = str(error) or type(error).__name__
    wrapped = BrokerError(f"{action} {broker.url} failed: {detail}")
    wrapped.__cause__ = error
    return wrapped
