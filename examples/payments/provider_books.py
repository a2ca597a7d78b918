"""The provider's movements of money, and all calls that it got, in an SQLite file."""

from __future__ import annotations

import secrets
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

TABLES = """
CREATE TABLE IF NOT EXISTS movements (
    id text PRIMARY KEY, kind text NOT NULL, key text, amount integer NOT NULL, currency text NOT NULL, reference text NOT NULL
);
CREATE UNIQUE INDEX IF NOT EXISTS one_movement_per_key ON movements (key) WHERE key <> '';
CREATE TABLE IF NOT EXISTS calls (number integer PRIMARY KEY, kind text, key text, request_id text, traceparent text);
"""
COLUMNS = ("id", "kind", "key", "amount", "currency", "reference")

Tell = Callable[[sqlite3.Connection, str, dict[str, Any]], None]


@contextmanager
def transaction(file: sqlite3.Connection) -> Iterator[None]:
    file.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        file.execute("ROLLBACK")
        raise
    file.execute("COMMIT")


class Books:
    """Movements and calls, on one connection that all threads share."""

    def __init__(self, path: str) -> None:
        self._lock = threading.Lock()
        self._file = sqlite3.connect(path, timeout=30, check_same_thread=False, isolation_level=None)
        self._file.execute("PRAGMA journal_mode = WAL")
        self._file.executescript(TABLES)

    def move(
        self, kind: str, key: str, amount: int, currency: str, reference: str, *, tell: Tell
    ) -> tuple[dict[str, Any], bool]:
        """Return the movement, and whether it is new; a known key moves nothing.  Call *tell* in a payout's transaction."""
        with self._lock, transaction(self._file):
            known = self._by_key(key)
            if known is not None:
                return known, False
            movement = (f"{kind[:2]}_{secrets.token_hex(6)}", kind, key, amount, currency, reference)
            self._file.execute("INSERT INTO movements VALUES (?, ?, ?, ?, ?, ?)", movement)
            made = dict(zip(COLUMNS, movement, strict=True))
            if kind == "payout":
                tell(self._file, "refund.succeeded", made)
            return made, True

    def note_call(self, kind: str, key: str, request_id: str, traceparent: str) -> None:
        """Store a call, before its effect."""
        with self._lock:
            call = (kind, key, request_id, traceparent)
            self._file.execute("INSERT INTO calls (kind, key, request_id, traceparent) VALUES (?, ?, ?, ?)", call)

    def by_key(self, key: str) -> dict[str, Any] | None:
        """Return the movement that was made under *key*, or None.  Clients use this if the outcome is unknown."""
        with self._lock:
            return self._by_key(key)

    def _by_key(self, key: str) -> dict[str, Any] | None:
        row = self._file.execute("SELECT * FROM movements WHERE key = ? AND key <> ''", (key,)).fetchone()
        return dict(zip(COLUMNS, row, strict=True)) if row else None

    def report(self, kind: str | None) -> dict[str, Any]:
        """Return all movements, their number per key, and the calls."""
        with self._lock:
            rows = self._file.execute("SELECT * FROM movements ORDER BY rowid").fetchall()
            calls = self._file.execute(
                "SELECT kind, key, request_id, traceparent FROM calls ORDER BY number"
            ).fetchall()
        movements = [dict(zip(COLUMNS, row, strict=True)) for row in rows if kind in (None, row[1])]
        per_key: dict[str, int] = {}
        for movement in movements:
            per_key[movement["key"]] = per_key.get(movement["key"], 0) + 1
        names = ("kind", "key", "request_id", "traceparent")
        listed = [dict(zip(names, call, strict=True)) for call in calls if kind in (None, call[0])]
        return {"count": len(movements), "per_key": per_key, "movements": movements, "calls": listed}
