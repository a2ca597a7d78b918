"""A process's connections to a SQLite file, opened on first use, used by one thread at a time, closed before forks."""

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

# Seconds between two tries for a file that another process is writing.  The pauses of SQLite itself grow, so newcomers
# would overtake.  These stay short and random, so that every process gets its turn.
SHORTEST_PAUSE, LONGEST_PAUSE = 0.0005, 0.004

# Seconds.  If the last write took less, the event loop does the next one itself, because a thread's two wake-ups take
# as long.  If the disk is slow, or another process is writing the file, a thread waits for it.
BRIEF = 0.003

FORK_PAUSE = 0.001  # seconds between two looks at whether a fork has ended; most take no longer

BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL}

# Errors of the file itself.  The connection is closed after one of them.
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

# After these errors, the log may hold a transaction whose commit failed.

UNWRITTEN = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR}

# The exceptions for a caller's bad values: too big, not encodable, of an unknown type.  They include SQLite's faults.
BAD_VALUES = (sqlite3.Error, ValueError, OverflowError, TypeError)


def code(error: BaseException) -> int:
    """Return SQLite's primary result code, or 0."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def is_busy(error: BaseException) -> bool:
    """Whether the error says that another connection has the lock."""
    return code(error) in BUSY


def is_bad_value(error: BaseException) -> bool:
    """Whether the caller's values caused *error*, and not the file or its lock."""
    return isinstance(error, BAD_VALUES) and code(error) not in FAULTS and not is_busy(error)


def as_store_error(error: BaseException, path: str) -> StoreError:
    """Return the StoreError for a driver's *error*."""
    kind, reason = FAULTS.get(code(error), (StoreError, "it refused a statement"))
    return kind(f"{path}: {reason} ({error})")


def overwrite_log(connection: sqlite3.Connection, overwrite: str) -> None:
    """Write over the transaction that a failed commit may have left in the log.  *overwrite* is a small write.

    If only the sync failed, the log holds the whole transaction.  No reader sees it, but after a crash, recovery would
    take it for committed, although its caller got an error.
    """
    with contextlib.suppress(sqlite3.Error):
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(overwrite)
        connection.execute("COMMIT")
    with contextlib.suppress(sqlite3.Error):
        if connection.in_transaction:
            connection.execute("ROLLBACK")


class Connection:
    """One connection to the file at *path*.  *prepare* sets up a new one; *overwrite* is a small write."""

    def __init__(
        self, path: str, prepare: Work[None], *, overwrite: str, timeout: float, threaded: bool = True
    ) -> None:
        self.path = path
        self.timeout = timeout
        self.threaded = threaded  # if True, an event loop never writes by itself
        self._prepare = prepare
        self._overwrite = overwrite
        self._connection: sqlite3.Connection | None = None
        self._reset()
        reset_in_child(self)
        if path != MEMORY:
            close_before_fork(self)

    def _reset(self) -> None:
        self._lock = threading.RLock()  # reentrant, because a signal handler may fork while its thread holds the lock
        self._in_use = False
        self._took = 0.0  # seconds that the last work took
        if self.path != MEMORY:  # a child has its own copy of a database in memory
            self._connection = None
        self._thread = ThreadPoolExecutor(1, f"oncemore-sqlite {self.path}")  # the thread starts with its first job

    def _close_for_fork(self) -> bool:
        if not self._lock.acquire(timeout=self.timeout):
            return False
        closed = False
        try:
            if not self._in_use:  # True if a signal handler forks while its own thread uses the connection
                self._close_connection()
                closed = True
        finally:
            if not closed:
                self._lock.release()
        return closed

    def _end_fork(self) -> None:
        self._lock.release()

    def use(self, work: Work[T]) -> T:
        """Call *work* with the open connection, and return its result.  Retry while the file is locked."""
        with self._lock:
            start = time.monotonic()
            while True:
                try:
                    return self._try(work)
                except sqlite3.Error as error:
                    if time.monotonic() - start > self.timeout:
                        raise StoreTimeout(
                            f"{self.path}: locked by another connection for {self.timeout:g} s; or by the caller, if "
                            "it is itself performing an operation with effect = 'transaction'"
                        ) from error
                time.sleep(random.uniform(SHORTEST_PAUSE, LONGEST_PAUSE))

    def use_on_loop(self, work: Work[T]) -> tuple[T] | None:
        """Do *work* on the event loop's thread, and return its result.  Return None if the file is slow or in use."""
        if self.threaded or self._connection is None or self._took >= BRIEF:  # the first use creates tables: too slow
            return None
        if not self._lock.acquire(blocking=False):
            return None
        try:
            return (self._try(work),)
        except sqlite3.Error:  # another connection has the lock, maybe for long
            return None
        finally:
            self._lock.release()

    def use_on_thread(self, work: Work[T]) -> asyncio.Future[T]:
        """Do *work* on this connection's own thread, and return a future of its result."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        try:
            self._thread.submit(answer_on, loop, future, partial(self.use, work))
        except RuntimeError:  # no thread can start: the main thread has ended, the system has too many, or `close` runs
            try:
                result: Any = self.use(work)
            except Exception as error:
                result = error
            set_result(future, result)
        return future

    def _try(self, work: Work[T]) -> T:
        """Return the result of *work*.  Raises sqlite3.Error only if the file is locked, else StoreError."""
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
        """End the thread after its jobs are done, and close the connection.  A later use opens it again."""
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
                overwrite_log(self._connection, self._overwrite)
            self._close_connection()

    def _close_connection(self) -> None:
        # Forget the connection first: an interrupt after close() must not leave a closed one behind.
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.close()


class Use(Generic[T]):
    """Effect: do *work* with a connection.  On an event loop, the connection's thread does it."""

    __slots__ = ("connection", "work")

    def __init__(self, connection: Connection, work: Work[T]) -> None:
        self.connection = connection
        self.work = work

    def run(self) -> T:
        return self.connection.use(self.work)

    def arun(self) -> Awaitable[T]:
        return self.connection.use_on_thread(self.work)


