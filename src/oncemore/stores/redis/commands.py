"""Runs batches of script calls, packed by script and by node, and sent again if that is safe; scans all records."""

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

# Items of one script call.  The server does nothing else meanwhile, so this keeps a call well under a millisecond.
CALL_LIMIT = 64
PAUSE = Backoff(base=0.02, cap=0.4)
SHORTEST_ATTEMPT = 0.05  # seconds; if less time is left, the batch fails
QUICK_ATTEMPTS = 3  # without a pause: an idle connection was closed, a slot has moved, the scripts were flushed

# Error replies after which nothing has happened, so the call is sent again.  WRONG_SERVER: the server is no primary any
# more, or its name means another server by now.
WRONG_SERVER = {"READONLY", "MASTERDOWN", "CLUSTERDOWN"}
RETRIED = {"BUSY", "TRYAGAIN", *WRONG_SERVER}
# A primary without its replicas: it may have been replaced, if there is somebody to ask.
LONELY = "NOREPLICAS"
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

ALL = -1  # replicas: as many as the sentinels or the cluster know of
ASKING = pack("ASKING")


class ScriptItem(msgspec.Struct, gc=False):
    """One record's part in a call of *script*.  *holder* names a claim.

    If *script* is None, *args* are the words of a command for the primary with the number *server*.
    """

    script: Script | None
    key: str
    args: tuple[Any, ...] = ()
    holder: str = ""
    server: int = 0


class ScriptCall(NamedTuple):
    """One command of a batch: the items with these *indexes*, which all have the same script.

    *asking* is the node that the slot is being moved to.
    """

    indexes: Sequence[int]
    asking: Address = None


class CommandRunner:
    """Sends items to the servers of *topology*.  *common* gives the arguments that every script call begins with."""

    def __init__(self, topology: Topology, common: Callable[[], tuple[Any, ...]], *, timeout: float) -> None:
        self.topology = topology
        self.common = common
        self.timeout = timeout

    def run(self, items: Sequence[ScriptItem]) -> Plan[list[Any]]:
        """The result of each item, or its own StoreError, within the timeout."""
        return ScriptBatch(self, items).run()


class NodeBatchers:
    """One batcher for each node, so that a node that is slow or down delays only the callers who need it."""

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
    """Items that are sent together.  With *replicas*, a write counts only if so many replicas have it, or ALL.

    Two kinds of items may have been carried out although their result is an error: *uncertain*, without an answer, and
    *uncounted*, which too few replicas have.
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
        self.uncounted: list[ScriptItem] = []
        self._calls = list(self._make_calls())  # to be sent, or sent again
        self._errors: dict[int, OncemoreError] = {}  # why an item has to be sent again
        self._unknown: set[Script | None] = set()  # scripts that a server did not have, and that are sent in full
        self._lost = False  # the primary has to be located before the next attempt

    def _make_calls(self) -> Iterator[ScriptCall]:
        """One call for all items of a script; but one for each item in a cluster, where a call must keep to one slot."""
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
        """Send all calls, and the unanswered ones again, until every call is answered or the time is up."""
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
        """Seconds for one write and its replies: at most half of the whole time, so that there is a second attempt."""
        return max(SHORTEST_ATTEMPT, min(self.runner.timeout / 2, self.deadline - SYSTEM.monotonic()))

    def _attempt(self) -> Plan[None]:
        """Send all that is unanswered, to each node in one write."""
        calls, self._calls = self._calls, []
        if self._lost or not self.topology.known:
            try:
                yield from self.topology.locate(self._time_left())
            except ConfigurationError as error:
                self._fail(calls, error)
                return
            except StoreError as error:
                for call in calls:
                    self._send_again(call.indexes, error)
                return
            self._lost = False
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
                self._lose_primary(address)
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
        """The commands of one write, each of which has one reply."""
        packets = []
        for call in calls:
            if call.asking:
                packets.append(ASKING)
            packets.append(self._pack(call))
        if replicas:  # on the same connection, or it would wait for somebody else's writes
            packets.append(pack("WAIT", replicas, int(timeout * 800)))
        return packets

    def _pack(self, call: ScriptCall) -> bytes:
        items = [self.items[index] for index in call.indexes]
        script = items[0].script
        if script is None:
            return pack(*items[0].args)
        words: list[Any] = [b"EVAL", script.source] if script in self._unknown else [b"EVALSHA", script.sha]
        words += (len(items), *[item.key for item in items], *self.runner.common())
        for item in items:
            words += item.args
        return pack(*words)

    def _fail(self, calls: list[ScriptCall], error: OncemoreError | None = None) -> None:
        """No further attempt would pass, or there is no time for one: each item gets *error*, or the reason for its last attempt.

        An earlier attempt may have been carried out, so an undo is still due.
        """
        for index in (index for call in calls for index in call.indexes):
            self.results[index] = own_error(error or self._errors[index])
            self.uncertain.append(self.items[index])

    def _take_replies(self, address: Address, calls: list[ScriptCall], replies: list[Any], replicas: int) -> None:
        """Give each item its part of its call's reply.  Of a write, so many *replicas* must know."""
        too_few = ""
        if replicas:
            count = replies.pop()
            if isinstance(count, redis.ResponseError):  # from a replica, or to a user without the right
                too_few = f"Redis does not wait for replicas: {reply_text(count)}"
            elif count < replicas:
                too_few = f"Only {count} of {replicas} replicas have the write"
            if too_few:
                self._lose_primary(address)  # it may have been replaced: ask before the next attempt
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
                    self.uncounted.append(self.items[index])
                self.results[index] = result

    def _take_error(self, address: Address, call: ScriptCall, reply: redis.ResponseError) -> None:
        """The whole call failed: most often nothing happened, and it can be sent again in another way."""
        text = reply_text(reply)
        code = error_code(text)
        error: OncemoreError = reply_error(reply)
        again, asking = [call.indexes], None
        if code == "NOSCRIPT":
            self._unknown.add(self.items[call.indexes[0]].script)
        elif code in ("MOVED", "ASK") and not self.topology.one_primary:
            slot, node = read_redirection(text, address)
            if code == "MOVED":  # for good
                self.topology.move(slot, node)
            else:  # for this call
                asking = node
        elif code in WRONG_SERVER or (code == LONELY and self.topology.fails_over):
            self._lose_primary(address)
        elif code not in RETRIED:
            if code in ("MOVED", "ASK"):
                error = ConfigurationError("The server is in a cluster: write redis+cluster:// in the URL")
            if len(call.indexes) == 1:
                self.results[call.indexes[0]] = error
                return
            again = [(index,) for index in call.indexes]  # so that one bad item fails alone
        for indexes in again:
            self._send_again(indexes, error, asking)

    def _lose_primary(self, address: Address) -> None:
        """Locate the primary before the next attempt, and use none of the connections that are open to it."""
        self._lost = True
        if self.topology.one_primary:  # in a cluster, the nodes of other batches may be well
            self.topology.known = False
        self.topology.pool.drop(address)

    def _send_again(self, indexes: Sequence[int], error: OncemoreError, asking: Address = None) -> None:
        self._calls.append(ScriptCall(indexes, asking))
        self._errors.update(dict.fromkeys(indexes, error))


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


