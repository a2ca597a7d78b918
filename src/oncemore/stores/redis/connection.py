"""Connections to Redis that carry a whole group of commands in one write, for threads and for event loops alike.

redis-py finds the address, connects, encrypts and logs in.  Then the socket is ours: its own way of reading costs one
coroutine per answer, which is most of the time of a group.
"""

from __future__ import annotations

import asyncio
import os
import socket
import weakref
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeAlias

import hiredis
import redis.asyncio

from ...errors import StoreError, StoreTimeout, StoreUnavailable

Address: TypeAlias = tuple[str, int] | None  # None: where the URL says
Dial: TypeAlias = Callable[[Address, bool], Any]  # redis-py's connection, not yet connected: for a loop, or for threads

Result: TypeAlias = list[Any] | StoreError  # the answers, or what went wrong

RECEIVE = 256 * 1024

# All that can go wrong on the way; a UnicodeError is a host whose name cannot be looked up.
TROUBLE = (redis.RedisError, hiredis.HiredisError, OSError, UnicodeError)


def pack(*words: str | bytes | int) -> bytes:
    """One command as it is sent."""
    packet: bytes = hiredis.pack_command(words)  # type: ignore[arg-type]
    return packet


class Wire:
    """A connected socket, used by one thread at a time."""

    def __init__(self, connection: Any) -> None:
        connection.connect()
        self.sock, connection._sock = connection._sock, None  # or redis-py would close it
        self.reader = hiredis.Reader()

    def send(self, packet: bytes, patience: float) -> None:
        self.sock.settimeout(patience)
        self.sock.sendall(packet)

    def receive(self, count: int) -> list[Any]:
        """The next *count* answers."""
        answers: list[Any] = []
        while True:
            while (answer := self.reader.gets()) is not False:
                answers.append(answer)
            if len(answers) >= count:
                return answers
            data = self.sock.recv(RECEIVE)
            if not data:
                raise ConnectionResetError("the server closed the connection")
            self.reader.feed(data)

    def hang_up(self) -> None:
        """End the connection from another thread; the one that waits for an answer gets an error."""
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.sock.close()


