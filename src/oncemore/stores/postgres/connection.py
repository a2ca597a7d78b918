"""One connection to PostgreSQL, driven through libpq's non-blocking calls (`psycopg.pq`).

psycopg connects, and decodes the rows.  The exchange of a statement for its rows is written out here, once for threads
and event loops alike, because a lane needs what a cursor does not give: an end to every wait, and a prepared statement
under a name that means the same text to every process behind a pooler.
"""

from __future__ import annotations

import struct
from collections.abc import Generator, Sequence
from typing import Any, Protocol

import psycopg
from psycopg.adapt import Transformer
from psycopg.pq import ConnStatus, DiagnosticField, ExecStatus, TransactionStatus
from psycopg.pq.abc import PGresult

from .statements import Statement

Rows = list[tuple[Any, ...]]
Steps = Generator[bool, None, Rows]  # yields whenever it must wait: True where there is something left to write

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


class Home(Protocol):
    """Where a link goes when its work is done."""

    def put(self, link: Link) -> None: ...


class Link:
    """One open connection.  *alone* says that no pooler stands between: what we set and prepare is there next time."""

    def __init__(self, connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any], home: Home) -> None:
        self.connection = connection
        self.pgconn = connection.pgconn
        self.home = home
        self.greeted = False
        self.alone = False
        self._rows = Transformer(connection)
        self._prepared: set[bytes] = set()

    @property
    def idle(self) -> bool:
        """Whether it is open, and neither in a transaction nor in the middle of an exchange."""
        return self.pgconn.transaction_status == TransactionStatus.IDLE

    def drop(self) -> None:
        """End the connection; whoever expects an answer of it gets none."""
        self.pgconn.finish()

    def exchange(self, statement: Statement, values: Sequence[Any] | None) -> Steps:
        """The rows that the statement returns; without *values* it may be a script, and returns none."""
        pgconn = self.pgconn
        try:
            if values is None:
                pgconn.send_query(statement.text.encode())
                yield from self._result()
                return []
            texts, formats = dump_all(values)
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
            raise failure(pgconn, failed)
        if last is None:
            raise Lost("the server closed the connection")
        return last


def failure(pgconn: Any, result: PGresult) -> Exception:
    """What a result that is an error means."""
    sqlstate = (result.error_field(DiagnosticField.SQLSTATE) or b"").decode()
    message = (result.error_field(DiagnosticField.MESSAGE_PRIMARY) or result.error_message).decode(errors="replace")
    if sqlstate in GOING or sqlstate.startswith("08") or not sqlstate or pgconn.status == ConnStatus.BAD:
        return Lost(message)
    return Rejected(message, sqlstate)


BYTEA = 17
NULL = struct.pack("!i", -1)


BINARY = (bytes, list)  # sent as they are; all else as text, whose type PostgreSQL infers


def dump_all(values: Sequence[Any]) -> tuple[list[bytes | None], list[int]]:
    """The values as parameters, and their formats: 0 for text, 1 for binary."""
    texts = [value.encode() if type(value) is str else dump(value) for value in values]
    return texts, [int(isinstance(value, BINARY)) for value in values]


def dump(value: Any) -> bytes | None:
    if value is None or isinstance(value, bytes):
        return value
    return dump_array(value) if isinstance(value, list) else str(value).encode()


def dump_array(items: list[bytes | None]) -> bytes:
    """A bytea[] in its binary form."""
    parts = [struct.pack("!iiIii", 1, 1, BYTEA, len(items), 1)]
    for item in items:
        parts += (NULL,) if item is None else (struct.pack("!i", len(item)), item)
    return b"".join(parts)
