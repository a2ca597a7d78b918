"""The PostgreSQL store: the ledger's verbs, the operators' verbs, and the tables of features."""

from __future__ import annotations

import re
import weakref
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlencode

import msgspec
import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from ..._ledger.connect import adapter_module, hide_password, take_options
from ..._ledger.decisions import not_deletable, not_resolvable
from ..._ledger.model import Claim, Lease, Operation, Outcome, Record, encode_outcome, state_of
from ..._ledger.states import HELD, RELEASED, RUNNING, SETTLED, State
from ..._ledger.store import Filter, Page, Stats, Store
from ..._ledger.tables import Dialect, Executes, Feature, belongs_to, not_a_place, not_in_transaction
from ..._ledger.transactions import Query, Rows, Statement, TransactionAdapter, TransactionSource
from ..._runtime.batching import Batcher, Submit
from ..._runtime.clock import SYSTEM
from ..._runtime.plan import Plan
from ..._runtime.wakeups import Id, Wakeups
from ...errors import ConfigurationError, InvalidPayload, StoreError, StoreTimeout
from . import tables
from .batch import LOCKED, Batches
from .listener import PostgresListener
from .pipeline import Pipeline
from .psycopg import IDLE, FeatureTransaction, JoinedBelowDjango, JoinedPsycopg, OwnSource
from .rows import LONGEST_SPAN, Item, check_length, encode_rows, escape_text, read_record
from .session import Database
from .statements import prepared

OPTIONS: dict[str, Any] = {
    "schema": "public",
    "prefix": "oncemore_",
    "create": True,
    "timeout": 5.0,
    "poll": 1.0,
    "listen": True,
    "pool": 16,
    "idle_in_transaction": 300.0,
}
# With these settings a dead peer is noticed within a minute.  By default, it takes two hours.
CONNECTION = {
    "fallback_application_name": "oncemore",
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
}

STRAY_PERCENT = re.compile("%(?![0-9A-Fa-f]{2})")

UNNOTIFIED_POLL = 0.25  # seconds between two looks of a waiter, if no messages arrive
MOST_REMEMBERED = 10_000  # records
# Unlike clock_timestamp(), statement_timestamp() does not change within a statement, so a comparison can use an index.
NOW = "(statement_timestamp() + make_interval(secs => $1))"
# The most calls in a batch.  While the server works on one batch, this process works on the previous one's answers.
BATCH_LIMIT = 32


def connect(url: str) -> Store:
    """Return the ledger at *url*.  Its connections are opened on first use."""
    return PostgresStore(url)


def url_of(settings: Mapping[str, Any], options: Mapping[str, str]) -> str:
    """Return the URL for libpq's *settings* and the store's *options*, which override them."""
    merged = {**{name: value for name, value in settings.items() if value is not None}, **options}
    return f"postgresql:///?{urlencode(merged, quote_via=quote)}"


def schema(url: str) -> str:
    """Return the script that creates the tables, with comments for an administrator."""
    _, options = take_options(url, OPTIONS)
    return tables.script(tables.names(options["schema"], options["prefix"]))


