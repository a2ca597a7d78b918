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
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from ..._runtime.batching import set_result
from ..._runtime.forks import check_usable, close_before_fork, reset_in_child
from ...errors import StoreError, StoreTimeout, StoreUnavailable

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]

MEMORY = ":memory:"

# Seconds between two tries for a file that another process is writing.  SQLite's own pauses grow with the time that has
# passed, so that newcomers overtake; these stay short, and differ by chance, so that every process gets its turn.
SHORTEST_PAUSE, LONGEST_PAUSE = 0.0005, 0.004

# A write that takes less than this is done by the event loop itself, because calling a thread and being called back takes
# as long.  The last write tells; a slow disk, or a file that another process is writing, is waited for on a thread.
BRIEF = 0.003

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
    """Whether *error* concerns what was asked, rather than the file or its lock."""
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
        self._worker = Worker(f"oncemore-sqlite {self.path}")

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
        return self._worker.send(lambda: self.use(work))

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
        """End the thread and the connection; a later use opens it again."""
        self._worker.stop()
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


class Worker:
    """A thread called *name* that does jobs one after another, and answers on the event loop that sent them.

    It starts with the first job, and ends with `stop` or with this object.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._jobs: SimpleQueue[Any] | None = None
        self._thread: threading.Thread | None = None

    def send(self, job: Callable[[], Any]) -> asyncio.Future[Any]:
        """A future of what *job* returns, for the running event loop."""
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        with self._lock:
            if self._jobs is None:
                self._start()
            assert self._jobs is not None
            self._jobs.put((job, loop, future))
        return future

    def _start(self) -> None:
        jobs: SimpleQueue[Any] = SimpleQueue()
        thread = threading.Thread(target=serve, args=(jobs,), name=self.name, daemon=True)
        thread.start()  # which may be refused; then the next job tries again
        weakref.finalize(self, jobs.put, None)  # a store that nobody closed takes its thread with it
        self._jobs, self._thread = jobs, thread

    def stop(self) -> None:
        """Return when all jobs are done and the thread is over."""
        with self._lock:
            jobs, thread, self._jobs, self._thread = self._jobs, self._thread, None, None
        if jobs is not None and thread is not None:
            jobs.put(None)
            thread.join()


def serve(jobs: SimpleQueue[Any]) -> None:
    """Do the jobs, one after another, until there is a None."""
    while (entry := jobs.get()) is not None:
        job, loop, future = entry
        try:
            answer = job()
        except BaseException as error:
            answer = error
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits any more
            loop.call_soon_threadsafe(set_result, future, answer)
        del entry, job, loop, future, answer  # while the thread waits, it keeps nothing alive
