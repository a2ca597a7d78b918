"""Connections to Redis: one write and its replies, from a thread or on an event loop, with a deadline.

redis-py connects, encrypts, logs in, sends and parses.  This module keeps the free connections, and closes a connection
that still has to be answered.
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

# Every error that a connection may raise; a UnicodeError is a host name that cannot be looked up.
CONNECTION_ERRORS = (redis.RedisError, OSError, UnicodeError)
ABANDONED = "the server is no longer the primary"
LATE_TURNS = 2  # of a busy event loop, in which a reply that came in time is read
CLOSE_SECONDS = 2.0  # TLS waits for the server's answer when it closes a connection


def pack(*words: str | bytes | int) -> bytes:
    """One command in the form in which it is sent.  redis-py's own packing for event loops takes several times as long."""
    packet: bytes = hiredis.pack_command(words)  # type: ignore[arg-type]
    return packet


class Connector:
    """Makes redis-py connections that are not connected yet, with the options of *url*; *replaced* replace some of these.

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
        """A connection for threads, which takes at most *timeout* seconds to connect, to log in, and to send."""
        kind, options = self._for_threads
        return kind(**at(options, address, timeout))

    def open_on_loop(self, address: Address) -> Any:
        """A connection for an event loop.  It has no timeouts, because redis-py would start a task for every write."""
        kind, options = self._for_loops
        return kind(**at(options, address, None))

    def pubsub(self, address: Address, timeout: float) -> Any:
        """A redis-py PubSub, with the timeouts of `open`."""
        kind, options = self._for_threads
        client: Any = redis.Redis(connection_pool=redis.ConnectionPool(kind, **at(options, address, timeout)))
        return client.pubsub()


def at(options: dict[str, Any], address: Address, timeout: float | None) -> dict[str, Any]:
    options = {**options, "socket_timeout": timeout, "socket_connect_timeout": timeout}
    return {**options, "host": address[0], "port": address[1]} if address else options


class ConnectionPool:
    """The connections that are open and not in use, by address: a free list for threads, and one for each event loop.

    A connection becomes free again only if all replies to all that was sent on it were read.  After `drop`, the
    connections of that address belong to an old generation, and are closed instead of being used again.
    """

    def __init__(self, connector: Connector) -> None:
        self.connector = connector
        self._reset()
        reset_in_child(self)  # a child must not use or close its parent's connections

    def _reset(self) -> None:
        self._generations: dict[Address, int] = {}
        self.abandoned: dict[Address, int] = {}  # how often each address was
        self.in_use: dict[
            Any, tuple[Address, asyncio.AbstractEventLoop | None]
        ] = {}  # by connection; None: of a thread
        self._breaking: set[asyncio.Future[None]] = set()
        self._threads: FreeConnections = {}
        self._loops: PerLoop[FreeConnections] = PerLoop(dict)

    def generation(self, address: Address) -> int:
        return self._generations.setdefault(address, 0)

    def drop(self, address: Address) -> None:
        """Use no connection again that is open to *address* now.  May be called on any thread."""
        self._generations[address] = self.generation(address) + 1

    def drop_all(self) -> None:
        for address in tuple(self._generations):
            self.drop(address)

    def abandon(self, address: Address) -> None:
        """Break all connections to *address*, because it is no primary any more.  May be called on any thread.

        Commands under way fail, also if their replies arrive now, and can be sent to the new primary.
        """
        self.abandoned[address] = self.abandoned.get(address, 0) + 1
        self.drop(address)
        for connection, (place, loop) in tuple(self.in_use.items()):
            if place == address:
                with suppress(Exception):  # it ends by itself at the same time, or its loop was closed
                    if loop is None:
                        connection.disconnect()
                    else:
                        loop.call_soon_threadsafe(self._break_on_loop, connection)

    def _break_on_loop(self, connection: Any) -> None:
        task = asyncio.ensure_future(connection.disconnect(nowait=True))
        self._breaking.add(task)  # the loop's own references to tasks are weak
        task.add_done_callback(self._breaking.discard)

    def take(self, address: Address, generation: int) -> Any:
        """A free connection for this thread, or None."""
        free = self._threads.setdefault(address, [])
        with suppress(IndexError):  # not asked before, because other threads take connections at the same time
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
        """A free connection for the running event loop, or None."""
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
        """Close the free connections of threads.  All that are in use are closed when they are put back."""
        self.drop_all()
        for free in tuple(self._threads.values()):
            while free:
                free.pop()[1].disconnect()

    async def aclose(self) -> None:
        """Close the free connections of the running event loop; return when the sockets are closed: the loop may end next."""
        for free in (self._loops.pop() or {}).values():
            while free:
                with suppress(*CONNECTION_ERRORS):
                    async with asyncio.timeout(CLOSE_SECONDS):
                        await free.pop()[1].disconnect()


class NotConnected(StoreUnavailable):
    """No connection to Redis is open and free."""


class SendCommands(msgspec.Struct, gc=False):
    """Effect: send *packet* to *address* in one write and return its *count* replies; an error reply is one of them.

    A new connection is opened if none is free; with *connected*, NotConnected is raised instead.
    Raises ConfigurationError if the server refuses the login.  Raises StoreTimeout or StoreUnavailable if not all replies
    came within *timeout* seconds; the server may have carried out the commands all the same.  On a thread, a reply that
    has begun to arrive may take longer: redis-py's blocking sockets have a timeout for each read, that of the connection,
    and none for a whole reply.
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
            connection.send_packed_command([self.packet])  # connects first, if need be
            while len(replies) < self.count:
                # The timeout of a socket stays as it was when it was opened, so another one needs a wait of its own.
                unusual = connection.socket_timeout != self.timeout
                if unusual and not connection.can_read(max(0.0, deadline - SYSTEM.monotonic())):
                    raise redis.TimeoutError("no reply")
                try:
                    replies.append(connection.read_response())
                except redis.ResponseError as error:
                    replies.append(error)
            if pool.abandoned.get(address) != abandoned:
                raise redis.ConnectionError(ABANDONED)
        except BaseException as error:  # also Ctrl-C: a reply that comes later would be taken for the next caller's
            with suppress(*CONNECTION_ERRORS):
                connection.disconnect()
            self._raise_own(error, abandoned)
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
            self._raise_own(error, abandoned)
            raise
        finally:
            pool.in_use.pop(connection, None)
        await pool.aput_back(address, generation, connection)
        return replies

    def _check_may_open(self) -> None:
        if self.connected:
            raise NotConnected("No connection to Redis is open yet")

    def _raise_own(self, error: BaseException, abandoned: int | None) -> None:
        """Raise the caller's error for *error*, unless that is not about the connection."""
        if isinstance(error, CONNECTION_ERRORS):
            raise connection_error(error, self.address) from error
        # redis-py is surprised if another thread closes its connection.
        if isinstance(error, Exception) and self.pool.abandoned.get(self.address) != abandoned:
            raise connection_error(redis.ConnectionError(ABANDONED), self.address) from error


def expire(limit: asyncio.Timeout, turns: int = LATE_TURNS) -> None:
    """End *limit* after some more turns of the loop.

    A loop that was busy reads a reply that came in time only in its next turn, and wakes the reader in the turn after that.
    """
    loop = asyncio.get_running_loop()
    if turns:
        loop.call_soon(expire, limit, turns - 1)
    else:
        with suppress(RuntimeError):  # it has ended meanwhile
            limit.reschedule(loop.time())


def connection_error(error: BaseException, address: Address) -> StoreError | ConfigurationError:
    """The error for the caller if a connection to *address* could not be opened, or broke."""
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