class PostgresStore:
    """Keeps records in a table.  Concurrent claims are sent as one statement, and so are concurrent writes."""

    def __init__(self, url: str) -> None:
        place, options = take_options(url, OPTIONS)
        for name in ("timeout", "poll", "pool"):
            if options[name] <= 0:
                raise ConfigurationError(f"{name}=0 in the store's URL: it must be greater than zero")
        names = tables.names(options["schema"], options["prefix"])
        conninfo = libpq_conninfo(place)
        self.url = hide_password(url)
        self.wakeups = Wakeups()
        self.database = Database(
            conninfo,
            names,
            create=options["create"],
            timeout=options["timeout"],
            idle=options["idle_in_transaction"],
        )
        self.holder = self.database.holder
        self._sql = self.database.sql
        self._poll: float = options["poll"]
        # A channel's name has at most 63 bytes.  Ledgers that share a channel only wake each other's waiters in vain.
        channel = f"{options['schema']}.{options['prefix']}changes"[:63]
        self._listener = PostgresListener(conninfo, channel, self.wakeups, unavailable=not options["listen"])
        self._watched: dict[Id, int] = {}  # the tokens of records that send a message when they change
        self._batches = Batches(self.database, self.wakeups, self._listener)
        self._claims = Batcher(self._batches.run_claims, limit=BATCH_LIMIT, undo=self._batches.undo_claims)
        self._writes = Batcher(self._batches.run_writes, limit=BATCH_LIMIT)
        # Calls for records that open transactions have locked.  Their own batcher keeps other calls from waiting.
        self._locked: set[Id] = set()  # the ids of these records, until a call finds a record free
        self._locked_calls = Batcher(
            self._batches.run_locked,
            limit=BATCH_LIMIT,
            undo=self._batches.undo_claims,
            can_undo=lambda item: item.verb == "claim",
        )
        self.lender: TransactionSource = OwnSource(self.database, limit=options["pool"])
        self.tables = PostgresTables(self.database, self._batches)
        weakref.finalize(self, self._listener.close)  # ends the listener's thread if nobody closes the store

    @property
    def poll(self) -> float:
        """The seconds after which a waiter looks by itself; fewer if no messages arrive."""
        return min(self._poll, UNNOTIFIED_POLL) if self._listener.unavailable else self._poll

    @poll.setter
    def poll(self, seconds: float) -> None:
        self._poll = seconds

    @property
    def shift(self) -> float:
        """Seconds to add to the server's clock."""
        return self.database.shift

    @shift.setter
    def shift(self, seconds: float) -> None:
        self.database.shift = seconds

    def ready(self) -> Plan[None]:
        """Create the tables, unless they are known to exist."""
        return self.database.ready()

    # The owner's verbs, which run in batches

    def claim(self, operation: Operation, *, lease: float, request: bytes = b"") -> Plan[Lease | Record]:
        self._listener.listen()  # also because the guard's cache must learn of deletions
        claim = Claim(operation, self.holder.next(), min(lease, LONGEST_SPAN))
        item = Item(
            "claim",
            operation.id,
            claim,
            request or None,
            name=escape_text(operation.name),
            fingerprint=escape_text(operation.fingerprint),
            holder=claim.holder,
            lease=claim.lease,
        )
        check_length(*item.id)
        return (yield from self._submit(self._claims, item))  # type: ignore[no-any-return]

    def _submit(self, batcher: Batcher[Item], item: Item) -> Plan[Any]:
        """Return the item's answer.  Raises StoreTimeout if another transaction locks the record for too long."""
        answer = LOCKED if item.id in self._locked else (yield Submit(batcher, item))
        while answer is LOCKED:
            waited = SYSTEM.monotonic() - item.asked
            if waited > self.database.timeout / 5:
                raise StoreTimeout(
                    f"Another transaction kept the record of this key locked for {waited:.1f} s; retry later"
                )
            if len(self._locked) >= MOST_REMEMBERED:
                self._locked.clear()
            self._locked.add(item.id)
            answer = yield Submit(self._locked_calls, item)
            if answer is not LOCKED:
                self._locked.discard(item.id)
        return answer

    def unclaim(self, claims: Sequence[Claim]) -> Plan[None]:
        return self._batches.unclaim(claims)

    def renew(self, held: Lease, *, lease: float) -> Plan[Lease]:
        until = yield from self._change(held, RUNNING, lease=min(lease, LONGEST_SPAN))
        return msgspec.structs.replace(held, expires_at=until)

    def settle(
        self, held: Lease, outcome: Outcome, *, retention: float, audit: bool = False, note: str = ""
    ) -> Plan[None]:
        yield from self.settle_first(held, outcome, retention, audit=audit, note=note)

    def settle_first(
        self, held: Lease, outcome: Outcome, retention: float, *, audit: bool = False, note: str = ""
    ) -> Plan[bool]:
        """Settle, and return whether this call did it: if the owner had settled the record before, nothing is changed."""
        until = yield from self._change(
            held,
            SETTLED,
            encode_outcome(outcome),
            retention=min(retention, LONGEST_SPAN),
            status=outcome.status,
            response_hash=outcome.digest(),
            note=escape_text(note),
            audit=audit,
        )
        return until is not None

    def release(self, held: Lease, *, retention: float) -> Plan[None]:
        yield from self._change(held, RELEASED, retention=min(retention, LONGEST_SPAN))

    def hold(self, held: Lease, *, note: str = "") -> Plan[None]:
        yield from self._change(held, HELD, note=escape_text(note))

    def _change(self, held: Lease, state: State, outcome: bytes | None = None, **changes: Any) -> Plan[Any]:
        item = Item("change", held.operation.id, held, outcome, token=held.token, state=state, **changes)
        return self._submit(self._writes, item)

    def touch(self, record: Record, *, retention: float) -> Plan[None]:
        item = Item("touch", record.id, token=record.token, retention=min(retention, LONGEST_SPAN))
        yield from self._submit(self._writes, item)

    def watch(self, record: Record) -> Plan[None]:
        """Ask the record's owner to send a message at the next change.  Owners in this process wake waiters anyway."""
        if self._listener.unavailable or self._watched.get(record.id) == record.token or self._is_mine(record):
            return
        self._listener.listen()
        try:
            running = yield from self._submit(self._writes, Item("watch", record.id, token=record.token))
        except StoreError:
            return  # no message will come, so the waiter looks by itself after a while
        if not running:
            self.wakeups.notify(record.id)
            return
        if len(self._watched) >= MOST_REMEMBERED:
            self._watched.clear()
        self._watched[record.id] = record.token

    def _is_mine(self, record: Record) -> bool:
        return record.holder.rpartition(":")[0] == self.holder.next().rpartition(":")[0]

    def find(self, scope: str, key: str) -> Plan[Record | None]:
        return (yield from self._submit(self._writes, Item("find", (scope, key))))  # type: ignore[no-any-return]

    # The operators' verbs

    def list(self, where: Filter, *, limit: int = 100, cursor: str | None = None) -> Plan[Page]:
        after = read_cursor(cursor) if cursor else None
        texts = {
            name: escape_text(text) for name in ("scope", "key", "name") if (text := getattr(where, name)) is not None
        }
        where = msgspec.structs.replace(where, **texts)
        rows = yield from self.database.admin_rows(*self._sql.list(where, after, limit=limit + 1, shift=self.shift))
        more = encode_rows(rows[limit - 1][:2]).decode() if len(rows) > limit else None
        return Page(tuple(read_record(row) for row in rows[:limit]), more)

    def resolve(
        self, scope: str, key: str, outcome: Outcome | None, *, retention: float, note: str = ""
    ) -> Plan[Record]:
        holder = self.holder.next()  # shows that the resolution is this one, if the answer is lost and it is sent again
        kept: Sequence[Any] = (None, None, "")
        if outcome is not None:
            kept = (outcome.status, encode_outcome(outcome), outcome.digest())
        state = RELEASED if outcome is None else SETTLED
        values = [
            escape_text(scope),
            escape_text(key),
            self.shift,
            state,
            min(retention, LONGEST_SPAN),
            *kept,
            escape_text(note),
            holder,
        ]
        while True:
            rows = yield from self.database.admin_rows(self._sql.resolve, values)
            record = read_record(rows[0]) if rows else None
            if record is not None and record.holder == holder:
                yield from self._notify(record.id)
                return record
            found = state_of(record)
            if found not in (HELD, "lapsed"):  # if it is one of these, it became so just now: try again
                raise not_resolvable(found)

    def delete(self, scope: str, key: str) -> Plan[bool]:
        # Look first, because the statement is sent again if its answer is lost, and then finds nothing.
        known = (yield from self.find(scope, key)) is not None
        while True:
            rows = yield from self.database.admin_rows(
                self._sql.delete, [escape_text(scope), escape_text(key), self.shift]
            )
            if not rows:
                if known:
                    yield from self._notify((scope, key))
                return known
            removed, state, over = rows[0]
            if removed:
                yield from self._notify((scope, key))
                return True
            if state == RUNNING and not over:  # a lapsed record became so just now: try again
                raise not_deletable()
            if over and state not in (RUNNING, HELD):  # expired: the purge deletes it, because it may archive it first
                return False

    def purge(self, *, batch: int = 1000) -> Plan[int]:
        rows = yield from self.database.admin_rows(self._sql.purge, [self.shift, batch])
        return rows[0][0]  # type: ignore[no-any-return]

    def stats(self) -> Plan[Stats]:
        rows = yield from self.database.admin_rows(self._sql.stats, [self.shift])
        return Stats(**dict(zip(Stats.__struct_fields__, rows[0], strict=True)))

    def _notify(self, id: Id) -> Plan[None]:
        self.wakeups.notify(id)
        yield from self._batches.notify([id])

    def close(self) -> None:
        """Close the connections of this process's threads, and end the listener's thread.  A later use reopens them."""
        self._listener.close()
        self.lender.close()
        self.database.close()

    async def aclose(self) -> None:
        """Close as `close` does, and close the connections of the running event loop, after their batches."""
        for batcher in (self._claims, self._writes, self._locked_calls):
            await batcher.drain()
        await self.lender.aclose()
        await self.database.aclose()
        self.close()


