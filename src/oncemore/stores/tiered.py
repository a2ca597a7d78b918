"""PostgreSQL decides, Redis remembers: a ledger in PostgreSQL that also copies its settled outcomes to Redis.

    redis+postgresql://user@host/db?redis=redis%3A%2F%2Fhost%3A6379%2F0

Everything before `redis=` is the URL of the PostgreSQL ledger, with all of its options; the value of `redis=` is the
URL of the Redis server, percent-encoded.  Needs `pip install 'oncemore[postgres,redis]'`.  Other options of ours:

    budget=5ms     how long a look into Redis may take before the request goes on with PostgreSQL
    cap=1h         how long a copy is kept at most, even if the outcome is kept for longer
    largest=65536  outcomes of more bytes than this are not copied

Every claim, settle and release goes to PostgreSQL.  A claim looks into Redis first: if it finds a copy of the settled
outcome, the request is answered without PostgreSQL.  Copies are safe because settled outcomes never change:

- A copy is written after the commit, never before.  That there is *no* record is never remembered.
- The name of a copy has the identity and the timeline of the PostgreSQL server.  A server that was promoted has another
  timeline, so the copies of outcomes that a failover has lost are not found any more.
- Copies are used only while this process's own connection to the primary is open and answers.
- A copy that is not whole, of another version, of another operation, for another fingerprint or past its retention is
  not used.
- A deleted or resolved record has its copy replaced by a mark, before the change and after it, and no process can write
  a copy while the mark is there.
"""

from __future__ import annotations

import asyncio
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any, cast
from urllib.parse import quote

import msgspec
import psycopg
import redis

from .._ledger.connect import connect as connect_store
from .._ledger.connect import hide_password, take_options
from .._ledger.encrypted import StoreWrapper
from .._ledger.events import log
from .._ledger.model import Lease, Operation, Outcome, Record
from .._ledger.states import SETTLED
from .._ledger.store import STORE_FAILURES, Store, TierCounts
from .._ledger.transactions import Statement, Transaction, TransactionSource
from .._runtime.batching import Submit
from .._runtime.clock import SYSTEM
from .._runtime.forks import reset_in_child
from .._runtime.listening import Listener
from .._runtime.loops import PerLoop, keep_task
from .._runtime.plan import Plan, arun, run
from .._runtime.wakeups import Id
from ..errors import ConfigurationError, OncemoreError, StoreUnavailable
from .postgres import PostgresStore
from .postgres import schema as postgres_schema
from .redis import RedisStore
from .redis.commands import NodeBatchers, ScriptItem
from .redis.connection import CONNECTION_ERRORS, Address, ConnectionPool, SendCommands, pack
from .redis.records import digest

OPTIONS: dict[str, Any] = {"redis": "", "budget": 0.005, "cap": 3600.0, "largest": 65536}
BATCH_LIMIT = 64
VERSION = 1  # of the form of a copy

# The primary is asked this often whether it is still there, still the primary, and of the same timeline.  Without an
# answer for so long, no copy is used.
PROBE_SECONDS, TRUST_SECONDS = 0.25, 1.0
GATHER_SECONDS = 0.02  # copies are written together, at most fifty times a second
MARGIN = 0.5  # seconds before the end of its retention, a copy is not used any more: two clocks are compared
MOST_PENDING = 10_000  # copies that wait to be written; more are forgotten
OLDEST_PENDING = 5.0  # seconds; an older copy is not written, because the mark of a deletion may be gone by then
MARK_SECONDS = 60
MARK = b"-"  # where a copy was: the record was deleted or resolved
CONNECT_SECONDS = 1.0  # to open a connection to Redis, which no request waits for
FAILURES = 3  # looks that failed in a row, until Redis is left alone
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 10.0

PROBE = """
    SELECT extract(epoch FROM clock_timestamp())::float8, left(pg_walfile_name(pg_current_wal_lsn()), 8),
        (SELECT system_identifier FROM pg_control_system())::text, current_database()::text
"""


