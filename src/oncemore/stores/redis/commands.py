"""Runs batches of script calls, packed by script and by node, and sent again if that is safe.  Scans all records."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import redis
from redis import exceptions

from ..._ledger.model import Record
from ..._ledger.store import Filter, Page, Stats
from ..._runtime.backoff import Backoff
from ..._runtime.batching import Batcher, own_error
from ..._runtime.clock import SYSTEM
from ..._runtime.plan import Plan, Sleep
from ...errors import ConfigurationError, CorruptRecord, InvalidPayload, OncemoreError, StoreError, StoreUnavailable
from .connection import Address, SendCommands, pack
from .records import NOBODY, read_record
from .scripts import FIND, PURGE, STATES, Script
from .topology import Topology, read_redirection

# The most items of one script call.  The server does nothing else meanwhile, so a call should take under a millisecond.
CALL_LIMIT = 64
PAUSE = Backoff(base=0.02, cap=0.4)
SHORTEST_ATTEMPT = 0.05  # seconds; if less time is left, the batch fails
QUICK_ATTEMPTS = 3  # without a pause: an idle connection was closed, a slot has moved, the scripts were flushed

# Error replies after which nothing has happened, so the call is sent again.  WRONG_SERVER: the server is no longer the
# primary, or its host name now leads to another server.
WRONG_SERVER = {"READONLY", "MASTERDOWN", "CLUSTERDOWN"}
RETRIED = {"BUSY", "TRYAGAIN", *WRONG_SERVER}
# The primary has lost its replicas.  It may have been replaced, so the sentinels or the cluster are asked, if any.
NO_REPLICAS = "NOREPLICAS"
REFUSED = {"OOM", "MISCONF", "NOREPLICAS", "NOPERM"}

# redis-py removes the first word of an error if it has a class for it.  The classes depend on its version.
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

ALL = -1  # a number of replicas: all that the sentinels or the cluster know
ASKING = pack("ASKING")


class ScriptItem(msgspec.Struct, gc=False):
    """One record's part in a call of *script*.  If it is a claim, *holder* is its name.

    If *script* is None, *args* are the words of a command for the primary with the number *server*.
    """

    script: Script | None
    key: str
    args: tuple[Any, ...] = ()
    holder: str = ""
    server: int = 0


class ScriptCall(NamedTuple):
    """One command of a batch: the items with these *indexes*, which all have the same script.

    *asking* is the node that their slot is being moved to, if the present node has said so.
    """

    indexes: Sequence[int]
    asking: Address = None


class CommandRunner:
    """Sends items to the servers of *topology*.  *common* returns the arguments that every script call begins with."""

    def __init__(self, topology: Topology, common: Callable[[], tuple[Any, ...]], *, timeout: float) -> None:
        self.topology = topology
        self.common = common
        self.timeout = timeout

    def run(self, items: Sequence[ScriptItem]) -> Plan[list[Any]]:
        """Return the result of each item, or its own OncemoreError, within the timeout."""
        return ScriptBatch(self, items).run()


class NodeBatchers:
    """Keeps one batcher for each node, so that a node that is slow or down delays only its own callers."""

    def __init__(
        self, topology: Topology, run_batch: Callable[[list[Any]], Plan[Sequence[Any]]], **options: Any
    ) -> None:
        self._topology = topology
        self._run_batch = run_batch
        self._options = options
        self._by_address: dict[Address, Batcher[Any]] = {}

    def for_key(self, key: str | bytes) -> Batcher[Any]:
        address = self._topology.address(key)
        batcher = self._by_address.get(address)
        return batcher or self._by_address.setdefault(address, Batcher(self._run_batch, **self._options))

    async def drain(self) -> None:
        """Return when no batch is under way on the running event loop."""
        for batcher in tuple(self._by_address.values()):
            await batcher.drain()


class ScriptBatch:
    """Items that are sent together.  A write counts only if *replicas* replicas have it; ALL means all known ones.

    Two kinds of items may have been carried out although their result is an error: *uncertain* items were given up
    after one or more attempts, and *unreplicated* items are on too few replicas.
    """

    def __init__(
        self, runner: CommandRunner, items: Sequence[ScriptItem], replicas: int = 0, timeout: float | None = None
    ) -> None:
        self.runner = runner
        self.topology = runner.topology
        self.items = items
        self.replicas = replicas
        self.deadline = SYSTEM.monotonic() + min(runner.timeout, timeout or runner.timeout)
        self.results: list[Any] = [None] * len(items)
        self.uncertain: list[ScriptItem] = []
        self.unreplicated: list[ScriptItem] = []
        self._calls = list(self._make_calls())  # the calls that have to be sent, or sent again
        self._errors: dict[int, OncemoreError] = {}  # by index: why an item has to be sent again
        self._missing: set[Script | None] = set()  # scripts that a server did not have, and that are sent in full
        self._must_locate = False  # whether the primary has to be located before the next attempt

    def _make_calls(self) -> Iterator[ScriptCall]:
        """Yield calls of many items with the same script.  In a cluster, a call has one item, to keep to one slot."""
        if not self.topology.one_primary:
            yield from [ScriptCall((index,)) for index in range(len(self.items))]
            return
        by_script: dict[Script | None, list[int]] = {}
        for index, item in enumerate(self.items):
            by_script.setdefault(item.script, []).append(index)
        for indexes in by_script.values():
            for start in range(0, len(indexes), CALL_LIMIT):
                yield ScriptCall(indexes[start : start + CALL_LIMIT])

    def run(self) -> Plan[list[Any]]:
        """Send all calls, and send the unanswered ones again until every call is answered or the time is up."""
        attempts = 0
        while True:
            yield from self._attempt()
            if not self._calls:
                return self.results
            attempts += 1
            pause = PAUSE.delay(attempts - QUICK_ATTEMPTS, random.random()) if attempts > QUICK_ATTEMPTS else 0.0
            if SYSTEM.monotonic() + pause + SHORTEST_ATTEMPT >= self.deadline:
                self._fail(self._calls)
                return self.results
            if pause:
                yield Sleep(pause)

    def _time_left(self) -> float:
        """Return the seconds for one write and its replies: at most half of the timeout, to allow a second attempt."""
        return max(SHORTEST_ATTEMPT, min(self.runner.timeout / 2, self.deadline - SYSTEM.monotonic()))

    def _attempt(self) -> Plan[None]:
        """Send all unanswered calls, to each node in one write."""
        calls, self._calls = self._calls, []
        if self._must_locate or not self.topology.known:
            try:
                yield from self.topology.locate(self._time_left())
            except ConfigurationError as error:
                self._fail(calls, error)
                return
            except StoreError as error:
                for call in calls:
                    self._send_again(call.indexes, error)
                return
            self._must_locate = False
        by_address: dict[Address, list[ScriptCall]] = {}
        for call in calls:
            by_address.setdefault(self._address(call), []).append(call)
        for address, sent in by_address.items():
            timeout = self._time_left()
            replicas = self.topology.replicas(address) if self.replicas == ALL else self.replicas
            packets = self._packets(sent, timeout, replicas)
            try:
                replies = yield SendCommands(self.topology.pool, address, b"".join(packets), len(packets), timeout)
            except ConfigurationError as error:
                self._fail(sent, error)
            except StoreError as error:
                self._forget_primary(address)
                for call in sent:
                    self._send_again(call.indexes, error)
            else:
                self._take_replies(address, sent, replies, replicas)

    def _address(self, call: ScriptCall) -> Address:
        item = self.items[call.indexes[0]]
        if item.script is None:
            primaries = self.topology.primaries()
            return primaries[item.server % len(primaries)]
        return call.asking or self.topology.address(item.key)

    def _packets(self, calls: list[ScriptCall], timeout: float, replicas: int) -> list[bytes]:
        """Return the commands of one write.  Each has one reply."""
        packets = []
        for call in calls:
            if call.asking:
                packets.append(ASKING)
            packets.append(self._pack(call))
        if replicas:  # on the same connection, because WAIT waits for the writes of its connection
            packets.append(pack("WAIT", replicas, int(timeout * 800)))
        return packets

    def _pack(self, call: ScriptCall) -> bytes:
        items = [self.items[index] for index in call.indexes]
        script = items[0].script
        if script is None:
            return pack(*items[0].args)
        words: list[Any] = [b"EVAL", script.source] if script in self._missing else [b"EVALSHA", script.sha]
        words += (len(items), *[item.key for item in items], *self.runner.common())
        for item in items:
            words += item.args
        return pack(*words)

    def _fail(self, calls: list[ScriptCall], error: OncemoreError | None = None) -> None:
        """Give each item *error*, or the error of its last attempt, because no further attempt is made.

        An earlier attempt may have been carried out, so the items are *uncertain*.
        """
        for index in (index for call in calls for index in call.indexes):
            self.results[index] = own_error(error or self._errors[index])
            self.uncertain.append(self.items[index])

    def _take_replies(self, address: Address, calls: list[ScriptCall], replies: list[Any], replicas: int) -> None:
        """Give each item its part of its call's reply, or an error if fewer than *replicas* replicas have the write."""
        too_few = ""
        if replicas:
            count = replies.pop()
            if isinstance(count, redis.ResponseError):  # the server is a replica, or the user may not use WAIT
                too_few = f"Redis refused WAIT, so its replicas may not have the write: {reply_text(count)}"
            elif count < replicas:
                too_few = f"Only {count} of {replicas} replicas have the write; try again when enough of them are up"
            if too_few:
                self._forget_primary(address)  # it may have been replaced
        remaining = iter(replies)
        for call in calls:
            if call.asking:
                next(remaining)
            reply = next(remaining)
            if isinstance(reply, redis.ResponseError):
                self._take_error(address, call, reply)
                continue
            if self.items[call.indexes[0]].script is None:
                reply = [reply]
            for index, result in zip(call.indexes, reply, strict=True):
                if isinstance(result, redis.ResponseError):
                    result = reply_error(result)
                elif too_few:
                    result = StoreUnavailable(too_few)
                    self.unreplicated.append(self.items[index])
                self.results[index] = result

    def _take_error(self, address: Address, call: ScriptCall, reply: redis.ResponseError) -> None:
        """Handle the failure of a whole call.  Usually nothing happened, and the call is sent again in another way."""
        text = reply_text(reply)
        code = error_code(text)
        error: OncemoreError = reply_error(reply)
        again, asking = [call.indexes], None
        if code == "NOSCRIPT":
            self._missing.add(self.items[call.indexes[0]].script)
        elif code in ("MOVED", "ASK") and not self.topology.one_primary:
            slot, node = read_redirection(text, address)
            if code == "MOVED":  # for good
                self.topology.move(slot, node)
            else:  # for this call
                asking = node
        elif code in WRONG_SERVER or (code == NO_REPLICAS and self.topology.fails_over):
            self._forget_primary(address)
        elif code not in RETRIED:
            if code in ("MOVED", "ASK"):
                error = ConfigurationError("The server is in a cluster: write redis+cluster:// in the URL")
            if len(call.indexes) == 1:
                self.results[call.indexes[0]] = error
                return
            again = [(index,) for index in call.indexes]  # so that one bad item fails alone
        for indexes in again:
            self._send_again(indexes, error, asking)

    def _forget_primary(self, address: Address) -> None:
        """Locate the primary before the next attempt, and use none of the present connections to *address* again."""
        self._must_locate = True
        if self.topology.one_primary:  # in a cluster, the nodes of other batches may be up
            self.topology.known = False
        self.topology.pool.drop(address)

    def _send_again(self, indexes: Sequence[int], error: OncemoreError, asking: Address = None) -> None:
        self._calls.append(ScriptCall(indexes, asking))
        self._errors.update(dict.fromkeys(indexes, error))


