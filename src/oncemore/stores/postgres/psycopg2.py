"""How psycopg2's connections carry the ledger's statements, under SQLAlchemy.

psycopg2 sends text alone, so a statement goes with its values written into it, the claim behind its BEGIN and the
outcome before its COMMIT, as one message each.  For that the connection must leave its BEGIN to us: it is in autocommit
mode while it is lent, in which its own commit() and rollback() do nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import psycopg2.extensions  # type: ignore[import-untyped]

from .literals import Written, inline
from .psycopg import ThreadWire
from .statements import Ask, Rows
from .transactions import Misuse

LEVELS = {
    psycopg2.extensions.ISOLATION_LEVEL_READ_UNCOMMITTED: "READ UNCOMMITTED",
    psycopg2.extensions.ISOLATION_LEVEL_READ_COMMITTED: "READ COMMITTED",
    psycopg2.extensions.ISOLATION_LEVEL_REPEATABLE_READ: "REPEATABLE READ",
    psycopg2.extensions.ISOLATION_LEVEL_SERIALIZABLE: "SERIALIZABLE",
}


class Psycopg2Wire(ThreadWire):
    """A connection of psycopg2's."""

    def _begin(self, ask: Ask) -> Rows:
        raw = self.taken = self.loan.take()
        if idle(raw):  # else a hook of the engine's has said something first, and the transaction has begun
            LENT[raw], raw.autocommit = raw.autocommit, True
        return self._run(f"{begin_of(raw)};\n{inline(*ask)}")

    def _sent(self, *asks: Ask) -> list[Rows]:
        return [self._run(inline(*ask)) for ask in asks]

    def _adapted(self, ask: Ask) -> Ask:
        statement, values = ask
        with self._ours().cursor(cursor_factory=psycopg2.extensions.cursor) as cursor:
            return statement, [Written(cursor.mogrify("%s", (value,)).decode()) for value in values]

    def _run(self, script: str) -> Rows:
        with self._ours().cursor(cursor_factory=psycopg2.extensions.cursor) as cursor:
            cursor.execute(script)
            rows = cursor.fetchall() if cursor.description else ()
        return [[bytes(value) if isinstance(value, memoryview) else value for value in row] for row in rows]

    def _commit(self, asks: Sequence[Ask]) -> None:
        self.loan.finish()
        if idle(self._ours()):
            raise Misuse
        self._run(";\n".join([*(inline(*ask) for ask in asks), "COMMIT"]))
        self.committed = True
        restore(self.taken)

    def _roll_back(self) -> None:
        if self.raw is not None:
            self._run("ROLLBACK")
            restore(self.taken)

    def _cut(self, raw: Any) -> None:
        raw.close()


# Those that are lent, and whether they were in autocommit mode before.
LENT: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


def restore(raw: Any) -> None:
    if raw in LENT:
        raw.autocommit = LENT.pop(raw)


def on_return(raw: Any, *_: Any) -> None:
    """For an engine's pool, which a performer may give its connection back to: nobody must find our transaction on it."""
    if raw in LENT:
        with raw.cursor() as cursor:
            cursor.execute("ROLLBACK")
        restore(raw)


def idle(raw: Any) -> bool:
    return raw.info.transaction_status == psycopg2.extensions.TRANSACTION_STATUS_IDLE  # type: ignore[no-any-return]


def begin_of(raw: Any) -> str:
    """The BEGIN that the connection would have sent itself."""
    words = ["BEGIN"]
    if raw.isolation_level in LEVELS:
        words.append(f"ISOLATION LEVEL {LEVELS[raw.isolation_level]}")
    if raw.readonly is not None:
        words.append("READ ONLY" if raw.readonly else "READ WRITE")
    if raw.deferrable is not None:
        words.append("DEFERRABLE" if raw.deferrable else "NOT DEFERRABLE")
    return " ".join(words)
