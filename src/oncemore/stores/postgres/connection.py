"""Free connections: one list for the threads of this process, and one for each event loop."""

from __future__ import annotations

import asyncio
import re
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

from ..._runtime.clock import SYSTEM
from ..._runtime.forks import reset_in_child
from ..._runtime.loops import PerLoop
from ...errors import ConfigurationError, StoreTimeout
from .pipeline import AnswerTimeout, state_of

SHORTEST_CONNECT = 2  # seconds: libpq raises a shorter connect_timeout to this one
PREPARE_THRESHOLD = 5  # psycopg's default; it counts only for statements of the performer

# libpq reports a refusal only as text.  If the server's messages are in another language, nothing matches, and the
# store tries again until its timeout.
REFUSAL = re.compile(
    r"authentication failed|(?:role|database) \".*\" does not exist|no pg_hba\.conf entry|is not permitted to log in|"
    r"permission denied for database|server does not support SSL"
)

IDLE = int(TransactionStatus.IDLE)


class Connections:
    """The connections to one database.  Each is taken for one exchange or one transaction at a time.

    `take` (on a thread) and `atake` (on an event loop) return a connection that nobody else uses until `give_back`.
    They open a new connection if none is free.  The connection that was given back last is taken first, because its
    server process is still warm.  A free connection that the server has closed is dropped, so that a restart leaves no
    dead ones.  A forked child starts with empty lists.

    Args:
        conninfo: libpq's connection string.
        limit: The most connections that threads, or each event loop, may have taken at a time; None for any number.
        autocommit: psycopg's setting for new connections.
        sync_class: The class of connections for threads.
        async_class: The class of connections for event loops.
    """

    def __init__(
        self,
        conninfo: str,
        *,
        limit: int | None = None,
        autocommit: bool = True,
        sync_class: type[psycopg.Connection[Any]] = psycopg.Connection,
        async_class: type[psycopg.AsyncConnection[Any]] = psycopg.AsyncConnection,
    ) -> None:
        self.conninfo = conninfo
        self.limit = limit
        self.autocommit = autocommit
        self.sync_class = sync_class
        self.async_class = async_class
        self.prepares = True  # False behind a pooler: new connections then prepare nothing
        self._reset()
        reset_in_child(self)

    def _reset(self) -> None:
        self.threads = FreeList(threading.Semaphore(self.limit) if self.limit else None)
        self.loops = PerLoop(
            lambda: FreeList(asyncio.Semaphore(self.limit) if self.limit else None), dropped=FreeList.close
        )

    def take(self, timeout: float) -> Any:
        """Return a connection for this thread.

        Raises StoreTimeout if the limit is reached, ConfigurationError if the server refuses the login or the database,
        and psycopg.Error if connecting fails for another reason.
        """
        free, ends = self.threads, SYSTEM.monotonic() + timeout
        if free.slots is not None and not free.slots.acquire(timeout=max(0.0, timeout)):
            raise self._all_in_use(timeout)
        try:
            connection = free.pop()
            if connection is None:
                left = max(SHORTEST_CONNECT, int(ends - SYSTEM.monotonic()))
                with refusals_explained():
                    connection = self.sync_class.connect(self.conninfo, **self._settings(), connect_timeout=left)
            state_of(connection).free_list = free
        except BaseException:
            free.release_slot()
            raise
        return connection

    async def atake(self, timeout: float) -> Any:
        """Like `take`, for the running event loop."""
        free, ends = self.loops.get(), SYSTEM.monotonic() + timeout
        if free.slots is not None:
            try:
                async with asyncio.timeout(max(0.0, timeout)):
                    await free.slots.acquire()
            except TimeoutError as error:
                raise self._all_in_use(timeout) from error
        try:
            connection = free.pop()
            if connection is None:
                connection = await self._aconnect(ends - SYSTEM.monotonic())
            state_of(connection).free_list = free
        except BaseException:
            free.release_slot()
            raise
        return connection

    async def _aconnect(self, timeout: float) -> psycopg.AsyncConnection[Any]:
        try:
            async with asyncio.timeout(max(0.0, timeout)):
                with refusals_explained():
                    return await self.async_class.connect(self.conninfo, **self._settings())
        except TimeoutError as error:
            raise AnswerTimeout("connecting took too long") from error

    def _settings(self) -> dict[str, Any]:
        return {"autocommit": self.autocommit, "prepare_threshold": PREPARE_THRESHOLD if self.prepares else None}

    def give_back(self, connection: Any) -> None:
        """Let another caller take *connection*.  Call this on the thread or loop that took it.  Never waits or fails.

        If the connection is in a transaction or an exchange, or the list was closed meanwhile, it is closed instead.
        A second call does nothing.
        """
        state = state_of(connection)
        free, state.free_list = state.free_list, None
        if free is None:
            return
        if not free.closed and connection.pgconn.transaction_status == IDLE:
            free.connections.append(connection)
        else:
            connection.pgconn.finish()
        free.release_slot()

    def _all_in_use(self, timeout: float) -> StoreTimeout:
        return StoreTimeout(
            f"All {self.limit} connections were in use for {timeout:.1f} s; retry, or allow transactions more with "
            "pool= in the store's URL"
        )

    def close(self) -> None:
        """Close the connections of the threads and of closed event loops."""
        free, self.threads = self.threads, FreeList(threading.Semaphore(self.limit) if self.limit else None)
        free.close()
        self.loops.drop_closed()

    async def aclose(self) -> None:
        """Close the running loop's connections."""
        free = self.loops.pop()
        if free is not None:
            free.close()


class FreeList:
    """The free connections of the threads, or of one event loop.  *slots* limits the number of taken ones."""

    def __init__(self, slots: threading.Semaphore | asyncio.Semaphore | None) -> None:
        self.slots: Any = slots
        self.connections: list[Any] = []
        self.closed = False
        # An event loop may be gone before anybody closes its list.  Not at exit: a child would close its parent's.
        weakref.finalize(self, close_connections, self.connections).atexit = False

    def pop(self) -> Any:
        """Return the free connection that was given back last, or None."""
        with suppress(IndexError):  # a check of the length would race with other threads
            while True:
                connection = self.connections.pop()
                if is_alive(connection):
                    return connection
                connection.pgconn.finish()
        return None

    def release_slot(self) -> None:
        if self.slots is not None:
            with suppress(RuntimeError):  # the event loop was closed, so none of its tasks waits for a slot
                self.slots.release()

    def close(self) -> None:
        """Close the free connections now, and the taken ones when they are given back."""
        self.closed = True
        close_connections(self.connections)


def close_connections(connections: list[Any]) -> None:
    with suppress(IndexError):  # a check of the length would race with other threads
        while True:
            connections.pop().pgconn.finish()


@contextmanager
def refusals_explained() -> Iterator[None]:
    """Raise ConfigurationError if the server refuses a new connection and further attempts cannot help."""
    try:
        yield
    except psycopg.OperationalError as error:
        message = " ".join(str(error).split())
        if REFUSAL.search(message) or (error.pgconn is not None and error.pgconn.needs_password):
            raise ConfigurationError(
                f"PostgreSQL refused to connect: {message}; correct the user, password or database in the store's URL"
            ) from error
        raise


def is_alive(connection: Any) -> bool:
    """Whether a free connection is still open, as far as its socket shows without a round trip."""
    pgconn = connection.pgconn
    try:
        for _ in range(2):  # a server that shuts down sends a message first, and then ends the stream
            pgconn.consume_input()
    except psycopg.OperationalError:
        return False
    return bool(pgconn.transaction_status == IDLE)