# Scans of all records, for operators.  Each step is short, so claims are not delayed.

CURSOR = re.compile(r"([0-9]{0,9})\.([0-9]{1,20})\.([0-9a-f,]*)")
RECORD = "{" + 40 * "[0-9a-f]" + "}"  # as a pattern for SCAN
STEP = 50  # keys at a time; a claim that arrives meanwhile waits until the server has scanned them


class ScanCursor(msgspec.Struct, frozen=True):
    """The position of a scan: the server (None: all are done), SCAN's position there, and records found but not returned."""

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
        """From the text of a page's cursor."""
        match = CURSOR.fullmatch(cursor)
        if match is None:
            raise InvalidPayload(f"{cursor[:40]!r} is not a cursor that this store has given")
        server, position, pending = match.groups()
        return cls(int(server) if server else None, int(position), tuple(filter(None, pending.split(","))))


class Scan:
    """The scans of one store.  They are not batched with claims, so that neither waits for the other."""

    def __init__(self, runner: CommandRunner, prefix: str) -> None:
        self.runner = runner
        self.prefix = prefix
        self._purged = ScanCursor()

    def _run(self, script: Script, keys: Sequence[str]) -> Plan[list[Any]]:
        """One result per key; None for a key that holds something else than a record."""
        results = (yield from self.runner.run([ScriptItem(script, key) for key in keys])) if keys else []
        return [result_or_raise(result) for result in results]

    def _step(self, cursor: ScanCursor, pattern: str = RECORD) -> Plan[tuple[list[str], ScanCursor]]:
        """The next keys, and the cursor behind them."""
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
            # An unreadable record does not tell its operation, and is left out.
            found |= {key: each for key, each in records.items() if each.id != NOBODY and where.matches(each)}
        pending = tuple(key.partition("{")[2].rstrip("}") for key in tuple(found)[limit:])
        cursor = msgspec.structs.replace(cursor, pending=pending)
        return Page(tuple(found.values())[:limit], None if cursor.over else str(cursor))

    def purge(self, batch: int) -> Plan[int]:
        """Continue the scan of the last purge, so that batch after batch scans the keys once."""
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
        """The stored and the actual state of each key that holds a record."""
        states = yield from self._run(STATES, keys)
        return [(key, state) for key, state in zip(keys, states, strict=True) if state and state[0] != b"deleted"]


def result_or_raise(result: Any) -> Any:
    """The result, unless it is an error; None if something that is no record lies under the key."""
    if isinstance(result, CorruptRecord):
        return None
    if isinstance(result, StoreError):
        raise result
    return result
