"""The process's connections to a SQLite file: opened on first use, by one thread at a time, and closed across forks."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sqlite3
import threading
import time
import weakref
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, TypeVar

from ..._ledger.transactions import Do
from ..._runtime.batching import set_result
from ..._runtime.forks import check_usable, close_before_fork, reset_in_child
from ..._runtime.wakeups import Id
from ...errors import StoreError, StoreTimeout, StoreUnavailable
from .._compat import stop_aiosqlite

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]

MEMORY = ":memory:"

# Seconds between two tries for a file that another process is writing.  SQLite's own pauses grow with the time that has
# passed, so that newcomers overtake; these stay short, and differ by chance, so that every process gets its turn.
SHORTEST_PAUSE, LONGEST_PAUSE = 0.0005, 0.004

# A write that takes less than this is done by the event loop itself, because calling a thread and being called back takes
# as long.  The last write tells; a slow disk, or a file that another process is writing, is waited for on a thread.
BRIEF = 0.003

FORK_PAUSE = 0.001  # between two looks at whether a fork is over, which mostly takes no longer

BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL}

# Errors of the file itself.  The connection is not trusted afterwards.
FAULTS: dict[int, tuple[type[StoreError], str]] = {
    sqlite3.SQLITE_FULL: (StoreError, "the disk is full"),
    sqlite3.SQLITE_IOERR: (StoreError, "the disk failed"),
    sqlite3.SQLITE_CORRUPT: (StoreError, "the file is damaged; restore it from a backup"),
    sqlite3.SQLITE_NOTADB: (StoreError, "the file is not a SQLite database"),
    sqlite3.SQLITE_READONLY: (
        StoreError,
        "it is read-only; this process must be able to write the file and its folder",
    ),
    sqlite3.SQLITE_CANTOPEN: (StoreUnavailable, "it cannot be opened; its folder must exist and be writable"),
    sqlite3.SQLITE_PERM: (StoreUnavailable, "access is denied"),
    sqlite3.SQLITE_NOMEM: (StoreUnavailable, "there is no memory left"),
}

UNWRITTEN = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR}

# Errors of one caller's values, which say nothing of the file: too big, not encodable, of an unknown type.
BAD_VALUES = (sqlite3.Error, ValueError, OverflowError, TypeError)


def code(error: BaseException) -> int:
    """SQLite's primary result code, or 0."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def is_busy(error: BaseException) -> bool:
    """Whether another process has the lock that was asked for."""
    return code(error) in BUSY


def is_bad_value(error: BaseException) -> bool:
    """Whether *error* concerns the caller's values, rather than the file or its lock."""
    return isinstance(error, BAD_VALUES) and code(error) not in FAULTS and not is_busy(error)


def as_store_error(error: BaseException, path: str) -> StoreError:
    """The error that the caller gets for a driver's *error*."""
    kind, what = FAULTS.get(code(error), (StoreError, "it refused a statement"))
    return kind(f"{path}: {what} ({error})")


def disown(connection: sqlite3.Connection, overwrite: str) -> None:
    """Write over what a failed commit has left in the log; *overwrite* is a small write.

    If only the sync failed, the log holds the whole transaction; nobody sees it, but a process that recovers the file
    after a crash would take it for committed, though its caller was told that it failed.
    """
    with contextlib.suppress(sqlite3.Error):
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(overwrite)
        connection.execute("COMMIT")
    with contextlib.suppress(sqlite3.Error):
        if connection.in_transaction:
            connection.execute("ROLLBACK")


