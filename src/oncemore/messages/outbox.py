"""The outbox: a message is a row that commits with the change it tells of, and a relay sends it from there."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time as clocks
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal
from uuid import UUID

import msgspec

from .._contract.keys import check_name
from .._contract.policy import duration
from .._ledger.context import CURRENT, Op
from .._ledger.guard import Guard, Progress, check_guard, check_positive
from .._ledger.tables import Tables
from .._ledger.transactions import Transaction
from .._runtime.forks import reset_in_child
from .._runtime.plan import Plan, arun, run
from .._runtime.wakeups import Id
from ..errors import ConfigurationError, InvalidKey, InvalidPayload, NotFound, OncemoreError
from . import outbox_sql as sql
from .envelope import LIMIT, UNSET, Envelope, Extension, check_text, encode, format_time
from .outbox_sql import FEATURE
from .tracing import create_traceparent

MessageState = Literal["pending", "sent", "dead"]
LONG_WAIT = 10.0  # seconds that a message may wait for an older transaction before that is worth telling
SMALL = 4096  # bytes that attributes have at most, unless there are many headers

# Between two notifications of relays in other processes, and how long the thread that sends them waits for the next.
PAUSE, IDLE = 0.02, 10.0


class OutboxStats(msgspec.Struct, frozen=True):
    """How many messages an outbox has.

    *oldest_age* is for how long the oldest pending one has been due, in seconds.  *waiting* are those of the pending ones
    that have waited for ten seconds or more for the end of an older transaction, because their order depends on it.
    """

    pending: int
    oldest_age: float
    dead: int
    sent: int
    waiting: int


class OutboxMessage(msgspec.Struct, frozen=True):
    """One message as an operator sees it.  Times are seconds since 1970, by the database's clock."""

    id: str
    type: str
    subject: str | None
    state: MessageState
    attempts: int  # that failed
    error: str  # of the latest attempt
    created_at: float
    due_at: float
    ended_at: float | None  # sent or dead since
    seq: int
    envelope: Envelope


Messages = list[OutboxMessage]


