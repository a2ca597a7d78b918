"""Connections to Redis: one write and its replies, from a thread or on an event loop, with a deadline.

redis-py connects, encrypts, logs in, sends and parses.  This module keeps the free
connections, and closes a connection that still has to be answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any, TypeAlias

import hiredis
import redis

from ..._runtime.clock import SYSTEM
from ..._runtime.forks import reset_in_child
from ..._runtime.loops import PerLoop
from ...errors import StoreError, StoreTimeout, StoreUnavailable

Address: TypeAlias = tuple[str, int] | None  # None: the server that the URL names
Kind: TypeAlias = tuple[Any, dict[str, Any]]  # a connection class of redis-py, and its options

# Every error that a connection may raise; a UnicodeError is a host name that cannot be looked up.
CONNECTION_ERRORS = (redis.RedisError, OSError, UnicodeError)


def pack(*words: str | bytes | int) -> bytes:
    """One command in the form in which it is sent.  redis-py's own packing for event loops takes several times as long."""
    packet: bytes = hiredis.pack_command(words)  # type: ignore[arg-type]
    return packet


class Connector:
    """Makes redis-py connections that are not connected yet, with the options of the store's URL."""

    def __init__(self, for_threads: Kind, for_loops: Kind) -> None:
        self._for_threads = for_threads
        self._for_loops = for_loops

    def open(self, address: Address) -> Any:
        kind, options = self._for_threads
        return kind(**at(options, address))

    def open_on_loop(self, address: Address) -> Any:
        kind, options = self._for_loops
        return kind(**at(options, address))

    def pubsub(self, address: Address, timeout: float) -> Any:
        """A redis-py PubSub, which takes at most *timeout* seconds to connect, to send, and to log in."""
        kind, options = self._for_threads
        options = {**at(options, address), "socket_timeout": timeout, "socket_connect_timeout": timeout}
        client: Any = redis.Redis(connection_pool=redis.ConnectionPool(kind, **options))
        return client.pubsub()


def at(options: dict[str, Any], address: Address) -> dict[str, Any]:
    return {**options, "host": address[0], "port": address[1]} if address else options


class ConnectionPool:
    """The connections that are open and not in use, by address: a free list for threads, and one for each event loop.

    A connection goes back to its list only if all replies to all that was sent on it were read, and if the list was not
    dropped meanwhile by `disconnect`.  *timeout* is the longest that one round trip takes, in seconds.
    """

    def __init__(self, connector: Connector, timeout: float) -> None:
        self.connector = connector
        self.timeout = timeout
        self._reset()
        reset_in_child(self)  # a child must not use its parent's connections, nor close them

    def _reset(self) -> None:
        self._threads: dict[Address, list[Any]] = {}
        self._loops: PerLoop[dict[Address, list[Any]]] = PerLoop(dict)

    def free_for_threads(self, address: Address) -> list[Any]:
        return self._threads.setdefault(address, [])

    def free_on_loop(self, address: Address) -> list[Any]:
        return self._loops.get().setdefault(address, [])

    def disconnect(self, address: Address) -> None:
        """Close the free connections of threads to *address*.  One that is in use is closed when its round trip is over."""
        connections = self._threads.pop(address, [])
        while connections:
            connections.pop().disconnect()

    async def adisconnect(self, address: Address) -> None:
        """As `disconnect`, for those of the running event loop."""
        connections = self._loops.get().pop(address, [])
        while connections:
            await connections.pop().disconnect(nowait=True)

    def close(self) -> None:
        for address in tuple(self._threads):
            self.disconnect(address)

    async def aclose(self) -> None:
        """Return when the sockets are closed too: the loop may end next."""
        for connections in (self._loops.pop() or {}).values():
            while connections:
                with suppress(*CONNECTION_ERRORS):  # TLS waits for the server's answer
                    async with asyncio.timeout(self.timeout):
                        await connections.pop().disconnect()


