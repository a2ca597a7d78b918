"""Which server has which record: the server of the URL, the primary that sentinels name, or the nodes of a cluster."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

import redis
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from ..._ledger.connect import hide_password
from ..._runtime.clock import SYSTEM
from ..._runtime.plan import Plan
from ...errors import ConfigurationError, StoreError, StoreUnavailable
from .connection import Address, ConnectionPool, Connector, SendCommands, pack

SENTINEL_PORT = 26379
REDIS_PORT = 6379
SEPARATOR = re.compile(r"[/?#]")  # the host is between the second and the third of these

T = TypeVar("T")


class Topology:
    """Knows the address of the primary for each key: here the one server that the URL names.

    If *known* is False, `locate` has to be called before the next attempt; until it succeeds, the last known address is
    used.  With *one_primary*, one script call may carry many records.
    """

    one_primary = True

    def __init__(self, connector: Connector) -> None:
        self.pool = ConnectionPool(connector)
        self.pools = [self.pool]  # all that have to be closed
        self.known = True
        self.primary: Address = None

    def locate(self, timeout: float) -> Plan[None]:
        """Find out which server is the primary.  Raises StoreError if nobody knows it."""
        self.known = True
        yield from ()

    def address(self, key: str) -> Address:
        return self.primary

    def primaries(self) -> list[Address]:
        return [self.primary]

    def move(self, slot: int, address: Address) -> None:
        raise NotImplementedError


class SentinelTopology(Topology):
    """The server that the sentinels name as the primary of *service*; they are asked at first, and after each failure."""

    def __init__(
        self, connector: Connector, sentinel_connector: Connector, sentinels: list[Address], service: str
    ) -> None:
        super().__init__(connector)
        self.sentinel_pool = ConnectionPool(sentinel_connector)
        self.pools.append(self.sentinel_pool)
        self.sentinels = sentinels
        self.service = service
        self.known = False

    def locate(self, timeout: float) -> Plan[None]:
        self.sentinels = [*self.sentinels[1:], self.sentinels[0]]  # one may not have noticed the failover yet
        question = pack("SENTINEL", "MASTER", self.service)
        failure = f"No sentinel knows a primary for {self.service!r}"
        self.primary = yield from first_answer(
            self.sentinel_pool, self.sentinels, question, read_primary, timeout, failure
        )
        self.known = True


class ClusterTopology(Topology):
    """The primaries of a cluster and the slots that each has: learned from any node, corrected by MOVED replies.

    Our own map, because redis-py's cluster client believes the first node that it asks, and because a write and its WAIT
    must share a connection.
    """

    one_primary = False

    def __init__(self, connector: Connector, nodes: list[Address]) -> None:
        super().__init__(connector)
        self.nodes = nodes  # of the URL
        self.known = False
        self._slots: list[Address] = [None] * REDIS_CLUSTER_HASH_SLOTS

    def locate(self, timeout: float) -> Plan[None]:
        self.nodes = [*self.nodes[1:], self.nodes[0]]  # one may have lost sight of the others
        nodes = list(dict.fromkeys([*self.nodes, *self.primaries()]))
        failure = "No node of the Redis cluster knows which node has which slot"
        self._slots = yield from first_answer(self.pool, nodes, pack("CLUSTER", "SLOTS"), read_slots, timeout, failure)
        self.known = True

    def address(self, key: str) -> Address:
        # If no node has the slot, any node replies with the reason.
        return self._slots[key_slot(key.encode())] or self.nodes[0]

    def primaries(self) -> list[Address]:
        return [*sorted({address for address in self._slots if address})] or self.nodes

    def move(self, slot: int, address: Address) -> None:
        self._slots[slot] = address


def first_answer(
    pool: ConnectionPool,
    servers: list[Address],
    question: bytes,
    read: Callable[[Any, Address], T | None],
    timeout: float,
    failure: str,
) -> Plan[T]:
    """The first answer that *read* can use, from the servers in turn.  Raises StoreUnavailable if there is none in time."""
    deadline, reason = SYSTEM.monotonic() + timeout, ""
    for server in servers:
        try:
            # Half of the time, so that there is some left to ask another server.
            (reply,) = yield SendCommands(pool, server, question, 1, timeout / 2)
        except StoreError as error:
            reply = error
        if isinstance(reply, Exception):
            reason = f": {reply}"
        elif (answer := read(reply, server)) is not None:
            return answer
        if SYSTEM.monotonic() >= deadline:
            break
    raise StoreUnavailable(f"{failure}{reason}")


def read_primary(about: list[bytes], asked: Address) -> Address:
    """From the reply to SENTINEL MASTER, which has names and values in turn; None if the primary seems to be down."""
    values = dict(zip(about[::2], about[1::2], strict=True))
    flags = values[b"flags"].split(b",")
    if b"master" not in flags or b"s_down" in flags or b"o_down" in flags:
        return None
    return values[b"ip"].decode(), int(values[b"port"])


def read_slots(ranges: list[Any], asked: Address) -> list[Address] | None:
    """The primary of each slot, from the reply to CLUSTER SLOTS; None if the node knows of no slots."""
    slots: list[Address] = [None] * REDIS_CLUSTER_HASH_SLOTS
    for first, last, (host, port, *_), *_ in ranges:
        slots[first : last + 1] = [named(host.decode() if host else "", port, asked)] * (last - first + 1)
    return slots if ranges else None


def read_redirection(text: str, asked: Address) -> tuple[int, Address]:
    """The slot and its node, from an error such as `MOVED 3999 127.0.0.1:6381`."""
    _, slot, place = text.split(" ")
    host, _, port = place.rpartition(":")
    return int(slot), named(host, int(port), asked)


def named(host: str, port: int, asked: Address) -> Address:
    """A node that does not know its own name is at the host that was *asked*."""
    return host or (asked[0] if asked else "localhost"), port


# From a URL


def read_topology(url: str) -> Topology:
    """The servers that the URL names.  Raises ConfigurationError for a mistake in it; opens nothing."""
    try:
        parts = urlsplit(url)
        path = parts.path.strip("/")
        if parts.scheme == "redis+sentinel":
            return read_sentinel(parts)
        if parts.scheme == "redis+cluster" and path in ("", "0"):
            return ClusterTopology(Connector(plain_url(parts)), read_addresses(parts, REDIS_PORT))
        if parts.scheme != "redis+cluster" and (not path or path.isdecimal()):
            return Topology(Connector(url))
        if parts.scheme == "redis" and not parts.hostname:
            return Topology(Connector(url.replace("redis", "unix", 1)))
        raise ValueError(f"/{path} is no database of this kind of server")
    except (TypeError, ValueError, redis.RedisError) as error:
        shown = hide_password(url)
        if "@" in url and "@" not in SEPARATOR.split(url)[2]:  # the error would show a part of the password
            raise ConfigurationError(f"{shown}: in the password, write / as %2F, ? as %3F and # as %23") from None
        raise ConfigurationError(f"{shown}: {error}") from error


def read_sentinel(parts: SplitResult) -> SentinelTopology:
    """redis+sentinel://login@host,host/service/db"""
    service, _, db = unquote(parts.path).strip("/").partition("/")
    if not service or not (db or "0").isdecimal():
        raise ValueError("after the hosts, write the service's name and the database's number, as in /mymaster/0")
    options = dict(parse_qsl(parts.query))
    login = {name: options.pop(f"sentinel_{name}", None) for name in ("username", "password")}
    url = plain_url(parts._replace(path=f"/{db or 0}", query=urlencode(options)))
    # Without a name, because a user of the sentinels with few rights may not set one.
    sentinel_connector = Connector(url, **login, db=0, client_name=None)
    return SentinelTopology(Connector(url), sentinel_connector, read_addresses(parts, SENTINEL_PORT), service)


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
