"""The outbox: each message is a row that commits with the change it tells of; a relay sends it to a broker."""

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
LONG_WAIT = 10.0  # seconds; if a message waits longer for an older transaction, `stats` and the relay's log show it
SMALL = 4096  # bytes; attributes without headers are assumed to be smaller

# Seconds between two notifications of other processes, and seconds without one after which the thread ends.
PAUSE, IDLE = 0.02, 10.0


class OutboxStats(msgspec.Struct, frozen=True):
    """The number of messages in an outbox, by state.

    Attributes:
        pending: Messages that are not sent yet, including those that are not due.
        oldest_age: Seconds for which the oldest pending message has been due; 0.0 if none is due.
        dead: Dead letters.
        sent: Sent messages that are kept.
        waiting: Pending messages that have been due for ten seconds or more, and wait for an older transaction to end
            because it may still add one that comes before them.
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
    attempts: int  # the failed ones, and one that is under way under a lease
    error: str  # the error of the latest failed attempt
    created_at: float
    due_at: float
    ended_at: float | None  # when it was sent, or became a dead letter
    seq: int
    envelope: Envelope


Messages = list[OutboxMessage]


class Outbox:
    """Adds messages in your transactions; a `Relay` sends them.

    Args:
        guard: The guard of the database with the table: PostgreSQL or SQLite.
        source: The name of this service in each envelope.  One guard may have outboxes for several sources.
        keep: For how long sent messages are kept, for `replay`; by default they are deleted.
        limit: The maximum size of a message in bytes.
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
        """Add a message to the transaction of *place*, and return its id.  It is sent if the transaction commits.

        Args:
            place: The running operation (`op`), if it has a transaction; or your own connection or session in a
                transaction (psycopg, asyncpg, sqlite3, aiosqlite, SQLAlchemy); or a Django database alias.
            type: The kind of event, such as "refund.succeeded".
            data: A value that can be written as JSON, or bytes.
            subject: The thing that the message is about.  Messages with the same subject are sent in order.
            id: Your own id.  By default it is derived from an operation with a transaction, so that a second run of the
                operation makes the same id; otherwise it is random and sorts by time (UUIDv7).
            delay: How much later to send the message: seconds, or text such as "5m".
            at: The time at which to send the message, instead of *delay*.
            headers: Extension attributes of the envelope: names in lower-case letters and digits.
            datacontenttype: The media type of the data; by default JSON, or bytes.
            correlationid: By default the key of the running operation.
            traceparent: By default a span `create` is recorded below the current OpenTelemetry span.

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
        """The awaited form of `add`."""
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
            # Without a transaction, the first run may have committed some messages, and the second may add others.
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
        if len(envelope.raw or b"") + SMALL > self.limit // 2 or headers:  # base64 makes the data a third larger
            envelope.check_size(self.limit)
        return envelope

    def _add(self, place: Any, envelope: Envelope, delay: float | str | None, at: datetime | None) -> Plan[str]:
        if isinstance(place, Op) and place.transaction is None:
            how = "add it in a step that takes a connection" if place.steps else "say effect = 'transaction'"
            raise ConfigurationError(
                f"This operation has no transaction with which the message could commit: {how}; or pass your own connection "
                "or session, in a transaction, instead of the operation"
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
                transaction.connection.deferring = transaction  # the next message may be added through the connection
                return envelope.id
        if transaction is not None:
            yield from self._number_deferred(transaction)
        yield from self.tables.execute_in(place, query, after_commit=self.announcer.announce)
        return envelope.id

    def _number_deferred(self, transaction: Transaction) -> Plan[None]:
        """Reserve numbers for the deferred messages, because they come before a message that is written now."""
        deferred = transaction.deferred
        adds, _ = self.tables.query(sql.ADD)
        waiting = [n for n, (statement, _) in enumerate(deferred) if statement is adds]
        if waiting:
            rows = yield from transaction.execute(self.tables.query(sql.RESERVE, len(waiting)))
            for n, (seq,) in zip(waiting, rows, strict=True):
                deferred[n] = self.tables.query(sql.ADD_NUMBERED, *deferred[n][1][1:], seq)

    # For operators.  Each method has an awaited form with an `a` before its name.

    def stats(self) -> OutboxStats:
        """Count the messages, and return for how long the oldest pending one has been due."""
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
        """Return a page of messages, the oldest first.  For the next page, pass the last message's `seq` as *after*.

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
        """Return a page of dead letters: messages that failed too often, or have no broker for their type."""
        return run(self._list("dead", type, None, limit, after))

    async def adead(self, *, type: str | None = None, limit: int = 100, after: int = 0) -> Messages:
        """The awaited form of `dead`."""
        return await arun(self._list("dead", type, None, limit, after))

    def requeue(self, id: str) -> None:
        """Have a dead letter sent again, under the same id, with its attempts counted from zero."""
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
        """Have messages that were sent since a time sent again, under the same ids, and return how many.

        *since* is a time, or an age such as "2h".  In *type*, `*` stands for any characters.  Brokers deliver the
        messages again; consumers ignore the ids that they have handled.
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
                raise ConfigurationError(f"since = {since!r} has no time zone: pass a datetime with one")
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
        """Delete sent messages, or dead letters with *dead*, that ended long enough ago; return how many.

        *older_than* is an age; by default the outbox's `keep`.  It is required for dead letters.
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
        """Translate a pattern of types for the database: for LIKE on PostgreSQL, for GLOB on SQLite."""
        if type is None:
            return None
        if self.tables.dialect == "postgres":
            return re.sub(r"([%_\\])", r"\\\1", type).replace("*", "%")
        return re.sub(r"([?\[])", r"[\1]", type)

    # Wake-ups

    @property
    def wakeup_id(self) -> Id:
        """The id of the wake-ups that relays of this outbox wait for."""
        return ("oncemore.outbox", self.source)


