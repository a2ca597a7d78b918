"""Runs batches of script calls: packed by script and by node, one write for each node, sent again if that is safe."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import redis
from redis import exceptions

from ..._runtime.backoff import Backoff
from ..._runtime.batching import Batcher
from ..._runtime.clock import SYSTEM
from ..._runtime.plan import Plan, Sleep
from ...errors import ConfigurationError, CorruptRecord, StoreError, StoreUnavailable
from .connection import Address, ConnectionPool, Disconnect, RoundTrip, pack
from .scripts import Script
from .topology import Cluster, Topology

# Items of one script call.  The server does nothing else meanwhile, so this keeps a call well under a millisecond.
CALL_LIMIT = 64
PAUSE = Backoff(base=0.02, cap=0.4)
SHORTEST_ATTEMPT = 0.05  # seconds; if less time is left, the batch fails
QUICK_ATTEMPTS = 3  # without a pause: an idle connection was closed, a slot has moved, the scripts were flushed

# Error replies after which nothing has happened, so the call is sent again.  WRONG_SERVER: the server is no primary any
# more, or its name means another server by now.
WRONG_SERVER = {"READONLY", "MASTERDOWN", "CLUSTERDOWN"}
RETRIED = {"BUSY", "TRYAGAIN", *WRONG_SERVER}
REFUSED = {"OOM", "MISCONF", "NOREPLICAS", "NOPERM"}

# redis-py removes the first word of an error that it has a class for; which errors have one depends on its version.
CODES: dict[type[Exception], str] = {
    exceptions.AskError: "ASK",
    exceptions.ClusterDownError: "CLUSTERDOWN",
    exceptions.MasterDownError: "MASTERDOWN",
    exceptions.MovedError: "MOVED",
    exceptions.NoPermissionError: "NOPERM",
    exceptions.NoScriptError: "NOSCRIPT",
    exceptions.OutOfMemoryError: "OOM",
    exceptions.ReadOnlyError: "READONLY",
    exceptions.TryAgainError: "TRYAGAIN",
}
WITHIN_SCRIPT = re.compile(r"(?:ERR )?Error running script .*: -([A-Z]+) ")  # before Redis 7

ASKING = pack("ASKING")


class Item(NamedTuple):
    """One record's part in a call of *script*.  *holder* names a claim."""

    script: Script
    key: str
    args: tuple[Any, ...] = ()
    holder: str = ""


class Command(NamedTuple):
    """A command that is no script, for the primary with the number *server*."""

    words: tuple[Any, ...]
    server: int = 0


class Call:
    """One command of a batch: a script with its items, or a plain one.  *error* tells why it has to be sent again."""

    __slots__ = ("asking", "error", "full", "indexes", "items")

    def __init__(self, indexes: Sequence[int], items: Sequence[Any]) -> None:
        self.indexes = indexes  # of its items in the batch
        self.items = items
        self.full = False  # the server does not have the script
        self.asking: Address = None  # the node that the slot is being moved to
        self.error: StoreError | None = None

    def address(self, topology: Topology) -> Address:
        first = self.items[0]
        if isinstance(first, Command):
            primaries = topology.primaries()
            return primaries[first.server % len(primaries)]
        return self.asking or topology.address(first.key)

    def packed(self, common: tuple[Any, ...]) -> bytes:
        first = self.items[0]
        if isinstance(first, Command):
            return pack(*first.words)
        script = first.script
        words = [b"EVAL", script.source] if self.full else [b"EVALSHA", script.sha]
        words += (len(self.items), *[item.key for item in self.items], *common)
        for item in self.items:
            words += item.args
        return pack(*words)

    def take_reply(self, reply: Any, results: list[Any]) -> bool:
        """Give each item its part of the reply; False if the reply is an error of the whole call."""
        if isinstance(reply, redis.ResponseError):
            return False
        if isinstance(self.items[0], Command):
            reply = [reply]
        for index, own in zip(self.indexes, reply, strict=True):
            results[index] = own if not isinstance(own, redis.ResponseError) else reply_error(own)
        return True

    def split(self) -> list[Call]:
        """A call for each item."""
        return [Call((index,), (item,)) for index, item in zip(self.indexes, self.items, strict=True)]


