"""The copies of settled outcomes in Redis: which of them are used, when they are written, and how they are removed.

A copy is used only while the PostgreSQL server is known to be the copy's own: `PrimaryWatch` checks that.
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

VERSION = 1  # the version of a copy's format
BATCH_LIMIT = 64  # lookups in one batch
WRITE_LIMIT = 500  # copies in one write
MARGIN = 0.5  # a copy is not used in the last seconds of its retention, because two clocks are compared
MOST_PENDING = 2000  # copies that wait to be written; further ones are dropped
OLDEST_PENDING = 5.0  # seconds; an older copy is not written, because the mark of a deletion may be gone by then
MARK_SECONDS = 60
MARK = b"-"  # takes the place of a copy if the record was deleted or resolved
CONNECT_SECONDS = 1.0  # the timeout for connections and writes in the background, and for marks
PING = pack("PING")

# The primary is asked every PROBE_SECONDS whether it is still the primary, and of the same timeline.  If it has not
# answered for TRUST_SECONDS, no copy is used.
PROBE_SECONDS, TRUST_SECONDS = 0.25, 1.0
GATHER_SECONDS = 0.02  # the background work is done at most fifty times a second

PROBE = """
    SELECT extract(epoch FROM clock_timestamp())::float8, left(pg_walfile_name(pg_current_wal_lsn()), 8),
        (SELECT system_identifier FROM pg_control_system())::text, current_database()::text
"""


class Moment(msgspec.Struct, frozen=True, gc=False):
    """The time at which PostgreSQL was asked, on the monotonic clock, and the server that it was then.

    The age of a copy counts from *at*, even if this process was stopped before it got the answer.  The copy belongs to
    *namespace*, even if another server is promoted before it is written.
    """

    at: float
    namespace: str


class Copy(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A settled record as Redis stores it.  *expires_at* is by PostgreSQL's clock."""

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
CHECKSUM = 4  # bytes of the checksum in front of a copy


def pack_copy(copy: Copy) -> bytes:
    packed = encode(copy)
    return crc32(packed).to_bytes(CHECKSUM, "big") + packed


