"""A ledger in a SQLite file, for any number of processes on one machine.

    sqlite:///once.db           a file, relative to the working folder when the store is made
    sqlite:////var/lib/once.db  a file by its absolute path
    sqlite://                   in memory, for this store alone

A call returns after its commit is on the disk (WAL, `synchronous=FULL`).  Concurrent calls are committed together.
The file must be on a local disk.  Options, as `?name=value`:

    create=true         create the tables on first use; with false they must exist: see `oncemore.stores.schema(url)`
    foreign_keys=false  with true, transactions enforce the foreign keys of your own tables; SQLite's default is off
    prefix=oncemore_    the beginning of the tables' names
    synchronous=full    with `normal`, a power failure can lose the last commits: an operation may then run again
    thread=auto         event loops write by themselves while the disk is fast; with `always`, a thread writes for them
    timeout=5s          how long to wait for the file while other processes write it
"""

from __future__ import annotations

import asyncio
import os
import re
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import msgspec

from ..._ledger.connect import adapter_module, take_options, with_options
from ..._ledger.model import Claim, Holder, Lease, Operation, Outcome, Record
from ..._ledger.store import Filter, Page, Stats, token_of
from ..._ledger.tables import Dialect, Executes, Feature, belongs_to, not_a_place, not_in_transaction
from ..._ledger.transactions import Query, Rows, Statement, TransactionAdapter, TransactionSource
from ..._runtime.batching import Batcher, Submit, own_error
from ..._runtime.plan import Plan, Sleep
from ..._runtime.wakeups import Id, Wakeups
from ...errors import ConfigurationError, StoreError
from .batch import (
    NO_RECORD,
    ChangeItem,
    ClaimItem,
    Item,
    SettleItem,
    SqliteBatch,
    Sweep,
    as_record,
    find_record,
    run_batch,
)
from .statements import NOW, SqliteStatements, TableMaker, make_ready, script
from .transactions import (
    JoinedSqlite,
    LedgerFile,
    OwnSqliteTransaction,
    SqliteAdapter,
    SqliteBelowDjango,
    SqliteSource,
    run_queries,
)
from .writer import MEMORY, Connection, Use, Write

OPTIONS = {
    "create": True,
    "foreign_keys": False,
    "prefix": "oncemore_",
    "synchronous": "full",
    "thread": "auto",
    "timeout": 5.0,
}
OLDEST = (3, 33, 0)  # the first version with UPDATE FROM

# A purge removes records in slices of about SLICE_SECONDS, because a claim that shares a slice's commit waits for it.
# While the store is busy, slices take longer, so the next ones are smaller.
SMALLEST_SLICE, LARGEST_SLICE = 50, 2000  # records
SLICE_SECONDS = 0.005
REST = 0.5  # after a slice, the purge pauses for this multiple of the time that the slice took

FILES = (Statement("PRAGMA database_list"), ())


def connect(url: str) -> SqliteStore:
    """Return the ledger in the file that *url* names.  The file is opened, or created, on first use."""
    return SqliteStore(url)


def url_of(path: str, options: Mapping[str, str]) -> str:
    """Return the URL of the ledger in the file that SQLAlchemy or Django opens at *path*."""
    if path in ("", MEMORY) or path.startswith("file:"):
        raise ConfigurationError(
            f"No other connection can open the database {path or MEMORY!r}: the ledger needs a file, named by its path"
        )
    return with_options(f"sqlite:///{quote(os.path.abspath(path))}", options)


def schema(url: str) -> str:
    """Return the script that creates the tables."""
    return script(read_url(url)[1]["prefix"])


