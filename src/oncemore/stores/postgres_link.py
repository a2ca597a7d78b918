"""A connection to PostgreSQL of a lane's own, driven through libpq's non-blocking calls (`psycopg.pq`).

psycopg connects, and decodes the rows.  The exchange of a statement for its rows is written out here, once for threads
and event loops alike, because a lane needs what a cursor does not give: an end to every wait, and a prepared statement
under a name that means the same text to every process behind a pooler.
"""

from __future__ import annotations

import asyncio
import selectors
import struct
import threading
import weakref
from collections.abc import Generator, Sequence
from typing import Any

import psycopg
from psycopg.adapt import Transformer
from psycopg.pq import ConnStatus, DiagnosticField, ExecStatus
from psycopg.pq.abc import PGresult

from ..core.clock import SYSTEM
from ..core.fork import reset_in_child
from .postgres_sql import Statement

Rows = list[tuple[Any, ...]]
Steps = Generator[bool, None, Rows]  # yields whenever it must wait: True where there is something left to write

# libpq's own smallest; a connection that takes longer than the rest of the caller's time is still given up.
SHORTEST_CONNECT = 2

# The server says these as it goes away, or as it turns out not to be the primary; another connection may do better.
GOING = {"57P01", "57P02", "57P03", "25006"}
PREPARED_ALREADY = "42P05"


class Lost(Exception):
    """The connection failed; whether the statement was carried out is not known."""


class TimedOut(Lost):
    """The answer did not come in time."""


class Rejected(Exception):
    """The server refused the statement, and nothing of it happened."""

    def __init__(self, message: str, sqlstate: str) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate


class Link:
    """One open connection.  *alone* says that no pooler stands between: what we set and prepare is there next time."""

    def __init__(self, connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
        self.connection = connection
        self.pgconn = connection.pgconn
        self.lock = threading.Lock()
        self.greeted = False
        self.alone = False
        self.reader = Reader(connection.pgconn.socket)
        self._rows = Transformer(connection)
        self._prepared: set[bytes] = set()

    @property
    def open(self) -> bool:
        return self.pgconn.status == ConnStatus.OK

    def drop(self) -> None:
        self.reader.forget()
        self.pgconn.finish()

    def exchange(self, statement: Statement, values: Sequence[Any] | None) -> Steps:
        """The rows that the statement returns; without *values* it may be a script, and returns none."""
        pgconn = self.pgconn
        try:
            if values is None:
                pgconn.send_query(statement.text.encode())
                yield from self._result()
                return []
            parameters = [dump(value) for value in values]
            texts, formats = [text for text, _ in parameters], [format for _, format in parameters]
            if self.alone and statement.name:
                yield from self._prepare(statement)
                pgconn.send_query_prepared(statement.name, texts, formats, 1)
            else:
                pgconn.send_query_params(statement.text.encode(), texts, None, formats, 1)
            result = yield from self._result()
        except psycopg.OperationalError as error:
            raise Lost(str(error).strip()) from error
        self._rows.set_pgresult(result)
        return self._rows.load_rows(0, result.ntuples, tuple)

    def _prepare(self, statement: Statement) -> Generator[bool, None, None]:
        if statement.name in self._prepared:
            return
        self.pgconn.send_prepare(statement.name, statement.text.encode())
        try:
            yield from self._result()
        except Rejected as error:
            if error.sqlstate != PREPARED_ALREADY:  # by another through the same pooler: the name vouches for the text
                raise
        self._prepared.add(statement.name)

    def _result(self) -> Generator[bool, None, PGresult]:
        """The last result of what was sent; raises where one of them is an error."""
        pgconn, last, failed = self.pgconn, None, None
        while pgconn.flush():
            yield True
            pgconn.consume_input()
        while True:
            while pgconn.is_busy():
                yield False
                pgconn.consume_input()
            result = pgconn.get_result()
            if result is None:
                break
            last = result
            if result.status == ExecStatus.FATAL_ERROR:
                failed = failed or result
        if failed is not None:
            raise self._failure(failed)
        if last is None:
            raise Lost("the server closed the connection")
        return last

    def _failure(self, result: PGresult) -> Exception:
        sqlstate = (result.error_field(DiagnosticField.SQLSTATE) or b"").decode()
        message = (result.error_field(DiagnosticField.MESSAGE_PRIMARY) or result.error_message).decode(errors="replace")
        if sqlstate in GOING or sqlstate.startswith("08") or not sqlstate or self.pgconn.status == ConnStatus.BAD:
            return Lost(message)
        return Rejected(message, sqlstate)


class Reader:
    """Waits for a socket on an event loop.  It stays registered between two waits, which saves four system calls."""

    def __init__(self, socket: int) -> None:
        self._socket = socket
        self._registered = False
        self._waiting: asyncio.Future[bool] | None = None

    async def wait(self, writing: bool, seconds: float) -> None:
        """Return when there is something to read (or room for more, when *writing*)."""
        loop = asyncio.get_running_loop()
        waiting = self._waiting = loop.create_future()
        if not self._registered:
            loop.add_reader(self._socket, self._ready)
            self._registered = True
        if writing:
            loop.add_writer(self._socket, self._ready)
        timer = loop.call_later(max(0.0, seconds), tell, waiting, False)
        try:
            if not await waiting:
                raise TimedOut("the answer took too long")
        finally:
            timer.cancel()
            self._waiting = None
            if writing:
                loop.remove_writer(self._socket)

    def _ready(self) -> None:
        if self._waiting is None:  # nobody expects anything: the server has closed the connection, or made a remark
            self.forget()
        else:
            tell(self._waiting, True)

    def forget(self) -> None:
        """Leave the loop alone; the number of a closed socket may soon be another's."""
        if self._registered:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._registered = False


def tell(waiting: asyncio.Future[bool], ready: bool) -> None:
    if not waiting.done():
        waiting.set_result(ready)


class Line:
    """Where a lane keeps its connections: one for this process's threads, and one for each event loop."""

    def __init__(self, conninfo: str) -> None:
        self.conninfo = conninfo
        self._reset()
        reset_in_child(self)

    def _reset(self) -> None:
        self.link: Link | None = None
        self.loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Link] = weakref.WeakKeyDictionary()

    def close(self) -> None:
        """End the threads' connection, once it is idle, and those of event loops that are no more."""
        link, self.link = self.link, None
        if link is not None:
            with link.lock:
                link.drop()
        for loop, there in tuple(self.loops.items()):
            if loop.is_closed():
                there.pgconn.finish()
                del self.loops[loop]

    async def aclose(self) -> None:
        """End the running loop's connection."""
        link = self.loops.pop(asyncio.get_running_loop(), None)
        if link is not None:
            link.drop()


