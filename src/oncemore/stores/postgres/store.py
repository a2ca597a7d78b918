"""The verbs of the ledger in PostgreSQL."""

from __future__ import annotations

import re
import weakref
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlencode

import msgspec
import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from ..._ledger.connect import hide_password, take_options
from ..._ledger.decisions import not_deletable, not_resolvable
from ..._ledger.events import log
from ..._ledger.model import Lease, Operation, Outcome, Record, encode_outcome
from ..._ledger.states import HELD, RELEASED, RUNNING, SETTLED, State, read
from ..._ledger.store import Filter, Holder, Page, Stats, Store
from ..._ledger.transactions import Lender
from ..._runtime.batching import Batcher, Submit
from ..._runtime.plan import Plan
from ..._runtime.wakeups import Id, Wakeups
from ...errors import ConfigurationError, InvalidPayload, OncemoreError, StoreError
from . import tables
from .batch import Flights, is_expired
from .connection import Rows
from .lender import PostgresLender, wire_of
from .listener import Ear
from .rows import (
    LONGEST_SPAN,
    Claimed,
    Found,
    Item,
    Moved,
    Touched,
    Watched,
    check_length,
    encode_rows,
    read_record,
    safe,
)
from .session import Database
from .statements import Statement
from .transactions import Enlisted

OPTIONS: dict[str, Any] = {
    "schema": "public",
    "prefix": "oncemore_",
    "create": True,
    "timeout": 5.0,
    "poll": 1.0,
    "listen": True,
    "pool": 16,
}
# A dead peer is noticed within a minute, where the system would take two hours.
CONNECTION = {
    "fallback_application_name": "oncemore",
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
}

STRAY_PERCENT = re.compile("%(?![0-9A-Fa-f]{2})")

# What psycopg's connect() takes, and libpq does not know.
CLIENT_SIDE = {"autocommit", "prepare_threshold", "context", "row_factory", "cursor_factory"}

BLIND_POLL = 0.25
MOST_MARKED = 10_000
# Not all who wait: while the server works on one group, this process works on what the last one was answered.
TOGETHER = 32


def connect(url: str) -> Store:
    """The ledger in the database that *url* names; nothing is opened before it is used."""
    return PostgresStore(url)


def enlist(pool: Any, options: Mapping[str, str]) -> Store:
    """The ledger in the database of a pool of psycopg_pool's, whose connections are the ones that are lent."""
    if callable(pool.conninfo) or callable(pool.kwargs):
        raise ConfigurationError(
            "The pool makes up its address as it goes: give the guard a pool with a fixed conninfo"
        )
    kwargs = {name: value for name, value in (pool.kwargs or {}).items() if name not in CLIENT_SIDE}
    store = PostgresStore(url_of(conninfo_to_dict(pool.conninfo, **kwargs), options))
    store.lender = Enlisted(store, lambda: wire_of(pool, store.database.timeout))
    return store


def url_of(settings: Mapping[str, Any], options: Mapping[str, str]) -> str:
    """A URL that says the same as libpq's settings, with ours."""
    said = {**{name: value for name, value in settings.items() if value is not None}, **options}
    return f"postgresql:///?{urlencode(said, quote_via=quote)}"


def schema(url: str) -> str:
    """The script that creates the tables, with comments for those who run it."""
    _, options = take_options(url, OPTIONS)
    return tables.script(tables.names(options["schema"], options["prefix"]))


