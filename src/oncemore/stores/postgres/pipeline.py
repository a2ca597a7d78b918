"""Several statements in one round trip: libpq's pipeline mode, once for claims and transactions, threads and event loops.

psycopg's own `pipeline()` does the same, but looks at the socket after each command: in a transaction it adds six times
as much processor time.  psycopg still opens the connections, waits for their sockets, and reads the rows.
"""

from __future__ import annotations

import asyncio
import itertools
import struct
from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg.adapt import PyFormat, Transformer
from psycopg.pq import ConnStatus, ExecStatus, TransactionStatus
from psycopg.pq.abc import PGresult

from ..._runtime.clock import SYSTEM
from ...errors import ConfigurationError
from ._compat import (
    WAIT_READ,
    WAIT_READ_OR_WRITE,
    PgGenerator,
    RowReader,
    error_from_result,
    prepared_mark,
    wait,
    was_deallocated,
)
from .statements import Query, Rows, Statement, prepared

# BEGIN and COMMIT are prepared, so that the server need not parse them each time.  ROLLBACK is not: it must work even if
# the server has lost the prepared statements.
BEGIN, COMMIT, ROLLBACK = prepared("BEGIN"), prepared("COMMIT"), Statement("ROLLBACK")

# Plain integers, because comparing enumerations is slow, and it is done for every result.
TUPLES_OK, FATAL_ERROR, PIPELINE_SYNC = map(
    int, (ExecStatus.TUPLES_OK, ExecStatus.FATAL_ERROR, ExecStatus.PIPELINE_SYNC)
)
IN_TRANSACTION = int(TransactionStatus.INTRANS)
UTF8 = (b"UTF8", b"UNICODE")  # the server's name for it; a pooler may repeat the name that the client asked for

NOT_PREPARED, ALREADY_PREPARED, CHANGED_COLUMNS = "26000", "42P05", "0A000"
# The server does not know a prepared statement any more, or a table's columns have changed since it was prepared.
OUTDATED = {NOT_PREPARED, CHANGED_COLUMNS}


class AnswerTimeout(psycopg.OperationalError):
    """The answer did not come in time.  Whether the statements were carried out is not known; the connection is closed."""


class ConnectionState:
    """The ledger's knowledge of one connection: its prepared statements, and how to read its rows.

    Any user of the connection may have the prepared statements deallocated (psycopg does so after its own rollback).  The
    server then refuses them, and the next exchange prepares them again, under new names.
    """

    def __init__(self, connection: Any) -> None:
        encoding = connection.pgconn.parameter_status(b"client_encoding") or b"UTF8"  # psycopg assumes the same
        # In another encoding, the same key would be stored as different bytes, and its operation would run twice.
        if encoding.upper().replace(b"-", b"").replace(b"_", b"") not in UTF8:
            raise ConfigurationError(
                f"The connections are in {encoding.decode()}, but the ledger's texts are in UTF-8: give your pool or engine "
                "client_encoding=UTF8"
            )
        # Set by the store, if the connection is its own:
        self.configured = False  # the session's settings were made
        self.free_list: Any = None  # where the connection goes when it is given back
        self.prepared: dict[bytes, bytes] = {}
        self.mark = prepared_mark(connection)  # before the latest exchange
        self.rows = RowReader(connection)
        self._count = itertools.count()

    def new_name(self, statement: Statement) -> bytes:
        return b"%s_%d" % (statement.name, next(self._count))


def state_of(connection: Any) -> ConnectionState:
    state: ConnectionState | None = getattr(connection, "_oncemore_state", None)
    if state is None:
        state = connection._oncemore_state = ConnectionState(connection)
    return state