class Open:
    """The effect of getting a line's open connection; a new one where there is none."""

    __slots__ = ("ends", "line")

    def __init__(self, line: Line, ends: float) -> None:
        self.line = line
        self.ends = ends

    def run(self) -> Link:
        line = self.line
        if line.link is None or not line.link.open:
            line.link = Link(self._connect())
        return line.link

    def _connect(self) -> psycopg.Connection[Any]:
        left = max(SHORTEST_CONNECT, int(self.ends - SYSTEM.monotonic()))
        try:
            return psycopg.connect(self.line.conninfo, autocommit=True, connect_timeout=left)
        except psycopg.Error as error:
            raise Lost(str(error).strip()) from error

    async def arun(self) -> Link:
        loops, loop = self.line.loops, asyncio.get_running_loop()
        link = loops.get(loop)
        if link is None or not link.open:
            link = loops[loop] = Link(await self._aconnect())
        return link

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
        with link.lock:
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
    with Selector() as selector:
        selector.register(socket, selectors.EVENT_READ | (selectors.EVENT_WRITE if writing else 0))
        if not selector.select(max(0.0, seconds)):
            raise TimedOut("the answer took too long")


# Not the default one, which on Linux would open and close a file descriptor for each wait.
Selector: type[selectors.BaseSelector] = getattr(selectors, "PollSelector", selectors.SelectSelector)

BYTEA = 17
NULL = struct.pack("!i", -1)


def dump(value: Any) -> tuple[bytes | None, int]:
    """The value as a parameter, and its format: 0 for text, whose type PostgreSQL infers, or 1 for binary."""
    match value:
        case None:
            return None, 0
        case str():
            return value.encode(), 0
        case bytes():
            return value, 1
        case list():
            return dump_array(value), 1
    return str(value).encode(), 0


def dump_array(items: list[bytes | None]) -> bytes:
    """A bytea[] in its binary form."""
    parts = [struct.pack("!iiIii", 1, 1, BYTEA, len(items), 1)]
    for item in items:
        parts += (NULL,) if item is None else (struct.pack("!i", len(item)), item)
    return b"".join(parts)
