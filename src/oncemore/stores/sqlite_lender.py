"""Lends connections to the ledger's own SQLite file: sqlite3's to threads, aiosqlite's to event loops.

The file has one writer at a time, so one connection for all threads and one for each event loop are enough: whoever
wants one waits for its turn in order, which is fairer and faster than to contend for the file.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import weakref
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from ..core.bell import Id
from ..core.fork import reset_in_child
from ..core.lending import Do, Transaction
from ..core.plan import Effect, Plan
from ..errors import ConfigurationError, InProgress, MissingDriver, StoreTimeout
from .sqlite_connection import MEMORY
from .sqlite_transaction import SqliteTransaction, again, ended

if TYPE_CHECKING:
    import aiosqlite

    from .sqlite import SqliteStore

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]


class Lent(sqlite3.Connection):
    """A connection whose transaction is the guard's: the borrower can neither commit nor roll back by mistake."""

    def commit(self) -> None:
        raise ended()

    def rollback(self) -> None:
        raise ended()

    def __exit__(self, *_: object) -> Any:
        return False  # `with connection:` would commit; here it is a block like any other


class SqliteLender:
    """Lends the connections of *store*'s file."""

    def __init__(self, store: SqliteStore, prepare: Callable[[sqlite3.Connection], None]) -> None:
        self.store = store
        self._prepare = prepare
        self._reset()
        reset_in_child(self)

    def _reset(self) -> None:
        self.threads = ThreadDesk(self)
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopDesk] = weakref.WeakKeyDictionary()

    def open(self) -> Plan[Transaction]:
        store = self.store
        if store.path == MEMORY:
            raise ConfigurationError("A ledger in memory lends no connection: effect = 'transaction' needs a file")
        desk: Desk = yield Do(lambda: self.threads, self._on_loop)
        wire = OwnWire(desk, store.timeout)
        return SqliteTransaction(
            wire, store.sql, path=store.path, shift=store.shift, holder=store.holder.next(), timeout=store.timeout
        )

    async def _on_loop(self) -> Desk:
        loop = asyncio.get_running_loop()
        return self._loops.get(loop) or self._loops.setdefault(loop, LoopDesk(self))

    def made_ready(self, connection: sqlite3.Connection) -> None:
        self._prepare(connection)

    def again(self, error: BaseException) -> bool:
        return again(error)

    def close(self) -> None:
        self.threads.close()

    async def aclose(self) -> None:
        desk = self._loops.pop(asyncio.get_running_loop(), None)
        if desk is not None:
            await desk.close()
        self.close()


class ThreadDesk:
    """The threads' connection, and who has it."""

    def __init__(self, lender: SqliteLender) -> None:
        self.lender = lender
        self.connection: sqlite3.Connection | None = None
        self.running: Id | None = None
        self.owner: object = None
        self.gate = threading.Lock()

    def here(self) -> object:
        return threading.get_ident()

    def take(self, limit: float) -> bool:
        """Whether the connection is the caller's now."""
        if not self.gate.acquire(timeout=limit):
            return False
        if self.connection is None:
            try:
                connection = open_file(self.lender.store.path)
                self.lender.made_ready(connection)
            except BaseException:
                self.gate.release()
                raise
            self.connection = connection
        return True

    def call(self, work: Work[T]) -> Effect[T]:
        connection = self.connection
        assert connection is not None, "the connection was taken"
        return Do(lambda: work(connection), None)

    def shut(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def close(self) -> None:
        with self.gate:
            self.shut()


class LoopDesk:
    """An event loop's connection, and who has it."""

    def __init__(self, lender: SqliteLender) -> None:
        self.lender = lender
        self.connection: aiosqlite.Connection | None = None
        self.running: Id | None = None
        self.owner: object = None
        self.gate = asyncio.Lock()

    def here(self) -> object:
        return asyncio.current_task()

    async def take(self, limit: float) -> bool:
        if self.gate.locked():
            try:
                await asyncio.wait_for(self.gate.acquire(), limit)
            except TimeoutError:
                return False
        else:
            await self.gate.acquire()  # at once: to wait for it would take a task
        if self.connection is None:
            try:
                connection = await open_aiosqlite(self.lender.store.path)
                await connection._execute(self.lender.made_ready, connection._conn)  # type: ignore[no-untyped-call]
            except BaseException:
                self.gate.release()
                raise
            self.connection = connection
            weakref.finalize(self, stop, connection)  # its thread would else outlive a loop that nobody closed
        return True

    def call(self, work: Work[T]) -> Effect[T]:
        connection = self.connection
        assert connection is not None, "the connection was taken"

        async def awaited() -> T:
            result: T = await connection._execute(work, connection._conn)  # type: ignore[no-untyped-call]
            return result

        return Do(None, awaited)

    def shut(self) -> None:
        if self.connection is not None:
            stop(self.connection)
            self.connection = None

    async def close(self) -> None:
        async with self.gate:
            self.shut()


Desk = ThreadDesk | LoopDesk


class OwnWire:
    """One borrower's turn at a desk."""

    def __init__(self, desk: Desk, timeout: float) -> None:
        self.desk = desk
        self.timeout = timeout
        self.taken = False

    @property
    def connection(self) -> Any:
        return self.desk.connection

    def session(self) -> Any:
        raise ConfigurationError("op.session() needs SQLAlchemy: hand the guard an Engine, as in Guard(engine)")

    def open(self, id: Id, wait: float) -> Plan[None]:
        desk, limit = self.desk, max(wait, self.timeout)
        if desk.owner is not None and desk.owner == desk.here():
            raise ConfigurationError(
                "SQLite has one writer at a time: an operation with effect = 'transaction' cannot run inside another one; "
                "do its work on op.connection"
            )
        same = desk.running == id
        taken = yield Do(lambda: desk.take(wait if same else limit), lambda: desk.take(wait if same else limit))  # type: ignore[arg-type,return-value]
        if not taken and same:
            raise InProgress("The first request with this key is still running; retry later", retry_after=1.0)
        if not taken:
            raise StoreTimeout(f"{desk.lender.store.path}: this process has been writing it for {limit:g} s")
        self.taken = True
        desk.running, desk.owner = id, desk.here()

    def call(self, work: Work[T]) -> Effect[T]:
        return self.desk.call(work)

    def end(self, *, healthy: bool) -> Plan[None]:
        if not healthy:
            self.drop()
        else:
            self._leave()
        return
        yield

    def drop(self) -> None:
        if self.taken:
            self.desk.shut()
        self._leave()

    def _leave(self) -> None:
        if self.taken:
            self.taken = False
            self.desk.running = self.desk.owner = None
            self.desk.gate.release()


def open_file(path: str) -> Lent:
    return sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False, factory=Lent)


def open_aiosqlite(path: str) -> Awaitable[aiosqlite.Connection]:
    try:
        import aiosqlite
    except ModuleNotFoundError as error:
        raise MissingDriver(
            "effect = 'transaction' on sqlite:/// from an event loop needs a driver; install it with: "
            "pip install 'oncemore[aiosqlite]'"
        ) from error
    connection = aiosqlite.connect(path, timeout=0, isolation_level=None, check_same_thread=False, factory=Lent)
    thread_of(connection).daemon = True  # a process that ends does not wait for it
    return connection


def stop(connection: aiosqlite.Connection) -> None:
    """End the connection and its thread, from wherever this is called."""
    connection.stop()
    thread_of(connection).join(5)


def thread_of(connection: Any) -> threading.Thread:
    thread: threading.Thread = getattr(connection, "_thread", connection)  # older ones were the thread themselves
    return thread