class Pipeline:
    """Effect: send the queries in one libpq pipeline, and return the rows of each.

    Works on a psycopg Connection (`run`) and on an AsyncConnection (`arun`), in autocommit mode or in a transaction.
    Outside a transaction, the queries of one pipeline are committed or rolled back together.
    """

    __slots__ = ("connection", "deadline", "queries")

    def __init__(self, connection: Any, queries: Sequence[Query], deadline: float | None = None) -> None:
        self.connection = connection
        self.queries = queries
        self.deadline = deadline

    def run(self) -> list[Rows]:
        with self.connection.lock:
            return wait(self.connection, exchange(self.connection, self.queries, self.deadline))  # type: ignore[no-any-return]

    async def arun(self) -> list[Rows]:
        lock, left = self.connection.lock, None if self.deadline is None else self.deadline - SYSTEM.monotonic()
        try:
            # If a task that the performer has left behind is in a long query, do not wait for it longer than for an answer.
            async with asyncio.timeout(left if lock.locked() else None):
                await lock.acquire()
        except TimeoutError as error:
            raise AnswerTimeout("the connection was in use") from error
        try:
            return await wait(self.connection, exchange(self.connection, self.queries, self.deadline))  # type: ignore[no-any-return]
        finally:
            lock.release()


def exchange(connection: Any, queries: Sequence[Query], deadline: float | None = None) -> PgGenerator[list[Rows]]:
    """Send *queries* in one pipeline, and return the rows of each.  `Connection.wait()` runs this generator.

    Precondition: the caller holds `connection.lock`.
    The first query that fails is raised as psycopg's exception for it, and the server skips the queries behind it, a COMMIT
    included.  If the connection fails, or *deadline* (on the monotonic clock) passes, an OperationalError without
    `sqlstate` is raised and the connection is closed; whether the queries were carried out is then not known.
    Statements with a name are prepared, unless `prepare_threshold` is None: that says that a pooler is in between.
    """
    pgconn, state = connection.pgconn, state_of(connection)
    if pgconn.transaction_status == IN_TRANSACTION:
        check_session(connection)
    if was_deallocated(connection, state.mark):  # as after a savepoint that the performer has rolled back
        state.prepared.clear()
    state.mark = prepared_mark(connection)
    names = dict(state.prepared) if connection.prepare_threshold is not None else None
    preparing: dict[int, tuple[bytes, bytes]] = {}  # statements to be prepared now, by the position of their result
    sent = 0
    try:
        pgconn.enter_pipeline_mode()
        for statement, values in queries:
            parameters, formats = encode_parameters(values)
            if names is None or not statement.name:
                pgconn.send_query_params(statement.text.encode(), parameters, None, formats, 1)
            else:
                name = names.get(statement.name)
                if name is None:
                    name = names[statement.name] = state.new_name(statement)
                    pgconn.send_prepare(name, statement.text.encode())
                    preparing[sent] = (statement.name, name)
                    sent += 1
                pgconn.send_query_prepared(name, parameters, formats, 1)
            sent += 1
        pgconn.pipeline_sync()
        results = yield from read_results(pgconn, deadline)
        pgconn.exit_pipeline_mode()
    except BaseException:  # also an interrupt: answers may still come, and the next user must not get them
        pgconn.finish()
        raise
    rows: list[Rows] = []
    for position, result in enumerate(results):
        status = result.status
        if status == FATAL_ERROR:
            error = error_from_result(result)
            if error.sqlstate in OUTDATED:
                state.prepared.clear()
            raise error
        if position in preparing:
            state.prepared.update([preparing[position]])
        else:
            rows.append(state.rows.read(result) if status == TUPLES_OK else ())
    return rows


