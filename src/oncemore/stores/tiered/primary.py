"""Whether the PostgreSQL server is still the one that the copies are of: its identity, its timeline and its clock."""

from __future__ import annotations

import select
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

import msgspec
import psycopg

from ..._ledger.events import log
from ..._runtime.clock import SYSTEM
from ..._runtime.listening import Listener
from ..postgres import PostgresStore

# The primary is asked this often whether it is still there, still the primary, and of the same timeline.  Without an
# answer for so long, no copy is used.
PROBE_SECONDS, TRUST_SECONDS = 0.25, 1.0
GATHER_SECONDS = 0.02  # the background work is done at most fifty times a second

PROBE = """
    SELECT extract(epoch FROM clock_timestamp())::float8, left(pg_walfile_name(pg_current_wal_lsn()), 8),
        (SELECT system_identifier FROM pg_control_system())::text, current_database()::text
"""


class PrimaryWatch(Listener["psycopg.Connection[Any]"]):
    """Keeps a connection to the primary open on a thread of its own, and asks it four times a second who it is.

    The same thread calls *work*, soon after `wake` and at least four times a second.
    """

    name = "oncemore-tiered"

    def __init__(self, primary: PostgresStore, work: Callable[[], None]) -> None:
        self._primary = primary
        self._work = weakref.WeakMethod(work)  # its owner has this watch, which ends with it
        super().__init__()

    def _reset(self) -> None:
        super()._reset()
        self._wake = threading.Event()
        self._namespace = ""
        self._offset = 0.0  # of PostgreSQL's clock against this process's
        self._confirmed_at = 0.0
        self._socket = -1
        self._warned = False

    def wake(self) -> None:
        """Have the work done soon."""
        if not self._wake.is_set():  # to set it again would cost more than to look
            self._wake.set()

    def namespace(self) -> str | None:
        """The part of a copy's name that stands for the primary as it is now; None if that is not known.

        None also if the primary has not answered for a second: a server that was promoted instead may have lost outcomes of
        which there are copies.
        """
        return self._namespace if SYSTEM.monotonic() - self._confirmed_at < TRUST_SECONDS else None

    def is_connected(self) -> bool:
        """Whether the connection to the primary is open, as far as the operating system knows.

        If the server has closed the connection, there is something to read, before the thread knows of it.
        """
        if not self._namespace:
            return False
        socket = select.poll()  # a new one, because threads cannot share it
        socket.register(self._socket, select.POLLIN)
        return not socket.poll(0)

    def now(self) -> float:
        """The time by PostgreSQL's clock."""
        return self.time_at(SYSTEM.monotonic())

    def time_at(self, moment: float) -> float:
        """The time by PostgreSQL's clock at that moment of the monotonic clock."""
        return moment + self._offset + self._primary.shift

    def namespace_of(self, row: Sequence[Any]) -> str:
        """The identity of the server, its database and its table, and the server's timeline; *row* is a PROBE's."""
        _, timeline, system, database = row
        identity = msgspec.msgpack.encode((system, database, self._primary.database.names["records"]))
        return f"{blake2b(identity, digest_size=8).hexdigest()}.{timeline}"

    def connect(self) -> psycopg.Connection[Any]:
        conninfo = self._primary.database.conninfo
        connection = psycopg.connect(conninfo, autocommit=True, connect_timeout=5, prepare_threshold=None)
        try:
            self._socket = connection.fileno()
            self._probe(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def receive(self, connection: psycopg.Connection[Any], seconds: float) -> None:
        try:
            if self._wake.wait(seconds):
                time.sleep(GATHER_SECONDS)
                self._wake.clear()
            work = self._work()
            if work is None or not self._namespace:  # it was closed meanwhile
                return
            work()
            if SYSTEM.monotonic() - self._confirmed_at >= PROBE_SECONDS:
                self._probe(connection)
        except BaseException:
            self._namespace = ""  # the connection is closed next, and the number of its socket may become another's
            raise

    def close(self) -> None:
        self._namespace = ""
        super().close()

    def _probe(self, connection: psycopg.Connection[Any]) -> None:
        before = SYSTEM.monotonic()
        try:
            row = connection.execute(PROBE).fetchone()
        except psycopg.Error as error:
            if not self._warned and error.sqlstate not in (None, "55000"):  # 55000: it is a standby for now
                self._warned = True
                log.warning("Redis is not used, because the primary does not tell its timeline: %s", error)
            raise
        assert row is not None, "it is one row"
        self._offset = row[0] - before  # the earliest time that it can have been: a copy ends rather too soon
        self._namespace = self.namespace_of(row)
        self._confirmed_at = before