def read_url(url: str) -> tuple[str, dict[str, Any]]:
    """Return the file's path and the options."""
    place, _, query = url.partition("?")
    rest, options = take_options(f"sqlite://?{query}", OPTIONS)
    if not re.fullmatch(r"sqlite://(/[^#]+)?", place, re.ASCII | re.DOTALL):
        raise ConfigurationError(
            f"{url!r} names no file: write sqlite:/// and a path; an absolute path begins with a fourth /"
        )
    if unknown := urlsplit(rest).query:
        raise ConfigurationError(f"{unknown!r} in {url!r} is unknown: the options are {', '.join(OPTIONS)}")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", options["prefix"], re.ASCII):
        raise ConfigurationError(
            f"prefix={options['prefix']}: write letters, digits and underscores, not a digit first"
        )
    if options["synchronous"] not in ("full", "normal"):
        raise ConfigurationError(f"synchronous={options['synchronous']}: write full or normal")
    if options["thread"] not in ("auto", "always"):
        raise ConfigurationError(f"thread={options['thread']}: write auto or always")
    if sqlite3.sqlite_version_info < OLDEST:
        raise ConfigurationError(f"SQLite {sqlite3.sqlite_version} is too old: use a Python with SQLite 3.33 or newer")
    path = unquote(place.removeprefix("sqlite://")[1:])
    return (os.path.abspath(path) if path not in ("", MEMORY) else MEMORY), options


def checkpoint_log(connection: sqlite3.Connection) -> None:
    """Move the write-ahead log into the file, so that no commit has to do it.  Writers do not wait for this."""
    connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()


