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
    deduplication_id,
    send_answer,
    wrap_error,
)
from ..envelope import Envelope, parse_structured, structured

OPTIONS = {"visibility": VISIBILITY, "window": 86400.0}
FIELD = b"event"
# In the error for a message that is larger than the server accepts.  All other errors come from the server's state,
# rights or settings, because Redis does not check messages.
TOO_LARGE = "Protocol error"
BLOCK = 0.5  # seconds that one read waits, before it looks for overdue deliveries again
LOOK = 0.1  # seconds between two looks for overdue deliveries
SWEEP = 10.0  # seconds between two removals of messages that all groups have acknowledged
GONE = 3600.0  # seconds after which an idle consumer without deliveries is taken for crashed

# Each id is remembered in a key of its own, in the stream's slot of a cluster.  The key is written last: a script that
# fails midway is not rolled back, and an id without its message would be a lost message.
# KEYS: the stream, the id's key.  ARGV: the body, the milliseconds to remember the id, "1" if the stream must exist.
ADD = """
if ARGV[3] == '1' and redis.call('EXISTS', KEYS[1]) == 0 then return redis.error_reply('NOSTREAM the stream does not exist') end
if redis.call('EXISTS', KEYS[2]) == 1 then return false end
local id = redis.call('XADD', KEYS[1], '*', 'event', ARGV[1])
redis.call('SET', KEYS[2], '1', 'PX', ARGV[2])
return id
"""

# Sets the idle time of a delivery, unless another consumer has taken it over.  XCLAIM with JUSTID counts no delivery.
# KEYS: the stream.  ARGV: the group, the consumer, the id, the idle time in milliseconds.
MOVE = """
if #redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[3], ARGV[3], 1, ARGV[2]) == 0 then return 0 end
redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[3], 'IDLE', ARGV[4], 'JUSTID')
return 1
"""

# Removes crashed consumers.  A script, because a consumer might get a message between the check and its removal, and
# the message would be removed with it.
# KEYS: the stream.  ARGV: the group, the least idle time in milliseconds.
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
    """A stream.  The script that adds a message also remembers its id, for *window* seconds.

    A stored message is as durable as the server's settings make it: with `appendfsync always` it survives a crash.
    """

    def __init__(self, address: Address, settings: Mapping[str, Any]) -> None:
        if len(address.hosts) > 1:
            raise ConfigurationError(
                f"{address.url!r} names several hosts: a stream is on one server, so name the primary"
            )
        if address.space and not address.space.isdecimal():
            raise ConfigurationError(
                f"{address.url!r}: {address.space!r} is not the number of a database: "
                f"write redis+stream://host/0/{address.channel}"
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
                raise wrap_error(self, "The connection to", error) from error
            self._client = client

    def connected(self) -> redis.Redis:
        """Return a new client, which connects when it is first used."""
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
            # Relays and consumers try again by themselves, and must be able to stop soon.
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
            return [wrap_error(self, "Publishing to", error)] * len(envelopes)
        return [self._error(each) if isinstance(each, Exception) else None for each in answers]

    def _error(self, error: Exception) -> BrokerError:
        wrapped = wrap_error(self, "Publishing to", error)
        return wrapped if TOO_LARGE in str(error) else BrokerDown(wrapped.detail)

    def _add_arguments(self, envelope: Envelope) -> tuple[str | bytes | int, ...]:
        seen = f"{{{self.channel}}}:seen:{deduplication_id(envelope, self.channel)}"
        must_exist = "0" if self.address.options["create"] else "1"
        return self.channel, seen, structured(envelope), int((self.window or 0.001) * 1000), must_exist

    def subscribe(self, group: str, *, prefetch: int = PREFETCH) -> Subscription:
        return RedisSubscription(self, group)


class RedisSubscription(Subscription):
    """A consumer of a group.  It takes over deliveries that were left unacknowledged for *visibility* seconds."""

    def __init__(self, broker: RedisStreamBroker, group: str) -> None:
        self.broker = broker
        self.group = group
        self.stream = broker.channel
        self.name = f"{platform.node()[:40]}:{os.getpid()}:{secrets.token_hex(4)}"
        self.visibility = broker.address.options["visibility"]
        self.client: redis.Redis | None = None
        self.swept = time.monotonic()
        self.looked = 0.0  # when all overdue deliveries were last looked through; `cursor` is where to continue
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
            raise wrap_error(broker, f"Looking for the group {self.group!r} of", error) from error
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
            raise wrap_error(self.broker, "Receiving from", error) from error

    async def _overdue(self, limit: int) -> list[Delivery]:
        """Take over deliveries that were left unacknowledged for too long."""
        assert self.client is not None
        if time.monotonic() < self.looked + LOOK:
            return []
        idle = int((self.visibility or 0.0) * 1000)
        self.cursor, entries, *_ = await self.client.xautoclaim(
            self.stream, self.group, self.name, min_idle_time=idle, start_id=self.cursor, count=limit
        )
        if self.cursor == b"0-0":  # the end of the list
            self.looked = time.monotonic()
        found: list[Delivery] = []
        for id, fields in entries:
            [pending] = await self.client.xpending_range(self.stream, self.group, id, id, 1) or [{"times_delivered": 1}]
            found.append(RedisDelivery(self, id, fields, cast("int", pending["times_delivered"])))
        return found

    async def _new(self, limit: int, wait: float) -> list[Delivery]:
        """Return messages that were not delivered to the group yet."""
        assert self.client is not None
        answer: Any = await self.client.xreadgroup(
            self.group, self.name, {self.stream: ">"}, count=limit, block=max(1, int(wait * 1000))
        )
        return [RedisDelivery(self, id, fields, 1) for _, entries in answer or () for id, fields in entries]

    async def _sweep(self) -> None:
        """If it is time, remove messages that all groups have acknowledged, and crashed consumers."""
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
        """Set the idle time of a delivery to *idle* seconds, unless another consumer has taken it over."""
        await self.answer("eval", MOVE, 1, self.stream, self.group, self.name, id, int(max(0.0, idle) * 1000))

    async def answer(self, command: str, *arguments: Any) -> None:
        if self.client is None:
            raise BrokerError(f"The subscription to {self.broker.url} is closed")
        await send_answer(self.broker, getattr(self.client, command)(*arguments), (RedisError, OSError))

    async def aclose(self) -> None:
        if self.client is not None:
            client, self.client = self.client, None
            await client.aclose()


def entry_order(id: bytes) -> tuple[int, int]:
    """Return a sort key for an entry's id, which is a time and a number."""
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
        await self.subscription.answer("xack", self.subscription.stream, self.subscription.group, self.id)

    async def nack(self, delay: float = 0.0) -> None:
        await self.subscription.move(self.id, (self.subscription.visibility or 0.0) - delay)

    async def extend(self) -> None:
        await self.subscription.move(self.id, 0.0)