class RoundTrip:
    """Effect: send *packet* to *address* in one write and return its *count* replies; an error reply is one of them.

    Raises StoreTimeout or StoreUnavailable if not all replies came within *timeout* seconds; the server may have carried
    out the commands all the same.  On a thread, a reply that has begun to arrive may take so long again for its rest:
    redis-py's blocking sockets have a timeout for each read, and none for a whole reply.
    """

    __slots__ = ("address", "count", "packet", "pool", "timeout")

    def __init__(self, pool: ConnectionPool, address: Address, packet: bytes, count: int, timeout: float) -> None:
        self.pool = pool
        self.address = address
        self.packet = packet
        self.count = count
        self.timeout = timeout

    def run(self) -> list[Any]:
        deadline = SYSTEM.monotonic() + self.timeout
        usual = self.timeout == self.pool.timeout
        free = self.pool.free_for_threads(self.address)
        try:
            try:
                connection, kept = free.pop(), True
            except IndexError:
                connection, kept = self.pool.connector.open(self.address), usual
                connection.socket_timeout = min(connection.socket_timeout or self.timeout, self.timeout)
                connection.socket_connect_timeout = min(connection.socket_connect_timeout or self.timeout, self.timeout)
            try:
                connection.send_packed_command([self.packet])  # connects first, if need be
                replies = []
                for _ in range(self.count):
                    # The timeout of a socket stays as it was when it was opened, so another one needs a wait of its own.
                    if not usual and not connection.can_read(max(0.0, deadline - SYSTEM.monotonic())):
                        raise redis.TimeoutError("no reply")
                    try:
                        replies.append(connection.read_response())
                    except redis.ResponseError as error:
                        replies.append(error)
            except BaseException:  # also Ctrl-C: a reply that comes later would be taken for the next caller's
                connection.disconnect()
                raise
        except CONNECTION_ERRORS as error:
            raise connection_error(error, self.address) from error
        # One that was opened with little time left has timeouts that are too short for others.
        if kept and self.pool.free_for_threads(self.address) is free:
            free.append(connection)
        else:
            connection.disconnect()
        return replies

    async def arun(self) -> list[Any]:
        free = self.pool.free_on_loop(self.address)
        try:
            connection = free.pop() if free else self.pool.connector.open_on_loop(self.address)
            try:
                # One deadline for all of it.  redis-py's own timeouts, which are off, start a task for every write.
                async with asyncio.timeout(self.timeout):
                    await connection.send_packed_command([self.packet])
                    replies = []
                    for _ in range(self.count):
                        try:
                            replies.append(await connection.read_response())
                        except redis.ResponseError as error:
                            replies.append(error)
            except BaseException:
                await connection.disconnect(nowait=True)
                raise
        except CONNECTION_ERRORS as error:
            raise connection_error(error, self.address) from error
        if self.pool.free_on_loop(self.address) is free:
            free.append(connection)
        else:
            await connection.disconnect(nowait=True)
        return replies


class Disconnect:
    """Effect: close the free connections to *address*, because the server there has failed or is another one by now."""

    __slots__ = ("address", "pool")

    def __init__(self, pool: ConnectionPool, address: Address) -> None:
        self.pool = pool
        self.address = address

    def run(self) -> None:
        self.pool.disconnect(self.address)

    def arun(self) -> Awaitable[None]:
        return self.pool.adisconnect(self.address)


def connection_error(error: BaseException, address: Address) -> StoreError:
    """The error for the caller if a connection to *address* could not be opened, or broke."""
    server = "Redis at {}:{}".format(*address) if address else "Redis"
    if isinstance(error, redis.TimeoutError | TimeoutError):
        return StoreTimeout(f"{server} did not answer in time")
    if isinstance(error, redis.AuthenticationError | redis.exceptions.NoPermissionError):
        return StoreUnavailable(f"{server} refused the login: {error}")
    return StoreUnavailable(f"{server} cannot be reached: {error}")