class PostgresTables:
    """Features' tables beside the ledger's, in the same schema."""

    dialect: Dialect = "postgres"

    def __init__(self, database: Database, batches: Batches) -> None:
        self.database = database
        self.batches = batches

    def statement(self, text: str) -> Statement:
        return prepared(text.format(**self.database.names, now=NOW))

    def ready(self, feature: Feature) -> Plan[None]:
        return self.database.ready(feature)

    def ready_in(self, feature: Feature, adapter: Executes) -> Plan[None]:
        """Create the tables on the store's connection, because nobody else can use a table before it is committed."""
        return self.ready(feature)

    def execute(self, queries: Sequence[Query], *, patient: bool) -> Plan[list[Rows]]:
        return self.database.feature_rows(queries, patient=patient)

    def open(self) -> TransactionAdapter:
        return FeatureTransaction(self.database.features, self.database.timeout, self._configure)

    def _configure(self, connection: Any) -> Pipeline:
        query = self.database.session_query(self.database.features, connection)
        return Pipeline(connection, [query], SYSTEM.monotonic() + self.database.timeout)

    def join(self, place: Any) -> Plan[Executes]:
        if isinstance(place, psycopg.Connection | psycopg.AsyncConnection):
            # psycopg begins a transaction with the first statement, unless it is in autocommit mode.
            if place.autocommit and place.pgconn.transaction_status == IDLE:
                raise not_in_transaction(place)
            return JoinedPsycopg(place)
        if isinstance(place, str):
            return (yield from adapter_module("django").join(place, "postgresql", JoinedBelowDjango()))  # type: ignore[no-any-return]
        if belongs_to(place, "asyncpg"):
            return adapter_module("asyncpg").join(place)  # type: ignore[no-any-return]
        if belongs_to(place, "sqlalchemy"):
            return (yield from adapter_module("sqlalchemy").join(place, "postgresql"))  # type: ignore[no-any-return]
        raise not_a_place(place)

    @property
    def pooled(self) -> bool:
        return self.database.pooled

    async def aclose(self) -> None:
        await self.database.aclose()

    def notify(self, id: Id) -> Plan[None]:
        return self.batches.notify([id])

    def listen(self) -> None:
        self.batches.listener.listen()


def libpq_conninfo(url: str) -> str:
    """Return libpq's connection string for the URL, with the store's defaults."""
    if STRAY_PERCENT.search(url):  # libpq's error would quote the text around it, which may be the password
        raise ConfigurationError(f"{hide_password(url)}: a % in it begins no escape; write it as %25")
    try:
        return make_conninfo("", **{**CONNECTION, **conninfo_to_dict(url), "client_encoding": "UTF8"})
    except psycopg.Error as error:
        raise ConfigurationError(f"{hide_password(url)}: {error}") from error


def read_cursor(cursor: str) -> Sequence[str]:
    """Return the scope and key of the last record of a page."""
    try:
        return msgspec.json.decode(cursor, type=tuple[str, str])
    except (msgspec.MsgspecError, ValueError) as error:
        raise InvalidPayload(f"{cursor!r} is not a cursor that list() has given") from error
