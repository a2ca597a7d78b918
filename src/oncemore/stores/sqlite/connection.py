"""One connection to a SQLite file: opened on first use, by one thread at a time, closed across forks, its errors told."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sqlite3
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from ..._runtime.forks import Rest, reset_in_child
from ...errors import StoreError, StoreTimeout, StoreUnavailable
from .worker import Worker

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]

MEMORY = ":memory:"

# Between two tries for a file that another process is writing: at most so many times what our own writes take,
# within these bounds.  SQLite's own waiting grows longer the longer it lasts, and newcomers overtake; ours grows shorter.
PAUSE, SHORTEST, LONGEST = 2.0, 0.0005, 0.01
PATIENCE, IMPATIENT = 1.0, 0.2

# For so long after a process has met another at the file, it gives way.
CROWDED = 1.0

# A write that will hardly take longer than this is done by the event loop itself: to call a thread and to be called back
# takes as long.  It goes by the last one; a slower disk, or another process at the file, is waited for on a thread.
BRIEF = 0.003

BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL}

# What the file itself did wrong.  The connection is not trusted afterwards.
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

# SQLite must not be carried across a fork: the child would believe in locks that only its parent holds, and what it commits
# would be lost as soon as the parent closes the file.  So each connection is closed before, while nobody uses it, and both
# sides open it again when they need it.
CONNECTIONS = Rest()


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
    """What the caller is told of a driver's *error*."""
    kind, what = FAULTS.get(code(error), (StoreError, "it refused a statement"))
    return kind(f"{path}: {what} ({error})")


def disown(connection: sqlite3.Connection, overwrite: str) -> None:
    """Write over what a failed commit has left in the log; *overwrite* is a small write.

    Where only the sync failed, the log holds the whole transaction; nobody sees it, but whoever recovers the file
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
    """The process's connection to the file at *path*.  *prepare* makes a new one ready; *overwrite* is a small write."""

    def __init__(
        self, path: str, prepare: Work[None], *, overwrite: str, timeout: float, threaded: bool = True
    ) -> None:
        self.path = path
        self.timeout = timeout
        self.threaded = threaded  # always, rather than where the work may take long
        self._prepare = prepare
        self._overwrite = overwrite
        self._connection: sqlite3.Connection | None = None
        self._crowded_until = self._ended = self._took = self._usual = 0.0
        self._reset()
        reset_in_child(self)
        CONNECTIONS.things.add(self)

    def _reset(self) -> None:
        self._lock = threading.RLock()  # a signal's handler may fork while this very thread has it
        self._worker = Worker(f"oncemore-sqlite {self.path}")

    def _rest(self) -> bool:
        return self._lock.acquire()

    def _put_away(self) -> None:
        if self.path != MEMORY:
            self._shut()

    def _go_on(self) -> None:
        self._lock.release()

    def use(self, work: Work[T]) -> T:
        """The result of *work*, called with the open connection; while the file is locked it is called again."""
        with self._lock:
            self._give_way()
            start = time.monotonic()
            while True:
                try:
                    return self._try(work)
                except sqlite3.Error as error:
                    self._pause(start, error)

    def _try(self, work: Work[T]) -> T:
        """The result of *work*; of SQLite's own errors only those come out that another process's lock causes."""
        try:
            connection = self._open()
            began = time.monotonic()
            result = work(connection)
        except BAD_VALUES as error:
            self._recover(error)
            if is_busy(error):
                raise
            raise as_store_error(error, self.path) from error
        except BaseException:
            self._roll_back()
            raise
        self._ended = time.monotonic()
        last, self._took = self._took, self._ended - began
        self._usual = min(last, self._took)  # now and then one has to move the log into the file, and takes far longer
        return result

    def _pause(self, start: float, error: sqlite3.Error) -> None:
        """Let the other process finish, unless we have waited since *start* for too long."""
        now = time.monotonic()
        self._crowded_until = now + CROWDED
        if now - start > self.timeout:
            raise StoreTimeout(
                f"{self.path}: locked by another for {self.timeout:g} s; or by the caller, if it is itself performing an "
                "operation with effect = 'transaction'"
            ) from error
        pause = min(max(PAUSE * self._usual, SHORTEST), LONGEST)
        time.sleep(random.uniform(0.2, 1.0) * (pause if now - start < PATIENCE else pause * IMPATIENT))

    def _give_way(self) -> None:
        """Where others want the file too, leave it to them for as long as we have it."""
        now = time.monotonic()
        if now < self._crowded_until and now < self._ended + self._usual:
            time.sleep(self._ended + self._usual - now)

    def send(self, work: Work[T]) -> asyncio.Future[T]:
        """A future of the same, for the running event loop; the work is done on this connection's own thread."""
        return self._worker.send(lambda: self.use(work))

    def at_once(self, work: Work[T]) -> tuple[T] | None:
        """The result of *work*, done by the event loop itself if the file is quick and free; else None."""
        if not self._is_quick() or not self._lock.acquire(blocking=False):
            return None
        try:
            return (self._try(work),)
        except sqlite3.Error:  # another process has the file, which may last
            return None
        finally:
            self._lock.release()

    def _is_quick(self) -> bool:
        open = self._connection is not None  # the first use makes the tables
        return open and not self.threaded and self._took < BRIEF and time.monotonic() >= self._crowded_until

    def close(self) -> None:
        """End the thread and the connection; a later use opens it again."""
        self._worker.stop()
        with self._lock:
            self._shut()

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            connection = sqlite3.connect(self.path, timeout=0, isolation_level=None, check_same_thread=False)
            connection.text_factory = lambda text: text.decode(errors="replace")  # damaged text must be readable
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
            self._shut()

    def _shut(self) -> None:
        connection, self._connection = self._connection, None  # first, for an interrupt may come once it is closed
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.close()


class Use(Generic[T]):
    """The effect of doing *work* with a connection."""

    __slots__ = ("connection", "work")

    def __init__(self, connection: Connection, work: Work[T]) -> None:
        self.connection = connection
        self.work = work

    def run(self) -> T:
        return self.connection.use(self.work)

    def arun(self) -> Awaitable[T]:
        return self.connection.send(self.work)


class Write(Use[T]):
    """A Use that is brief, unless the disk is slow."""

    __slots__ = ()

    async def arun(self) -> T:
        done = self.connection.at_once(self.work)
        return done[0] if done is not None else await self.connection.send(self.work)