class Write(Use[T]):
    """Effect: do *work* with a connection.  An event loop does it by itself while writes are brief (BRIEF)."""

    __slots__ = ()

    async def arun(self) -> T:
        done = self.connection.use_on_loop(self.work)
        return done[0] if done is not None else await self.connection.use_on_thread(self.work)


def answer_on(loop: asyncio.AbstractEventLoop, future: asyncio.Future[T], job: Callable[[], T]) -> None:
    """Do *job* on this thread, and give its result to *future* on *loop*, even if the caller has gone meanwhile."""
    # The executor keeps a job for which it could not start a thread.  `use_on_thread` did that job, so skip it.
    if future.done() and not future.cancelled():
        return
    try:
        answer: Any = job()
    except BaseException as error:
        answer = error
    with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody waits
        loop.call_soon_threadsafe(set_result, future, answer)


class Writer:
    """The queue in which all threads, or the tasks of one event loop, wait for their turn to write the file at *path*.

    Waiting in order is fairer and faster than contending for the file's lock.  *connection* is the ledger's own
    connection, or None.  It stays open between turns.
    """

    def __init__(self, path: str, *, for_loop: bool = False) -> None:
        self.path = path
        self._for_loop = for_loop
        self._reset()
        reset_in_child(self)

    def _reset(self) -> None:
        self.operation: Id | None = None  # the operation that has the turn
        self.owner: object = None  # the task or thread that has the turn
        self.connection: Any = None
        self._queue = asyncio.Lock() if self._for_loop else None  # tasks wait for it; threads wait for `_lock`
        self._lock = threading.Lock()  # held during a turn, and during a fork, which may come from any thread
        self._stop: Callable[[], object] = lambda: None
        self._stopping: threading.Thread | None = None

    def turn(self, limit: float, got: Callable[[], None]) -> Do[None]:
        """Effect: wait for the turn, at most *limit* seconds.  *got* is called immediately when the caller gets it."""
        return Do(lambda: self._wait(limit, got), lambda: self._await(limit, got))

    def _wait(self, limit: float, got: Callable[[], None]) -> None:
        if self._lock.acquire(timeout=limit):
            got()

    async def _await(self, limit: float, got: Callable[[], None]) -> None:
        assert self._queue is not None, "the writer belongs to an event loop"
        if not await acquired(self._queue, limit):
            return
        try:
            while not self._lock.acquire(blocking=False):  # only a fork may have it, and not for long
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
        """Keep *connection* open between turns, until a fork, `close_connection`, or the end of this writer."""
        self.connection = connection
        if not isinstance(connection, sqlite3.Connection):
            self._stop = weakref.finalize(self, stop_aiosqlite, connection)

    def close_connection(self) -> None:
        """Close the ledger's own connection, if there is one.  Does not wait for an aiosqlite thread's statement."""
        connection, self.connection = self.connection, None
        if isinstance(connection, sqlite3.Connection):
            connection.close()
        elif connection is not None:
            stopping = threading.Thread(target=self._stop, daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread can start, because the interpreter is shutting down
                stopping.start()
                self._stopping = stopping

    def close(self) -> None:
        with self._lock:
            self.close_connection()

    async def aclose(self) -> None:
        assert self._queue is not None, "the writer belongs to an event loop"
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
    """Acquire *lock* within *limit* seconds, and return whether that succeeded."""
    if not lock.locked():
        return await lock.acquire()  # does not wait
    try:
        async with asyncio.timeout(limit):
            return await lock.acquire()
    except TimeoutError:
        return False