def connect(url: str) -> TieredStore:
    """The ledger at *url*; nothing is opened before it is used."""
    scheme, _, rest = url.partition("://")
    if scheme == "redis+sqlite":
        raise no_primary("SQLite")
    address, options = take_options(rest, OPTIONS)
    if not options["redis"]:
        raise ConfigurationError(
            f"{hide_password(url)} names no Redis: add ?redis= and its URL, percent-encoded, as in redis=redis%3A%2F%2Fhost%2F0"
        )
    primary = PostgresStore(f"postgresql://{address}")
    try:
        cache = RedisStore(options["redis"])
    except ConfigurationError as error:
        raise ConfigurationError(f"redis= in the store's URL: {error.detail}") from error
    return TieredStore(primary, cache, budget=options["budget"], cap=options["cap"], largest=options["largest"])


def schema(url: str) -> str:
    """The script that creates the tables of the primary; Redis needs nothing."""
    address, _ = take_options(url.partition("://")[2], OPTIONS)
    return postgres_schema(f"postgresql://{address}")


def no_primary(name: str) -> ConfigurationError:
    return ConfigurationError(
        f"{name} cannot be the primary of a tiered store: it has to be PostgreSQL. SQLite is a file of this machine, and "
        "answers sooner than Redis could; Redis and memory forget"
    )


class TieredStore(StoreWrapper):
    """A PostgreSQL ledger with copies of its settled outcomes in Redis.

    Args:
        primary: The PostgreSQL ledger, or its URL, or your own pool or engine.
        cache: The Redis store, or its URL.
        budget: How many seconds a look into Redis may take.
        cap: How many seconds a copy is kept at most.
        largest: How many bytes a copied outcome has at most.
    """

    def __init__(
        self,
        primary: Any,
        cache: Any,
        *,
        budget: float = OPTIONS["budget"],
        cap: float = OPTIONS["cap"],
        largest: int = OPTIONS["largest"],
    ) -> None:
        primary = primary if hasattr(primary, "claim") else connect_store(primary)
        cache = cache if hasattr(cache, "claim") else connect_store(cache)
        if not isinstance(primary, PostgresStore):
            raise no_primary(type(primary).__name__.removesuffix("Store"))
        if not isinstance(cache, RedisStore):
            raise ConfigurationError(f"The cache of a tiered store has to be Redis, and {cache.url} is not")
        if budget <= 0 or cap <= 0:
            raise ConfigurationError(f"budget = {budget:g} s and cap = {cap:g} s must both be greater than zero")
        super().__init__(cast("Store", primary))
        shown = quote(cache.url, safe="")
        self.url = f"redis+{primary.url}{'&' if '?' in primary.url else '?'}redis={shown}"
        self._cache = cache
        self._copies = Copies(primary, cache, budget=budget, cap=cap, largest=largest)

    @property
    def tiers(self) -> TierCounts:
        """How often Redis was asked by this process, and how it answered."""
        return self._copies.counts()

    @property
    def lender(self) -> TransactionSource | None:
        inner = self.inner.lender
        return None if inner is None else cast("TransactionSource", TieredSource(inner, self._copies))

    def claim(self, operation: Operation, *, lease: float, request: bytes = b"") -> Plan[Lease | Record]:
        copied = yield from self._copies.find(operation)
        if copied is not None:
            return copied
        asked = SYSTEM.monotonic()
        found = yield from self.inner.claim(operation, lease=lease, request=request)
        if isinstance(found, Record):
            self._copies.keep(found, asked)
        return found

    def settle(
        self, held: Lease, outcome: Outcome, *, retention: float, audit: bool = False, note: str = ""
    ) -> Plan[None]:
        asked = SYSTEM.monotonic()
        yield from self.inner.settle(held, outcome, retention=retention, audit=audit, note=note)
        self._copies.keep_settled(held, outcome, retention, asked)

    def touch(self, record: Record, *, retention: float) -> Plan[None]:
        with suppress(*STORE_FAILURES):  # the copy then ends when the record would have ended
            yield from self._copies.forget(record.id)
        yield from self.inner.touch(record, retention=retention)

    def resolve(
        self, scope: str, key: str, outcome: Outcome | None, *, retention: float, note: str = ""
    ) -> Plan[Record]:
        yield from self._forget_first((scope, key))
        record = yield from self.inner.resolve(scope, key, outcome, retention=retention, note=note)
        yield from self._forget_again((scope, key))
        return record

    def delete(self, scope: str, key: str) -> Plan[bool]:
        yield from self._forget_first((scope, key))
        deleted = yield from self.inner.delete(scope, key)
        yield from self._forget_again((scope, key))
        return deleted

    def _forget_first(self, id: Id) -> Plan[None]:
        try:
            yield from self._copies.forget(id)
        except STORE_FAILURES as error:
            raise StoreUnavailable(
                f"Nothing was changed, because Redis may have a copy of this record and cannot be told: {error.detail}; "
                "try again when Redis answers"
            ) from error

    def _forget_again(self, id: Id) -> Plan[None]:
        with suppress(*STORE_FAILURES):  # the first mark is there for a minute
            yield from self._copies.forget(id)

    def close(self) -> None:
        self._copies.close()
        self._cache.close()
        self.inner.close()

    async def aclose(self) -> None:
        await self._copies.aclose()
        await self._cache.aclose()
        await self.inner.aclose()


