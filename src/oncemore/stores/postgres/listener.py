"""Hears of the changes that other processes make: one LISTEN connection and one thread per store, once it is in use."""

from __future__ import annotations

import secrets
import selectors
import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import msgspec
import psycopg
from psycopg import sql

from ..._runtime.forks import reset_in_child
from ..._runtime.wakeups import Id, Wakeups
from .rows import plain, safe

LONGEST_MESSAGE = 7900  # PostgreSQL takes less than 8000 bytes
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0

encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder(tuple[str, list[Id]]).decode


class Deaf(Exception):
    """A pooler stands between: it would not know whom to give our messages."""


class Ear:
    """Notifies *wakeups* of the records that others have changed.  It is *deaf* behind a pooler."""

    def __init__(self, conninfo: str, channel: str, wakeups: Wakeups, *, deaf: bool = False) -> None:
        self.conninfo = conninfo
        self.channel = channel
        self.wakeups = wakeups
        self.deaf = deaf
        self._reset()
        reset_in_child(self)

    def _reset(self) -> None:
        self._sign = secrets.token_hex(8)  # of our own messages, which need not come back to us
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stop: socket.socket | None = None

    def listen(self) -> None:
        """Start to listen, unless that was done before."""
        if self._thread is not None or self.deaf:
            return
        with self._lock, suppress(RuntimeError):  # the interpreter is about to end, and starts no more threads
            if self._thread is None:
                stop, stopped = socket.socketpair()
                thread = threading.Thread(target=self._run, args=(stopped,), name="oncemore-ear", daemon=True)
                thread.start()
                self._thread, self._stop = thread, stop

    def close(self) -> None:
        with self._lock:
            thread, stop = self._thread, self._stop
            self._thread = self._stop = None
        if thread is not None and stop is not None:
            stop.shutdown(socket.SHUT_RDWR)  # to close it might not be enough: a forked child has it too
            stop.close()
            if thread is not threading.current_thread():
                thread.join(timeout=1.0)  # it may be busy with connecting; it ends then

    def messages(self, ids: Iterable[Id]) -> Iterator[str]:
        """What to tell the other processes about *ids*, in as few messages as it fits into."""
        group: list[Id] = []
        size = 0
        for scope, key in ids:
            id = (safe(scope), safe(key))
            size += len(encode(id)) + 1
            if group and size > LONGEST_MESSAGE:
                yield encode((self._sign, group)).decode()
                group, size = [], len(encode(id)) + 1
            group.append(id)
        if group:
            yield encode((self._sign, group)).decode()

    # In its own thread

    def _run(self, stopped: socket.socket) -> None:
        pause = FIRST_PAUSE
        with stopped, selectors.DefaultSelector() as selector:
            selector.register(stopped, selectors.EVENT_READ)
            while True:
                try:
                    with psycopg.connect(self.conninfo, autocommit=True, connect_timeout=5) as connection:
                        self._listen(connection)
                        pause = FIRST_PAUSE
                        if self._hear(connection, selector):
                            return
                except Deaf:
                    self.deaf = True
                    return
                except (psycopg.Error, OSError):
                    pass  # until it is back, those who wait look for themselves, as they do now and then anyway
                if selector.select(pause):
                    return
                pause = min(pause * 2, LONGEST_PAUSE)

    def _listen(self, connection: psycopg.Connection[Any]) -> None:
        row = connection.execute("SELECT pg_backend_pid()").fetchone()
        if row is None or row[0] != connection.info.backend_pid:
            raise Deaf
        connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(self.channel)))
        self.wakeups.notify_all()  # something may have changed while nobody listened

    def _hear(self, connection: psycopg.Connection[Any], selector: selectors.BaseSelector) -> bool:
        """Ring for every message that comes; True when it is time to stop."""
        pgconn = connection.pgconn
        there = pgconn.socket
        selector.register(there, selectors.EVENT_READ, "server")
        try:
            while True:
                while message := pgconn.notifies():
                    self._ring(message.extra)
                if any(key.data is None for key, _ in selector.select()):
                    return True
                pgconn.consume_input()
        finally:
            selector.unregister(there)

    def _ring(self, message: bytes) -> None:
        try:
            sign, ids = decode(message)
        except msgspec.MsgspecError:
            return  # anyone may send to the channel
        if sign != self._sign:
            for scope, key in ids:
                self.wakeups.notify((plain(scope), plain(key)))