class SqliteStore:
    """Keeps records in a file.  Batches of writes share one connection; long reads and transactions have others."""

    poll = 0.25  # other processes send no notifications; a look writes nothing, so it costs no sync

    def __init__(self, url: str) -> None:
        self.url = url
        self.wakeups = Wakeups()
        self.shift = 0.0
        self.holder = Holder()
        self.path, options = read_url(url)
        self.timeout: float = options["timeout"]
        self.sql = SqliteStatements(options["prefix"])
        pragmas: dict[str, object] = {"synchronous": options["synchronous"]}
        if options["foreign_keys"]:  # if false, SQLite's own default stays: off in most builds
            pragmas["foreign_keys"] = True
        maker = TableMaker(self.path, options["prefix"], create=options["create"])
        prepare = partial(make_ready, tables=maker, pragmas=pragmas)
        open_file = partial(Connection, self.path, prepare, overwrite=self.sql.overwrite, timeout=self.timeout)
        self._writer = open_file(threaded=options["thread"] == "always")
        self._reader = self._writer if self.path == MEMORY else open_file()
        # One batcher for all writes, so that claims and outcomes share a commit.
        self._batcher: Batcher[Item] = Batcher(self._run_batch, undo=self.unclaim, can_undo=attrgetter("can_undo"))
        self._own = SqliteSource(self, lambda writer: SqliteAdapter(writer, prepare))
        self.lender: TransactionSource = self._own
        self.tables = SqliteTables(self, self._writer, self._reader, self._own, maker)
        self._sweep = Sweep()
        self._ready = False

    def ready(self) -> Plan[None]:
        """Create the tables if they are missing."""
        if not self._ready:
            yield Use(self._writer, lambda connection: None)
            self._ready = True

    def _run_batch(self, items: list[Item]) -> Plan[Sequence[Any]]:
        try:
            work = partial(run_batch, sql=self.sql, shift=self.shift, items=items, sweep=self._sweep)
            results: list[Any] = yield Write(self._writer, work)
        except StoreError as error:  # nothing was committed
            return [own_error(error) for _ in items]
        for item in items:
            if item.notifies and not isinstance(item.result, BaseException):
                self.wakeups.notify(item.id)
        return results

    def _change(self, id: Id, apply: Callable[[SqliteBatch], Any], *, notifies: bool = False) -> Plan[Any]:
        return (yield Submit(self._batcher, ChangeItem(id, apply, notifies=notifies)))

    # The guard's verbs

    def claim(self, operation: Operation, *, lease: float, request: bytes = b"") -> Plan[Lease | Record]:
        id = (operation.scope, operation.key)
        item = ClaimItem(id, operation, lease, self.holder.next(), request)
        found: Lease | Record = yield Submit(self._batcher, item)
        return found

    def unclaim(self, claims: Sequence[Claim | Item]) -> Plan[None]:
        """Undo claims.  Runs on the writer's thread, so after a batch that may still be claiming them."""
        items: list[Item] = [
            ChangeItem(claim.operation.id, partial(SqliteBatch.unclaim, id=claim.operation.id, holder=claim.holder))
            for claim in claims
            if isinstance(claim, Claim | ClaimItem)
        ]
        if items:
            yield Use(self._writer, partial(run_batch, sql=self.sql, shift=self.shift, items=items))
        for item in items:
            self.wakeups.notify(item.id)

    def renew(self, held: Lease, *, lease: float) -> Plan[Lease]:
        until = yield from self._change(held.operation.id, lambda batch: batch.renew(held, lease))
        return msgspec.structs.replace(held, expires_at=until)

    def settle(
        self, held: Lease, outcome: Outcome, *, retention: float, audit: bool = False, note: str = ""
    ) -> Plan[None]:
        yield Submit(self._batcher, SettleItem(held, outcome, retention, audit, note))

    def release(self, held: Lease, *, retention: float) -> Plan[None]:
        yield from self._change(held.operation.id, lambda batch: batch.release(held, retention), notifies=True)

    def hold(self, held: Lease, *, note: str = "") -> Plan[None]:
        yield from self._change(held.operation.id, lambda batch: batch.hold(held, note), notifies=True)

    def touch(self, record: Record, *, retention: float) -> Plan[None]:
        yield from self._change(record.id, lambda batch: batch.touch(record, retention))

    def watch(self, record: Record) -> Plan[None]:
        """Do nothing, because waiters look at the records of other processes by themselves."""
        return
        yield

    # The operator's verbs

    def find(self, scope: str, key: str) -> Plan[Record | None]:
        work = partial(find_record, sql=self.sql, shift=self.shift, id=(scope, key))
        record: Record | None = yield Use(self._reader, work)
        return record

    def list(self, where: Filter, *, limit: int = 100, cursor: str | None = None) -> Plan[Page]:
        text, values = self.sql.page(where)
        parameters = (self.shift, token_of(cursor), limit + 1, *values)
        rows = yield Use(self._reader, lambda connection: connection.execute(text, parameters).fetchall())
        records = tuple(as_record(row) for row in rows[:limit])
        return Page(records, str(records[-1].token) if records and len(rows) > limit else None)

    def resolve(
        self, scope: str, key: str, outcome: Outcome | None, *, retention: float, note: str = ""
    ) -> Plan[Record]:
        id = (scope, key)
        record: Record = yield from self._change(
            id, lambda batch: batch.resolve(id, outcome, retention, note), notifies=True
        )
        return record

    def delete(self, scope: str, key: str) -> Plan[bool]:
        id = (scope, key)
        known: bool = yield from self._change(id, lambda batch: batch.delete(id), notifies=True)
        return known

    def purge(self, *, batch: int = 1000) -> Plan[int]:
        total, size = 0, SMALLEST_SLICE
        while total < batch:
            most = min(size, batch - total)
            start = time.monotonic()
            gone: int = yield from self._change(NO_RECORD, partial(SqliteBatch.purge, most=most))
            took = time.monotonic() - start
            # The size is at most halved or doubled, because a single slice may have waited for another process.
            size = int(size * min(2.0, max(0.5, SLICE_SECONDS / max(took, 1e-6))))
            size = min(LARGEST_SLICE, max(SMALLEST_SLICE, size))
            total += gone
            if gone:
                yield Use(self._reader, checkpoint_log)
            if gone < most:
                break
            yield Sleep(REST * took)
        return total

    def stats(self) -> Plan[Stats]:
        rows = yield Use(self._reader, lambda connection: connection.execute(self.sql.stats, (self.shift,)).fetchall())
        counts = {"expired": 0, "lapsed": 0}
        for state, count, expired, lapsed in rows:
            counts[state] = count
            counts["expired"] += expired
            counts["lapsed"] += lapsed
        return Stats(**counts)

    def close(self) -> None:
        """Close this process's connections and end its threads.  A later use opens them again."""
        self.lender.close()
        self._own.close()
        self._writer.close()
        self._reader.close()

    async def aclose(self) -> None:
        """Wait until no batch is under way on this event loop, and close as `close` does."""
        await self._batcher.drain()
        await self.lender.aclose()
        await self._own.aclose()
        await asyncio.to_thread(self.close)