def reply_text(error: redis.ResponseError) -> str:
    """Return the error as the server sent it, with its code in front."""
    code = CODES.get(type(error))
    return f"{code} {error}" if code else str(error)


def error_code(text: str) -> str:
    """Return the word that names the error: the first, or, before Redis 7 in a script, one in the middle."""
    inside = WITHIN_SCRIPT.match(text)
    return inside[1] if inside else text.partition(" ")[0]


def reply_error(error: redis.ResponseError) -> StoreError:
    """Return the error for the caller if the server replied with *error*."""
    text = reply_text(error)
    code = error_code(text)
    failure: StoreError
    if code == "WRONGTYPE":
        failure = CorruptRecord("The value at this operation's key in Redis is not a record of oncemore; remove it")
    elif code in RETRIED or code in REFUSED:
        failure = StoreUnavailable(f"Redis refused: {text}")
    else:
        failure = StoreError(f"Redis failed: {text}")
    failure.__cause__ = error
    return failure


# Scans of all records, for operators.  Each step is short, so claims are not delayed.

CURSOR = re.compile(r"([0-9]{0,9})\.([0-9]{1,20})\.([0-9a-f,]*)")
RECORD = "{" + 40 * "[0-9a-f]" + "}"  # SCAN's pattern for the name of a record, without the prefix
STEP = 50  # keys that SCAN looks at in one call; a claim that arrives meanwhile waits for it


