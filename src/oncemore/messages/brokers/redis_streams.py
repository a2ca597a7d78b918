"""`redis+stream://host/0/payments`: a stream of Redis or Valkey, read by consumer groups."""

from __future__ import annotations

import os
import platform
import secrets
import time
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, cast

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from ...errors import BrokerError, ConfigurationError
from ..broker import (
    PREFETCH,
    VISIBILITY,
    Address,
    BrokerDown,
    Delivery,
    Subscription,
    UrlBroker,
    answered,
    deduplication_id,
    failed,
)
from ..envelope import Envelope, parse_structured, structured

OPTIONS = {"visibility": VISIBILITY, "window": 86400.0}
FIELD = b"event"
# In the error of a message that is larger than the server accepts.  All other errors are of the server's state, rights or
# settings, because it does not look into messages.
TOO_LARGE = "Protocol error"
BLOCK = 0.5  # seconds for one read; then look for deliveries that are due again
LOOK = 0.1  # seconds between two looks for them
SWEEP = 10.0  # seconds between two removals of messages that all groups have acknowledged
GONE = 3600.0  # seconds after which a consumer that has asked for nothing, and has nothing, has crashed

# An id is remembered in a key of its own, in the stream's slot of a cluster.  It is written last: a script that fails in
# the middle is not rolled back, and an id without its message would be a lost message.  KEYS: the stream, the id's key.
# ARGV: the body, the milliseconds for which the id is remembered, the stream must exist.
ADD = """
if ARGV[3] == '1' and redis.call('EXISTS', KEYS[1]) == 0 then return redis.error_reply('NOSTREAM the stream does not exist') end
if redis.call('EXISTS', KEYS[2]) == 1 then return false end
local id = redis.call('XADD', KEYS[1], '*', 'event', ARGV[1])
redis.call('SET', KEYS[2], '1', 'PX', ARGV[2])
return id
"""

# Only while the delivery is still this consumer's: another may have taken it over.  XCLAIM with JUSTID counts no delivery.
# KEYS: the stream.  ARGV: the group, the consumer, the id, the milliseconds that the delivery shall seem to be idle.
MOVE = """
if #redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[3], ARGV[3], 1, ARGV[2]) == 0 then return 0 end
redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[3], 'IDLE', ARGV[4], 'JUSTID')
return 1
"""

# In one step: a consumer that was given a message since it was looked at would lose it, because its deliveries go with it.
# KEYS: the stream.  ARGV: the group, the milliseconds for which a consumer has asked for nothing.
REMOVE_GONE = """
for _, consumer in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
    local its = {}
    for n = 1, #consumer, 2 do its[consumer[n]] = consumer[n + 1] end
    if its.pending == 0 and its.idle > tonumber(ARGV[2]) then
        redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], its.name)
    end
end
"""


class RedisStreamBroker(UrlBroker):
    """A stream.  A script remembers each id for *window* seconds, in the same step that adds the message.

    "Stored" means what the server is configured for: with `appendfsync always`, a message survives a crash.
    """

    def __init__(self, address: Address, settings: Mapping[str, Any]) -> None:
        if len(address.hosts) > 1:
            raise ConfigurationError(
                f"{address.url!r} names several hosts: a stream is on one server, so name the primary"
            )
        if address.space and not address.space.isdecimal():
            raise ConfigurationError(
                f"{address.url!r}: {address.space!r} is no number of a database: write redis+stream://host/0/{address.channel}"
            )
        super().__init__(address, settings)
        self._client: redis.Redis | None = None

    async def aopen(self) -> None:
        if self._client is None:
            client = self.connected()
            try:
                await cast("Awaitable[Any]", client.ping())
            except (RedisError, OSError) as error:
                await client.aclose()
                raise failed(self, "The connection to", error) from error
            self._client = client

    def connected(self) -> redis.Redis:
        """A new client, which opens its connection when it is first used."""
        address = self.address
        [(host, port)] = address.host_and_port(6379)
        tls = {"ssl": True} if address.tls() else {}
        files = {"ssl_ca_certs": "tls_ca", "ssl_certfile": "tls_cert", "ssl_keyfile": "tls_key"}
        tls |= {name: address.options[option] for name, option in files.items() if tls and address.options[option]}
        return redis.Redis(
            host=host,
            port=port,
            db=int(address.space or 0),
            username=address.username or None,
            password=address.password or None,
            socket_timeout=self.timeout,
            socket_connect_timeout=self.timeout,
            # Relays and consumers repeat by themselves, and must end soon when they are told to.
            **{"retry": Retry(NoBackoff(), 0), **tls, **self.settings},
        )

    async def aclose(self) -> None:
        if self._client is not None:
            client, self._client = self._client, None
            await client.aclose()

    async def send(self, envelopes: Sequence[Envelope]) -> Sequence[Exception | None]:
        assert self._client is not None
        try:
            async with self._client.pipeline(transaction=False) as pipeline:
                for envelope in envelopes:
                    pipeline.eval(ADD, 2, *self._add_arguments(envelope))
                answers = await pipeline.execute(raise_on_error=False)
        except (RedisError, OSError) as error:
            return [failed(self, "Publishing to", error)] * len(envelopes)
        return [self._error(each) if isinstance(each, Exception) else None for each in answers]

    def _error(self, error: Exception) -> BrokerError:
        wrapped = failed(self, "Publishing to", error)
        return wrapped if TOO_LARGE in str(error) else BrokerDown(wrapped.detail)

    def _add_arguments(self, envelope: Envelope) -> tuple[str | bytes | int, ...]:
        seen = f"{{{self.channel}}}:seen:{deduplication_id(envelope, self.channel)}"
        must_exist = "0" if self.address.options["create"] else "1"
        return self.channel, seen, structured(envelope), int((self.window or 0.001) * 1000), must_exist

    def subscribe(self, group: str, *, prefetch: int = PREFETCH) -> Subscription:
        return RedisSubscription(self, group)