class Outbox:
    """Adds messages in the user's transactions; a `Relay` sends them.

    Args:
        guard: The table is in its database: PostgreSQL or SQLite.
        source: The name of this service in each envelope; a guard may have several outboxes.
        keep: For how long sent messages are kept, for `replay`; by default they are deleted.
        limit: The most bytes that a message may have.
    """

    def __init__(self, guard: Guard, *, source: str, keep: float | str | None = None, limit: int = LIMIT) -> None:
        self.guard = check_guard(guard)
        self.source = check_source(source)
        self.keep = None if keep is None else duration(keep)
        self.limit = check_positive("limit", limit)
        self.tables = Tables(guard.store, FEATURE)
        self.announcer = Announcer(self.tables, self.wakeup_id)

    # Adding

    def add(
        self,
        place: Any,
        type: str,
        data: Any = UNSET,
        *,
        subject: str | None = None,
        id: str | None = None,
        delay: float | str | None = None,
        at: datetime | None = None,
        headers: Mapping[str, Extension] | None = None,
        datacontenttype: str | None = None,
        correlationid: str | None = None,
        traceparent: str | None = None,
    ) -> str:
        """Add a message to the transaction of *place*, and return its id.  It is sent if that transaction commits.

        Args:
            place: The running operation (`op`), if it has a transaction; or your own connection or session in one: psycopg,
                asyncpg, sqlite3, aiosqlite, SQLAlchemy; or a database alias of Django's, such as "default".
            type: The kind of event, such as "refund.succeeded".
            data: Anything that can be written as JSON, or bytes.
            subject: The thing that it is about.  Messages with the same subject are sent in their order.
            id: Your own id.  By default it is derived from the operation, so that a second run of the operation makes the
                same one; without an operation it is random and sorts by time (UUIDv7).
            delay: Send it that much later: seconds, or text such as "5m".
            at: Or send it then.
            headers: Extension attributes of the envelope: names in lower-case letters and digits.
            datacontenttype: The media type of the data; by default JSON, or bytes.
            correlationid: By default the operation's key.
            traceparent: By default that of a span `create`, made in the current OpenTelemetry span.

        Raises:
            ConfigurationError: *place* is in no transaction.
            InvalidPayload: An attribute or the data cannot be sent.
            PayloadTooLarge: The message has more bytes than the outbox's limit.
        """
        given = (subject, id, headers, datacontenttype, correlationid, traceparent)
        envelope = self._envelope(place, type, data, *given)
        return run(self._add(place, envelope, delay, at))

    async def aadd(
        self,
        place: Any,
        type: str,
        data: Any = UNSET,
        *,
        subject: str | None = None,
        id: str | None = None,
        delay: float | str | None = None,
        at: datetime | None = None,
        headers: Mapping[str, Extension] | None = None,
        datacontenttype: str | None = None,
        correlationid: str | None = None,
        traceparent: str | None = None,
    ) -> str:
        """Add a message as `add` does, on an event loop."""
        given = (subject, id, headers, datacontenttype, correlationid, traceparent)
        envelope = self._envelope(place, type, data, *given)
        return await arun(self._add(place, envelope, delay, at))

    def _envelope(
        self,
        place: Any,
        type: str,
        data: Any,
        subject: str | None,
        id: str | None,
        headers: Mapping[str, Extension] | None,
        datacontenttype: str | None,
        correlationid: str | None,
        traceparent: str | None,
    ) -> Envelope:
        op = place if isinstance(place, Op) else CURRENT.get()
        if id is not None:
            check_id(id)
        else:
            # Not for an operation without a transaction: its second run may add others, after some were committed.
            derives = op is not None and op.transaction is not None
            id = op.derive_next(f"{self.source}\n{type}\n{subject}") if op is not None and derives else uuid7()
        envelope = Envelope(
            type,
            data,
            id=id,
            source=self.source,
            subject=subject,
            time=datetime.fromtimestamp(clocks.time() + self.guard.store.shift, UTC),
            datacontenttype=datacontenttype,
            traceparent=create_traceparent(self.source, type, id) if traceparent is None else traceparent,
            correlationid=correlation_of(op) if correlationid is None else correlationid,
            extensions=headers,
        )
        if len(envelope.raw or b"") + SMALL > self.limit // 2 or headers:  # base64 makes a third more of it
            envelope.check_size(self.limit)
        return envelope

    def _add(self, place: Any, envelope: Envelope, delay: float | str | None, at: datetime | None) -> Plan[str]:
        if isinstance(place, Op) and place.transaction is None:
            how = "add it in a step that takes a connection" if place.steps else "say effect = 'transaction'"
            raise ConfigurationError(
                f"This operation has no transaction with which the message could commit: {how}; or give your own open connection "
                "or session instead of the operation"
            )
        transaction = transaction_of(place)
        values = [envelope.id, self.source, envelope.type, envelope.subject, pack_attributes(envelope), envelope.raw]
        if delay is not None or at is not None:
            query = self.tables.query(sql.ADD_LATER, *values, *when(delay, at))
        else:
            query = self.tables.query(sql.ADD, *values)
            if isinstance(place, Op) and transaction is not None and transaction.can_defer():
                yield from self.tables.access.ready(FEATURE)
                transaction.on_commit(self.announcer.announce)
                transaction.deferred.append(query)
                transaction.connection.deferring = transaction  # another message may be added on the connection itself
                return envelope.id
        if transaction is not None:
            yield from self._number_deferred(transaction)
        yield from self.tables.execute_in(place, query, after_commit=self.announcer.announce)
        return envelope.id

    def _number_deferred(self, transaction: Transaction) -> Plan[None]:
        """Number the messages that will be written with the commit, because they come before one that is written now."""
        deferred = transaction.deferred
        adds, _ = self.tables.query(sql.ADD)
        waiting = [n for n, (statement, _) in enumerate(deferred) if statement is adds]
        if waiting:
            rows = yield from transaction.execute(self.tables.query(sql.RESERVE, len(waiting)))
            for n, (seq,) in zip(waiting, rows, strict=True):
                deferred[n] = self.tables.query(sql.ADD_NUMBERED, *deferred[n][1][1:], seq)

    # The operator's verbs.  Each has an awaited form with an `a` before it.

    def stats(self) -> OutboxStats:
        """How many messages there are, and for how long the oldest has been due."""
        return run(self._stats())

    async def astats(self) -> OutboxStats:
        """The awaited form of `stats`."""
        return await arun(self._stats())

    def _stats(self) -> Plan[OutboxStats]:
        query = self.tables.query(sql.STATS, self.source, LONG_WAIT)
        ((row,),) = yield from self.tables.execute(query, patient=True)
        return OutboxStats(*row)

    def list(
        self,
        state: MessageState = "pending",
        *,
        type: str | None = None,
        subject: str | None = None,
        limit: int = 100,
        after: int = 0,
    ) -> Messages:
        """Some messages, the oldest first.  For the next page, pass the last one's `seq` as *after*.

        In *type*, `*` stands for any characters.
        """
        return run(self._list(state, type, subject, limit, after))

    async def alist(
        self,
        state: MessageState = "pending",
        *,
        type: str | None = None,
        subject: str | None = None,
        limit: int = 100,
        after: int = 0,
    ) -> Messages:
        """The awaited form of `list`."""
        return await arun(self._list(state, type, subject, limit, after))

    def _list(
        self, state: MessageState, type: str | None, subject: str | None, limit: int, after: int
    ) -> Plan[Messages]:
        if state not in ("pending", "sent", "dead"):
            raise ConfigurationError(f"state = {state!r} is unknown: choose 'pending', 'sent' or 'dead'")
        pattern = self._pattern(type)
        values = (self.source, state, after, pattern, subject, check_positive("limit", limit))
        (rows,) = yield from self.tables.execute(self.tables.query(sql.LIST, *values), patient=True)
        return [read_message(row) for row in rows]

    def dead(self, *, type: str | None = None, limit: int = 100, after: int = 0) -> Messages:
        """The dead letters: messages that have failed too often, or that no broker is for."""
        return run(self._list("dead", type, None, limit, after))

    async def adead(self, *, type: str | None = None, limit: int = 100, after: int = 0) -> Messages:
        """The awaited form of `dead`."""
        return await arun(self._list("dead", type, None, limit, after))

    def requeue(self, id: str) -> None:
        """Send a dead letter again, under the same id, with as many attempts as a new one."""
        run(self._requeue(id))

    async def arequeue(self, id: str) -> None:
        """The awaited form of `requeue`."""
        await arun(self._requeue(id))

    def _requeue(self, id: str) -> Plan[None]:
        (rows,) = yield from self.tables.execute(self.tables.query(sql.REQUEUE, self.source, id))
        if not rows:
            raise NotFound(f"The outbox of {self.source!r} has no dead letter {id!r}: outbox.dead() lists them")
        self.announcer.announce()

    def replay(self, since: datetime | float | str, type: str | None = None) -> int:
        """Send the messages that were sent since then again, under the same ids; return how many.

        *since* is a time, or how long ago, as in "2h".  In *type*, `*` stands for any characters.  Brokers deliver them again,
        and consumers that know the ids ignore them.
        """
        return run(self._replay(since, type))

    async def areplay(self, since: datetime | float | str, type: str | None = None) -> int:
        """The awaited form of `replay`."""
        return await arun(self._replay(since, type))

    def _replay(self, since: datetime | float | str, type: str | None) -> Plan[int]:
        found = yield from self._stats()
        if self.keep is None and not found.sent:
            raise ConfigurationError(
                "Sent messages are deleted, so there is nothing to replay: keep them for a while, as in "
                f"Outbox(guard, source={self.source!r}, keep='7d')"
            )
        start, pattern = self._since(since), self._pattern(type)
        (((count,),), _) = yield from self.tables.execute(
            self.tables.query(sql.COUNT_REPLAY, self.source, start, pattern),
            self.tables.query(sql.REPLAY, self.source, start, pattern),
            patient=True,
        )
        self.announcer.announce()
        return int(count)

    def _since(self, since: datetime | float | str) -> float:
        if isinstance(since, datetime):
            if since.tzinfo is None:
                raise ConfigurationError(f"since = {since!r} has no time zone")
            return since.timestamp()
        if isinstance(since, str):
            return clocks.time() + self.guard.store.shift - duration(since)
        return float(since)

    def purge(
        self,
        *,
        older_than: float | str | None = None,
        dead: bool = False,
        batch: int = 1000,
        progress: Progress | None = None,
    ) -> int:
        """Delete sent messages that need not be kept any longer, or, with *dead*, dead letters; how many.

        *older_than* is the outbox's `keep` by default; for dead letters it must be given.
        """
        return run(self._purge(older_than, dead, batch, progress))

    async def apurge(
        self,
        *,
        older_than: float | str | None = None,
        dead: bool = False,
        batch: int = 1000,
        progress: Progress | None = None,
    ) -> int:
        """The awaited form of `purge`."""
        return await arun(self._purge(older_than, dead, batch, progress))

    def _purge(self, older_than: float | str | None, dead: bool, batch: int, progress: Progress | None) -> Plan[int]:
        if dead and older_than is None:
            raise ConfigurationError(
                "Say how old dead letters must be to be deleted, as in purge(dead=True, older_than='30d')"
            )
        age = duration(older_than) if older_than is not None else self.keep or 0.0
        values = (self.source, "dead" if dead else "sent", age, check_positive("batch", batch))
        total = 0
        while True:
            (rows,) = yield from self.tables.execute(self.tables.query(sql.PURGE, *values), patient=True)
            total += len(rows)
            if progress is not None:
                progress(total)
            if len(rows) < batch:
                return total

    def _pattern(self, type: str | None) -> str | None:
        """The pattern of a type, as the database's own operator wants it."""
        if type is None:
            return None
        if self.tables.dialect == "postgres":
            return re.sub(r"([%_\\])", r"\\\1", type).replace("*", "%")
        return re.sub(r"([?\[])", r"[\1]", type)

    # Wake-ups

    @property
    def wakeup_id(self) -> Id:
        """The id of the wake-ups that relays wait for."""
        return ("oncemore.outbox", self.source)