class ScanCursor(msgspec.Struct, frozen=True):
    """The state of a scan: the server (None: all are done), SCAN's position there, and records not yet returned."""

    server: int | None = 0
    position: int = 0
    pending: tuple[str, ...] = ()

    @property
    def over(self) -> bool:
        return self.server is None and not self.pending

    def __str__(self) -> str:
        return f"{'' if self.server is None else self.server}.{self.position}.{','.join(self.pending)}"

    @classmethod
    def read(cls, cursor: str) -> ScanCursor:
        """Return the cursor for the text *cursor* of a page.  Raises InvalidPayload for any other text."""
        match = CURSOR.fullmatch(cursor)
        if match is None:
            raise InvalidPayload(f"{cursor[:40]!r} is not a cursor of this store: pass the cursor of the former page")
        server, position, pending = match.groups()
        return cls(int(server) if server else None, int(position), tuple(filter(None, pending.split(","))))


class Scan:
    """Scans the records of one store.  Scans are not batched with claims, so neither waits for the other."""

    def __init__(self, runner: CommandRunner, prefix: str) -> None:
        self.runner = runner
        self.prefix = prefix
        self._purged = ScanCursor()

    def _run(self, script: Script, keys: Sequence[str]) -> Plan[list[Any]]:
        """Return one result per key, or None for a key that does not hold a record."""
        results = (yield from self.runner.run([ScriptItem(script, key) for key in keys])) if keys else []
        return [result_or_raise(result) for result in results]

    def _step(self, cursor: ScanCursor, pattern: str = RECORD) -> Plan[tuple[list[str], ScanCursor]]:
        """Return the next keys, and the cursor after them."""
        if cursor.pending or cursor.server is None:
            pending = [f"{self.prefix}:{{{name}}}" for name in cursor.pending]
            return pending, msgspec.structs.replace(cursor, pending=())
        words = ("SCAN", cursor.position, "MATCH", f"{self.prefix}:{pattern}", "COUNT", STEP)
        (result,) = yield from self.runner.run([ScriptItem(None, "", words, server=cursor.server)])
        position, keys = result_or_raise(result)
        after = ScanCursor(cursor.server, int(position))
        if after.position == 0:
            last = cursor.server + 1 >= len(self.runner.topology.primaries())
            after = ScanCursor(None if last else cursor.server + 1)
        return [key.decode(errors="replace") for key in dict.fromkeys(keys)], after

    def page(self, where: Filter, limit: int, start: str | None) -> Plan[Page]:
        cursor = ScanCursor.read(start) if start else ScanCursor()
        found: dict[str, Record] = {}
        while len(found) < limit and not cursor.over:
            keys, cursor = yield from self._step(cursor)
            answers = yield from self._run(FIND, keys)
            records = {key: read_record(NOBODY, *answer) for key, answer in zip(keys, answers, strict=True) if answer}
            # The operation of an unreadable record is not known, so the record is left out.
            found |= {key: each for key, each in records.items() if each.id != NOBODY and where.matches(each)}
        pending = tuple(key.partition("{")[2].rstrip("}") for key in tuple(found)[limit:])
        cursor = msgspec.structs.replace(cursor, pending=pending)
        return Page(tuple(found.values())[:limit], None if cursor.over else str(cursor))

    def purge(self, batch: int) -> Plan[int]:
        """Remove up to *batch* expired records.  Each batch continues the scan of the last one."""
        cursor, fresh, gone = self._purged, self._purged == ScanCursor(), 0
        while gone < batch and not (cursor.over and (gone or fresh)):
            if cursor.over:
                cursor, fresh = ScanCursor(), True
            keys, after = yield from self._step(cursor)
            old = [key for key, state in (yield from self._states(keys)) if state[1] == b"absent"]
            purged = yield from self._run(PURGE, old[: batch - gone])
            cursor = cursor if len(old) > batch - gone else after
            gone += sum(filter(None, purged))
        self._purged = ScanCursor() if cursor.over else cursor
        return gone

    def stats(self) -> Plan[Stats]:
        counts: Counter[str] = Counter()
        cursor = ScanCursor()
        while not cursor.over:
            keys, cursor = yield from self._step(cursor)
            for _, (stored, state) in (yield from self._states(keys)):
                counts[stored.decode()] += 1
                counts["expired"] += state == b"absent"
                counts["lapsed"] += state == b"lapsed"
        cursor = ScanCursor()
        while not cursor.over:
            keys, cursor = yield from self._step(cursor, RECORD + ":*")
            counts["archived"] += len(keys)
        return Stats(**{name: counts[name] for name in Stats.__struct_fields__})

    def _states(self, keys: list[str]) -> Plan[list[tuple[str, list[bytes]]]]:
        """Return each key that holds a record, with its stored state and its state by the clock."""
        states = yield from self._run(STATES, keys)
        return [(key, state) for key, state in zip(keys, states, strict=True) if state and state[0] != b"deleted"]


def result_or_raise(result: Any) -> Any:
    """Return the result, or None if the key does not hold a record.  Raises the result if it is another error."""
    if isinstance(result, CorruptRecord):
        return None
    if isinstance(result, Exception):
        raise result
    return result
