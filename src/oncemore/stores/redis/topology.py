"""Where the commands of a Redis store go: to one server, to a sentinel's primary, or to the nodes of a cluster."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Protocol
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

import redis.asyncio.connection
import redis.connection
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from ..._ledger.connect import hide_password
from ..._runtime.clock import SYSTEM
from ..._runtime.plan import Plan
from ...errors import ConfigurationError, StoreError, StoreUnavailable
from .connection import Address, Dial, Exchange, HangUp, Line, Parcel, pack

SENTINEL_PORT = 26379
REDIS_PORT = 6379
AUTHORITY = re.compile(r"[/?#]")  # what it ends with; it is between the second of these and the third


class Places(Protocol):
    """Knows the address for each key; what it does not know, it asks for."""

    dial: Dial
    grouped: bool  # whether one script call may carry the records of a group
    known: bool  # False: it has to be asked for; until it was, what was known last is better than nothing

    def locate(self, patience: float) -> Plan[None]: ...
    def place(self, key: str) -> Address: ...
    def primaries(self) -> list[Address]: ...
    def move(self, slot: int, address: Address) -> None: ...


class OneServer:
    """The server that the URL names."""

    grouped = True

    def __init__(self, dial: Dial) -> None:
        self.dial = dial
        self.known = True

    def locate(self, patience: float) -> Plan[None]:
        """It is always where the URL says."""
        self.known = True
        yield from ()

    def place(self, key: str) -> Address:
        return None

    def primaries(self) -> list[Address]:
        return [None]

    def move(self, slot: int, address: Address) -> None:
        raise ConfigurationError("This server belongs to a cluster: write redis+cluster:// in the store's URL")


class SentinelPrimary:
    """The server that the sentinels hold to be the primary; asked again whenever it fails."""

    grouped = True

    def __init__(self, dial: Dial, ask: Dial, sentinels: list[Address], service: str) -> None:
        self.dial = dial
        self.guides = Guides(ask, sentinels)
        self.service = service
        self.known = False
        self._primary: Address = None

    def locate(self, patience: float) -> Plan[None]:
        question = pack("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.service)
        failure = f"No sentinel knows a primary for {self.service!r}"
        _, (host, port) = yield from self.guides.ask(question, patience, failure)
        self._primary, self.known = (host.decode(), int(port)), True

    def place(self, key: str) -> Address:
        return self._primary

    def primaries(self) -> list[Address]:
        return [self._primary]

    def move(self, slot: int, address: Address) -> None:
        raise ConfigurationError("This server belongs to a cluster: write redis+cluster:// in the store's URL")


class ClusterNodes:
    """The primaries of a cluster, and which of them has which slot; learned from any node, corrected by each answer."""

    grouped = False

    def __init__(self, dial: Dial, nodes: list[Address]) -> None:
        self.dial = dial
        self.guides = Guides(dial, nodes)
        self.known = False
        self._slots: list[Address] = [None] * REDIS_CLUSTER_HASH_SLOTS

    def locate(self, patience: float) -> Plan[None]:
        failure = "No node shows the way through the Redis cluster"
        node, slots = yield from self.guides.ask(pack("CLUSTER", "SLOTS"), patience, failure, self.primaries())
        self._slots, self.known = read_slots(slots, node), True

    def place(self, key: str) -> Address:
        # Of an uncovered slot, any node says what is wrong.
        return self._slots[key_slot(key.encode())] or self.guides.addresses[0]

    def primaries(self) -> list[Address]:
        return [*sorted({address for address in self._slots if address})] or self.guides.addresses

    def move(self, slot: int, address: Address) -> None:
        self._slots[slot] = address


class Guides:
    """Servers that know the way to others.  Each time another is the first to be asked: one may be behind the times."""

    def __init__(self, dial: Dial, addresses: list[Address]) -> None:
        self.dial = dial
        self.addresses = addresses

    def ask(
        self, question: bytes, patience: float, failure: str, others: Sequence[Address] = ()
    ) -> Plan[tuple[Address, list[Any]]]:
        """The first answer, and whose it is; *failure*, with the last reason, where nobody has one before the time is up."""
        ends = SYSTEM.monotonic() + patience
        for address in dict.fromkeys((*self.addresses, *others)):
            if address in self.addresses:
                self.addresses = [*(each for each in self.addresses if each != address), address]
            answer = yield from ask_once(self.dial, address, question, patience)
            if isinstance(answer, list) and answer:
                return address, answer
            reason = f": {answer}" if answer else ""
            if SYSTEM.monotonic() >= ends:
                break
        raise StoreUnavailable(failure + reason)


def ask_once(dial: Dial, address: Address, question: bytes, patience: float) -> Plan[Any]:
    """The answer, over a connection of its own, or what went wrong; soon enough for there to be time to ask another."""
    line = Line(dial, address)
    answers = (yield Exchange([Parcel(line, question, 1)], patience / 2))[0]
    yield HangUp(line)
    return answers if isinstance(answers, StoreError) else answers[0]


def read_slots(ranges: list[Any], asked: Address) -> list[Address]:
    """The primary of each slot; a node that does not know its own name is the one that was asked."""
    slots: list[Address] = [None] * REDIS_CLUSTER_HASH_SLOTS
    for first, last, (host, port, *_), *_ in ranges:
        assert asked is not None
        slots[first : last + 1] = [(host.decode() if host else asked[0], port)] * (last - first + 1)
    return slots


# From a URL


def read_places(url: str, *, timeout: float) -> Places:
    """The places that the URL names; a mistake in it is told now, before anything is opened."""
    try:
        parts = urlsplit(url)
        path = parts.path.strip("/")
        if parts.scheme == "redis+sentinel":
            return read_sentinel(parts, timeout)
        if parts.scheme == "redis+cluster" and path in ("", "0"):
            return ClusterNodes(dialler(plain(parts), timeout), addresses(parts, REDIS_PORT))
        if parts.scheme != "redis+cluster" and (not path or path.isdecimal()):
            return OneServer(dialler(url, timeout))
        if parts.scheme == "redis" and not parts.hostname:
            return OneServer(dialler(url.replace("redis", "unix", 1), timeout))
        raise ValueError(f"/{path} is no database of this kind of server")
    except (TypeError, ValueError, redis.RedisError) as error:
        shown = hide_password(url)
        if "@" in url and "@" not in AUTHORITY.split(url)[2]:  # the error would show a part of the password
            raise ConfigurationError(f"{shown}: in the password, write / as %2F, ? as %3F and # as %23") from None
        raise ConfigurationError(f"{shown}: {error}") from error


def read_sentinel(parts: SplitResult, timeout: float) -> SentinelPrimary:
    """redis+sentinel://login@host,host/service/db"""
    service, _, db = unquote(parts.path).strip("/").partition("/")
    if not service or not (db or "0").isdecimal():
        raise ValueError("after the hosts, write the service's name and the database's number, as in /mymaster/0")
    options = dict(parse_qsl(parts.query))
    login = {name: options.pop(f"sentinel_{name}", None) for name in ("username", "password")}
    url = plain(parts._replace(path=f"/{db or 0}", query=urlencode(options)))
    ask = dialler(url, timeout, {**login, "db": 0})
    return SentinelPrimary(dialler(url, timeout), ask, addresses(parts, SENTINEL_PORT), service)