class PostgresStore:
    """Records in a table.  The waiting claims of concurrent callers are one statement, and so are their writes."""

    def __init__(self, url: str) -> None:
        place, options = take_options(url, OPTIONS)
        for name in ("timeout", "poll", "pool"):
            if options[name] <= 0:
                raise ConfigurationError(f"{name}=0 in the store's URL: it must be more than nothing")
        names = tables.names(options["schema"], options["prefix"])
        conninfo = libpq_conninfo(place)
        self.url = hide_password(url)
        self.wakeups = Wakeups()
        self.holder = Holder()
        self.database = Database(conninfo, names, create=options["create"], timeout=options["timeout"])
        self._sql = self.database.sql
        self._poll: float = options["poll"]
        channel = f"{options['schema']}.{options['prefix']}bell"[:63]  # where two share one, they ring in vain at times
        self._ear = Ear(conninfo, channel, self.wakeups, deaf=not options["listen"])
        self._marked: dict[Id, int] = {}
        flights = Flights(self.database, self.wakeups, self._ear)
        self._claims = Batcher(flights.claims, limit=TOGETHER, undo=flights.undo_claims)
        self._writes = Batcher(flights.writes, limit=TOGETHER)
        self._desk = Batcher(flights.errand, limit=1, undo=flights.drop_errand)
        self.lender: Lender = PostgresLender(self, conninfo, most=options["pool"])
        weakref.finalize(self, self._ear.close)  # its thread would else outlive a store that nobody closed

    @property
    def poll(self) -> float:
        """The longest that a waiter trusts wake-ups alone; shorter where no messages arrive."""
        return min(self._poll, BLIND_POLL) if self._ear.deaf else self._poll

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
        """Have the tables made, if they are not."""
        if not self.database.ready:
            yield from self._errand(self._sql.version, [])

    # The owner's verbs, which fly in groups

    def claim(self, operation: Operation, *, lease: float) -> Plan[Lease | Record]:
        self._ear.listen()  # also for the guard's cache, which must hear of deletions
        row = Claimed(
            scope=safe(operation.scope),
            key=safe(operation.key),
            name=safe(operation.name),
            fingerprint=safe(operation.fingerprint),
            holder=self.holder.next(),
            lease=min(lease, LONGEST_SPAN),
        )
        check_length(row.scope, row.key)
        return (yield Submit(self._claims, Item(row, operation)))  # type: ignore[no-any-return]

    def renew(self, held: Lease, *, lease: float) -> Plan[Lease]:
        until = yield self._moved(held, RUNNING, lease=min(lease, LONGEST_SPAN))
        return msgspec.structs.replace(held, expires_at=until)

    def settle(
        self, held: Lease, outcome: Outcome, *, retention: float, audit: bool = False, note: str = ""
    ) -> Plan[None]:
        yield self._moved(
            held,
            SETTLED,
            encode_outcome(outcome),
            retention=min(retention, LONGEST_SPAN),
            status=outcome.status,
            response_hash=outcome.digest(),
            note=safe(note),
            audit=audit,
        )

    def release(self, held: Lease, *, retention: float) -> Plan[None]:
        yield self._moved(held, RELEASED, retention=min(retention, LONGEST_SPAN))

    def hold(self, held: Lease, *, note: str = "") -> Plan[None]:
        yield self._moved(held, HELD, note=safe(note))

    def _moved(self, held: Lease, state: State, outcome: bytes | None = None, **changes: Any) -> Submit[Item]:
        scope, key = held.operation.id
        row = Moved(scope=safe(scope), key=safe(key), token=held.token, state=state, **changes)
        return Submit(self._writes, Item(row, held, outcome))

    def touch(self, record: Record, *, retention: float) -> Plan[None]:
        row = Touched(
            scope=safe(record.scope),
            key=safe(record.key),
            token=record.token,
            retention=min(retention, LONGEST_SPAN),
        )
        yield Submit(self._writes, Item(row))

    def watch(self, record: Record) -> Plan[None]:
        """Have the record's owner send a message when it is done; one of this very process notifies its waiters anyway."""
        if self._ear.deaf or self._marked.get(record.id) == record.token or self._is_mine(record):
            return
        self._ear.listen()
        try:
            running = yield Submit(
                self._writes,
                Item(Watched(scope=safe(record.scope), key=safe(record.key), token=record.token)),
            )
        except StoreError:
            return  # then there is no message, and the waiter looks for itself in a while
        if running:
            self._mark(record)
        else:
            self.wakeups.notify(record.id)

    def _is_mine(self, record: Record) -> bool:
        return record.holder.rpartition(":")[0] == self.holder.next().rpartition(":")[0]

    def _mark(self, record: Record) -> None:
        if len(self._marked) >= MOST_MARKED:
            self._marked.clear()
        self._marked[record.id] = record.token

    def find(self, scope: str, key: str) -> Plan[Record | None]:
        return (yield Submit(self._writes, Item(Found(scope=safe(scope), key=safe(key)))))  # type: ignore[no-any-return]

    # The operators' verbs

    def list(self, where: Filter, *, limit: int = 100, cursor: str | None = None) -> Plan[Page]:
        after = read_cursor(cursor) if cursor else None
        texts = {name: safe(text) for name in ("scope", "key", "name") if (text := getattr(where, name)) is not None}
        where = msgspec.structs.replace(where, **texts)
        rows = yield from self._errand(*self._sql.list(where, after, limit=limit + 1, shift=self.shift))
        more = encode_rows(rows[limit - 1][:2]).decode() if len(rows) > limit else None
        return Page(tuple(read_record(row) for row in rows[:limit]), more)

    def resolve(
        self, scope: str, key: str, outcome: Outcome | None, *, retention: float, note: str = ""
    ) -> Plan[Record]:
        holder = self.holder.next()  # tells our own doing from another's, should the answer be lost
        kept: Sequence[Any] = (None, None, "")
        if outcome is not None:
            kept = (outcome.status, encode_outcome(outcome), outcome.digest())
        state = RELEASED if outcome is None else SETTLED
        values = [safe(scope), safe(key), self.shift, state, min(retention, LONGEST_SPAN), *kept, safe(note), holder]
        while True:
            rows = yield from self._errand(self._sql.resolve, values)
            record = read_record(rows[0]) if rows else None
            if record is not None and record.holder == holder:
                yield from self._tell(record.id)
                return record
            judged = state_of(record)
            if judged not in (HELD, "lapsed"):  # then it has become so just now
                raise not_resolvable(judged)

    def delete(self, scope: str, key: str) -> Plan[bool]:
        # Looked for before: should the answer be lost, the statement that is sent again finds nothing any more.
        known = (yield from self.find(scope, key)) is not None
        while True:
            rows = yield from self._errand(self._sql.delete, [safe(scope), safe(key), self.shift])
            if not rows:
                if known:
                    yield from self._tell((scope, key))
                return known
            removed, state, over = rows[0]
            if removed:
                yield from self._tell((scope, key))
                return True
            if state == RUNNING and not over:  # else it has become deletable just now
                raise not_deletable()
            if over and state not in (RUNNING, HELD):  # what has expired is left to the purge, which may archive it
                return False

    def purge(self, *, batch: int = 1000) -> Plan[int]:
        rows = yield from self._errand(self._sql.purge, [self.shift, batch])
        return rows[0][0]  # type: ignore[no-any-return]

    def stats(self) -> Plan[Stats]:
        rows = yield from self._errand(self._sql.stats, [self.shift])
        return Stats(**dict(zip(Stats.__struct_fields__, rows[0], strict=True)))

    def _errand(self, statement: Statement, values: Sequence[Any]) -> Plan[Rows]:
        return (yield Submit(self._desk, (statement, values)))  # type: ignore[no-any-return]

    def _tell(self, id: Id) -> Plan[None]:
        self.wakeups.notify(id)
        for message in self._ear.messages([id]):
            try:
                yield from self._errand(self._sql.notify, [self._ear.channel, message])
            except OncemoreError as error:  # the others' waiters and caches look for themselves, in a minute at most
                log.info("No word of a change could be sent: %s", error)

    def close(self) -> None:
        """End the connections of this process's threads, and the thread that listens; they come back when needed."""
        self._ear.close()
        self.lender.close()
        self.database.lanes.close()
        self.database.desk.close()

    async def aclose(self) -> None:
        """As `close`, for the running event loop's connections too."""
        for batcher in (self._claims, self._writes, self._desk):
            await batcher.drain()
        await self.lender.aclose()
        await self.database.lanes.aclose()
        await self.database.desk.aclose()
        self.close()


def libpq_conninfo(url: str) -> str:
    """The URL as libpq takes it, with our defaults."""
    if STRAY_PERCENT.search(url):  # libpq would quote what is around it, which may be the password
        raise ConfigurationError(f"{hide_password(url)}: a % in it stands for itself; write it as %25")
    try:
        return make_conninfo("", **{**CONNECTION, **conninfo_to_dict(url), "client_encoding": "UTF8"})
    except psycopg.Error as error:
        raise ConfigurationError(f"{hide_password(url)}: {error}") from error


def read_cursor(cursor: str) -> Sequence[str]:
    """The scope and key that a page ended with."""
    try:
        return msgspec.json.decode(cursor, type=tuple[str, str])
    except (msgspec.MsgspecError, ValueError) as error:
        raise InvalidPayload(f"{cursor!r} is not a cursor that list() has given") from error


def state_of(record: Record | None) -> str:
    """The state as the store's clock saw it."""
    if record is None:
        return "absent"
    return read(record.state, expired=is_expired(record), lapsed=record.lease_until <= record.now)
