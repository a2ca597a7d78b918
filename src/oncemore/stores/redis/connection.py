"""Connections to Redis: sends one write and reads its replies, on a thread or an event loop, with a deadline.

redis-py connects, encrypts, logs in, sends and parses.  This module keeps the free connections, and closes a connection
if some of its replies were not read.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, TypeAlias

import hiredis
import msgspec
import redis.asyncio.connection
import redis.connection

from ..._runtime.clock import SYSTEM
from ..._runtime.forks import reset_in_child
from ..._runtime.loops import PerLoop
from ...errors import ConfigurationError, StoreError, StoreTimeout, StoreUnavailable

Address: TypeAlias = tuple[str, int] | None  # None: the server that the URL names
FreeConnections: TypeAlias = dict[Address, list[tuple[int, Any]]]  # each with the generation in which it was opened

# Every error that a connection may raise.  UnicodeError is raised for a host name that cannot be looked up.
CONNECTION_ERRORS = (redis.RedisError, OSError, UnicodeError)
ABANDONED = "the server is no longer the primary"
LATE_TURNS = 2  # extra turns of a busy event loop, so that a reply that came in time is still read
CLOSE_SECONDS = 2.0  # the timeout for closing a connection, because TLS waits for the server's answer


def pack(*words: str | bytes | int) -> bytes:
    """Return one command in wire format.  redis-py's own packing for event loops takes several times as long."""
    packet: bytes = hiredis.pack_command(words)  # type: ignore[arg-type]
    return packet


class Connector:
    """Makes redis-py connections that are not connected yet, with the options of *url*.  *replaced* overrides options.

    Raises TypeError, ValueError or redis.RedisError for an option that redis-py does not know.
    """

    def __init__(self, url: str, **replaced: Any) -> None:
        kinds: list[tuple[Any, dict[str, Any]]] = []
        for module in (redis.connection, redis.asyncio.connection):
            options = {"client_name": "oncemore", **module.parse_url(url), **replaced}
            options.update(protocol=2, decode_responses=False)
            options.pop("max_connections", None)
            kinds.append((options.pop("connection_class", module.Connection), options))
        self._for_threads, self._for_loops = kinds
        self.open(None, 1.0)
        self.open_on_loop(None)

    def open(self, address: Address, timeout: float) -> Any:
        """Return a connection for threads.  To connect and each later read or write may take *timeout* seconds."""
        kind, options = self._for_threads
        return kind(**options_for(options, address, timeout))

    def open_on_loop(self, address: Address) -> Any:
        """Return a connection for an event loop.  It has no timeouts: for them, redis-py starts a task per write."""
        kind, options = self._for_loops
        return kind(**options_for(options, address, None))

    def pubsub(self, address: Address, timeout: float) -> Any:
        """Return a redis-py PubSub with the timeouts of `open`."""
        kind, options = self._for_threads
        client: Any = redis.Redis(connection_pool=redis.ConnectionPool(kind, **options_for(options, address, timeout)))
        return client.pubsub()


def options_for(options: dict[str, Any], address: Address, timeout: float | None) -> dict[str, Any]:
    options = {**options, "socket_timeout": timeout, "socket_connect_timeout": timeout}
    return {**options, "host": address[0], "port": address[1]} if address else options


