"""The copies of settled outcomes in Redis: which are believed, when they are written, and how they are taken back.

A copy is believed only while the PostgreSQL server is known to be the one that it is of: `PrimaryWatch` sees to that.
"""

from __future__ import annotations

import select
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from typing import Any
from zlib import crc32

import msgspec
import psycopg
import redis

from ..._ledger.events import log
from ..._ledger.model import Lease, Operation, Outcome, Record
from ..._ledger.states import SETTLED
from ..._ledger.store import STORE_FAILURES, TierCounts
from ..._ledger.transactions import Do, Statement
from ..._runtime.batching import Submit
from ..._runtime.clock import SYSTEM
from ..._runtime.forks import reset_in_child
from ..._runtime.listening import Listener
from ..._runtime.loops import PerLoop, keep_task
from ..._runtime.plan import Plan, arun, run
from ..._runtime.wakeups import Id
from ...errors import StoreUnavailable
from ..postgres import PostgresStore
from ..redis import RedisStore
from ..redis.commands import NodeBatchers
from ..redis.connection import Address, NotConnected, SendCommands, pack

VERSION = 1  # of the form of a copy
BATCH_LIMIT = 64  # looks at a time
WRITE_LIMIT = 500  # copies in one write
MARGIN = 0.5  # seconds before the end of its retention, a copy is not used any more: two clocks are compared
MOST_PENDING = 2000  # copies that wait to be written; more are forgotten
OLDEST_PENDING = 5.0  # seconds; an older copy is not written, because the mark of a deletion may be gone by then
MARK_SECONDS = 60
MARK = b"-"  # where a copy was: the record was deleted or resolved
CONNECT_SECONDS = 1.0  # to open a connection to Redis, or to write to it, which no request waits for
PING = pack("PING")

# The primary is asked this often whether it is still there, still the primary, and of the same timeline.  Without an
# answer for so long, no copy is used.
PROBE_SECONDS, TRUST_SECONDS = 0.25, 1.0
GATHER_SECONDS = 0.02  # the background work is done at most fifty times a second

PROBE = """
    SELECT extract(epoch FROM clock_timestamp())::float8, left(pg_walfile_name(pg_current_wal_lsn()), 8),
        (SELECT system_identifier FROM pg_control_system())::text, current_database()::text
"""


class Moment(msgspec.Struct, frozen=True, gc=False):
    """When PostgreSQL was asked, on the monotonic clock, and which server it was then.

    A copy is as old as that, also if this process was stopped before it got the answer; and it is a copy of that server's
    record, also if another server was promoted before the copy is written.
    """

    at: float
    namespace: str


class Copy(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A settled record as it lies in Redis.  All times are PostgreSQL's."""

    version: int
    scope: str
    key: str
    name: str
    fingerprint: str
    token: int
    attempts: int
    expires_at: float
    outcome: Outcome


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Copy).decode
CHECKSUM = 4  # bytes in front of a copy


def pack_copy(copy: Copy) -> bytes:
    packed = encode(copy)
    return crc32(packed).to_bytes(CHECKSUM, "big") + packed


def read_copy(value: bytes) -> Copy | None:
    """The copy; None if it is not whole, or of another version."""
    packed = value[CHECKSUM:]
    if crc32(packed).to_bytes(CHECKSUM, "big") != value[:CHECKSUM]:
        return None
    try:
        copy = decode(packed)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return copy if copy.version == VERSION else None