class TieredSource:
    """Opens transactions; after their commit, their outcomes are copied."""

    def __init__(self, inner: TransactionSource, copies: Copies) -> None:
        self.inner = inner
        self._copies = copies

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def open(self) -> Plan[Transaction]:
        transaction = yield from self.inner.open()
        return cast("Transaction", TieredTransaction(transaction, self._copies))


class TieredTransaction:
    """A transaction of the primary.  A repeat is answered by a copy, and outcomes are copied after the commit."""

    def __init__(self, inner: Transaction, copies: Copies) -> None:
        self.inner = inner
        self._copies = copies
        self._settled: list[tuple[Lease, Outcome, float, float]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def begin(self, operation: Operation, *, lease: float, wait: float, request: bytes = b"") -> Plan[Lease | Record]:
        """Claim the operation; if there is a copy of its outcome, no transaction is opened."""
        copied = yield from self._copies.find(operation)
        if copied is not None:
            return copied
        asked = SYSTEM.monotonic()
        found = yield from self.inner.begin(operation, lease=lease, wait=wait, request=request)
        if isinstance(found, Record):
            self._copies.keep(found, asked)
        return found

    def settle(
        self, held: Lease, outcome: Outcome, *, retention: float, audit: bool = False, note: str = ""
    ) -> Plan[None]:
        self._settled.append((held, outcome, retention, SYSTEM.monotonic()))
        return self.inner.settle(held, outcome, retention=retention, audit=audit, note=note)

    def commit(self) -> Plan[None]:
        yield from self.inner.commit()
        for settled in self._settled:
            self._copies.keep_settled(*settled)


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
CHECKSUM = 8  # bytes in front of a copy


def pack_copy(copy: Copy) -> bytes:
    packed = encode(copy)
    return blake2b(packed, digest_size=CHECKSUM).digest() + packed


def read_copy(value: bytes) -> Copy | None:
    """The copy; None if it is not whole, or of another version."""
    packed = value[CHECKSUM:]
    if blake2b(packed, digest_size=CHECKSUM).digest() != value[:CHECKSUM]:
        return None
    try:
        copy = decode(packed)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return copy if copy.version == VERSION else None


class Copies:
    """The copies of settled outcomes in Redis: found within the *budget*, written in the background.

    If Redis fails three times in a row, it is left alone until a connection could be opened again.  No request waits
    for that, nor for a copy to be written: both are done by the thread that also watches the primary.
    """

    def __init__(self, primary: PostgresStore, cache: RedisStore, *, budget: float, cap: float, largest: int) -> None:
        self.primary = primary
        self.cache = cache
        self.cap = cap
        self.largest = largest
        self.budget = budget
        self.pool = OpenConnections(self)
        self.watch = PrimaryWatch(self)
        self._lookups = NodeBatchers(cache.topology, self._look, limit=BATCH_LIMIT, linger=False)
        self._prefix = f"{cache.prefix}:copy"
        self._reset()
        reset_in_child(self)
        weakref.finalize(self, self.watch.close)

    def _reset(self) -> None:
        self._pending: deque[tuple[float, Copy]] = deque(maxlen=MOST_PENDING)
        self._marked: dict[Id, float] = {}  # when this process has marked a record as changed
        self._failures = 0
        self._paused_until = 0.0  # greater than zero: Redis is left alone
        self._pause = FIRST_PAUSE
        self._writes_fail = False
        self.hits = self.misses = self.errors = self.skipped = 0

    def counts(self) -> TierCounts:
        return TierCounts(
            hits=self.hits, misses=self.misses, errors=self.errors, skipped=self.skipped, open=bool(self._paused_until)
        )

    def name(self, id: Id, namespace: str) -> str:
        return f"{self._prefix}:{namespace}:{{{digest(id)}}}"

    # Finding

    def find(self, operation: Operation) -> Plan[Record | None]:
        """The settled record, if Redis has a copy that can be believed, within the budget; else None."""
        self.watch.listen()
        namespace = self.watch.namespace()
        if namespace is None or not self._is_usable():
            self.skipped += 1
            return None
        name = self.name(operation.id, namespace)
        try:
            value = yield Submit(self._lookups.for_key(name), ScriptItem(None, name))
        except STORE_FAILURES:
            self.skipped += 1
            return None
        copy = read_copy(value) if isinstance(value, bytes) and value != MARK else None
        now = self.watch.now()
        if (
            copy is None
            or (copy.scope, copy.key) != operation.id
            or copy.fingerprint != operation.fingerprint
            or copy.expires_at - MARGIN <= now
            or operation.id in self._marked
            or self.watch.namespace()
            != namespace  # this process was stopped for a while, and the primary may have changed
        ):
            self.misses += 1
            return None
        self.hits += 1
        return Record(
            *operation.id, copy.name, copy.fingerprint, SETTLED, copy.token, "", copy.attempts, 0.0, 0.0, now,
            expires_at=copy.expires_at, outcome=copy.outcome, tier="redis",
        )  # fmt: skip

    def _is_usable(self) -> bool:
        if not self._paused_until:
            return True
        if SYSTEM.monotonic() < self._paused_until:
            return False
        self._paused_until = SYSTEM.monotonic() + self._pause  # one look is let through, which has a connection opened
        return True

    def _look(self, items: list[ScriptItem]) -> Plan[list[Any]]:
        """The values of copies: bytes, None, or an error for all of them."""
        address = self.cache.topology.address(items[0].key)
        packet = b"".join(pack("GET", item.key) for item in items)
        try:
            replies = yield SendCommands(self.pool, address, packet, len(items), self.budget)
        except STORE_FAILURES as error:
            if not isinstance(error, NotConnected):
                self.failed(error)
            raise
        self._failures = 0
        broken = [reply for reply in replies if isinstance(reply, redis.ResponseError)]
        if broken:  # such as WRONGTYPE: somebody else's value lies there; or a server that has lost its place
            self.errors += len(broken)
            if len(broken) == len(replies) and not str(broken[0]).startswith("WRONGTYPE"):
                self.failed(broken[0])
            replies = [None if isinstance(reply, redis.ResponseError) else reply for reply in replies]
        return replies  # type: ignore[no-any-return]

    # Whether Redis is there

    def failed(self, error: BaseException, *, connecting: bool = False) -> None:
        """Count a failure.  After a few in a row Redis is left alone for a while, which grows."""
        self.errors += 1
        self._failures += 1
        if self._failures < FAILURES and not connecting:
            return
        if not self._paused_until:
            log.warning("Redis is left alone, and every request asks PostgreSQL: %s", error)
        self.cache.topology.known = False
        self.pool.drop_all()
        self._paused_until = SYSTEM.monotonic() + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def connected(self) -> None:
        """A connection to Redis was opened, and answers."""
        self._failures = 0
        if self._paused_until:
            self._paused_until, self._pause = 0.0, FIRST_PAUSE
            log.warning("Redis answers again, and is asked first")

    # Writing

    def keep(self, record: Record, asked: float) -> None:
        """Have the settled record copied soon.

        *asked* is when PostgreSQL was asked, on the monotonic clock: the copy is as old as that, also if this process was
        stopped before it got the answer.
        """
        if record.state == SETTLED and record.outcome is not None and record.expires_at is not None:
            names = (record.scope, record.key, record.name, record.fingerprint)
            self._keep(Copy(VERSION, *names, record.token, record.attempts, record.expires_at, record.outcome), asked)

    def keep_settled(self, held: Lease, outcome: Outcome, retention: float, asked: float) -> None:
        """Have the outcome that was settled just now copied soon; *asked* as in `keep`."""
        operation, expires_at = held.operation, self.watch.time_at(asked) + retention
        names = (operation.scope, operation.key, operation.name, operation.fingerprint)
        self._keep(Copy(VERSION, *names, held.token, held.attempt, expires_at, outcome), asked)

    def _keep(self, copy: Copy, asked: float) -> None:
        if len(copy.outcome.body) <= self.largest and self.watch.namespace() is not None and not self._paused_until:
            self._pending.append((asked, copy))
            self.watch.wake.set()

    def write_pending(self) -> None:
        """Write the copies that wait, on the thread of the watch.  NX keeps the mark of a deletion where it is."""
        namespace, batch = self.watch.namespace(), list[Copy]()
        oldest = SYSTEM.monotonic() - OLDEST_PENDING
        for id, at in tuple(self._marked.items()):
            if at < SYSTEM.monotonic() - MARK_SECONDS:
                self._marked.pop(id, None)
        with suppress(IndexError):
            while len(batch) < MOST_PENDING:
                at, copy = self._pending.popleft()
                if at >= oldest and (copy.scope, copy.key) not in self._marked:
                    batch.append(copy)
        if not batch or namespace is None or self._paused_until:
            return
        now = self.watch.now()
        by_address: dict[Address, list[bytes]] = {}
        for copy in batch:
            seconds = min(copy.expires_at - MARGIN - now, self.cap)
            with suppress(OncemoreError, TypeError, ValueError, OverflowError):  # such as a lone surrogate: not copied
                name, value = self.name((copy.scope, copy.key), namespace), pack_copy(copy)
                if seconds > 0.001 and len(value) <= self.largest + 1024:
                    command = pack("SET", name, value, "PX", int(1000 * seconds), "NX")
                    by_address.setdefault(self.cache.topology.address(name), []).append(command)
        for address, commands in by_address.items():
            self._write(address, commands)

    def _write(self, address: Address, commands: list[bytes]) -> None:
        try:
            failure = error_among(run(self._send(address, commands)))
        except STORE_FAILURES as error:
            self.failed(error)
            return
        if failure is not None:
            self.errors += 1
            if not self._writes_fail:  # it is full, or read-only: said once
                log.warning("Redis takes no copies for now: %s", failure)
        self._writes_fail = failure is not None

    def _send(self, address: Address, commands: Sequence[bytes]) -> Plan[list[Any]]:
        """The replies to commands that no request waits for."""
        pool = self.cache.topology.pool
        return (yield SendCommands(pool, address, b"".join(commands), len(commands), CONNECT_SECONDS))  # type: ignore[no-any-return]

    def forget(self, id: Id) -> Plan[None]:
        """Replace the copy of *id* by a mark, so that none is found, and none can be written for a minute.

        Raises one of STORE_FAILURES if Redis cannot be told, or if PostgreSQL does not tell which copies are of now.
        """
        self._marked[id] = SYSTEM.monotonic()
        (row,) = yield from self.primary.database.admin_rows(Statement(PROBE), [])
        name = self.name(id, self.watch.namespace_of(row))
        topology = self.cache.topology
        if not topology.known:
            yield from topology.locate(CONNECT_SECONDS)
        replies = yield from self._send(topology.address(name), [pack("SET", name, MARK, "EX", MARK_SECONDS)])
        failure = error_among(replies)
        if failure is not None:
            raise StoreUnavailable(f"Redis refused: {failure}") from failure

    def close(self) -> None:
        self.watch.close()
        self.pool.close()

    async def aclose(self) -> None:
        await self._lookups.drain()
        await self.pool.aclose()
        self.close()


def error_among(replies: Sequence[Any]) -> redis.ResponseError | None:
    return next((reply for reply in replies if isinstance(reply, redis.ResponseError)), None)


class NotConnected(StoreUnavailable):
    """No connection to Redis is open; one is being opened, and nobody waits for it."""


class OpenConnections(ConnectionPool):
    """Lends connections that are open already.  New ones are opened in the background, and must answer a PING first.

    For threads, the thread of the watch opens them; for an event loop, a task does.
    """

    def __init__(self, copies: Copies) -> None:
        self.copies = weakref.proxy(copies)
        self.topology = copies.cache.topology
        super().__init__(self.topology.pool.connector)

    def _reset(self) -> None:
        super()._reset()
        self.wanted: set[Address] = set()
        self._opening: PerLoop[set[Address]] = PerLoop(set)
        self._addresses: set[Address] = set()

    def take(self, address: Address, generation: int, timeout: float) -> Any:
        free = self._threads.setdefault(address, [])
        with suppress(IndexError):
            while True:
                opened, connection = free.pop()
                if opened == generation:
                    return connection
                connection.disconnect()
        self._addresses.add(address)
        self.wanted.add(address)
        self.copies.watch.wake.set()
        raise NotConnected("No connection to Redis is open yet")

    async def atake(self, address: Address, generation: int) -> Any:
        free = self._loops.get().setdefault(address, [])
        while free:
            opened, connection = free.pop()
            if opened == generation:
                return connection
            await connection.disconnect(nowait=True)
        self._addresses.add(address)
        opening = self._opening.get()
        if address not in opening:
            opening.add(address)
            keep_task(self._open_on_loop(address, opening))
        raise NotConnected("No connection to Redis is open yet")

    async def _open_on_loop(self, address: Address, opening: set[Address]) -> None:
        connection: Any = None
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                if not self.topology.known:
                    await arun(self.topology.locate(CONNECT_SECONDS))
                address = self.topology.primary if self.topology.one_primary else address
                connection = self.connector.open_on_loop(address)
                await connection.connect()
                await connection.send_command("PING")
                await connection.read_response()
        except (*CONNECTION_ERRORS, *STORE_FAILURES) as error:
            if connection is not None:
                await connection.disconnect(nowait=True)
            self.copies.failed(error, connecting=True)
        else:
            await self.aput_back(address, self.generation(address), connection)
            self.copies.connected()
        finally:
            opening.clear()

    def open_wanted(self) -> None:
        """Open the connections that threads have asked for; on the thread of the watch."""
        while self.wanted:
            address, connection = self.wanted.pop(), None
            try:
                if not self.topology.known:
                    run(self.topology.locate(CONNECT_SECONDS))
                address = self.topology.primary if self.topology.one_primary else address
                connection = self.connector.open(address, CONNECT_SECONDS)
                connection.connect()
                connection.send_command("PING")
                connection.read_response()
            except (*CONNECTION_ERRORS, *STORE_FAILURES) as error:
                if connection is not None:
                    connection.disconnect()
                self.copies.failed(error, connecting=True)
            else:
                self.put_back(address, self.generation(address), connection)
                self.copies.connected()

    def drop_all(self) -> None:
        for address in tuple(self._addresses):
            self.drop(address)


class PrimaryWatch(Listener["psycopg.Connection[Any]"]):
    """Keeps a connection to the primary open, and knows its timeline and its clock; writes copies on the same thread.

    If the primary does not answer for a second, `namespace` is None, and no copy is used: a server that was promoted may
    have lost outcomes of which there are copies.
    """

    name = "oncemore-tiered"

    def __init__(self, copies: Copies) -> None:
        self.copies = weakref.proxy(copies)
        self.conninfo = copies.primary.database.conninfo
        self.records = copies.primary.database.names["records"]
        self.wake = threading.Event()
        super().__init__()

    def _reset(self) -> None:
        super()._reset()
        self.wake = threading.Event()
        self._namespace = ""
        self._offset = 0.0  # of PostgreSQL's clock against this process's
        self._confirmed_at = 0.0
        self._socket = -1
        self._warned = False

    def namespace(self) -> str | None:
        """The part of a copy's name that stands for the primary as it is now; None if that is not known."""
        if not self._namespace or SYSTEM.monotonic() - self._confirmed_at >= TRUST_SECONDS:
            return None
        # If the server has closed the connection, there is something to read, before the thread knows of it.
        socket = select.poll()  # a new one, because threads cannot share it
        socket.register(self._socket, select.POLLIN)
        return None if socket.poll(0) else self._namespace

    def now(self) -> float:
        """The time by PostgreSQL's clock."""
        return self.time_at(SYSTEM.monotonic())

    def time_at(self, moment: float) -> float:
        """The time by PostgreSQL's clock at that moment of the monotonic clock."""
        shift: float = self.copies.primary.shift
        return moment + self._offset + shift

    def namespace_of(self, row: Sequence[Any]) -> str:
        """The identity of the server, its database and its table, and the server's timeline."""
        _, timeline, system, database = row
        identity = encode((system, database, self.records))
        return f"{blake2b(identity, digest_size=8).hexdigest()}.{timeline}"

    def connect(self) -> psycopg.Connection[Any]:
        connection = psycopg.connect(self.conninfo, autocommit=True, connect_timeout=5, prepare_threshold=None)
        try:
            self._socket = connection.fileno()
            self._probe(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def close(self) -> None:
        self._namespace = ""  # the number of the socket may soon be another's
        super().close()

    def _probe(self, connection: psycopg.Connection[Any]) -> None:
        before = SYSTEM.monotonic()
        try:
            row = connection.execute(PROBE).fetchone()
        except psycopg.Error as error:
            self._namespace = ""
            if not self._warned and error.sqlstate not in (None, "55000"):  # 55000: it is a standby for now
                self._warned = True
                log.warning("Redis is not used, because the primary does not tell its timeline: %s", error)
            raise
        assert row is not None, "it is one row"
        self._offset = row[0] - before  # the earliest time that it can have been: a copy ends rather too soon
        self._namespace = self.namespace_of(row)
        self._confirmed_at = before

    def receive(self, connection: psycopg.Connection[Any], seconds: float) -> None:
        if self.wake.wait(seconds):
            time.sleep(GATHER_SECONDS)
            self.wake.clear()
            self.copies.pool.open_wanted()
            self.copies.write_pending()
        if SYSTEM.monotonic() - self._confirmed_at >= PROBE_SECONDS:
            self._probe(connection)
