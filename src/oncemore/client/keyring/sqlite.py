"""The keyring in a SQLite file: many processes share it, a claim is on disk before it returns, and a kill loses nothing."""

from __future__ import annotations

import asyncio
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import msgspec
from msgspec.structs import replace

from ..._runtime.forks import Rest, reset_in_child
from ..._runtime.plan import Plan
from ...errors import OncemoreError
from ..effects import FinishDespiteCancel
from ..errors import KeyringError
from . import RETENTION
from .entry import Entry, check_reuse, is_sendable
from .owner import is_alive, this_process

SCHEMA = """
CREATE TABLE IF NOT EXISTS oncemore_keys (
  scope TEXT NOT NULL, key TEXT NOT NULL, fingerprint TEXT NOT NULL,
  method TEXT NOT NULL, url TEXT NOT NULL, headers BLOB NOT NULL, body BLOB,
  state TEXT NOT NULL CHECK (state IN ('sending', 'open', 'settled')),
  status INTEGER NOT NULL, created_at REAL NOT NULL, owner INTEGER NOT NULL, token INTEGER NOT NULL,
  PRIMARY KEY (scope, key)
);
CREATE INDEX IF NOT EXISTS oncemore_keys_pending ON oncemore_keys (created_at) WHERE state <> 'settled';
CREATE INDEX IF NOT EXISTS oncemore_keys_settled ON oncemore_keys (created_at) WHERE state = 'settled';
"""
COLUMNS = "scope, key, fingerprint, method, url, headers, body, state, status, created_at, owner, token"
FIND = f"SELECT {COLUMNS} FROM oncemore_keys WHERE scope = ? AND key = ?"
PUT = f"INSERT OR REPLACE INTO oncemore_keys ({COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
UNSETTLED = f"SELECT {COLUMNS} FROM oncemore_keys WHERE state <> 'settled' ORDER BY created_at"
SETTLE = "UPDATE oncemore_keys SET state = 'settled', status = ?, body = NULL WHERE scope = ? AND key = ?"
LEAVE = "UPDATE oncemore_keys SET state = 'open' WHERE scope = ? AND key = ? AND token = ? AND state = 'sending'"
FORGET = "DELETE FROM oncemore_keys WHERE scope = ? AND key = ? AND token = ?"
TAKE = "UPDATE oncemore_keys SET owner = ?, token = ?, state = 'sending' WHERE scope = ? AND key = ?"
RELEASE = """UPDATE oncemore_keys SET owner = 0, state = ?
WHERE scope = ? AND key = ? AND token = ? AND state = 'sending'"""
# Each claim drops two of those that are too old, so that a process need not be started anew for the file to stay small.
OLD = "SELECT rowid FROM oncemore_keys WHERE state = 'settled' AND created_at < ? LIMIT 2"
PURGE = f"DELETE FROM oncemore_keys WHERE rowid IN ({OLD})"

# How long to wait for other processes' commits, each of which takes milliseconds.
PATIENCE = 10.0

# A file that is open while its process forks is open in neither as it should be: the child believes in locks that only its
# parent holds, and when that one closes the file, what the child writes to it afterwards is lost.
RINGS = Rest()