def read_copy(value: bytes) -> Copy | None:
    """Return the copy, or None if it is damaged or of another version."""
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

    If Redis fails three times in a row, it is not asked again until the background thread has reached it.
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
        # Opens if the server answers, but refuses copies because it is full or read-only.
        self.refusals = RedisBreaker("Redis takes no copies for now: %s", "Redis takes copies again")
        self._lookups = NodeBatchers(cache.topology, self._look_up, limit=BATCH_LIMIT, linger=False)
        self._prefix = f"{cache.prefix}:copy"
        self._reset()
        reset_in_child(self)
        weakref.finalize(self, self.watch.close)

    def _reset(self) -> None:
        self._pending: dict[Id, tuple[Moment, Copy]] = {}
        # Servers to which a thread has found no connection.  At the start, None stands for the first server, so that a
        # missing Redis is noticed immediately.
        self._wanted: set[Address] = {None}
        self._opening: PerLoop[set[Address]] = PerLoop(set)
        self.hits = self.misses = self.errors = self.skipped = 0

    def counts(self) -> TierCounts:
        counts = {name: getattr(self, name) for name in ("hits", "misses", "errors", "skipped")}
        return TierCounts(**counts, open=self.breaker.open)

    def name(self, id: Id, namespace: str) -> bytes:
        """Return the name of a copy.  The length keeps scope and key apart.  Keys with half a character are allowed."""
        scope, key = id
        return f"{self._prefix}:{namespace}:{len(scope)}:{scope}{key}".encode("utf-8", "surrogatepass")

    def moment(self) -> Moment | None:
        """Return the present moment, before PostgreSQL is asked for a record that may be copied.

        Return None if copies are not used now, because Redis has failed or the primary has not answered for a while.
        """
        watch = self.watch
        watch.listen()
        namespace = watch.namespace()
        return Moment(SYSTEM.monotonic(), namespace) if namespace and not self.breaker.open else None

    # Finding

    def find_or_claim(self, operation: Operation, claim: Plan[Lease | Record]) -> Plan[Lease | Record]:
        """Return the settled record from Redis, or else the result of *claim*, which is copied if it is settled."""
        asked = self.moment()
        if asked is not None:
            return self._find_or_claim(operation, asked, claim)
        self.skipped += 1
        return claim

    def _find_or_claim(self, operation: Operation, asked: Moment, claim: Plan[Lease | Record]) -> Plan[Lease | Record]:
        found = (yield from self._find(operation, asked.namespace)) or (yield from claim)
        if isinstance(found, Record) and found.tier == "database":
            self._keep(found, asked)
        return found

    def _find(self, operation: Operation, namespace: str) -> Plan[Record | None]:
        """Return the settled record if Redis answers within the budget with a copy that can be used; otherwise None."""
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
        # If the namespace has changed, this process was stopped for a while, and the primary may be another server.
        if copy is None or not self._fits(copy, operation) or watch.namespace() != namespace:
            self.misses += 1
            return None
        self.hits += 1
        return Record(
            *operation.id, copy.name, copy.fingerprint, SETTLED, copy.token, "", copy.attempts, 0.0, 0.0, watch.now(),
            expires_at=copy.expires_at, outcome=copy.outcome, tier="redis",
        )  # fmt: skip

    def _fits(self, copy: Copy, operation: Operation) -> bool:
        """Whether the copy is of this operation and fingerprint, and within its retention."""
        same = (copy.scope, copy.key) == operation.id and copy.fingerprint == operation.fingerprint
        return same and self.watch.now() < copy.expires_at - MARGIN

    def _look_up(self, names: list[Any]) -> Plan[Sequence[Any]]:
        """Return the value of each name: bytes, or None.  Raises one of STORE_FAILURES if no value can be used."""
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
            refused = StoreUnavailable(f"Redis answered a lookup with {str(values)[:80]!r}")
            self._failed(refused)
            raise refused
        self.breaker.worked()
        if not self.watch.is_connected():
            raise StoreUnavailable("The connection to the primary is lost, so copies are not used")
        return [value if isinstance(value, bytes) else None for value in values]

    def _failed(self, error: BaseException) -> None:
        self.errors += 1
        if self.breaker.failed(error):
            self.cache.topology.known = False
            self.cache.topology.pool.drop_all()

    # Opening connections in the background

    def _open_later(self, wanted: Address) -> None:
        """Have the thread of the watch open a connection.  For callers on threads."""
        self._wanted.add(wanted)
        self.watch.wake()

    async def _open_on_loop(self, wanted: Address) -> None:
        """Start a task that opens a connection.  For callers on an event loop."""
        opening = self._opening.get()
        if wanted not in opening:
            opening.add(wanted)
            keep_task(arun(self._open(wanted))).add_done_callback(lambda _: opening.discard(wanted))

    def _open(self, wanted: Address) -> Plan[None]:
        """Open a connection that answers a PING, and leave it in the pool.  None stands for the first primary."""
        topology = self.cache.topology
        try:
            if not topology.known:
                yield from topology.locate(CONNECT_SECONDS)
            # If there is only one primary, another server may have become it since *wanted* was added.
            address = topology.primaries()[0] if topology.one_primary or wanted is None else wanted
            for error in errors_among((yield from self._send(address, [PING]))):
                raise StoreUnavailable(f"Redis refused: {error}") from error
        except STORE_FAILURES as error:
            topology.known = False
            self.breaker.failed(error, immediately=True)
        else:
            if self.breaker.open:  # otherwise a PING that works would hide lookups that fail
                self.breaker.worked()

    # Writing

    def _keep(self, record: Record, asked: Moment) -> None:
        """Copy the record soon if it is settled."""
        if record.state == SETTLED and record.outcome is not None and record.expires_at is not None:
            names = (record.scope, record.key, record.name, record.fingerprint)
            self._put(asked, Copy(VERSION, *names, record.token, record.attempts, record.expires_at, record.outcome))

    def keep_settled(self, held: Lease, outcome: Outcome, retention: float, asked: Moment) -> None:
        """Copy the outcome soon.  It was settled a moment ago."""
        operation, expires_at = held.operation, self.watch.time_at(asked.at) + retention
        names = (operation.scope, operation.key, operation.name, operation.fingerprint)
        self._put(asked, Copy(VERSION, *names, held.token, held.attempt, expires_at, outcome))

    def _put(self, asked: Moment, copy: Copy) -> None:
        if len(copy.outcome.body) <= self.largest and len(self._pending) < MOST_PENDING:
            self._pending[copy.scope, copy.key] = (asked, copy)
            self.watch.wake()

    def work(self) -> None:
        """Open the wanted connections, and write the pending copies.  Runs on the thread of the watch."""
        self.cache.topology.watch()
        if self.breaker.is_due():
            self._wanted.add(None)
        while self._wanted:
            run(self._open(self._wanted.pop()))
        while self._pending:
            self._write(self._take_pending())

    def _take_pending(self) -> list[tuple[Moment, Copy]]:
        taken: list[tuple[Moment, Copy]] = []
        with suppress(KeyError):  # nothing is pending; other threads add and remove copies at the same time
            while len(taken) < WRITE_LIMIT:
                taken.append(self._pending.popitem()[1])
        return taken

    def _write(self, batch: list[tuple[Moment, Copy]]) -> None:
        """Write the copies.  NX does not overwrite the mark of a deletion."""
        if self.breaker.open or (self.refusals.open and not self.refusals.is_due()):
            return
        topology, now = self.cache.topology, self.watch.now()
        oldest = SYSTEM.monotonic() - OLDEST_PENDING
        by_address: dict[Address, list[bytes]] = {}
        for asked, copy in batch:
            milliseconds = int(1000 * min(copy.expires_at - MARGIN - now, self.cap))
            try:
                value = pack_copy(copy)
            except (TypeError, ValueError, OverflowError):  # msgpack cannot encode it, so there is no copy
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
                topology.known = False  # if the server is read-only, another may be the primary by now
                self.refusals.failed(broken[0], immediately=True)
            else:
                self.refusals.worked()

    def _send(self, address: Address, commands: Sequence[bytes]) -> Plan[list[Any]]:
        """Send commands with the timeout of background work, and return their replies."""
        pool = self.cache.topology.pool
        return (yield SendCommands(pool, address, b"".join(commands), len(commands), CONNECT_SECONDS))  # type: ignore[no-any-return]

    # Removing

    def forget(self, id: Id) -> Plan[None]:
        """Replace the copy of *id* by a mark.  No copy is found then, and none can be written for a minute.

        Raises StoreUnavailable if Redis does not take the mark, and StoreError if PostgreSQL does not answer.
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
                "Nothing was changed, because Redis may have a copy of this record, which cannot be removed: "
                f"{error.detail}; try again when Redis answers"
            ) from error

    def close(self) -> None:
        self.watch.close()

    async def aclose(self) -> None:
        await self._lookups.drain()
        self.close()


def errors_among(replies: Sequence[Any]) -> list[redis.ResponseError]:
    return [reply for reply in replies if isinstance(reply, redis.ResponseError)]


def is_refusal(reply: Any) -> bool:
    """Whether the server as a whole refuses.  WRONGTYPE only means that one name has another program's value."""
    return isinstance(reply, redis.ResponseError) and not str(reply).startswith("WRONGTYPE")