class RedisSubscription(Subscription):
    """A consumer of a group.  Deliveries that their consumer has left for *visibility* seconds are taken over."""

    def __init__(self, broker: RedisStreamBroker, group: str) -> None:
        self.broker = broker
        self.group = group
        self.stream = broker.channel
        self.name = f"{platform.node()[:40]}:{os.getpid()}:{secrets.token_hex(4)}"
        self.visibility = broker.address.options["visibility"]
        self.client: redis.Redis | None = None
        self.swept = time.monotonic()
        self.looked = 0.0  # when deliveries to take over were last looked for, and how far
        self.cursor: bytes | str = "0-0"

    async def aopen(self) -> None:
        if self.client is not None:
            return
        broker = self.broker
        client = broker.connected()
        try:
            if broker.address.options["create"]:
                try:
                    await client.xgroup_create(self.stream, self.group, id="0", mkstream=True)
                except ResponseError as error:
                    if "BUSYGROUP" not in str(error):
                        raise
            else:
                await client.xinfo_groups(self.stream)
        except (RedisError, OSError) as error:
            await client.aclose()
            raise failed(broker, f"Looking for the group {self.group!r} of", error) from error
        self.client = client

    async def receive(self, limit: int, wait: float) -> Sequence[Delivery]:
        await self.aopen()
        ends = time.monotonic() + wait
        try:
            while True:
                found = await self._overdue(limit) or await self._new(limit, min(BLOCK, ends - time.monotonic()))
                if found or time.monotonic() >= ends:
                    return found
                await self._sweep()
        except (RedisError, OSError) as error:
            raise failed(self.broker, "Receiving from", error) from error

    async def _overdue(self, limit: int) -> list[Delivery]:
        """Take over deliveries that a consumer of the group has left unacknowledged for too long."""
        assert self.client is not None
        if time.monotonic() < self.looked + LOOK:
            return []
        idle = int((self.visibility or 0.0) * 1000)
        self.cursor, entries, *_ = await self.client.xautoclaim(
            self.stream, self.group, self.name, min_idle_time=idle, start_id=self.cursor, count=limit
        )
        if self.cursor == b"0-0":  # that was the end of the list
            self.looked = time.monotonic()
        found: list[Delivery] = []
        for id, fields in entries:
            [pending] = await self.client.xpending_range(self.stream, self.group, id, id, 1) or [{"times_delivered": 1}]
            found.append(RedisDelivery(self, id, fields, cast("int", pending["times_delivered"])))
        return found

    async def _new(self, limit: int, wait: float) -> list[Delivery]:
        """The messages that no consumer of the group has been given yet."""
        assert self.client is not None
        answer: Any = await self.client.xreadgroup(
            self.group, self.name, {self.stream: ">"}, count=limit, block=max(1, int(wait * 1000))
        )
        return [RedisDelivery(self, id, fields, 1) for _, entries in answer or () for id, fields in entries]

    async def _sweep(self) -> None:
        """Now and then, remove the messages that all groups have acknowledged, and consumers that have crashed."""
        if not self.broker.address.options["create"] or time.monotonic() < self.swept + SWEEP:
            return
        assert self.client is not None
        self.swept = time.monotonic()
        oldest: list[bytes] = []
        for group in await self.client.xinfo_groups(self.stream):
            summary = await self.client.xpending(self.stream, group["name"])
            oldest.append(summary["min"] or group["last-delivered-id"])
        if oldest:
            await self.client.xtrim(self.stream, minid=min(oldest, key=entry_order), approximate=True)
        await self.client.eval(REMOVE_GONE, 1, self.stream, self.group, int(GONE * 1000))

    async def move(self, id: bytes, idle: float) -> None:
        """Let the delivery seem to be idle for *idle* seconds, if it is still this consumer's."""
        await self.tell("eval", MOVE, 1, self.stream, self.group, self.name, id, int(max(0.0, idle) * 1000))

    async def tell(self, command: str, *arguments: Any) -> None:
        if self.client is None:
            raise BrokerError(f"The subscription to {self.broker.url} is closed")
        await answered(self.broker, getattr(self.client, command)(*arguments), (RedisError, OSError))

    async def aclose(self) -> None:
        if self.client is not None:
            client, self.client = self.client, None
            await client.aclose()


def entry_order(id: bytes) -> tuple[int, int]:
    """The order of entries, whose ids are a time and a number."""
    first, _, second = id.partition(b"-")
    return int(first), int(second or 0)


class RedisDelivery(Delivery):
    __slots__ = ("id", "subscription")

    def __init__(self, subscription: RedisSubscription, id: bytes, fields: Mapping[bytes, bytes], count: int) -> None:
        raw = fields.get(FIELD, b"")
        super().__init__(lambda: parse_structured(raw), raw, count)
        self.subscription = subscription
        self.id = id

    async def ack(self) -> None:
        await self.subscription.tell("xack", self.subscription.stream, self.subscription.group, self.id)

    async def nack(self, delay: float = 0.0) -> None:
        await self.subscription.move(self.id, (self.subscription.visibility or 0.0) - delay)

    async def extend(self) -> None:
        await self.subscription.move(self.id, 0.0)