class SqliteTables:
    """Tables beside the ledger's, in the same file."""

    dialect: Dialect = "sqlite"

    def __init__(
        self, store: LedgerFile, writer: Connection, reader: Connection, source: SqliteSource, maker: TableMaker
    ) -> None:
        self.store = store
        self._writer = writer
        self._reader = reader
        self._source = source
        self._maker = maker
        self._ready: set[str] = set()
        self._made_in_transactions: set[str] = set()

    def statement(self, text: str) -> Statement:
        return Statement(text.format(p=self.store.sql.prefix, prefix=self.store.sql.prefix, now=NOW))

    def ready(self, feature: Feature) -> Plan[None]:
        if feature.name not in self._ready:
            yield Use(self._writer, partial(self._maker.make, feature=feature))
            self._ready.add(feature.name)

    def ready_in(self, feature: Feature, adapter: Executes) -> Plan[None]:
        """Create the tables in the user's transaction, because it may hold the file's write lock.

        If the transaction is rolled back, the tables are gone.  So `_made_in_transactions` remembers the feature, and
        each later transaction looks again.
        """
        if feature.name in self._ready:
            return
        rows: Rows = yield from adapter.execute((Statement(self._maker.exist), ()))
        if rows:
            rows = yield from adapter.execute((Statement(self._maker.version), (feature.name,)))
        missing = self._maker.missing(feature, rows)
        for text in missing:
            yield from adapter.execute((Statement(text), ()))
        if missing:
            self._made_in_transactions.add(feature.name)
        elif feature.name not in self._made_in_transactions:
            self._ready.add(feature.name)

    def execute(self, queries: Sequence[Query], *, patient: bool) -> Plan[list[Rows]]:
        if all(statement.text.lstrip().startswith("SELECT") for statement, _ in queries):
            return (yield Use(self._reader, partial(run_together, queries=queries, begin="BEGIN")))  # type: ignore[no-any-return]
        work = partial(run_together, queries=queries, begin="BEGIN IMMEDIATE")
        return (yield Write(self._writer, work))  # type: ignore[no-any-return]

    def open(self) -> TransactionAdapter:
        return OwnSqliteTransaction(self._source)

    def join(self, place: Any) -> Plan[Executes]:
        adapter: Executes
        if isinstance(place, sqlite3.Connection) or belongs_to(place, "aiosqlite"):
            # sqlite3 begins a transaction with the first INSERT, unless it is in autocommit mode.
            begins = place.isolation_level is not None and getattr(place, "autocommit", None) is not True
            if not place.in_transaction and not begins:
                raise not_in_transaction(place)
            adapter = JoinedSqlite(place)
        elif isinstance(place, str):
            adapter = yield from adapter_module("django").join(place, "sqlite", SqliteBelowDjango(self.store.sql))
        elif belongs_to(place, "sqlalchemy"):
            adapter = yield from adapter_module("sqlalchemy").join(place, "sqlite")
        else:
            raise not_a_place(place)
        yield from self._check_file(place, adapter)
        return adapter

    def _check_file(self, place: Any, adapter: Executes) -> Plan[None]:
        """Refuse a connection to another file, because the ledger's relays would never find the row there."""
        rows = yield from adapter.execute(FILES)
        path = next((row[2] for row in rows if row[1] == "main"), "")
        if self.store.path == MEMORY or os.path.realpath(path) != os.path.realpath(self.store.path):
            raise ConfigurationError(
                f"This {type(place).__name__} is on {path or MEMORY!r}, but the guard's file is {self.store.path!r}: "
                "rows commit together only in one file, so use the guard's"
            )

    pooled = False

    async def aclose(self) -> None:
        """Do nothing, because no connection of the store belongs to an event loop."""

    def notify(self, id: Id) -> Plan[None]:
        """Do nothing, because other processes look by themselves."""
        return
        yield

    def listen(self) -> None:
        """Do nothing, because no messages come."""


def run_together(connection: sqlite3.Connection, *, queries: Sequence[Query], begin: str) -> list[Rows]:
    """Run *queries* in one transaction, and return the rows of each.  If one fails, the caller rolls back."""
    connection.execute(begin)
    results = [run_queries(connection, [query]) for query in queries]
    connection.execute("COMMIT")
    return results