def read_results(pgconn: Any, deadline: float | None) -> PgGenerator[list[PGresult]]:
    """The result of each command, up to the end of the pipeline.

    Outside a transaction the server commits at the end of the pipeline.  If that fails, an error follows the last result.
    """
    results: list[PGresult] = []
    while pgconn.flush():
        yield WAIT_READ_OR_WRITE
        pgconn.consume_input()
        check_deadline(deadline)
    # Wait before the first look at the socket: looking releases the interpreter lock, and other threads come in between.
    yield WAIT_READ
    pgconn.consume_input()
    while True:
        while pgconn.is_busy():
            check_deadline(deadline)
            yield WAIT_READ
            pgconn.consume_input()
        result = pgconn.get_result()
        if result is None:  # the end of one command
            if pgconn.status == ConnStatus.BAD:
                raise psycopg.OperationalError("the server closed the connection")
        elif result.status == PIPELINE_SYNC:
            return results
        else:
            results.append(result)


def check_session(connection: Any) -> None:
    """Raise the server's reason if it has ended the session in the middle of a transaction, which it has then rolled back.

    libpq treats that message as a notice, because nothing was asked.  Sent first, a query would only find a closed
    connection, and leave in doubt whether a COMMIT was carried out.
    """
    reasons: list[psycopg.Error] = []

    def keep(notice: psycopg.errors.Diagnostic) -> None:  # it can be read only now
        if notice.severity_nonlocalized == "FATAL" and notice.sqlstate:
            reasons.append(psycopg.errors.lookup(notice.sqlstate)(notice.message_primary or ""))

    connection.add_notice_handler(keep)
    try:
        for _ in range(2):  # the end of the stream is behind the message
            connection.pgconn.consume_input()
            connection.pgconn.is_busy()  # parses what was read
    except psycopg.OperationalError:
        if reasons:
            raise reasons[0] from None
        raise
    finally:
        connection.remove_notice_handler(keep)


def check_deadline(deadline: float | None) -> None:
    if deadline is not None and SYSTEM.monotonic() >= deadline:
        raise AnswerTimeout("the answer took too long")


def begin_statement(connection: Any) -> Statement:
    """The BEGIN that psycopg would send, by the connection's own settings."""
    isolation_level, read_only, deferrable = connection.isolation_level, connection.read_only, connection.deferrable
    if isolation_level is None and read_only is None and deferrable is None:
        return BEGIN
    parts = ["BEGIN"]
    if isolation_level is not None:
        parts.append(f"ISOLATION LEVEL {isolation_level.name.replace('_', ' ')}")
    if read_only is not None:
        parts.append("READ ONLY" if read_only else "READ WRITE")
    if deferrable is not None:
        parts.append("DEFERRABLE" if deferrable else "NOT DEFERRABLE")
    return Statement(" ".join(parts))


def adapt_values(connection: Any, values: Sequence[Any]) -> list[str | None]:
    """A user's values as psycopg writes them in text; PostgreSQL infers their types from the statement."""
    dumper = Transformer(connection).get_dumper
    dumped = [None if value is None else dumper(value, PyFormat.TEXT).dump(value) for value in values]
    return [None if value is None else bytes(value).decode() for value in dumped]


# Parameters

BYTEA = 17  # the type's number in every PostgreSQL
NULL = struct.pack("!i", -1)
BINARY = (bytes, list)  # sent as they are; all others are sent as text, and PostgreSQL infers their types


def encode_parameters(values: Sequence[Any]) -> tuple[list[bytes | None], list[int]]:
    """The values as libpq's parameters, and the format of each: 0 for text, 1 for binary."""
    parameters = [value.encode() if type(value) is str else encode_parameter(value) for value in values]
    return parameters, [int(isinstance(value, BINARY)) for value in values]


def encode_parameter(value: Any) -> bytes | None:
    if value is None or isinstance(value, bytes):
        return value
    return encode_bytea_array(value) if isinstance(value, list) else str(value).encode()


def encode_bytea_array(items: list[bytes | None]) -> bytes:
    """A bytea[] in its binary form."""
    parts = [struct.pack("!iiIii", 1, 1, BYTEA, len(items), 1)]
    for item in items:
        parts += (NULL,) if item is None else (struct.pack("!i", len(item)), item)
    return b"".join(parts)
