"""Finds the server of a record: the server of the URL, the primary that sentinels name, or a node of a cluster."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

import redis
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from ..._ledger.connect import hide_password
from ..._ledger.store import STORE_FAILURES
from ..._runtime.forks import reset_in_child
from ..._runtime.listening import Listener
from ..._runtime.plan import Plan, run
from ...errors import ConfigurationError, StoreError, StoreUnavailable
from .connection import Address, ConnectionPool, Connector, SendCommands, pack

SENTINEL_PORT = 26379
REDIS_PORT = 6379
SEPARATOR = re.compile(r"[/?#]")  # the host is between the second and the third of these

QUESTION_PAUSE = 0.25  # seconds between two questions to a sentinel, or to the nodes of a cluster
ASK_SECONDS = 0.5  # the longest wait for the answer of one server to such a question


class Topology:
    """Knows the address of the primary for each key: here the one server that the URL names.

    If *known* is false, `locate` has to be called before the next attempt.  Until it succeeds, the last known address
    is used.  If *one_primary* is true, one script call may carry many records.  If *fails_over* is true, another server
    may become the primary, and `watch` notices that within half a second.
    """

    one_primary = True
    fails_over = False

    def __init__(self, connector: Connector) -> None:
        self.pool = ConnectionPool(connector)
        self.pools = [self.pool]  # all pools that have to be closed
        self.known = True
        self.primary: Address = None
        self.changes = 0  # how often a primary was replaced
        self.watchers: list[Listener[Any]] = []
        self._reset()
        reset_in_child(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()  # callers and watchers may change the known primaries at the same time

    def locate(self, timeout: float) -> Plan[None]:
        """Find out which server is the primary.  Raises one of STORE_FAILURES if no server tells."""
        self.known = True
        yield from ()

    def watch(self) -> None:
        """Start the background threads that notice if another server becomes the primary."""
        for watcher in self.watchers:
            watcher.listen()

    def unwatch(self) -> None:
        for watcher in self.watchers:
            watcher.close()

    def address(self, key: str | bytes) -> Address:
        return self.primary

    def primaries(self) -> list[Address]:
        return [self.primary]

    def replicas(self, primary: Address) -> int:
        """Return the number of replicas that *primary* should have, including those that are down."""
        raise NotImplementedError

    def move(self, slot: int, address: Address) -> None:
        raise NotImplementedError


class SentinelTopology(Topology):
    """Knows the server that the sentinels name as the primary of *service*.

    All of them are asked, at first and after each failure.  The answer with the highest epoch counts, because a
    sentinel may not have noticed a failover yet.  If that epoch is lower than one from an earlier answer, it counts
    only if all sentinels have answered.
    """

    fails_over = True

    def __init__(
        self, connector: Connector, sentinel_connector: Connector, sentinels: list[Address], service: str
    ) -> None:
        super().__init__(connector)
        self.sentinel_pool = ConnectionPool(sentinel_connector)
        self.pools.append(self.sentinel_pool)
        self.sentinels = sentinels
        self.service = service
        self.known = False
        self.watchers = [Watcher(partial(self._ask_and_use, sentinel)) for sentinel in sentinels]
        self._epoch = -1
        self._replicas = 0

    def locate(self, timeout: float) -> Plan[None]:
        views: list[SentinelView] = []
        reason: Exception | None = None
        for sentinel in self.sentinels:
            try:
                views.append((yield from self.ask(sentinel, timeout)))
            except (StoreError, ConfigurationError) as error:
                reason = error
        if not views and isinstance(reason, ConfigurationError):
            raise reason
        latest = max(views, key=lambda view: view.epoch, default=None)
        if latest is not None and len(views) == len(self.sentinels):
            self._epoch = min(self._epoch, latest.epoch)  # it is lower if the sentinels were set up anew
        if latest is None or not self.use(latest):
            raise StoreUnavailable(
                f"No sentinel knows a primary for {self.service!r}" + (f": {reason}" if reason else "")
            )
        self.known = True

    def ask(self, sentinel: Address, timeout: float) -> Plan[SentinelView]:
        """Return the view of *sentinel*.  Raises StoreUnavailable if it does not know the service."""
        # MASTER is not enough: in a failover, it names the old primary for some time after the new one was promoted.
        question = pack("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.service) + pack("SENTINEL", "MASTER", self.service)
        replies = yield SendCommands(self.sentinel_pool, sentinel, question, 2, min(timeout / 2, ASK_SECONDS))
        for reply in replies:
            if isinstance(reply, Exception):
                raise StoreUnavailable(str(reply))
        return read_sentinel_view(*replies)

    def _ask_and_use(self, sentinel: Address) -> Plan[None]:
        self.use((yield from self.ask(sentinel, 2 * ASK_SECONDS)))

    def use(self, view: SentinelView) -> bool:
        """Use the primary of *view* and return True, unless it is down or a later view is known.  On any thread."""
        with self._lock:
            if view.primary is None or view.epoch < self._epoch:
                return False
            former, self.primary = self.primary, view.primary
            self._epoch, self._replicas = view.epoch, view.replicas
        if former not in (None, view.primary):
            self.changes += 1
            self.pool.abandon(former)
        return True

    def replicas(self, primary: Address) -> int:
        return self._replicas


class ClusterTopology(Topology):
    """Knows the primaries of a cluster and their slots.  All nodes are asked, and MOVED replies correct the answers.

    For each slot, the answer with the highest epoch counts, as in the cluster itself.  A primary that was frozen and
    replaced does not know that when it wakes, and would go on to grant claims.
    redis-py's cluster client is not used, because it believes the first node that it asks, and because a write and its
    WAIT must share a connection.
    """

    one_primary = False
    fails_over = True

    def __init__(self, connector: Connector, nodes: list[Address]) -> None:
        super().__init__(connector)
        self.nodes = nodes  # the nodes that the URL names
        self.known = False
        self.watchers = [Watcher(partial(self.locate, 2 * ASK_SECONDS))]
        self._others: list[Address] = []  # known nodes that are not in the URL
        self._last_ranges: set[SlotRange] = set()  # the ranges in the latest answers
        self._ranges: list[SlotRange] = []  # the ranges in use, of which each has the highest epoch for some slot
        self._slots: list[Address] = [None] * REDIS_CLUSTER_HASH_SLOTS

    def locate(self, timeout: float) -> Plan[None]:
        question = pack("CLUSTER", "SLOTS") + pack("CLUSTER", "NODES")
        reported: list[SlotRange] = []
        answered: set[Address] = set()
        reason: Exception | None = None
        nodes = list(dict.fromkeys([*self.nodes, *self._others]))
        for node in nodes:
            try:
                slots, about = yield SendCommands(self.pool, node, question, 2, min(timeout / 2, ASK_SECONDS))
                if isinstance(slots, Exception):
                    raise StoreUnavailable(str(slots))
            except (StoreError, ConfigurationError) as error:
                reason = error
                continue
            answered.add(node)
            reported += read_ranges(slots, about if isinstance(about, bytes) else b"", node)
        if not reported:
            if isinstance(reason, ConfigurationError):
                raise reason
            raise StoreUnavailable(
                "No node of the Redis cluster knows which node has which slot" + (f": {reason}" if reason else "")
            )
        self._use(reported, answered)
        self.known = True

    def _use(self, reported: list[SlotRange], answered: set[Address]) -> None:
        with self._lock:
            replaced = self._learn(reported, answered)
        for primary in replaced:
            self.changes += 1
            self.pool.abandon(primary)

    def _learn(self, reported: list[SlotRange], answered: set[Address]) -> set[Address]:
        """Make a new map of the slots, and return the primaries that are no longer in it."""
        if self._last_ranges == {*reported}:
            return set()
        former = {each.primary for each in self._ranges}
        self._last_ranges = {*reported}
        # The ranges in use count as another answer, unless none of their primaries has answered.
        ranges = {*reported, *(self._ranges if former & answered else ())}
        latest: list[SlotRange | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        # Replicas come and go without a new epoch, and some nodes notice them sooner than others.
        for each in sorted(ranges, key=lambda each: (each.epoch, each in self._last_ranges, each.replica_count)):
            latest[each.first : each.last + 1] = [each] * (each.last + 1 - each.first)
        self._slots = [each and each.primary for each in latest]
        self._ranges = [each for each in dict.fromkeys(latest) if each]
        nodes = {node for each in ranges for node in (each.primary, *each.replicas) if node}
        self._others = sorted(nodes.difference(self.nodes))
        return former - {*self._slots}

    def address(self, key: str | bytes) -> Address:
        # If no node has the slot, any node replies with the reason.
        return self._slots[key_slot(key.encode() if isinstance(key, str) else key)] or self.nodes[0]

    def primaries(self) -> list[Address]:
        return [*sorted({address for address in self._slots if address})] or self.nodes

    def replicas(self, primary: Address) -> int:
        latest = max(
            (each for each in self._ranges if each.primary == primary), key=lambda each: each.epoch, default=None
        )
        return latest.replica_count if latest else 0

    def move(self, slot: int, address: Address) -> None:
        """Use *address* for *slot* until all nodes are asked again: the node that named it may be out of date."""
        self._slots[slot] = address
        self._last_ranges = set()


class Watcher(Listener[Any]):
    """Runs the plan of *ask* four times a second, on its own thread: no server announces a failover reliably."""

    name = "oncemore-topology"

    def __init__(self, ask: Callable[[], Plan[None]]) -> None:
        super().__init__()
        self.ask = ask

    def connect(self) -> Any:
        return ExitStack()  # the questions are sent on the pool's connections

    def receive(self, connection: Any, seconds: float) -> None:
        time.sleep(QUESTION_PAUSE)
        with suppress(*STORE_FAILURES):  # no server answers, or accepts the login; callers notice that themselves
            run(self.ask())


class SentinelView(NamedTuple):
    """The view of one sentinel: the primary since *epoch*, or None if it is down, and the number of its replicas."""

    epoch: int
    primary: Address
    replicas: int


class SlotRange(NamedTuple):
    """The slots from *first* to *last* belong to *primary* since *epoch*."""

    epoch: int
    first: int
    last: int
    primary: Address
    replicas: tuple[Address, ...]  # the replicas that are up
    replica_count: int  # the number of all replicas, including those that are down


def read_sentinel_view(place: list[bytes] | None, about: list[bytes]) -> SentinelView:
    """Return the view in the replies to SENTINEL GET-MASTER-ADDR-BY-NAME, and to MASTER: names and values in turn."""
    values = dict(zip(about[::2], about[1::2], strict=True))
    flags = values[b"flags"].split(b",")
    primary = (place[0].decode(), int(place[1])) if place else None
    replaced = primary is not None and primary != (values[b"ip"].decode(), int(values[b"port"]))
    down = b"master" not in flags or b"s_down" in flags or b"o_down" in flags
    epoch, replicas = int(values.get(b"config-epoch", 0)), int(values.get(b"num-slaves", 0))
    return SentinelView(epoch, primary if replaced or not down else None, replicas)


def read_ranges(ranges: list[Any], about: bytes, asked: Address) -> list[SlotRange]:
    """Return the ranges in the replies to CLUSTER SLOTS, which has the addresses for clients, and to CLUSTER NODES."""
    # The fields of a node: id, address, flags, id of its primary or -, two times, epoch, ...
    nodes = [parts for line in about.splitlines() if len(parts := line.split(b" ")) > 6]
    epochs = {node[0]: int(node[6]) for node in nodes}
    followed = Counter(node[3] for node in nodes)
    found = []
    for first, last, primary, *replicas in ranges:
        places = [node_address(host.decode() if host else "", port, asked) for host, port, *_ in (primary, *replicas)]
        id = primary[2] if len(primary) > 2 else b""
        count = max(len(replicas), followed[id])
        found.append(SlotRange(epochs.get(id, 0), first, last, places[0], tuple(places[1:]), count))
    return found


def read_redirection(text: str, asked: Address) -> tuple[int, Address]:
    """Return the slot and its node from an error such as `MOVED 3999 127.0.0.1:6381`."""
    _, slot, place = text.split(" ")
    host, _, port = place.rpartition(":")
    return int(slot), node_address(host, int(port), asked)


def node_address(host: str, port: int, asked: Address) -> Address:
    """Return the address of a node.  A node that does not know its own host is at the host that was *asked*."""
    return host or (asked[0] if asked else "localhost"), port


# From a URL


def read_topology(url: str) -> Topology:
    """Return the topology that the URL names.  Opens nothing.  Raises ConfigurationError for a mistake in the URL."""
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
    """Return the topology of a URL such as redis+sentinel://login@host,host/service/db."""
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
    """Return the URL as redis-py reads it, with only the first host.  `tls=true` makes it rediss://."""
    options = dict(parse_qsl(parts.query))
    scheme = "rediss" if options.pop("tls", "").lower() in ("true", "1") else "redis"
    login, at, hosts = parts.netloc.rpartition("@")
    netloc = f"{login}{at}{hosts.partition(',')[0]}"
    return parts._replace(scheme=scheme, netloc=netloc, query=urlencode(options)).geturl()


def read_addresses(parts: SplitResult, port: int) -> list[Address]:
    """Return each host and port of a list such as `a:7000,b,[::1]:7001`.  The default port is *port*."""
    hosts = [urlsplit(f"//{host}") for host in parts.netloc.rpartition("@")[2].split(",")]
    return [(host.hostname or "localhost", host.port or port) for host in hosts]
