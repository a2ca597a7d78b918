"""Where one borrower after the other gets a SQLite connection, and knows whom it waits for.

The file has one writer at a time, so whoever wants to be it waits for its turn in order, which is fairer and faster than
to contend for the file.  A desk is that of all threads, or of one event loop.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ..._ledger.transactions import Do, Transaction, no_session
from ..._runtime.forks import reset_in_child
from ..._runtime.plan import Effect, Plan
from ..._runtime.wakeups import Id
from ...errors import ConfigurationError, InProgress, StoreTimeout
from .transactions import SqliteTransaction, again

if TYPE_CHECKING:
    from .store import SqliteStore

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]
Taken = Callable[[], None]  # tells the wire that it has the desk, wherever that comes to be known


class Desk(Protocol):
    """One connection at a time, and who has it."""

    path: str
    running: Id | None
    owner: object

    @property
    def awaited(self) -> bool: ...  # whether the connection is of an async driver
    @property
    def connection(self) -> Any: ...  # what the performer borrows
    def here(self) -> object: ...  # who asks
    def turn(self, limit: float, taken: Taken) -> Effect[None]: ...
    def call(self, work: Work[T]) -> Effect[T]: ...
    def session(self) -> Any: ...
    def finish(self) -> Plan[None]: ...
    def give(self, *, committed: bool) -> Plan[None]: ...
    def shut(self) -> None: ...  # end a connection that is not trusted
    def end(self) -> Plan[None]: ...  # the same, for one who can wait until it is done
    def leave(self) -> None: ...  # the next one's turn


class ThreadDesk:
    """The desk of all threads; with what every desk has."""

    awaited = False

    def __init__(self, path: str) -> None:
        self.path = path
        self.connection: Any = None
        self.running: Id | None = None
        self.owner: object = None
        self.gate = threading.Lock()

    def here(self) -> object:
        return asker()

    def do(self, work: Callable[[], T]) -> Do[T]:
        return Do(work, None)

    def turn(self, limit: float, taken: Taken) -> Effect[None]:
        return self.do(lambda: self._turn(limit, taken))

    def _turn(self, limit: float, taken: Taken) -> None:
        if not self.gate.acquire(timeout=limit):
            return
        try:
            self.take()
        except BaseException:
            self.gate.release()
            raise
        taken()

    def take(self) -> None:
        """Have a connection."""
        raise NotImplementedError

    def raw(self) -> sqlite3.Connection:
        return self.connection  # type: ignore[no-any-return]

    def call(self, work: Work[T]) -> Effect[T]:
        return self.do(lambda: work(self.raw()))

    def session(self) -> Any:
        raise no_session()

    def finish(self) -> Plan[None]:
        return
        yield

    def give(self, *, committed: bool) -> Plan[None]:
        return
        yield

    def shut(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def end(self) -> Plan[None]:
        self.shut()
        return
        yield

    def leave(self) -> None:
        self.running = self.owner = None
        self.gate.release()

    def close(self) -> None:
        with self.gate:
            self.shut()


class Enlisted:
    """Lends the user's own connections: *threads* makes the desk of all threads, *loop* that of one event loop."""

    def __init__(
        self, store: SqliteStore, *, threads: Callable[[], Desk] | None = None, loop: Callable[[], Desk] | None = None
    ) -> None:
        self.store = store
        self._make_threads = threads
        self._make_loop = loop
        self._reset()
        reset_in_child(self)

    def _reset(self) -> None:
        self._threads = self._make_threads() if self._make_threads is not None else None
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Desk] = weakref.WeakKeyDictionary()

    def open(self) -> Plan[Transaction]:
        store = self.store
        desk: Desk = self._threads or (yield Do(None, self._on_loop))
        yield from store.ready()
        wire = DeskWire(desk, store.timeout)
        return SqliteTransaction(
            wire, store.sql, path=store.path, shift=store.shift, holder=store.holder.next(), timeout=store.timeout
        )

    async def _on_loop(self) -> Desk:
        loop = asyncio.get_running_loop()
        assert self._make_loop is not None, "there is a desk for threads, or for loops"
        return self._loops.get(loop) or self._loops.setdefault(loop, self._make_loop())

    def again(self, error: BaseException) -> bool:
        return again(error)

    def close(self) -> None:
        """Nothing here is ours to close."""

    async def aclose(self) -> None:
        """Nothing here is ours to close."""


class DeskWire:
    """One borrower's turn at a desk."""

    def __init__(self, desk: Desk, timeout: float) -> None:
        self.desk = desk
        self.timeout = timeout
        self.taken = False

    @property
    def connection(self) -> Any:
        return self.desk.connection

    @property
    def awaited(self) -> bool:
        return self.desk.awaited

    def session(self) -> Any:
        return self.desk.session()

    def open(self, id: Id, wait: float) -> Plan[None]:
        desk, who = self.desk, self.desk.here()
        if desk.owner is not None and desk.owner == who:
            raise ConfigurationError(
                "SQLite has one writer at a time: an operation with effect = 'transaction' cannot run inside another one; "
                "do its work on op.connection"
            )
        same = desk.running == id
        limit = wait if same else max(wait, self.timeout)
        try:
            yield desk.turn(limit, self._take)
        except BaseException:  # one who is cancelled may have got it all the same
            self.drop()
            raise
        if self.taken:
            desk.running, desk.owner = id, who
        elif same:
            raise InProgress("The first request with this key is still running; retry later", retry_after=1.0)
        else:
            raise StoreTimeout(f"{desk.path}: this process has been writing it for {limit:g} s")

    def _take(self) -> None:
        self.taken = True

    def call(self, work: Work[T]) -> Effect[T]:
        return self.desk.call(work)

    def finish(self) -> Plan[None]:
        return self.desk.finish()

    def end(self, *, healthy: bool, committed: bool) -> Plan[None]:
        try:
            yield from self.desk.give(committed=committed) if healthy else self.desk.end()
        finally:
            self._leave()

    def drop(self) -> None:
        if self.taken:
            self.desk.shut()
        self._leave()

    def _leave(self) -> None:
        if self.taken:
            self.taken = False
            self.desk.leave()


def asker() -> object:
    """Who runs this: the task of an event loop, or the thread."""
    loop = asyncio._get_running_loop()  # None where there is none, rather than an error
    return (asyncio.current_task(loop) if loop is not None else None) or threading.get_ident()