class Connection:
    """One connection to the file at *path*.  *prepare* makes a new one ready; *overwrite* is a small write."""

    def __init__(
        self, path: str, prepare: Work[None], *, overwrite: str, timeout: float, threaded: bool = True
    ) -> None:
        self.path = path
        self.timeout = timeout
        self.threaded = threaded  # always work on the thread, also if the work is brief
        self._prepare = prepare
        self._overwrite = overwrite
        self._connection: sqlite3.Connection | None = None
        self._reset()
        reset_in_child(self)
        if path != MEMORY:
            close_before_fork(self)

    def _reset(self) -> None:
        self._lock = threading.RLock()  # a signal's handler may fork while this very thread has it
        self._in_use = False
        self._took = 0.0
        if self.path != MEMORY:  # a child has its own copy of a database in memory
            self._connection = None
        self._thread = ThreadPoolExecutor(1, f"oncemore-sqlite {self.path}")  # starts with its first job

    def _close_for_fork(self) -> bool:
        if not self._lock.acquire(timeout=self.timeout):
            return False
        closed = False
        try:
            if not self._in_use:  # by this very thread
                self._close_connection()
                closed = True
        finally:
            if not closed:
                self._lock.release()
        return closed

    def _end_fork(self) -> None:
        self._lock.release()

    def use(self, work: Work[T]) -> T:
        """Return the result of *work*, called with the open connection; again and again while another process has the lock."""
        with self._lock:
            start = time.monotonic()
            while True:
                try:
                    return self._try(work)
                except sqlite3.Error as error:
                    if time.monotonic() - start > self.timeout:
                        raise StoreTimeout(
                            f"{self.path}: locked by another for {self.timeout:g} s; or by the caller, if it is itself "
                            "performing an operation with effect = 'transaction'"
                        ) from error
                time.sleep(random.uniform(SHORTEST_PAUSE, LONGEST_PAUSE))

    def use_at_once(self, work: Work[T]) -> tuple[T] | None:
        """Return the result of *work*, done by the event loop itself; None if the file is slow or in use."""
        if self.threaded or self._connection is None or self._took >= BRIEF:  # the first use makes the tables
            return None
        if not self._lock.acquire(blocking=False):
            return None
        try:
            return (self._try(work),)
        except sqlite3.Error:  # another process has the lock, and may keep it
            return None
        finally:
            self._lock.release()

    def use_on_thread(self, work: Work[T]) -> asyncio.Future[T]:
        """Return a future of the result of *work*, which this connection's own thread does."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        try:
            self._thread.submit(answer_on, loop, future, partial(self.use, work))
        except (
            RuntimeError
        ):  # no thread can be had: the main thread has ended, the system has too many, or `close` runs
            try:
                result: Any = self.use(work)
            except Exception as error:
                result = error
            set_result(future, result)
        return future

    def _try(self, work: Work[T]) -> T:
        """Return the result of *work*.  Raises an error of SQLite's own only if another process has the lock."""
        try:
            connection = self._open()
            start, self._in_use = time.monotonic(), True
            result = work(connection)
        except BAD_VALUES as error:
            self._recover(error)
            if is_busy(error):
                raise
            raise as_store_error(error, self.path) from error
        except BaseException:
            self._roll_back()
            raise
        finally:
            self._in_use = False
        self._took = time.monotonic() - start
        return result

    def close(self) -> None:
        """End the thread, once its jobs are done, and the connection; a later use opens it again."""
        thread, self._thread = self._thread, ThreadPoolExecutor(1, f"oncemore-sqlite {self.path}")
        thread.shutdown()
        with self._lock:
            self._close_connection()

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            check_usable(self.path)
            connection = sqlite3.connect(self.path, timeout=0, isolation_level=None, check_same_thread=False)
            connection.text_factory = partial(str, encoding="utf-8", errors="replace")  # damaged text must be readable
            try:
                self._prepare(connection)
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection

    def _roll_back(self) -> None:
        if self._connection is not None and self._connection.in_transaction:
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")

    def _recover(self, error: BaseException) -> None:
        self._roll_back()
        if code(error) in FAULTS and self._connection is not None and self.path != MEMORY:
            if code(error) in UNWRITTEN:
                disown(self._connection, self._overwrite)
            self._close_connection()

    def _close_connection(self) -> None:
        connection, self._connection = self._connection, None  # first, because an interrupt may come once it is closed
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.close()


class Use(Generic[T]):
    """Effect: do *work* with a connection."""

    __slots__ = ("connection", "work")

    def __init__(self, connection: Connection, work: Work[T]) -> None:
        self.connection = connection
        self.work = work

    def run(self) -> T:
        return self.connection.use(self.work)

    def arun(self) -> Awaitable[T]:
        return self.connection.use_on_thread(self.work)


