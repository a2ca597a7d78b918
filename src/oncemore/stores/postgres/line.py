"""Where connections wait for work, and the effects of using one: some for the threads, and some for each event loop."""

from __future__ import annotations

import asyncio
import select
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import psycopg

from ..._runtime.batching import set_result
from ..._runtime.clock import SYSTEM
from ..._runtime.forks import reset_in_child
from .connection import Link, Lost, Rejected, Rows, TimedOut
from .statements import Statement

# libpq's own smallest; a connection that takes longer than the rest of the caller's time is still given up.
SHORTEST_CONNECT = 2


class Idle:
    """Connections without work.  The last to come is the first to go: its server process is still warm."""

    def __init__(self) -> None:
        self.links: list[Link] = []
        self.closed = False

    def take(self) -> Link | None:
        """One that is open, if there is any; it is the taker's alone until it is put back."""
        while self.links:
            link = self.links.pop()
            if link.idle:
                return link
        return None

    def put(self, link: Link) -> None:
        if link.idle and not self.closed:
            self.links.append(link)
        else:
            link.drop()

    def close(self) -> None:
        """End these now, and those that are at work when they come back."""
        self.closed = True
        while self.links:
            self.links.pop().drop()


class Line:
    """The way to the server: idle connections of this process's threads, and of each event loop."""

    def __init__(self, conninfo: str) -> None:
        self.conninfo = conninfo
        self._reset()
        reset_in_child(self)

    def _reset(self) -> None:
        self.threads = Idle()
        self.loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Idle] = weakref.WeakKeyDictionary()

    def on_loop(self) -> Idle:
        loop = asyncio.get_running_loop()
        return self.loops.get(loop) or self.loops.setdefault(loop, Idle())

    def close(self) -> None:
        """End the threads' connections, and those of event loops that are no more."""
        idle, self.threads = self.threads, Idle()
        idle.close()
        for loop, there in tuple(self.loops.items()):
            if loop.is_closed():
                there.close()
                self.loops.pop(loop, None)

    async def aclose(self) -> None:
        """End the running loop's connections."""
        idle = self.loops.pop(asyncio.get_running_loop(), None)
        if idle is not None:
            idle.close()


class Open:
    """The effect of taking an idle connection from a line, or opening one."""

    __slots__ = ("ends", "line")

    def __init__(self, line: Line, ends: float) -> None:
        self.line = line
        self.ends = ends

    def run(self) -> Link:
        idle = self.line.threads
        return idle.take() or Link(self._connect(), idle)

    def _connect(self) -> psycopg.Connection[Any]:
        left = max(SHORTEST_CONNECT, int(self.ends - SYSTEM.monotonic()))
        try:
            return psycopg.connect(self.line.conninfo, autocommit=True, connect_timeout=left)
        except psycopg.Error as error:
            raise Lost(str(error).strip()) from error

    async def arun(self) -> Link:
        idle = self.line.on_loop()
        return idle.take() or LoopLink(await self._aconnect(), idle)

    async def _aconnect(self) -> psycopg.AsyncConnection[Any]:
        try:
            async with asyncio.timeout(max(0.0, self.ends - SYSTEM.monotonic())):
                return await psycopg.AsyncConnection.connect(self.line.conninfo, autocommit=True)
        except TimeoutError as error:
            raise TimedOut("connecting took too long") from error
        except psycopg.Error as error:
            raise Lost(str(error).strip()) from error


class Send:
    """The effect of sending a statement and waiting for its rows, at most until *ends*."""

    __slots__ = ("ends", "link", "statement", "values")

    def __init__(self, link: Link, statement: Statement, values: Sequence[Any] | None, ends: float) -> None:
        self.link = link
        self.statement = statement
        self.values = values
        self.ends = ends

    def run(self) -> Rows:
        link = self.link
        steps = link.exchange(self.statement, self.values)
        try:
            writing = next(steps)
            while True:
                wait(link.pgconn.socket, writing, self.ends - SYSTEM.monotonic())
                writing = next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        except Rejected:
            raise
        except BaseException:  # also an interrupt: the answer is still to come, and nobody would expect it
            link.drop()
            raise

    async def arun(self) -> Rows:
        link = self.link
        assert isinstance(link, LoopLink)
        steps = link.exchange(self.statement, self.values)
        try:
            writing = next(steps)
            while True:
                await link.reader.wait(writing, self.ends - SYSTEM.monotonic())
                writing = next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        except Rejected:
            raise
        except BaseException:
            link.drop()
            raise


def wait(socket: int, writing: bool, seconds: float) -> None:
    """Block until the socket has something to read (or can take more, when *writing*)."""
    if hasattr(select, "poll"):
        poll = select.poll()
        poll.register(socket, select.POLLIN | select.POLLOUT if writing else select.POLLIN)
        ready = bool(poll.poll(max(0.0, seconds) * 1000))
    else:  # Windows
        ready = any(select.select([socket], [socket] if writing else [], [], max(0.0, seconds)))
    if not ready:
        raise too_long()


def too_long() -> TimedOut:
    return TimedOut("the answer took too long")


class LoopLink(Link):
    """A link of an event loop's."""

    def __init__(self, connection: psycopg.AsyncConnection[Any], home: Idle) -> None:
        super().__init__(connection, home)
        self.reader = Reader(connection.pgconn.socket)

    def drop(self) -> None:
        self.reader.forget()
        super().drop()


class Reader:
    """Waits for a socket on an event loop.  It stays registered between two waits, which saves four system calls."""

    def __init__(self, socket: int) -> None:
        self._socket = socket
        self._registered = False
        self._writing = False
        self._then: Callable[[bool], object] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def call(self, writing: bool, seconds: float, then: Callable[[bool], object]) -> None:
        """Call *then* with True when there is something to read (or room for more, when *writing*); else in time with False."""
        loop = asyncio.get_running_loop()
        if not self._registered:
            loop.add_reader(self._socket, self._ready)
            self._registered = True
        if writing:
            loop.add_writer(self._socket, self._ready)
        self._then, self._writing = then, writing
        self._timer = loop.call_later(max(0.0, seconds), self._tell, False)

    async def wait(self, writing: bool, seconds: float) -> None:
        """Return when there is something to read (or room for more, when *writing*)."""
        waiting: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.call(writing, seconds, partial(set_result, waiting))
        try:
            if not await waiting:
                raise too_long()
        finally:
            self._stop()

    def _ready(self) -> None:
        if self._then is None:  # nobody expects anything: the server has closed the connection, or made a remark
            self.forget()
        else:
            self._tell(True)

    def _tell(self, ready: bool) -> None:
        then = self._then
        self._stop()
        if then is not None:
            then(ready)

    def _stop(self) -> None:
        self._then = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._writing:
            self._writing = False
            asyncio.get_running_loop().remove_writer(self._socket)

    def forget(self) -> None:
        """Leave the loop alone; the number of a closed socket may soon be another's."""
        if self._registered:
            self._registered = False
            with suppress(RuntimeError):  # the loop has ended
                asyncio.get_running_loop().remove_reader(self._socket)
