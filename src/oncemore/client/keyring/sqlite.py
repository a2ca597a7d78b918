"""The keyring in a SQLite file, for many processes of one machine: a claim is on the disk before it returns."""

from __future__ import annotations

import asyncio
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
from msgspec.structs import replace

from ..._runtime.forks import check_usable, close_before_fork, reset_in_child
from ..._runtime.plan import Plan
from ...errors import OncemoreError
from ..errors import KeyringError
from .entry import RETENTION, Entry, FinishDespiteCancel, check_reuse, is_sendable

try:
    import fcntl
except ImportError:  # Windows has no such locks, so every other process counts as gone
    fcntl = None  # type: ignore[assignment]

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
# A process that resumes an entry gives it a new token first.
TAKE = """UPDATE oncemore_keys SET owner = ?, token = ?, state = 'sending'
WHERE scope = ? AND key = ? AND token = ? AND state = ?"""
RELEASE = """UPDATE oncemore_keys SET owner = 0, state = ?
WHERE scope = ? AND key = ? AND token = ? AND state = 'sending'"""
# Each claim drops two entries that are too old, so that the file stays small without a restart.
OLD = "SELECT rowid FROM oncemore_keys WHERE state = 'settled' AND created_at < ? LIMIT 2"
PURGE = f"DELETE FROM oncemore_keys WHERE rowid IN ({OLD})"

# Seconds to wait for other processes' commits, each of which takes milliseconds.
PATIENCE = 10.0


class SqliteKeyring:
    """A keyring in the file at *path*, which only its owner may read because it holds request bodies."""

    def __init__(self, path: str, *, retention: float = RETENTION) -> None:
        self.path = os.path.realpath(path)
        self.retention = retention
        self._owners = f"{self.path}-owners"
        self._reset()
        reset_in_child(self)
        close_before_fork(self)

    def _reset(self) -> None:
        self._database: sqlite3.Connection | None = None
        self._lock = threading.Lock()
        # One thread, so that a call after a cancelled claim also runs after it.
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="oncemore-keyring")

    def _close_for_fork(self) -> bool:
        if not self._lock.acquire(timeout=PATIENCE):  # a signal handler may fork while its own thread has the lock
            return False
        try:
            self._shut()
        except BaseException:
            self._lock.release()
            raise
        return True

    def _end_fork(self) -> None:
        self._lock.release()

    def claim(self, entry: Entry, *, oldest: float) -> Plan[Entry]:
        held: Entry = yield RunInOrder(self, self._claim, entry, oldest)
        return held

    def settle(self, entry: Entry, status: int) -> Plan[None]:
        yield RunInOrder(self, self._write, SETTLE, status, entry.scope, entry.key)

    def leave(self, entry: Entry) -> Plan[None]:
        yield RunInOrder(self, self._write, LEAVE, entry.scope, entry.key, entry.token)

    def forget(self, entry: Entry) -> Plan[None]:
        yield RunInOrder(self, self._write, FORGET, entry.scope, entry.key, entry.token)

    def pending(self) -> Plan[list[Entry]]:
        entries: list[Entry] = yield RunInOrder(self, self._pending)
        return entries

    def adopt(self, entry: Entry) -> Plan[Entry | None]:
        adopted = replace(entry, token=secrets.randbits(62))
        try:
            taken = yield RunInOrder(self, self._adopt, entry, adopted.token)
        except (GeneratorExit, OncemoreError):
            raise
        except BaseException:  # cancelled, but the thread may still adopt the entry, which no caller would send
            yield FinishDespiteCancel(self.release(adopted))
            raise
        return adopted if taken else None

    def release(self, entry: Entry) -> Plan[None]:
        yield RunInOrder(self, self._write, RELEASE, entry.state, entry.scope, entry.key, entry.token)

    def close(self) -> None:
        """Close the file.  The next call opens it again."""
        self._executor.shutdown()
        with self._lock:
            self._shut()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="oncemore-keyring")

    async def aclose(self) -> None:
        """Close the file.  The keyring has no connections on an event loop."""
        self.close()

    def _claim(self, entry: Entry, oldest: float) -> Entry:
        # FULL: the key is on the disk before the first byte is sent.
        with self._transaction("FULL") as database:
            entry = replace(entry, owner=this_process(self._owners))
            database.execute(PURGE, (entry.created_at - self.retention,))
            row = database.execute(FIND, (entry.scope, entry.key)).fetchone()
            known = _entry(row) if row else None
            if known:
                check_reuse(known, entry)
                if not is_sendable(known, entry, oldest):
                    return known
                entry = replace(entry, created_at=known.created_at)
            database.execute(PUT, _row(entry))
        return replace(entry, state=known.state) if known else entry

    def _write(self, statement: str, *values: Any) -> bool:
        # NORMAL: if the machine loses power, the worst result is that the operation is sent once more under its key.
        with self._transaction("NORMAL") as database:
            return database.execute(statement, values).rowcount > 0

    def _pending(self) -> list[Entry]:
        with self._transaction("NORMAL") as database:
            entries = map(_entry, database.execute(UNSETTLED).fetchall())
            return [entry for entry in entries if entry.state == "open" or not is_alive(self._owners, entry.owner)]

    def _adopt(self, entry: Entry, token: int) -> bool:
        owner = this_process(self._owners)
        return self._write(TAKE, owner, token, entry.scope, entry.key, entry.token, entry.state)

    @contextmanager
    def _transaction(self, synchronous: str) -> Iterator[sqlite3.Connection]:
        try:
            with self._lock:
                database = self._database or self._connect()
                # Around BEGIN too, because an interrupt during the wait for the lock is raised just after BEGIN.
                with database:
                    database.execute(f"PRAGMA synchronous = {synchronous}")
                    database.execute("BEGIN IMMEDIATE")
                    yield database
        except (sqlite3.Error, OSError) as error:
            raise KeyringError(f"The keyring {self.path} failed: {error}") from error

    def _shut(self) -> None:
        database, self._database = self._database, None  # first: an interrupt may come just after the close
        if database is not None:
            database.close()

    def _connect(self) -> sqlite3.Connection:
        check_usable(self.path)
        _create(self.path)
        database = sqlite3.connect(self.path, timeout=PATIENCE, isolation_level=None, check_same_thread=False)
        _retry_while_locked(lambda: database.execute("PRAGMA journal_mode = WAL"))
        _retry_while_locked(lambda: database.executescript(SCHEMA))
        self._database = database
        return database