class Announcer:
    """Wakes the waiters for *id* after a commit: this process's immediately, others by a PostgreSQL notification.

    A thread of its own sends one notification for all commits of the last moments, on a connection of the ledger.  A
    NOTIFY in the user's transaction would make all commits of the database wait for each other.
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
            with contextlib.suppress(OncemoreError):  # the waiters also poll
                run(self._tables.access.notify(self._id))
            clocks.sleep(PAUSE)


def transaction_of(place: Any) -> Transaction | None:
    """Return the transaction of an operation, or of its connection if messages are deferred there; otherwise None."""
    if isinstance(place, Op):
        return place.transaction
    transaction: Transaction | None = getattr(place, "deferring", None)
    return transaction if transaction is not None and transaction._open else None


def sources_of(guard: Guard) -> list[str]:
    """Return the sources that have messages in the guard's database."""
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
    """Encode the attributes that have no column of their own."""
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
    """Make the envelope of a row without checking it again: it was checked when it was added."""
    others = decode_attributes(attributes)
    envelope = Envelope.__new__(Envelope)
    envelope.id, envelope.source, envelope.type, envelope.subject = id, source, type, subject
    envelope.time = None if others.time is None else datetime.fromisoformat(others.time)  # written by `format_time`
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
    """Return the seconds by which to delay a message, and the time at which to send it instead, or None."""
    if at is None:
        return duration(delay or 0.0), None
    if delay is not None:
        raise ConfigurationError("Pass delay or at, not both")
    if not isinstance(at, datetime) or at.tzinfo is None:
        raise ConfigurationError(f"at is {at!r}: it must be a datetime with a time zone")
    return 0.0, at.timestamp()


def check_id(id: Any) -> None:
    """Refuse an id that no inbox would accept."""
    try:
        check_name(id, "The message's id")
    except InvalidKey as error:
        raise InvalidPayload(error.detail) from None


def correlation_of(op: Op | None) -> str | None:
    """Return the operation's key; None if CloudEvents forbids it, because code may make keys of any characters."""
    try:
        return None if op is None else check_text("correlationid", op.key)
    except InvalidPayload:
        return None


def uuid7() -> str:
    """Return a random id that sorts by time (RFC 9562, version 7)."""
    milliseconds = clocks.time_ns() // 1_000_000
    value = milliseconds << 80 | int.from_bytes(os.urandom(10), "big")
    value = value & ~(0xF << 76) | 7 << 76  # the version
    value = value & ~(0x3 << 62) | 2 << 62  # the variant
    return str(UUID(int=value))