class ConnectionPool:
    """Keeps the free connections by address: one list for all threads, and one for each event loop.

    A connection becomes free again only if all replies to its commands were read.  After `drop`, the connections to
    that address belong to an old generation, and are closed instead of being used again.
    """

    def __init__(self, connector: Connector) -> None:
        self.connector = connector
        self._reset()
        reset_in_child(self)  # a child must not use or close its parent's connections

    def _reset(self) -> None:
        self._generations: dict[Address, int] = {}
        self.abandoned: dict[Address, int] = {}  # how often each address was abandoned
        # The address of each connection in use, and its event loop, or None for a thread.
        self.in_use: dict[Any, tuple[Address, asyncio.AbstractEventLoop | None]] = {}
        self._breaking: set[asyncio.Future[None]] = set()
        self._threads: FreeConnections = {}
        self._loops: PerLoop[FreeConnections] = PerLoop(dict)

    def generation(self, address: Address) -> int:
        return self._generations.setdefault(address, 0)

    def drop(self, address: Address) -> None:
        """Use none of the present connections to *address* again.  May be called on any thread."""
        self._generations[address] = self.generation(address) + 1

    def drop_all(self) -> None:
        for address in tuple(self._generations):
            self.drop(address)

    def abandon(self, address: Address) -> None:
        """Break all connections to *address*, because it is no longer the primary.  May be called on any thread.

        Commands under way fail even if their replies arrive.  They can be sent again to the new primary.
        """
        self.abandoned[address] = self.abandoned.get(address, 0) + 1
        self.drop(address)
        for connection, (place, loop) in tuple(self.in_use.items()):
            if place == address:
                with suppress(Exception):  # another thread may be closing the connection, or its loop was closed
                    if loop is None:
                        connection.disconnect()
                    else:
                        loop.call_soon_threadsafe(self._break_on_loop, connection)

    def _break_on_loop(self, connection: Any) -> None:
        task = asyncio.ensure_future(connection.disconnect(nowait=True))
        self._breaking.add(task)  # the loop's own references to tasks are weak
        task.add_done_callback(self._breaking.discard)

    def take(self, address: Address, generation: int) -> Any:
        """Return a free connection for this thread, or None."""
        free = self._threads.setdefault(address, [])
        with suppress(IndexError):  # other threads take connections at the same time, so a check would not help
            while True:
                opened, connection = free.pop()
                if opened == generation:
                    return connection
                connection.disconnect()
        return None

    def put_back(self, address: Address, generation: int, connection: Any) -> None:
        if generation == self.generation(address):
            self._threads.setdefault(address, []).append((generation, connection))
        else:
            connection.disconnect()

    async def atake(self, address: Address, generation: int) -> Any:
        """Return a free connection for the running event loop, or None."""
        free = self._loops.get().setdefault(address, [])
        while free:
            opened, connection = free.pop()
            if opened == generation:
                return connection
            await connection.disconnect(nowait=True)
        return None

    async def aput_back(self, address: Address, generation: int, connection: Any) -> None:
        if generation == self.generation(address):
            self._loops.get().setdefault(address, []).append((generation, connection))
        else:
            await connection.disconnect(nowait=True)

    def close(self) -> None:
        """Close the free connections of threads.  Connections in use are closed when they are put back."""
        self.drop_all()
        for free in tuple(self._threads.values()):
            while free:
                free.pop()[1].disconnect()

    async def aclose(self) -> None:
        """Close the free connections of the running event loop.  Wait for the sockets: the loop may end next."""
        for free in (self._loops.pop() or {}).values():
            while free:
                with suppress(*CONNECTION_ERRORS):
                    async with asyncio.timeout(CLOSE_SECONDS):
                        await free.pop()[1].disconnect()


class NotConnected(StoreUnavailable):
    """No connection to Redis is open and free."""