class SqliteKeyring:
    """A keyring in the file at *path*, which only its owner may read: it holds request bodies."""

    def __init__(self, path: str, *, retention: float = RETENTION) -> None:
        self.path = os.path.realpath(path)
        self.retention = retention
        self._owners = f"{self.path}-owners"
        self._reset()
        reset_in_child(self)
        RINGS.things.add(self)

    def _reset(self) -> None:
        self._database: sqlite3.Connection | None = None
        self._lock = threading.Lock()
        # One thread, so that what is asked for after a cancelled claim also happens after it.
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="oncemore-keyring")

    def _rest(self) -> bool:
        return self._lock.acquire(timeout=PATIENCE)  # a signal's handler may fork while this very thread has it

    def _put_away(self) -> None:
        self._shut()

    def _go_on(self) -> None:
        self._lock.release()

    def claim(self, entry: Entry, *, oldest: float) -> Plan[Entry]:
        held: Entry = yield InOrder(self, self._claim, entry, oldest)
        return held

    def settle(self, entry: Entry, status: int) -> Plan[None]:
        yield InOrder(self, self._write, SETTLE, status, entry.scope, entry.key)

    def leave(self, entry: Entry) -> Plan[None]:
        yield InOrder(self, self._write, LEAVE, entry.scope, entry.key, entry.token)

    def forget(self, entry: Entry) -> Plan[None]:
        yield InOrder(self, self._write, FORGET, entry.scope, entry.key, entry.token)

    def pending(self) -> Plan[list[Entry]]:
        entries: list[Entry] = yield InOrder(self, self._pending)
        return entries

    def adopt(self, *, opened: bool = False) -> Plan[list[Entry]]:
        adopted: list[Entry] = []
        try:
            yield InOrder(self, self._adopt, opened, adopted)
        except (GeneratorExit, OncemoreError):
            raise
        except BaseException:  # cancelled, while its thread goes on: what that adopts is nobody's
            yield FinishDespiteCancel(self._release_all(adopted))
            raise
        return adopted

    def _release_all(self, adopted: list[Entry]) -> Plan[None]:
        for entry in (yield InOrder(self, adopted.copy)):  # when its thread is done
            yield from self.release(entry)

    def release(self, entry: Entry) -> Plan[None]:
        yield InOrder(self, self._write, RELEASE, entry.state, entry.scope, entry.key, entry.token)

    def close(self) -> None:
        """Close the file; the next use opens it again."""
        self._executor.shutdown()
        with self._lock:
            self._shut()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="oncemore-keyring")

    async def aclose(self) -> None:
        """As `close`: nothing here belongs to an event loop."""
        self.close()

    def _claim(self, entry: Entry, oldest: float) -> Entry:
        # FULL: the key is on the disk before the first byte is on the wire.
        with self._transaction("FULL") as database:
            entry = replace(entry, owner=this_process(self._owners))
            database.execute(PURGE, (entry.created_at - self.retention,))
            row = database.execute(FIND, (entry.scope, entry.key)).fetchone()
            if row:
                known = _entry(row)
                check_reuse(known, entry)
                if not is_sendable(known, entry, oldest):
                    return known
                entry = replace(entry, created_at=known.created_at)
            database.execute(PUT, _row(entry))
        return entry

    def _write(self, statement: str, *values: Any) -> None:
        # NORMAL: should the machine lose power, the operation is merely asked for once more under its key.
        with self._transaction("NORMAL") as database:
            database.execute(statement, values)

    def _pending(self) -> list[Entry]:
        with self._transaction("NORMAL") as database:
            entries = map(_entry, database.execute(UNSETTLED).fetchall())
            return [entry for entry in entries if self._is_idle(entry)]

    def _adopt(self, opened: bool, adopted: list[Entry]) -> None:
        with self._transaction("NORMAL") as database:
            mine = this_process(self._owners)
            for entry in map(_entry, database.execute(UNSETTLED).fetchall()):
                if self._is_idle(entry) and (opened or entry.state == "sending"):
                    adopted.append(replace(entry, owner=mine, token=secrets.randbits(62)))
            database.executemany(TAKE, [(e.owner, e.token, e.scope, e.key) for e in adopted])

    def _is_idle(self, entry: Entry) -> bool:
        return entry.state == "open" or not is_alive(self._owners, entry.owner)

    @contextmanager
    def _transaction(self, synchronous: str) -> Iterator[sqlite3.Connection]:
        try:
            with self._lock:
                database = self._database or self._connect()
                # Also around the beginning: an interrupt that came while others had the lock is noticed just after it.
                with database:
                    database.execute(f"PRAGMA synchronous = {synchronous}")
                    database.execute("BEGIN IMMEDIATE")
                    yield database
        except (sqlite3.Error, OSError) as error:
            raise KeyringError(f"The keyring {self.path} failed: {error}") from error

    def _shut(self) -> None:
        database, self._database = self._database, None  # first, for an interrupt may come once it is closed
        if database is not None:
            database.close()

    def _connect(self) -> sqlite3.Connection:
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        database = sqlite3.connect(self.path, timeout=PATIENCE, isolation_level=None, check_same_thread=False)
        _patiently(lambda: database.execute("PRAGMA journal_mode = WAL"))
        _patiently(lambda: database.executescript(SCHEMA))
        self._database = database
        return database


def _patiently(step: Callable[[], object]) -> None:
    """Do *step*, however many processes open the file at once: switching to WAL does not wait for them by itself."""
    give_up = time.monotonic() + PATIENCE
    while True:
        try:
            step()
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > give_up:
                raise
            time.sleep(0.01)


class InOrder:
    """A keyring verb: done here by threads that may block, in the keyring's own thread for those who await."""

    __slots__ = ("arguments", "function", "keyring")

    def __init__(self, keyring: SqliteKeyring, function: Callable[..., Any], *arguments: Any) -> None:
        self.keyring = keyring
        self.function = function
        self.arguments = arguments

    def run(self) -> Any:
        return self.function(*self.arguments)

    async def arun(self) -> Any:
        loop = asyncio.get_running_loop()
        # Shielded, for what is cancelled before its turn has come would not be done at all.
        return await asyncio.shield(loop.run_in_executor(self.keyring._executor, self.run))


def _row(entry: Entry) -> tuple[Any, ...]:
    fields = msgspec.structs.asdict(entry)
    fields["headers"] = msgspec.json.encode(entry.headers)
    return tuple(fields[name] for name in COLUMNS.split(", "))


def _entry(row: tuple[Any, ...]) -> Entry:
    fields = dict(zip(COLUMNS.split(", "), row, strict=True))
    fields["headers"] = msgspec.json.decode(fields["headers"], type=tuple[tuple[str, str], ...])
    return Entry(**fields)