class Copies:
    """Finds copies within the *budget*, and writes them in the background, on the thread that also watches the primary.

    If Redis fails three times in a row, it is left alone until the background thread has reached it again.
    """

    def __init__(self, primary: PostgresStore, cache: RedisStore, *, budget: float, cap: float, largest: int) -> None:
        self.primary = primary
        self.cache = cache
        self.cap = cap
        self.largest = largest
        self.budget = budget
        self.watch = PrimaryWatch(primary, self.work)
        self.breaker = RedisBreaker(
            "Redis is left alone, and every request asks PostgreSQL: %s", "Redis answers again, and is asked first"
        )
        # For a server that answers, but is full or read-only.
        self.refusals = RedisBreaker("Redis takes no copies for now: %s", "Redis takes copies again")
        self._lookups = NodeBatchers(cache.topology, self._look, limit=BATCH_LIMIT, linger=False)
        self._prefix = f"{cache.prefix}:copy"
        self._reset()
        reset_in_child(self)
        weakref.finalize(self, self.watch.close)

    def _reset(self) -> None:
        self._pending: dict[Id, tuple[Moment, Copy]] = {}
        # Servers that a thread, or a loop, has found no connection to.  The first server from the start, so that it is
        # noticed at once if Redis is missing.
        self._wanted: set[Address] = {None}
        self._opening: PerLoop[set[Address]] = PerLoop(set)
        self.hits = self.misses = self.errors = self.skipped = 0

    def counts(self) -> TierCounts:
        counts = {name: getattr(self, name) for name in ("hits", "misses", "errors", "skipped")}
        return TierCounts(**counts, open=self.breaker.open)

    def name(self, id: Id, namespace: str) -> bytes:
        """The name of a copy in Redis; the length keeps scope and key apart.  PostgreSQL refuses half a character later."""
        scope, key = id
        return f"{self._prefix}:{namespace}:{len(scope)}:{scope}{key}".encode("utf-8", "surrogatepass")

    def moment(self) -> Moment | None:
        """Now, before PostgreSQL is asked for a record that may be copied; None if there is no use for copies for now.

        That is if Redis is left alone, or if the primary has not answered for a while.
        """
        watch = self.watch
        watch.listen()
        namespace = watch.namespace()
        return Moment(SYSTEM.monotonic(), namespace) if namespace and not self.breaker.open else None

    # Finding

    def or_else(self, operation: Operation, claim: Plan[Lease | Record]) -> Plan[Lease | Record]:
        """The settled record from Redis; or else the result of *claim*, which is copied if it is a settled record."""
        asked = self.moment()
        if asked is not None:
            return self._find_or_else(operation, asked, claim)
        self.skipped += 1
        return claim

    def _find_or_else(self, operation: Operation, asked: Moment, claim: Plan[Lease | Record]) -> Plan[Lease | Record]:
        found = (yield from self._find(operation, asked.namespace)) or (yield from claim)
        if isinstance(found, Record) and found.tier == "database":
            self._keep(found, asked)
        return found

    def _find(self, operation: Operation, namespace: str) -> Plan[Record | None]:
        """The settled record, if Redis has a copy that can be believed, within the budget; else None."""
        watch = self.watch
        name = self.name(operation.id, namespace)
        try:
            value = yield Submit(self._lookups.for_key(name), name)
        except STORE_FAILURES:
            self.skipped += 1
            return None
        if value is None or value == MARK:
            self.misses += 1
            return None
        copy = read_copy(value)
        if copy is None:
            self.errors += 1
        # If the namespace is another one, this process was stopped for a while, and the primary may have changed.
        if copy is None or not self._fits(copy, operation) or watch.namespace() != namespace:
            self.misses += 1
            return None
        self.hits += 1
        return Record(
            *operation.id, copy.name, copy.fingerprint, SETTLED, copy.token, "", copy.attempts, 0.0, 0.0, watch.now(),
            expires_at=copy.expires_at, outcome=copy.outcome, tier="redis",
        )  # fmt: skip

    def _fits(self, copy: Copy, operation: Operation) -> bool:
        """Whether it is of this operation, for this fingerprint, and within its retention."""
        same = (copy.scope, copy.key) == operation.id and copy.fingerprint == operation.fingerprint
        return same and self.watch.now() < copy.expires_at - MARGIN

    def _look(self, names: list[Any]) -> Plan[Sequence[Any]]:
        """The value under each name: bytes, or None.  Raises one of STORE_FAILURES if none of them can be believed."""
        topology = self.cache.topology
        together = topology.one_primary  # in a cluster, one command must keep to one slot
        packet = pack("MGET", *names) if together else b"".join(pack("GET", name) for name in names)
        count, address = 1 if together else len(names), topology.address(names[0])
        try:
            replies = yield SendCommands(topology.pool, address, packet, count, self.budget, connected=True)
        except NotConnected:
            yield Do(partial(self._open_later, address), partial(self._open_on_loop, address))
            raise
        except STORE_FAILURES as error:
            self._failed(error)
            raise
        values = replies[0] if together else replies
        broken = errors_among(replies)
        self.errors += len(broken)
        if not isinstance(values, list) or all(is_refusal(value) for value in values):
            refused = StoreUnavailable(f"Redis answered a look with {str(values)[:80]!r}")
            self._failed(refused)
            raise refused
        self.breaker.worked()
        if not self.watch.is_connected():
            raise StoreUnavailable("The connection to the primary is lost, so copies are not believed")
        return [value if isinstance(value, bytes) else None for value in values]

    def _failed(self, error: BaseException) -> None:
        self.errors += 1
        if self.breaker.failed(error):
            self.cache.topology.known = False
            self.cache.topology.pool.drop_all()

    # Opening connections, which no request waits for

    def _open_later(self, wanted: Address) -> None:
        """For a thread: the thread of the watch does it."""
        self._wanted.add(wanted)
        self.watch.wake()

    async def _open_on_loop(self, wanted: Address) -> None:
        """For an event loop: a task does it."""
        opening = self._opening.get()
        if wanted not in opening:
            opening.add(wanted)
            keep_task(arun(self._open(wanted))).add_done_callback(lambda _: opening.discard(wanted))

    def _open(self, wanted: Address) -> Plan[None]:
        """Have a connection open and free: one that has answered a PING.  None: to whatever server is the first."""
        topology = self.cache.topology
        try:
            if not topology.known:
                yield from topology.locate(CONNECT_SECONDS)
            # If there is one primary, it may be another server by now.
            address = topology.primaries()[0] if topology.one_primary or wanted is None else wanted
            for error in errors_among((yield from self._send(address, [PING]))):
                raise StoreUnavailable(f"Redis refused: {error}") from error
        except STORE_FAILURES as error:
            topology.known = False
            self.breaker.failed(error, at_once=True)
        else:
            if self.breaker.open:  # else a server that answers a PING, but no look, would never be left alone
                self.breaker.worked()

    # Writing

    def _keep(self, record: Record, asked: Moment) -> None:
        """Have the record copied soon, if it is settled."""
        if record.state == SETTLED and record.outcome is not None and record.expires_at is not None:
            names = (record.scope, record.key, record.name, record.fingerprint)
            self._put(asked, Copy(VERSION, *names, record.token, record.attempts, record.expires_at, record.outcome))

    def keep_settled(self, held: Lease, outcome: Outcome, retention: float, asked: Moment) -> None:
        """Have the outcome that was settled just now copied soon."""
        operation, expires_at = held.operation, self.watch.time_at(asked.at) + retention
        names = (operation.scope, operation.key, operation.name, operation.fingerprint)
        self._put(asked, Copy(VERSION, *names, held.token, held.attempt, expires_at, outcome))

    def _put(self, asked: Moment, copy: Copy) -> None:
        if len(copy.outcome.body) <= self.largest and len(self._pending) < MOST_PENDING:
            self._pending[copy.scope, copy.key] = (asked, copy)
            self.watch.wake()

    def work(self) -> None:
        """Open the connections that are wanted, and write the copies that wait; on the thread of the watch."""
        self.cache.topology.watch()
        if self.breaker.is_due():
            self._wanted.add(None)
        while self._wanted:
            run(self._open(self._wanted.pop()))
        while self._pending:
            self._write(self._take_pending())

    def _take_pending(self) -> list[tuple[Moment, Copy]]:
        taken: list[tuple[Moment, Copy]] = []
        with suppress(KeyError):  # it is empty; other threads add to it, and take from it, at the same time
            while len(taken) < WRITE_LIMIT:
                taken.append(self._pending.popitem()[1])
        return taken

    def _write(self, batch: list[tuple[Moment, Copy]]) -> None:
        """Write the copies.  NX keeps the mark of a deletion where it is."""
        if self.breaker.open or (self.refusals.open and not self.refusals.is_due()):
            return
        topology, now = self.cache.topology, self.watch.now()
        oldest = SYSTEM.monotonic() - OLDEST_PENDING
        by_address: dict[Address, list[bytes]] = {}
        for asked, copy in batch:
            milliseconds = int(1000 * min(copy.expires_at - MARGIN - now, self.cap))
            try:
                value = pack_copy(copy)
            except (TypeError, ValueError, OverflowError):  # PostgreSQL has it, and there is no copy
                continue
            if asked.at >= oldest and milliseconds > 0 and len(value) <= self.largest + 1024:
                name = self.name((copy.scope, copy.key), asked.namespace)
                command = pack("SET", name, value, "PX", milliseconds, "NX")
                by_address.setdefault(topology.address(name), []).append(command)
        for address, commands in by_address.items():
            try:
                broken = errors_among(run(self._send(address, commands)))
            except STORE_FAILURES as error:
                self._failed(error)
                return
            if broken:
                self.errors += 1
                topology.known = False  # if it is read-only, another server may be the primary by now
                self.refusals.failed(broken[0], at_once=True)
            else:
                self.refusals.worked()

    def _send(self, address: Address, commands: Sequence[bytes]) -> Plan[list[Any]]:
        """The replies to commands that no request waits for."""
        pool = self.cache.topology.pool
        return (yield SendCommands(pool, address, b"".join(commands), len(commands), CONNECT_SECONDS))  # type: ignore[no-any-return]

    # Taking back

    def forget(self, id: Id) -> Plan[None]:
        """Replace the copy of *id* by a mark, so that none is found, and none can be written for a minute.

        Raises StoreUnavailable if Redis cannot be told, and a StoreError if PostgreSQL does not say which copies are of now.
        """
        self._pending.pop(id, None)
        (row,) = yield from self.primary.database.admin_rows(Statement(PROBE), [])
        name = self.name(id, self.watch.namespace_of(row))
        topology = self.cache.topology
        try:
            if topology.fails_over or not topology.known:
                yield from topology.locate(CONNECT_SECONDS)
            replies = yield from self._send(topology.address(name), [pack("SET", name, MARK, "EX", MARK_SECONDS)])
            for error in errors_among(replies):
                raise StoreUnavailable(f"Redis refused: {error}") from error
        except STORE_FAILURES as error:
            topology.known = False
            raise StoreUnavailable(
                f"Nothing was changed, because Redis may have a copy of this record and cannot be told: {error.detail}; "
                "try again when Redis answers"
            ) from error

    def close(self) -> None:
        self.watch.close()

    async def aclose(self) -> None:
        await self._lookups.drain()
        self.close()


