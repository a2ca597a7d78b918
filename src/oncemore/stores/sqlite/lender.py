"""Lends connections to the ledger's own SQLite file: sqlite3's to threads, aiosqlite's to event loops.

The file has one writer at a time, so one connection for all threads and one for each event loop are enough: whoever
wants one waits for its turn in order, which is fairer and faster than to contend for the file.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
import weakref
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from ..._ledger.transactions import Do, Transaction, ended, no_session, threads
from ..._runtime.forks import Rest, reset_in_child
from ..._runtime.plan import Effect, Plan
from ..._runtime.wakeups import Id
from ...errors import ConfigurationError, MissingDriver
from .desk import Desk, DeskWire, Taken, ThreadDesk, Work
from .transactions import SqliteTransaction, again, make_plain
from .writer import MEMORY

if TYPE_CHECKING:
    import aiosqlite

    from .store import SqliteStore

T = TypeVar("T")

# Closed across forks as well, before the ledger's own connections, which one who finishes a transaction may need.
DESKS = Rest()
FORKING = 0.001  # between two looks at whether a fork is over, which mostly takes no longer


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
        self.threads = FileDesk(self)
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopDesk] = weakref.WeakKeyDictionary()

    def open(self) -> Plan[Transaction]:
        store = self.store
        if store.path == MEMORY:
            raise ConfigurationError("A ledger in memory lends no connection: effect = 'transaction' needs a file")
        desk: Desk = yield Do(lambda: self.threads, self._on_loop)
        wire = DeskWire(desk, store.timeout)
        return SqliteTransaction(
            wire, store.sql, path=store.path, shift=store.shift, holder=store.holder.next(), timeout=store.timeout
        )

    async def _on_loop(self) -> Desk:
        loop = asyncio.get_running_loop()
        desk = self._loops.get(loop)
        if desk is None:
            self._forget_closed()
            desk = self._loops[loop] = LoopDesk(self)
        return desk

    def _forget_closed(self) -> None:
        """End the connections of loops that are no more: a gate that someone has waited at keeps its loop alive."""
        for loop, desk in tuple(self._loops.items()):
            if loop.is_closed():
                self._loops.pop(loop, None)  # another thread may forget it, too
                desk.shut()

    def made_ready(self, connection: sqlite3.Connection) -> None:
        self._prepare(connection)

    def again(self, error: BaseException) -> bool:
        return again(error)

    def close(self) -> None:
        self._forget_closed()
        self.threads.close()

    async def aclose(self) -> None:
        desk = self._loops.pop(asyncio.get_running_loop(), None)
        if desk is not None:
            await desk.close()
        self.close()


class FileDesk(ThreadDesk):
    """The threads' one connection of our own."""

    def __init__(self, lender: SqliteLender) -> None:
        super().__init__(lender.store.path)
        self.lender = lender
        self.process = os.getpid()
        DESKS.things.add(self)

    def _rest(self) -> bool:
        """Once the borrower is done; but one who forks itself, or takes very long, is not waited for.

        Nor is anyone in a child: the parent's desk is kept there, and stays as it was.
        """
        if self.process != os.getpid() or self.owner == self.here():
            return False
        return self.gate.acquire(timeout=self.lender.store.timeout)

    def _put_away(self) -> None:
        self.shut()

    def _go_on(self) -> None:
        self.gate.release()

    def take(self) -> None:
        if self.connection is None:
            connection = open_file(self.path)
            try:
                self.lender.made_ready(connection)
            except BaseException:
                connection.close()
                raise
            self.connection = connection
        make_plain(self.connection)  # the last borrower may have had it otherwise


class LoopDesk:
    """An event loop's one connection of our own."""

    awaited = True

    def __init__(self, lender: SqliteLender) -> None:
        self.lender = lender
        self.path = lender.store.path
        self.connection: aiosqlite.Connection | None = None
        self.running: Id | None = None
        self.owner: object = None
        self.gate = asyncio.Lock()
        self.hand = threading.Lock()  # goes with the gate: a fork may come from any thread
        self.process, self.thread = os.getpid(), threading.get_ident()
        self._end: Callable[[], object] = lambda: None  # the connection and its thread
        self._ending: list[threading.Thread] = []
        DESKS.things.add(self)

    def _rest(self) -> bool:
        """As at a `FileDesk`; the loop's own thread cannot wait for a borrower that it would have to go on with."""
        limit = 0 if self.thread == threading.get_ident() else self.lender.store.timeout
        return self.process == os.getpid() and self.hand.acquire(timeout=limit)

    def _put_away(self) -> None:
        self.shut()
        for thread in self._ending:
            thread.join(5)

    def _go_on(self) -> None:
        self.hand.release()

    def here(self) -> object:
        return asyncio.current_task()

    def turn(self, limit: float, taken: Taken) -> Effect[None]:
        return Do(None, lambda: self._turn(limit, taken))

    async def _turn(self, limit: float, taken: Taken) -> None:
        if not await passed(self.gate, limit):
            return
        try:
            while not self.hand.acquire(blocking=False):  # a fork has it, and may wait for others on this very loop
                await asyncio.sleep(FORKING)
        except BaseException:
            self.gate.release()
            raise
        if self.connection is None:
            try:
                self.connection = connection = await open_aiosqlite(self.path)
                self._end = weakref.finalize(self, stop, connection)  # else its thread might outlive the loop
                await connection._execute(self.lender.made_ready, connection._conn)  # type: ignore[no-untyped-call]
            except BaseException:
                self.shut()
                self.leave()
                raise
        with suppress(ValueError):  # somebody has closed it, which is told of where it is used
            make_plain(self.connection)
        taken()

    def call(self, work: Work[T]) -> Effect[T]:
        connection = self.connection
        assert connection is not None, "the connection was taken"

        async def awaited() -> T:
            try:
                raw = connection._conn
            except ValueError as error:  # the performer has closed it
                raise ended() from error
            result: T = await connection._execute(work, raw)  # type: ignore[no-untyped-call]
            return result

        return Do(None, awaited)

    def session(self) -> Any:
        raise no_session()

    def finish(self) -> Plan[None]:
        return
        yield

    def give(self, *, committed: bool) -> Plan[None]:
        return
        yield

    def shut(self) -> None:
        """End the connection once its thread has done what it is at, which may take a while: nobody waits for it here."""
        connection, self.connection = self.connection, None
        if connection is not None:
            self._ending = [*filter(threading.Thread.is_alive, self._ending), thread_of(connection)]
            with suppress(RuntimeError):  # the interpreter ends, and the connection with it
                threads().submit(self._end)  # from there, aiosqlite tells no loop, which might be closed by then

    def end(self) -> Plan[None]:
        self.shut()
        return
        yield

    def leave(self) -> None:
        self.running = self.owner = None
        self.hand.release()
        self.gate.release()

    async def close(self) -> None:
        async with self.gate:
            self.shut()
        for thread in self._ending:
            await asyncio.to_thread(thread.join, 5)


async def passed(gate: asyncio.Lock, limit: float) -> bool:
    """Whether the gate is the caller's now."""
    if not gate.locked():
        return await gate.acquire()  # at once: to wait for it would take a task
    try:
        async with asyncio.timeout(limit):  # not wait_for, which makes a task of it
            return await gate.acquire()
    except TimeoutError:
        return False


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