# Whether Redis can be asked now

FAILURES = 3  # failures in a row after which Redis is not asked
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 10.0


class RedisBreaker:
    """Opens after failures of Redis, which is then not asked for a pause.  The pause doubles if Redis soon fails again.

    Opening and closing are logged.
    """

    def __init__(self, opened: str, closed: str) -> None:
        self._opened = opened  # the message for the log, with a place for the reason
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
        """Whether the breaker is open, and one attempt should be made now."""
        return self.open and SYSTEM.monotonic() >= self._failed_at + self._pause

    def failed(self, error: BaseException, *, immediately: bool = False) -> bool:
        """Count a failure.  After the third in a row, or after this one if *immediately*, open and return True."""
        with self._lock:
            self._failures += 1
            if self._failures < FAILURES and not immediately:
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
        """Count a success: forget the failures, and close the breaker if it is open."""
        self._failures = 0
        if self.open:
            with self._lock:
                closes, self.open = self.open, False
            if closes:
                log.warning(self._closed)


class PrimaryWatch(Listener["psycopg.Connection[Any]"]):
    """Keeps a connection to the primary open on its own thread, and asks for its identity four times a second.

    The same thread calls *work*, soon after `wake` and at least four times a second.
    """

    name = "oncemore-tiered"

    def __init__(self, primary: PostgresStore, work: Callable[[], None]) -> None:
        self._primary = primary
        self._work = weakref.WeakMethod(work)  # weak, because the watch must end with the owner of *work*
        super().__init__()

    def _reset(self) -> None:
        super()._reset()
        self._wake = threading.Event()
        self._namespace = ""
        self._offset = 0.0  # PostgreSQL's time minus the monotonic time of this process
        self._confirmed_at = 0.0
        self._socket = -1
        self._warned = False

    def wake(self) -> None:
        """Have the thread call *work* soon."""
        if not self._wake.is_set():  # checking is cheaper than setting it again
            self._wake.set()

    def namespace(self) -> str | None:
        """Return the part of a copy's name that stands for the present primary, or None if it is not known.

        None is also returned if the primary has not answered for a second.  Another server may have been promoted, and
        may have lost outcomes that have copies.
        """
        return self._namespace if SYSTEM.monotonic() - self._confirmed_at < TRUST_SECONDS else None

    def is_connected(self) -> bool:
        """Whether the connection to the primary is open, as far as the operating system knows.

        If the server has closed the connection, its socket is readable, even before the thread notices.
        """
        if not self._namespace:
            return False
        socket = select.poll()  # a new one, because threads cannot share it
        socket.register(self._socket, select.POLLIN)
        return not socket.poll(0)

    def now(self) -> float:
        """Return the time by PostgreSQL's clock."""
        return self.time_at(SYSTEM.monotonic())

    def time_at(self, moment: float) -> float:
        """Return the time by PostgreSQL's clock at *moment* of the monotonic clock."""
        return moment + self._offset + self._primary.shift

    def namespace_of(self, row: Sequence[Any]) -> str:
        """Return a digest of server, database and table, with the server's timeline.  *row* is the result of PROBE."""
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
            if work is None or not self._namespace:  # the watch was closed meanwhile
                return
            work()
            if SYSTEM.monotonic() - self._confirmed_at >= PROBE_SECONDS:
                self._probe(connection)
        except BaseException:
            self._namespace = ""  # the connection is closed next, and its socket's number may be used for another one
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
                log.warning("Redis is not used, because the primary refuses to tell its timeline: %s", error)
            raise
        assert row is not None, "it is one row"
        self._offset = row[0] - before  # the largest offset possible, so a copy ends too soon rather than too late
        self._namespace = self.namespace_of(row)
        self._confirmed_at = before