def errors_among(replies: Sequence[Any]) -> list[redis.ResponseError]:
    return [reply for reply in replies if isinstance(reply, redis.ResponseError)]


def is_refusal(reply: Any) -> bool:
    """Whether it says something about the server.  WRONGTYPE is about one name, under which somebody else's value lies."""
    return isinstance(reply, redis.ResponseError) and not str(reply).startswith("WRONGTYPE")


# Whether Redis can be asked now

FAILURES = 3  # in a row, until Redis is left alone
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 10.0


class RedisBreaker:
    """Open while Redis is left alone, after failures: for a pause that doubles with each failure soon after another.

    It is logged when it opens, and when it closes.
    """

    def __init__(self, opened: str, closed: str) -> None:
        self._opened = opened  # has a place for the reason
        self._closed = closed
        self._reset()
        reset_in_child(self)

    def _reset(self) -> None:
        self.open = False
        self._lock = threading.Lock()
        self._failures = 0
        self._failed_at = float("-inf")
        self._pause = FIRST_PAUSE

    def is_due(self) -> bool:
        """Whether it is open, and one attempt should be made now."""
        return self.open and SYSTEM.monotonic() >= self._failed_at + self._pause

    def failed(self, error: BaseException, *, at_once: bool = False) -> bool:
        """Count a failure.  Open, and return True, after the third in a row; or after this one, if *at_once*."""
        with self._lock:
            self._failures += 1
            if self._failures < FAILURES and not at_once:
                return False
            now = SYSTEM.monotonic()
            soon = now - self._failed_at < 2 * LONGEST_PAUSE
            self._pause = min(2 * self._pause, LONGEST_PAUSE) if soon else FIRST_PAUSE
            self._failed_at = now
            opens, self.open = not self.open, True
        if opens:
            log.warning(self._opened, error)
        return True

    def worked(self) -> None:
        """Close it, if it was open."""
        self._failures = 0
        if self.open:
            with self._lock:
                closes, self.open = self.open, False
            if closes:
                log.warning(self._closed)