class NodeBatchers:
    """One batcher for each node, so that a node that is slow or down delays only the callers who need it."""

    def __init__(self, topology: Topology, run_batch: Callable[[list[Item]], Plan[list[Any]]], **options: Any) -> None:
        self._topology = topology
        self._run_batch = run_batch
        self._options = options
        self._by_address: dict[Address, Batcher[Item]] = {}

    def for_key(self, key: str) -> Batcher[Item]:
        address = self._topology.address(key)
        batcher = self._by_address.get(address)
        return batcher or self._by_address.setdefault(address, Batcher(self._run_batch, **self._options))

    async def drain(self) -> None:
        """Return when no batch is under way on the running event loop."""
        for batcher in tuple(self._by_address.values()):
            await batcher.drain()


class CommandRunner:
    """Sends batches to the servers of *topology*.  *common* gives the arguments that every script call begins with."""

    def __init__(self, topology: Topology, common: Callable[[], tuple[Any, ...]], *, timeout: float) -> None:
        self.topology = topology
        self.common = common
        self.timeout = timeout
        self.pool = ConnectionPool(topology.connector, timeout / 2)

    def run(self, items: Sequence[Item | Command]) -> Plan[list[Any]]:
        """The result of each item, or its own StoreError, within the timeout."""
        return Batch(self, items).run()


class Batch:
    """Items that are sent together.  With *replicas*, a write counts only if so many replicas have it.

    *unanswered* are the calls that have to be sent, or sent again.  Two kinds of items may have been carried out
    although their result is an error: *uncertain*, without an answer, and *uncounted*, which too few replicas have.
    """

    def __init__(
        self, runner: CommandRunner, items: Sequence[Item | Command], replicas: int = 0, timeout: float | None = None
    ) -> None:
        self.runner = runner
        self.deadline = SYSTEM.monotonic() + min(runner.timeout, timeout or runner.timeout)
        self.topology = runner.topology
        self.replicas = replicas
        self.results: list[Any] = [None] * len(items)
        self.unanswered = list(make_calls(items, together=self.topology.one_primary))
        self.uncertain: list[Item] = []
        self.uncounted: list[Item] = []
        self.lost = False  # the primary has to be located before the next attempt

    def run(self) -> Plan[list[Any]]:
        """Send all calls, and the unanswered ones again, until every call is answered or the time is up."""
        attempts = 0
        while True:
            yield from self._attempt()
            if not self.unanswered:
                return self.results
            attempts += 1
            pause = PAUSE.delay(attempts - QUICK_ATTEMPTS, random.random()) if attempts > QUICK_ATTEMPTS else 0.0
            if SYSTEM.monotonic() + pause + SHORTEST_ATTEMPT >= self.deadline:
                self._give_up()
                return self.results
            if pause:
                yield Sleep(pause)

    def _time_left(self) -> float:
        """For one round trip: half of the whole time, so that there is a second one, or less."""
        return max(SHORTEST_ATTEMPT, min(self.runner.pool.timeout, self.deadline - SYSTEM.monotonic()))

    def _attempt(self) -> Plan[None]:
        """Send all that is unanswered, to each node in one write."""
        calls, self.unanswered = self.unanswered, []
        try:
            if self.lost or not self.topology.known:
                yield from self.topology.locate(self.runner.pool, self._time_left())
                self.lost = False
        except StoreError as error:
            return self._send_again(calls, error)
        by_address: dict[Address, list[Call]] = {}
        for call in calls:
            by_address.setdefault(call.address(self.topology), []).append(call)
        for address, sent in by_address.items():
            timeout = self._time_left()
            packets = self._packets(sent, timeout)
            try:
                replies = yield RoundTrip(self.runner.pool, address, b"".join(packets), len(packets), timeout)
            except StoreError as error:
                for call in sent:
                    call.asking = None
                self._send_again(sent, error)
                yield from self._lose_primary(address)
            else:
                yield from self._take_replies(address, sent, replies)

    def _packets(self, calls: list[Call], timeout: float) -> list[bytes]:
        """The commands of one write, each of which has one reply."""
        common = self.runner.common()
        packets = []
        for call in calls:
            if call.asking:
                packets.append(ASKING)
            packets.append(call.packed(common))
        if self.replicas:  # on the same connection, or it would wait for somebody else's writes
            packets.append(pack("WAIT", self.replicas, int(timeout * 800)))
        return packets

    def _take_replies(self, address: Address, calls: list[Call], replies: list[Any]) -> Plan[None]:
        too_few = self._too_few_replicas(replies.pop()) if self.replicas else None
        remaining = iter(replies)
        for call in calls:
            if call.asking:
                next(remaining)
                call.asking = None
            reply = next(remaining)
            if not call.take_reply(reply, self.results):
                yield from self._take_error(address, call, reply)
            elif too_few:
                for index, item in zip(call.indexes, call.items, strict=True):
                    if isinstance(item, Item) and not isinstance(self.results[index], StoreError):
                        self.results[index] = StoreUnavailable(too_few)
                        self.uncounted.append(item)

    def _too_few_replicas(self, reply: int | redis.ResponseError) -> str | None:
        """The reason why the writes do not count, if there is one; a replica, and a user without the right, get an error."""
        if isinstance(reply, redis.ResponseError):
            return f"Redis does not wait for replicas: {reply_text(reply)}"
        return f"Only {reply} of {self.replicas} replicas have the write" if reply < self.replicas else None

    def _take_error(self, address: Address, call: Call, error: redis.ResponseError) -> Plan[None]:
        """The whole call failed: most often nothing happened, and it can be sent again in another way."""
        text = reply_text(error)
        code = error_code(text)
        again = [call]
        if code == "NOSCRIPT" and not call.full:
            call.full = True
        elif code in ("MOVED", "ASK"):
            if not isinstance(self.topology, Cluster):
                for index in call.indexes:
                    self.results[index] = ConfigurationError(
                        "The server is in a cluster: write redis+cluster:// in the URL"
                    )
                return
            _, slot, place = text.split(" ")
            host, _, port = place.rpartition(":")
            node = (host or (address[0] if address else ""), int(port))
            if code == "MOVED":  # for good
                self.topology.move(int(slot), node)
            else:  # for this call
                call.asking = node
        elif code in WRONG_SERVER:
            yield from self._lose_primary(address)
        elif code not in RETRIED:
            if len(call.items) == 1:
                self.results[call.indexes[0]] = reply_error(error)
                return
            again = call.split()  # so that one bad item fails alone
        self._send_again(again, reply_error(error))

    def _lose_primary(self, address: Address) -> Plan[None]:
        """Locate the primary before the next attempt, and use none of the connections that are open to it."""
        self.lost = True
        if self.topology.one_primary:  # in a cluster, the nodes of other batches may be well
            self.topology.known = False
        yield Disconnect(self.runner.pool, address)

    def _send_again(self, calls: list[Call], error: StoreError) -> None:
        for call in calls:
            call.error = error
        self.unanswered += calls

    def _give_up(self) -> None:
        """An error of its own for each item, so that callers who share a failure do not share a traceback."""
        for call in self.unanswered:
            error = call.error or StoreUnavailable()
            self.uncertain += [item for item in call.items if isinstance(item, Item)]
            for index in call.indexes:
                own = self.results[index] = type(error)(error.detail)
                own.__cause__ = error.__cause__


