"""Listens for messages about changes that other processes make (LISTEN), on its own connection and thread."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import psycopg
from psycopg import sql

from ..._runtime.listening import CannotListen, Listener
from ..._runtime.wakeups import Id, Wakeups
from .connection import refusals_explained
from .rows import escape_text, unescape_text

LONGEST_MESSAGE = 7900  # PostgreSQL takes less than 8000 bytes

encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder(tuple[str, list[Id]]).decode


class PostgresListener(Listener[psycopg.Connection[Any]]):
    """Wakes the waiters of records that other processes have changed.

    It is `unavailable` behind a pooler, because a pooler does not pass messages on to the client that listens.
    """

    name = "oncemore-postgres-listener"

    def __init__(self, conninfo: str, channel: str, wakeups: Wakeups, *, unavailable: bool = False) -> None:
        self.conninfo = conninfo
        self.channel = channel
        self.wakeups = wakeups
        super().__init__(unavailable=unavailable)

    def _reset(self) -> None:
        super()._reset()
        self._sender = secrets.token_hex(8)  # the name of this process in its messages, so that it ignores them

    def connect(self) -> psycopg.Connection[Any]:
        with refusals_explained():
            connection = psycopg.connect(self.conninfo, autocommit=True, connect_timeout=5)
        try:
            row = connection.execute("SELECT pg_backend_pid()").fetchone()
            if row is None or row[0] != connection.info.backend_pid:
                raise CannotListen("a pooler is between the store and PostgreSQL")
            connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(self.channel)))
        except BaseException:
            connection.close()
            raise
        self.wakeups.notify_all()  # anything may have changed while nobody listened
        return connection

    def receive(self, connection: psycopg.Connection[Any], seconds: float) -> None:
        for message in connection.notifies(timeout=seconds):
            self._handle(message.payload)

    def _handle(self, payload: str) -> None:
        try:
            sender, ids = decode(payload)
        except msgspec.MsgspecError:
            return  # another program has sent to the channel
        if sender != self._sender:
            for scope, key in ids:
                self.wakeups.notify((unescape_text(scope), unescape_text(key)))

    def messages(self, ids: Iterable[Id]) -> Iterator[str]:
        """Return the messages that tell the other processes that *ids* have changed, as few as possible."""
        batch: list[Id] = []
        size = 0
        for scope, key in ids:
            id = (escape_text(scope), escape_text(key))
            size += len(encode(id)) + 1
            if batch and size > LONGEST_MESSAGE:
                yield encode((self._sender, batch)).decode()
                batch, size = [], len(encode(id)) + 1
            batch.append(id)
        if batch:
            yield encode((self._sender, batch)).decode()