class LoopWire(asyncio.Protocol):
    """A connected transport on one event loop.  The transport alone keeps it alive, so it goes when the loop goes."""

    @classmethod
    async def open(cls, connection: Any, address: Address) -> LoopWire:
        """The wire, once redis-py has logged in, for which it has a timeout of its own."""
        try:
            await connection.connect()
            return cls(connection._writer, address)
        finally:  # what was opened is ours now, or is not wanted any more
            writer, connection._writer, connection._reader = connection._writer, None, None
            if writer is not None and not isinstance(writer.transport.get_protocol(), cls):
                writer.transport.abort()

    def __init__(self, writer: asyncio.StreamWriter, address: Address) -> None:
        self.writer = writer  # it would close the transport if it were let go
        self.transport: asyncio.WriteTransport = writer.transport
        self.transport.set_protocol(self)
        self.address = address
        self.reader = hiredis.Reader()
        self.answers: list[Any] = []
        self.wanted = 0
        self.then: Callable[[Result], None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.gone: asyncio.Future[None] | None = None

    def begin(self, packet: bytes, count: int, patience: float, then: Callable[[Result], None]) -> None:
        """Send *packet*; *then* gets its answers, *count* of them, as soon as they are there."""
        self.wanted, self.then = count, then
        self.timer = asyncio.get_running_loop().call_later(patience, self.fail, TimeoutError("no answer"))
        self.transport.write(packet)

    async def exchange(self, packet: bytes, count: int, patience: float) -> Result:
        """The answers to *packet*, *count* of them."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()

        def then(result: Result) -> None:
            if not future.done():
                future.set_result(result)

        self.begin(packet, count, patience, then)
        try:
            return await future
        except BaseException:  # answers that come later belong to nobody
            self.close()
            raise

    def data_received(self, data: bytes) -> None:
        reader, answers = self.reader, self.answers
        reader.feed(data)
        while (answer := reader.gets()) is not False:
            answers.append(answer)
        if len(answers) >= self.wanted:
            self.answers = []
            self._end(answers)

    def connection_lost(self, error: Exception | None) -> None:
        self.fail(error or ConnectionResetError("the server closed the connection"))
        if self.gone is not None and not self.gone.done():
            self.gone.set_result(None)

    def fail(self, error: Exception) -> None:
        self.close()
        self._end(trouble(error, self.address))

    def _end(self, result: Result) -> None:
        then, self.then = self.then, None
        if then is not None and self.timer is not None:
            self.timer.cancel()
            then(result)

    def close(self) -> None:
        self.transport.abort()

    async def aclose(self) -> None:
        """Close, and return when the socket is closed too."""
        self.gone = asyncio.get_running_loop().create_future()
        self.close()
        await self.gone


class Line:
    """The way to one address: one connection for all threads, who take turns, and one on each event loop."""

    def __init__(self, dial: Dial, address: Address) -> None:
        self.dial = dial
        self.address = address
        self._reset()
        LINES.add(self)

    def _reset(self) -> None:
        self._wire: Wire | None = None
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, weakref.ref[LoopWire]] = (
            weakref.WeakKeyDictionary()
        )

    def _connection(self, on_loop: bool, patience: float) -> Any:
        """Not yet connected; no step on the way takes longer than *patience*."""
        connection = self.dial(self.address, on_loop)
        for name in ("socket_timeout", "socket_connect_timeout"):
            setattr(connection, name, min(getattr(connection, name, None) or patience, patience))
        return connection

    def loop_wire(self) -> LoopWire | None:
        """The connection on the running loop, where there is one."""
        known = self._loops.get(asyncio.get_running_loop())
        wire = known() if known else None
        return wire if wire is not None and not wire.transport.is_closing() else None

    def send(self, packet: bytes, patience: float) -> StoreError | None:
        """Send from this thread; what went wrong, if anything did."""
        try:
            wire = self._wire
            if wire is None:
                wire = self._wire = Wire(self._connection(False, patience))
            wire.send(packet, patience)
        except BaseException as error:
            return self._failed(error)
        return None

    def receive(self, count: int) -> Result:
        """The answers to what this thread has sent."""
        try:
            wire = self._wire
            if wire is None:
                raise ConnectionResetError("the connection was closed meanwhile")
            return wire.receive(count)
        except BaseException as error:
            return self._failed(error)

    def _failed(self, error: BaseException) -> StoreError:
        self.close()
        if isinstance(error, TROUBLE):
            return trouble(error, self.address)
        raise error

    async def exchange(self, packet: bytes, count: int, patience: float) -> Result:
        """The answers to *packet* on the running loop."""
        wire = self.loop_wire()
        try:
            if wire is None:
                wire = await LoopWire.open(self._connection(True, patience), self.address)
                self._loops[asyncio.get_running_loop()] = weakref.ref(wire)
        except TROUBLE as error:
            return trouble(error, self.address)
        return await wire.exchange(packet, count, patience)

    def close(self) -> None:
        """End the threads' connection; the next use opens another."""
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()

    async def aclose(self) -> None:
        """End the connection of the running loop; the next use opens another."""
        wire = self.loop_wire()
        if wire is not None:
            await wire.aclose()


class Parcel:
    """What goes to one address in one write."""

    __slots__ = ("count", "line", "packet")

    def __init__(self, line: Line, packet: bytes, count: int) -> None:
        self.line = line
        self.packet = packet
        self.count = count


class Exchange:
    """The effect of sending all parcels and getting, for each, its answers or what went wrong."""

    __slots__ = ("parcels", "patience")

    def __init__(self, parcels: list[Parcel], patience: float) -> None:
        self.parcels = parcels
        self.patience = patience

    def run(self) -> list[Result]:
        try:
            failed = [parcel.line.send(parcel.packet, self.patience) for parcel in self.parcels]
            return [
                error or parcel.line.receive(parcel.count) for parcel, error in zip(self.parcels, failed, strict=True)
            ]
        except BaseException:  # interrupted: what is still to be answered would be taken for the next group's
            for parcel in self.parcels:
                parcel.line.close()
            raise

    async def arun(self) -> list[Result]:
        if len(self.parcels) == 1:
            return [await self._exchange(self.parcels[0])]
        # All are waited for, also where one fails: what its line still owes would be taken for the next group's.
        results = await asyncio.gather(*map(self._exchange, self.parcels), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, StoreError):
                raise result
        return results  # type: ignore[return-value]

    def _exchange(self, parcel: Parcel) -> Awaitable[Result]:
        return parcel.line.exchange(parcel.packet, parcel.count, self.patience)


class HangUp:
    """The effect of ending a line's connection, the one that the caller would use."""

    __slots__ = ("line",)

    def __init__(self, line: Line) -> None:
        self.line = line

    def run(self) -> None:
        self.line.close()

    async def arun(self) -> None:
        await self.line.aclose()


def trouble(error: BaseException, address: Address) -> StoreError:
    """What a driver's or the system's *error* is to the caller."""
    where = "Redis at {}:{}".format(*address) if address else "Redis"
    failure: StoreError
    if isinstance(error, redis.TimeoutError | TimeoutError):
        failure = StoreTimeout(f"{where} did not answer in time")
    elif isinstance(error, redis.AuthenticationError | redis.exceptions.NoPermissionError):
        failure = StoreUnavailable(f"{where} refused the login: {error}")
    else:
        failure = StoreUnavailable(f"{where} cannot be reached: {error}")
    failure.__cause__ = error
    return failure


# A forked child must not touch its parent's connections, not even to close them; so it keeps them for good.
LINES: weakref.WeakSet[Line] = weakref.WeakSet()
INHERITED: list[object] = []


def forget_lines() -> None:
    for line in tuple(LINES):
        INHERITED.append((line._wire, [wire() for wire in line._loops.values()]))
        line._reset()


os.register_at_fork(after_in_child=forget_lines)
