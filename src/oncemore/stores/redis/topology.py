"""Which server has which record: the server of the URL, the primary that sentinels name, or the nodes of a cluster."""

from __future__ import annotations

import re
from typing import Any, Protocol
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

import redis.asyncio.connection
import redis.asyncio.retry
import redis.asyncio.sentinel
import redis.connection
import redis.retry
import redis.sentinel
from redis.backoff import NoBackoff
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from ..._ledger.connect import hide_password
from ..._runtime.clock import SYSTEM
from ..._runtime.plan import Plan
from ...errors import ConfigurationError, StoreError, StoreUnavailable
from .connection import CONNECTION_ERRORS, Address, ConnectionPool, Connector, RoundTrip, pack

SENTINEL_PORT = 26379
REDIS_PORT = 6379
SEPARATOR = re.compile(r"[/?#]")  # the host is between the second and the third of these


class Topology(Protocol):
    """Knows the address of the primary for each key.  If it may be wrong, it is located again before the next attempt."""

    connector: Connector
    one_primary: bool  # then one script call may carry many records
    known: bool  # False: `locate` must be called; until it succeeds, the last known address is used

    def locate(self, pool: ConnectionPool, timeout: float) -> Plan[None]: ...
    def address(self, key: str) -> Address: ...
    def primaries(self) -> list[Address]: ...


class SingleServer:
    """The server that the URL names."""

    one_primary = True

    def __init__(self, connector: Connector) -> None:
        self.connector = connector
        self.known = True
        self.primary: Address = None

    def locate(self, pool: ConnectionPool, timeout: float) -> Plan[None]:
        self.known = True
        yield from ()

    def address(self, key: str) -> Address:
        return self.primary

    def primaries(self) -> list[Address]:
        return [self.primary]


class SentinelPrimary(SingleServer):
    """The server that the sentinels name as the primary of *service*; they are asked at first, and after each failure.

    *options* are those of redis-py's clients for the sentinels.
    """

    def __init__(self, connector: Connector, sentinels: list[Address], service: str, options: dict[str, Any]) -> None:
        super().__init__(connector)
        self.sentinels = sentinels
        self.service = service
        self.options = options
        self.known = False
        for module in (redis, redis.asyncio):  # an option that redis-py does not know is refused now
            self.clients(module, 1.0)

    def locate(self, pool: ConnectionPool, timeout: float) -> Plan[None]:
        self.primary = yield DiscoverPrimary(self, timeout)
        self.known = True

    def clients(self, module: Any, timeout: float) -> Any:
        """redis-py's Sentinel, for threads or for event loops, whose clients together take no longer than *timeout*."""
        # Each time another sentinel is asked first: one may not have noticed the failover yet.
        self.sentinels = [*self.sentinels[1:], self.sentinels[0]]
        each = timeout / len(self.sentinels)
        limits = {"socket_timeout": each, "socket_connect_timeout": each, "retry": module.retry.Retry(NoBackoff(), 0)}
        return module.sentinel.Sentinel(self.sentinels, sentinel_kwargs={**self.options, **limits})


class DiscoverPrimary:
    """Effect: the address of the primary of *topology*, from the first sentinel that answers."""

    __slots__ = ("timeout", "topology")

    def __init__(self, topology: SentinelPrimary, timeout: float) -> None:
        self.topology = topology
        self.timeout = timeout

    def run(self) -> Address:
        sentinel = self.topology.clients(redis, self.timeout)
        try:
            host, port = sentinel.discover_master(self.topology.service)
        except CONNECTION_ERRORS as error:
            raise self.not_found(error) from None
        finally:
            for client in sentinel.sentinels:
                client.close()
        return host, port

    async def arun(self) -> Address:
        sentinel = self.topology.clients(redis.asyncio, self.timeout)
        try:
            host, port = await sentinel.discover_master(self.topology.service)
        except CONNECTION_ERRORS as error:
            raise self.not_found(error) from None
        finally:
            for client in sentinel.sentinels:
                await client.aclose()
        return host, port

    def not_found(self, error: Exception) -> StoreUnavailable:
        # Nothing of redis-py's own message, which in some versions shows the password of the connections.
        reason = f": {error}" if isinstance(error, redis.ResponseError) else ""
        return StoreUnavailable(f"No sentinel knows a primary for {self.topology.service!r}{reason}")