def plain(parts: SplitResult) -> str:
    """The URL as redis-py reads it, with the first of its hosts; `tls=true` makes it rediss://."""
    options = dict(parse_qsl(parts.query))
    scheme = "rediss" if options.pop("tls", "").lower() in ("true", "1") else "redis"
    login, at, hosts = parts.netloc.rpartition("@")
    netloc = f"{login}{at}{hosts.partition(',')[0]}"
    return parts._replace(scheme=scheme, netloc=netloc, query=urlencode(options)).geturl()


def addresses(parts: SplitResult, port: int) -> list[Address]:
    """Each host and port of a list such as `a:7000,b,[::1]:7001`."""
    hosts = [urlsplit(f"//{host}") for host in parts.netloc.rpartition("@")[2].split(",")]
    return [(host.hostname or "localhost", host.port or port) for host in hosts]


def dialler(url: str, timeout: float, changes: dict[str, Any] | None = None) -> Dial:
    """Makes redis-py connections by what *url* says, and checks its options by making one of each."""
    made = {}
    for on_loop, module in ((False, redis.connection), (True, redis.asyncio.connection)):
        options = module.parse_url(url)
        options.pop("max_connections", None)
        kind = options.pop("connection_class", module.Connection)
        options = {"socket_timeout": timeout, "socket_connect_timeout": timeout, "client_name": "oncemore", **options}
        made[on_loop] = (kind, {**options, **(changes or {}), "protocol": 2, "decode_responses": False})

    def dial(address: Address, on_loop: bool) -> Any:
        kind, options = made[on_loop]
        place = {"host": address[0], "port": address[1]} if address else {}
        return kind(**{**options, **place})

    dial(None, False)
    dial(None, True)
    return dial