class SendCommands(msgspec.Struct, gc=False):
    """Effect: send *packet* to *address* in one write, and return its *count* replies, error replies included.

    If no connection is free, a new one is opened, or NotConnected is raised if *connected* is true.
    Raises ConfigurationError if the server refuses the login.  Raises StoreTimeout or StoreUnavailable if not all replies
    came within *timeout* seconds; the server may have carried out the commands nevertheless.  On a thread, a reply that
    has begun to arrive may take longer, because redis-py's timeout applies to each read of the socket.
    """

    pool: ConnectionPool
    address: Address
    packet: bytes
    count: int
    timeout: float
    connected: bool = False

    def run(self) -> list[Any]:
        deadline = SYSTEM.monotonic() + self.timeout
        pool, address = self.pool, self.address
        generation, abandoned = pool.generation(address), pool.abandoned.get(address)
        connection = pool.take(address, generation)
        if connection is None:
            self._check_may_open()
            connection = pool.connector.open(address, self.timeout)
        pool.in_use[connection] = (address, None)
        replies: list[Any] = []
        try:
            connection.send_packed_command([self.packet])  # connects first if necessary
            while len(replies) < self.count:
                # A socket keeps the timeout that it was opened with, so another timeout needs a separate wait.
                unusual = connection.socket_timeout != self.timeout
                if unusual and not connection.can_read(max(0.0, deadline - SYSTEM.monotonic())):
                    raise redis.TimeoutError("no reply")
                try:
                    replies.append(connection.read_response())
                except redis.ResponseError as error:
                    replies.append(error)
            if pool.abandoned.get(address) != abandoned:
                raise redis.ConnectionError(ABANDONED)
        except BaseException as error:  # also Ctrl-C, because the next caller would read the late reply as its own
            with suppress(*CONNECTION_ERRORS):
                connection.disconnect()
            self._raise_translated(error, abandoned)
            raise
        finally:
            pool.in_use.pop(connection, None)
        pool.put_back(address, generation, connection)
        return replies

    async def arun(self) -> list[Any]:
        pool, address, loop = self.pool, self.address, asyncio.get_running_loop()
        generation, abandoned = pool.generation(address), pool.abandoned.get(address)
        connection = await pool.atake(address, generation)
        if connection is None:
            self._check_may_open()
            connection = pool.connector.open_on_loop(address)
        pool.in_use[connection] = (address, loop)
        replies: list[Any] = []
        try:
            async with asyncio.timeout(None) as limit:
                timer = loop.call_later(self.timeout, expire, limit)
                try:
                    await connection.send_packed_command([self.packet])
                    while len(replies) < self.count:
                        try:
                            replies.append(await connection.read_response())
                        except redis.ResponseError as error:
                            replies.append(error)
                finally:
                    timer.cancel()
            if pool.abandoned.get(address) != abandoned:
                raise redis.ConnectionError(ABANDONED)
        except BaseException as error:
            await connection.disconnect(nowait=True)
            self._raise_translated(error, abandoned)
            raise
        finally:
            pool.in_use.pop(connection, None)
        await pool.aput_back(address, generation, connection)
        return replies

    def _check_may_open(self) -> None:
        if self.connected:
            raise NotConnected("No connection to Redis is open yet")

    def _raise_translated(self, error: BaseException, abandoned: int | None) -> None:
        """Raise our error for *error* if it comes from the connection; otherwise return."""
        if isinstance(error, CONNECTION_ERRORS):
            raise connection_error(error, self.address) from error
        # redis-py may raise any error if another thread closes its connection.
        if isinstance(error, Exception) and self.pool.abandoned.get(self.address) != abandoned:
            raise connection_error(redis.ConnectionError(ABANDONED), self.address) from error


def expire(limit: asyncio.Timeout, turns: int = LATE_TURNS) -> None:
    """End *limit* after some more turns of the loop.

    A loop that was busy reads a reply that came in time only in its next turn, and wakes the reader one turn later.
    """
    loop = asyncio.get_running_loop()
    if turns:
        loop.call_soon(expire, limit, turns - 1)
    else:
        with suppress(RuntimeError):  # the limit has ended meanwhile
            limit.reschedule(loop.time())


def connection_error(error: BaseException, address: Address) -> StoreError | ConfigurationError:
    """Return the error for the caller if a connection to *address* could not be opened, or broke."""
    server = "Redis at {}:{}".format(*address) if address else "Redis"
    if isinstance(error, redis.TimeoutError | TimeoutError):
        return StoreTimeout(f"{server} did not answer in time")
    if isinstance(error, redis.AuthenticationError | redis.exceptions.NoPermissionError):
        return ConfigurationError(
            f"{server} refused the login: {error}; correct the user or password in the store's URL"
        )
    if "DB index is out of range" in str(error):
        return ConfigurationError(f"{server} has no such database: {error}; correct its number in the store's URL")
    return StoreUnavailable(f"{server} cannot be reached: {error}")