class Announcer:
    """Wakes the waiters for *id* after a commit: those of this process at once, others by the database's notification.

    One notification stands for all commits of the last moments, and is sent by a thread of its own on a connection of the
    ledger's, because a NOTIFY in the business transaction would let all commits of the database wait for each other.
    """

    def __init__(self, tables: Tables, id: Id) -> None:
        self._tables = tables
        self._id = id
        self._reset()
        reset_in_child(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def announce(self) -> None:
        self._tables.store.wakeups.notify(self._id)
        if self._tables.dialect != "postgres" or self._wake.is_set():
            return
        with self._lock, contextlib.suppress(RuntimeError):  # the interpreter ends, and starts no more threads
            self._wake.set()
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="oncemore-announcer", daemon=True)
                thread.start()
                self._thread = thread

    def _run(self) -> None:
        while True:
            if not self._wake.wait(IDLE):
                with self._lock:
                    if not self._wake.is_set():
                        self._thread = None
                        return
            self._wake.clear()
            with contextlib.suppress(OncemoreError):  # they look for themselves, too
                run(self._tables.access.notify(self._id))
            clocks.sleep(PAUSE)


def transaction_of(place: Any) -> Transaction | None:
    """The open transaction of an operation, if *place* is the operation, or a connection of it with deferred messages."""
    if isinstance(place, Op):
        return place.transaction
    transaction: Transaction | None = getattr(place, "deferring", None)
    return transaction if transaction is not None and transaction._open else None