def make_calls(items: Sequence[Item | Command], *, together: bool) -> Iterator[Call]:
    """One call for all items of a script; but one for each item in a cluster, where a call must keep to one slot."""
    by_script: dict[Script, list[int]] = {}
    for index, item in enumerate(items):
        if together and type(item) is Item:
            by_script.setdefault(item.script, []).append(index)
        else:
            yield Call((index,), (item,))
    for indexes in by_script.values():
        for start in range(0, len(indexes), CALL_LIMIT):
            part = indexes[start : start + CALL_LIMIT]
            yield Call(part, [items[index] for index in part])


def reply_text(error: redis.ResponseError) -> str:
    """The error as the server sent it, with its code in front."""
    code = CODES.get(type(error))
    return f"{code} {error}" if code else str(error)


def error_code(text: str) -> str:
    """The first word, which names the error; before Redis 7, an error within a script has it in the middle."""
    inside = WITHIN_SCRIPT.match(text)
    return inside[1] if inside else text.partition(" ")[0]


def reply_error(error: redis.ResponseError) -> StoreError:
    """The error for the caller if the server replied with *error*."""
    text = reply_text(error)
    code = error_code(text)
    failure: StoreError
    if code == "WRONGTYPE":
        failure = CorruptRecord("Something that is no record lies under this operation's key in Redis; remove it")
    elif code in RETRIED or code in REFUSED:
        failure = StoreUnavailable(f"Redis refused: {text}")
    else:
        failure = StoreError(f"Redis failed: {text}")
    failure.__cause__ = error
    return failure