class Cluster:
    """The primaries of a cluster and the slots that each has: learned from any node, corrected by MOVED replies.

    Our own map, because redis-py's cluster client believes the first node that it asks, and because a write and its WAIT
    must share a connection.
    """

    one_primary = False

    def __init__(self, connector: Connector, nodes: list[Address]) -> None:
        self.connector = connector
        self.nodes = nodes  # of the URL
        self.known = False
        self._slots: list[Address] = [None] * REDIS_CLUSTER_HASH_SLOTS

    def locate(self, pool: ConnectionPool, timeout: float) -> Plan[None]:
        """Ask nodes for the map until one has it, each time another one first: a node may have lost sight of the others."""
        deadline, reason = SYSTEM.monotonic() + timeout, ""
        for address in dict.fromkeys([*self.nodes, *self.primaries()]):
            if address in self.nodes:
                self.nodes = [*(node for node in self.nodes if node != address), address]
            try:
                # Half of the time, so that there is some left to ask another node.
                (ranges,) = yield RoundTrip(pool, address, pack("CLUSTER", "SLOTS"), 1, timeout / 2)
            except StoreError as error:
                ranges = error
            if isinstance(ranges, list) and ranges:
                self._slots, self.known = read_slots(ranges, address), True
                return
            reason = f": {ranges}" if ranges else reason
            if SYSTEM.monotonic() >= deadline:
                break
        raise StoreUnavailable(f"No node of the Redis cluster knows which node has which slot{reason}")

    def address(self, key: str) -> Address:
        # If no node has the slot, any node replies with the reason.
        return self._slots[key_slot(key.encode())] or self.nodes[0]

    def primaries(self) -> list[Address]:
        return [*sorted({address for address in self._slots if address})] or self.nodes

    def move(self, slot: int, address: Address) -> None:
        self._slots[slot] = address


def read_slots(ranges: list[Any], asked: Address) -> list[Address]:
    """The primary of each slot; a node that does not know its own name is the one that was asked."""
    slots: list[Address] = [None] * REDIS_CLUSTER_HASH_SLOTS
    for first, last, (host, port, *_), *_ in ranges:
        assert asked is not None
        slots[first : last + 1] = [(host.decode() if host else asked[0], port)] * (last - first + 1)
    return slots


# From a URL


def read_topology(url: str) -> Topology:
    """The servers that the URL names.  Raises ConfigurationError for a mistake in it; opens nothing."""
    try:
        parts = urlsplit(url)
        path = parts.path.strip("/")
        if parts.scheme == "redis+sentinel":
            return read_sentinel(parts)
        if parts.scheme == "redis+cluster" and path in ("", "0"):
            return Cluster(read_connector(plain_url(parts)), read_addresses(parts, REDIS_PORT))
        if parts.scheme != "redis+cluster" and (not path or path.isdecimal()):
            return SingleServer(read_connector(url))
        if parts.scheme == "redis" and not parts.hostname:
            return SingleServer(read_connector(url.replace("redis", "unix", 1)))
        raise ValueError(f"/{path} is no database of this kind of server")
    except (TypeError, ValueError, redis.RedisError) as error:
        shown = hide_password(url)
        if "@" in url and "@" not in SEPARATOR.split(url)[2]:  # the error would show a part of the password
            raise ConfigurationError(f"{shown}: in the password, write / as %2F, ? as %3F and # as %23") from None
        raise ConfigurationError(f"{shown}: {error}") from error


def read_sentinel(parts: SplitResult) -> SentinelPrimary:
    """redis+sentinel://login@host,host/service/db"""
    service, _, db = unquote(parts.path).strip("/").partition("/")
    if not service or not (db or "0").isdecimal():
        raise ValueError("after the hosts, write the service's name and the database's number, as in /mymaster/0")
    options = dict(parse_qsl(parts.query))
    login = {name: options.pop(f"sentinel_{name}", None) for name in ("username", "password")}
    url = plain_url(parts._replace(path=f"/{db or 0}", query=urlencode(options)))
    parse_url: Any = redis.connection.parse_url
    own = {**parse_url(url), **login, "db": 0, "protocol": 2}
    for name in ("host", "port", "max_connections"):
        own.pop(name, None)
    if own.pop("connection_class", None) is not None:
        own["ssl"] = True
    return SentinelPrimary(read_connector(url), read_addresses(parts, SENTINEL_PORT), service, own)


def plain_url(parts: SplitResult) -> str:
    """The URL as redis-py reads it, with the first of its hosts; `tls=true` makes it rediss://."""
    options = dict(parse_qsl(parts.query))
    scheme = "rediss" if options.pop("tls", "").lower() in ("true", "1") else "redis"
    login, at, hosts = parts.netloc.rpartition("@")
    netloc = f"{login}{at}{hosts.partition(',')[0]}"
    return parts._replace(scheme=scheme, netloc=netloc, query=urlencode(options)).geturl()


def read_addresses(parts: SplitResult, port: int) -> list[Address]:
    """Each host and port of a list such as `a:7000,b,[::1]:7001`."""
    hosts = [urlsplit(f"//{host}") for host in parts.netloc.rpartition("@")[2].split(",")]
    return [(host.hostname or "localhost", host.port or port) for host in hosts]


def read_connector(url: str) -> Connector:
    """A connector with the options of *url*, which are checked by making one connection of each kind."""
    kinds = []
    for module in (redis.connection, redis.asyncio.connection):
        options = module.parse_url(url)
        options.pop("max_connections", None)
        kind = options.pop("connection_class", module.Connection)
        ours = {"socket_timeout": None, "socket_connect_timeout": None, "client_name": "oncemore"}
        kinds.append((kind, {**ours, **options, "protocol": 2, "decode_responses": False}))
    connector = Connector(*kinds)
    connector.open(None)
    connector.open_on_loop(None)
    return connector