def sources_of(guard: Guard) -> list[str]:
    """The sources that have messages in the guard's database."""
    tables = Tables(guard.store, FEATURE)
    (rows,) = run(tables.execute(tables.query(sql.SOURCES), patient=True))
    return [row[0] for row in rows]


def check_source(source: Any) -> str:
    try:
        return check_text("source", source)
    except InvalidPayload as error:
        raise ConfigurationError(
            f"{error.detail}: write the name of the service, as in Outbox(guard, source='payments')"
        ) from None


def pack_attributes(envelope: Envelope) -> bytes:
    """The attributes that have no column of their own."""
    own: dict[str, Any] = {}
    if envelope.time is not None:
        own["time"] = format_time(envelope.time)
    for name in ("datacontenttype", "traceparent", "correlationid"):
        if (value := getattr(envelope, name)) is not None:
            own[name] = value
    if envelope.extensions:
        own["extensions"] = envelope.extensions
    return encode(own)


class Attributes(msgspec.Struct):
    time: str | None = None
    datacontenttype: str | None = None
    traceparent: str | None = None
    correlationid: str | None = None
    extensions: dict[str, Any] = {}


decode_attributes = msgspec.json.Decoder(Attributes).decode


def read_envelope(
    id: str, source: str, type: str, subject: str | None, attributes: bytes, data: bytes | None
) -> Envelope:
    """The envelope of a row.  It was checked when it was added."""
    others = decode_attributes(attributes)
    envelope = Envelope.__new__(Envelope)
    envelope.id, envelope.source, envelope.type, envelope.subject = id, source, type, subject
    envelope.time = None if others.time is None else datetime.fromisoformat(others.time)  # it is our own spelling
    envelope.datacontenttype = others.datacontenttype
    envelope.traceparent, envelope.correlationid = others.traceparent, others.correlationid
    envelope.extensions, envelope.raw, envelope._data = others.extensions, data, UNSET
    envelope.replays = 0
    return envelope