def _create(path: str) -> None:
    """Create the file for its owner alone.  An existing file is not opened: to close it would release SQLite's locks."""
    with _held_lock, suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


def _retry_while_locked(step: Callable[[], object]) -> None:
    """Repeat *step* while other processes lock the file: switching to WAL does not wait for them by itself."""
    give_up = time.monotonic() + PATIENCE
    while True:
        try:
            step()
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > give_up:
                raise
            time.sleep(0.01)


class RunInOrder:
    """Effect: call a blocking function in this thread, or await it in the keyring's own thread."""

    __slots__ = ("arguments", "function", "keyring")

    def __init__(self, keyring: SqliteKeyring, function: Callable[..., Any], *arguments: Any) -> None:
        self.keyring = keyring
        self.function = function
        self.arguments = arguments

    def run(self) -> Any:
        return self.function(*self.arguments)

    async def arun(self) -> Any:
        loop = asyncio.get_running_loop()
        # Shielded, because a call that is cancelled before its turn would not run at all.
        return await asyncio.shield(loop.run_in_executor(self.keyring._executor, self.run))


def _row(entry: Entry) -> tuple[Any, ...]:
    fields = msgspec.structs.asdict(entry)
    fields["headers"] = msgspec.json.encode(entry.headers)
    return tuple(fields[name] for name in COLUMNS.split(", "))


def _entry(row: tuple[Any, ...]) -> Entry:
    fields = dict(zip(COLUMNS.split(", "), row, strict=True))
    fields["headers"] = msgspec.json.decode(fields["headers"], type=tuple[tuple[str, str], ...])
    return Entry(**fields)


# Which processes are alive.  One descriptor per file and process, never closed: closing any descriptor of a file releases all
# locks in it.
_held: dict[str, tuple[int, int]] = {}
_held_lock = threading.Lock()


def this_process(path: str) -> int:
    """Return the number of this process: the position of a byte that it keeps locked in the file *path* while it lives.

    The system releases the lock when the process ends, however it ends.
    """
    return _hold(path)[1]


def is_alive(path: str, owner: int) -> bool:
    """Whether the process with the number *owner* still holds its lock."""
    descriptor, own = _hold(path)
    if owner == own or fcntl is None:
        return owner == own
    try:
        # Shared, so that two processes that ask at the same time do not take each other for the owner.
        fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, owner)
    except OSError:
        return True
    fcntl.lockf(descriptor, fcntl.LOCK_UN, 1, owner)
    return False


def _hold(path: str) -> tuple[int, int]:
    with _held_lock:
        if path not in _held:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            number = 1 + secrets.randbits(62)
            if fcntl is not None:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
            _held[path] = (descriptor, number)
        return _held[path]


def _forget_parent() -> None:
    """Reset in a forked child, which has its parent's memory, but not its locks."""
    global _held_lock
    _held.clear()
    _held_lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_parent)