class Write(Use[T]):
    """Effect: do *work* that is brief, unless the disk is slow."""

    __slots__ = ()

    async def arun(self) -> T:
        done = self.connection.use_at_once(self.work)
        return done[0] if done is not None else await self.connection.use_on_thread(self.work)


def answer_on(loop: asyncio.AbstractEventLoop, future: asyncio.Future[T], job: Callable[[], T]) -> None:
    """Do *job* on this thread, and give its result to *future* on *loop*, even if the caller has gone meanwhile."""
    if (
        future.done() and not future.cancelled()
    ):  # the loop did it: no thread could be started for it, but one for the next
        return
    try:
        answer: Any = job()
    except BaseException as error:
        answer = error
    with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits any more
        loop.call_soon_threadsafe(set_result, future, answer)


class Writer:
    """The queue of all threads, or of one event loop, for the turn to write the file at *path*.

    Waiting in order is fairer and faster than contending for the file's lock.  *connection* is a connection of the
    ledger's own, if there is one; it stays open between two turns.
    """

    def __init__(self, path: str, *, for_loop: bool = False) -> None:
        self.path = path
        self._for_loop = for_loop
        self._reset()
        reset_in_child(self)

    def _reset(self) -> None:
        self.operation: Id | None = None  # running now
        self.owner: object = None  # the task or thread that runs it
        self.connection: Any = None
        self._queue = asyncio.Lock() if self._for_loop else None  # of tasks; threads wait for the lock itself
        self._lock = threading.Lock()  # held during a turn, and during a fork: a fork may come from any thread
        self._stop: Callable[[], object] = lambda: None
        self._stopping: threading.Thread | None = None

    def turn(self, limit: float, got: Callable[[], None]) -> Do[None]:
        """Effect: wait for the turn, at most *limit* seconds.  *got* is called in the very moment that it is ours."""
        return Do(lambda: self._wait(limit, got), lambda: self._await(limit, got))

    def _wait(self, limit: float, got: Callable[[], None]) -> None:
        if self._lock.acquire(timeout=limit):
            got()

    async def _await(self, limit: float, got: Callable[[], None]) -> None:
        assert self._queue is not None, "the writer is that of an event loop"
        if not await acquired(self._queue, limit):
            return
        try:
            while not self._lock.acquire(blocking=False):  # only a fork has it, and not for long
                await asyncio.sleep(FORK_PAUSE)
        except BaseException:
            self._queue.release()
            raise
        got()

    def end_turn(self) -> None:
        self.operation = self.owner = None
        self._lock.release()
        if self._queue is not None:
            self._queue.release()

    def keep_open(self, connection: Any) -> None:
        """Keep *connection* open between turns, until it is closed or this writer is gone; closed before each fork."""
        self.connection = connection
        if not isinstance(connection, sqlite3.Connection):
            self._stop = weakref.finalize(self, stop_aiosqlite, connection)

    def close_connection(self) -> None:
        """Close our own connection, if there is one.  An aiosqlite thread finishes its statement first; nobody waits."""
        connection, self.connection = self.connection, None
        if isinstance(connection, sqlite3.Connection):
            connection.close()
        elif connection is not None:
            stopping = threading.Thread(target=self._stop, daemon=True)
            with contextlib.suppress(RuntimeError):  # the interpreter ends, and the connection with it
                stopping.start()
                self._stopping = stopping

    def close(self) -> None:
        with self._lock:
            self.close_connection()

    async def aclose(self) -> None:
        assert self._queue is not None, "the writer is that of an event loop"
        async with self._queue:
            self.close_connection()
        if self._stopping is not None:
            await asyncio.to_thread(self._stopping.join)

    def _close_for_fork(self) -> bool:
        if not self._lock.acquire(blocking=False):
            return False
        try:
            self.close_connection()
            if self._stopping is not None:
                self._stopping.join()
        except BaseException:
            self._lock.release()
            raise
        return True

    def _end_fork(self) -> None:
        self._lock.release()


async def acquired(lock: asyncio.Lock, limit: float) -> bool:
    if not lock.locked():
        return await lock.acquire()  # does not wait
    try:
        async with asyncio.timeout(limit):
            return await lock.acquire()
    except TimeoutError:
        return False