class PrimaryWatch(Listener["psycopg.Connection[Any]"]):
    """Keeps a connection to the primary open on a thread of its own, and asks it four times a second who it is.

    The same thread calls *work*, soon after `wake` and at least four times a second.
    """

    name = "oncemore-tiered"

    def __init__(self, primary: PostgresStore, work: Callable[[], None]) -> None:
        self._primary = primary
        self._work = weakref.WeakMethod(work)  # its owner has this watch, which ends with it
        super().__init__()

    def _reset(self) -> None:
        super()._reset()
        self._wake = threading.Event()
        self._namespace = ""
        self._offset = 0.0  # of PostgreSQL's clock against this process's
        self._confirmed_at = 0.0
        self._socket = -1
        self._warned = False

    def wake(self) -> None:
        """Have the work done soon."""
        if not self._wake.is_set():  # to set it again would cost more than to look
            self._wake.set()

    def namespace(self) -> str | None:
        """The part of a copy's name that stands for the primary as it is now; None if that is not known.

        None also if the primary has not answered for a second: a server that was promoted instead may have lost outcomes of
        which there are copies.
        """
        return self._namespace if SYSTEM.monotonic() - self._confirmed_at < TRUST_SECONDS else None

    def is_connected(self) -> bool:
        """Whether the connection to the primary is open, as far as the operating system knows.

        If the server has closed the connection, there is something to read, before the thread knows of it.
        """
        if not self._namespace:
            return False
        socket = select.poll()  # a new one, because threads cannot share it
        socket.register(self._socket, select.POLLIN)
        return not socket.poll(0)

    def now(self) -> float:
        """The time by PostgreSQL's clock."""
        return self.time_at(SYSTEM.monotonic())

    def time_at(self, moment: float) -> float:
        """The time by PostgreSQL's clock at that moment of the monotonic clock."""
        return moment + self._offset + self._primary.shift

    def namespace_of(self, row: Sequence[Any]) -> str:
        """The identity of the server, its database and its table, and the server's timeline; *row* is a PROBE's."""
        _, timeline, system, database = row
        identity = msgspec.msgpack.encode((system, database, self._primary.database.names["records"]))
        return f"{blake2b(identity, digest_size=8).hexdigest()}.{timeline}"

    def connect(self) -> psycopg.Connection[Any]:
        conninfo = self._primary.database.conninfo
        connection = psycopg.connect(conninfo, autocommit=True, connect_timeout=5, prepare_threshold=None)
        try:
            self._socket = connection.fileno()
            self._probe(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def receive(self, connection: psycopg.Connection[Any], seconds: float) -> None:
        try:
            if self._wake.wait(seconds):
                time.sleep(GATHER_SECONDS)
                self._wake.clear()
            work = self._work()
            if work is None or not self._namespace:  # it was closed meanwhile
                return
            work()
            if SYSTEM.monotonic() - self._confirmed_at >= PROBE_SECONDS:
                self._probe(connection)
        except BaseException:
            self._namespace = ""  # the connection is closed next, and the number of its socket may become another's
            raise

    def close(self) -> None:
        self._namespace = ""
        super().close()

    def _probe(self, connection: psycopg.Connection[Any]) -> None:
        before = SYSTEM.monotonic()
        try:
            row = connection.execute(PROBE).fetchone()
        except psycopg.Error as error:
            if not self._warned and error.sqlstate not in (None, "55000"):  # 55000: it is a standby for now
                self._warned = True
                log.warning("Redis is not used, because the primary does not tell its timeline: %s", error)
            raise
        assert row is not None, "it is one row"
        self._offset = row[0] - before  # the earliest time that it can have been: a copy ends rather too soon
        self._namespace = self.namespace_of(row)
        self._confirmed_at = before
