"""The protocol of message brokers, for relays and consumers; and `connect`, which makes one from a URL."""

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

# Scheme: the module in brokers/ and its subclass of UrlBroker.  A new broker is one new file and one line here.
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

WITHOUT_SPACES = ("nats", "kafka", "sqs")  # a channel's name is the whole path there

PREFETCH = 100  # deliveries that a consumer may have taken and not yet acknowledged
VISIBILITY = 30.0  # seconds, in the subscriptions that we create
TIMEOUT = 10.0  # seconds; a NATS cluster that has lost a leader confirms again after five

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
    """The broker stores no message for now: it cannot be reached, does not answer, has no room, or does not let us in.

    A relay counts no attempt for it, and tries all messages again until the broker is back.
    """


class Delivery(ABC):
    """One delivery of a message to a consumer, which ends it by `ack` or `nack`.

    Attributes:
        envelope: The message, or None if it is malformed.
        problem: The reason why it is malformed; empty if it is not.
        raw: The bytes of a malformed message.
        count: How often the broker has delivered it, this time included; 1 if the broker does not count.
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
        """Tell the broker that it is done: it will not be delivered to this group again."""

    @abstractmethod
    async def nack(self, delay: float = 0.0) -> None:
        """Have it delivered again, to any consumer of the group, after *delay* seconds."""

    async def extend(self) -> None:
        """Let the visibility time-out begin anew.  Nothing happens if the broker has none."""
        return


class Subscription(ABC):
    """A consumer's connection to its group's share of a channel.

    `receive` raises BrokerError if the connection is lost; unacknowledged deliveries are then repeated.  Close the
    subscription, and open a new one.
    """

    # Seconds after which an unacknowledged delivery is repeated; None if that happens only when the connection ends.
    visibility: float | None = None

    async def aopen(self) -> None:
        """Connect, and create what is missing; `visibility` is known then."""
        return

    @abstractmethod
    async def receive(self, limit: int, wait: float) -> Sequence[Delivery]:
        """At most *limit* deliveries, as soon as there is one; none if *wait* seconds have passed."""

    async def stop(self) -> None:
        """Take no more messages; those that were delivered can still be answered.  The last call but `aclose`."""
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
        group: The name of the consumers' group that the URL gives; empty if it gives none.
        window: Seconds for which the broker recognises a repeated id; None if it does not, or if it never forgets one.
    """

    url: str
    channel: str
    group: str
    window: float | None

    async def aopen(self) -> None:
        """Connect, and create the channel if it is missing; raises BrokerError.  Nothing happens if it is open."""

    async def aclose(self) -> None:
        """Disconnect.  Nothing happens if it is not open."""

    async def publish(self, envelopes: Sequence[Envelope]) -> Sequence[Exception | None]:
        """Send the envelopes in their order; one result for each, None only if the broker has stored it.

        An error that concerns all of them is the result of each; nothing is raised.  BrokerDown says that it is not the
        message's fault.  After a lost connection the next call connects again.
        """

    def subscribe(self, group: str, *, prefetch: int = PREFETCH) -> Subscription:
        """A subscription for one consumer of *group*, with at most *prefetch* unacknowledged deliveries."""


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
        """Each host with its port."""
        return [host_and_port(host, default_port, self.url) for host in self.hosts or ("127.0.0.1",)]

    def tls(self) -> ssl.SSLContext | None:
        """The TLS settings; None if the connection is not encrypted."""
        options = self.options
        if not (options["tls"] or options["tls_ca"] or self.scheme in ("amqps", "rediss+stream")):
            return None
        context = ssl.create_default_context(cafile=options["tls_ca"] or None)
        if options["tls_cert"]:
            context.load_cert_chain(options["tls_cert"], options["tls_key"] or None)
        return context


class UrlBroker(ABC):
    """The base class of the brokers in brokers/, each made from its URL and the driver's own *settings*."""

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
        """Send the envelopes, on an open connection; one result for each."""

    @abstractmethod
    def subscribe(self, group: str, *, prefetch: int = PREFETCH) -> Subscription: ...


async def answered(broker: UrlBroker, answer: Awaitable[object], errors: tuple[type[Exception], ...]) -> None:
    """Await the *answer* to a delivery; BrokerError if the driver raises one of *errors*."""
    try:
        await answer
    except errors as error:
        raise failed(broker, "The answer to a delivery of", error) from error


def parse_address(url: str, known: Mapping[str, Any], channel: str = "") -> Address:
    """Read a broker's URL; *known* are the options of its kind, *channel* is for a URL that names none."""
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
        raise ConfigurationError(f"{url!r}: the port {port!r} is no number")
    return name.strip("[]"), int(port)


def connect(url: str | Broker, *, channel: str = "", **settings: Any) -> Broker:
    """The broker at *url*; nothing is opened before it is used.  A broker is returned as it is.

    *channel* is for a URL that names none.  *settings* are passed on to the driver as they are.
    """
    if not isinstance(url, str):
        if isinstance(url, Broker):
            return url
        raise ConfigurationError(f"{url!r} is no broker: give a URL as text, or an object with the methods of Broker")
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
            f"{address.url!r}: a channel of {scheme}:// has nothing around it: write {scheme}://host/{address.channel}"
        )
    return cast("Broker", getattr(module, kind)(address, settings))


def deduplication_id(envelope: Envelope, channel: str) -> str:
    """The id by which a broker recognises a repetition: unique in the channel, also if several sources write to it."""
    id = envelope.id if envelope.source == channel else f"{envelope.source}#{envelope.id}"
    return f"{id}#replay-{envelope.replays}" if envelope.replays else id


def failed(broker: Broker, what: str, error: BaseException) -> BrokerError:
    """The error for a driver's *error*."""
    said = str(error) or type(error).__name__
    wrapped = BrokerError(f"{what} {broker.url} failed: {said}")
    wrapped.__cause__ = error
    return wrapped