def read_message(row: Any) -> OutboxMessage:
    seq, id, source, type, subject, attributes, data, state, attempts, error, created_at, due_at, ended_at = row
    envelope = read_envelope(id, source, type, subject, attributes, data)
    return OutboxMessage(
        id, type, subject, state, attempts, error, created_at, due_at, ended_at, seq=seq, envelope=envelope
    )


def when(delay: float | str | None, at: datetime | None) -> tuple[float, float | None]:
    """The seconds to wait, and the time to wait for."""
    if at is None:
        return duration(delay or 0.0), None
    if delay is not None:
        raise ConfigurationError("Say delay or at, not both")
    if not isinstance(at, datetime) or at.tzinfo is None:
        raise ConfigurationError(f"at = {at!r} must be a datetime with a time zone")
    return 0.0, at.timestamp()


def check_id(id: Any) -> None:
    """Refuse an id of the user's that no inbox would take."""
    try:
        check_name(id, "The message's id")
    except InvalidKey as error:
        raise InvalidPayload(error.detail) from None


def correlation_of(op: Op | None) -> str | None:
    """The operation's key, unless CloudEvents forbids it as an attribute: keys that code makes may have any characters."""
    try:
        return None if op is None else check_text("correlationid", op.key)
    except InvalidPayload:
        return None


def uuid7() -> str:
    """A random id that sorts by time (RFC 9562, version 7)."""
    milliseconds = clocks.time_ns() // 1_000_000
    value = milliseconds << 80 | int.from_bytes(os.urandom(10), "big")
    value = value & ~(0xF << 76) | 7 << 76  # the version
    value = value & ~(0x3 << 62) | 2 << 62  # the variant
    return str(UUID(int=value))
