"""Sends several statements in one round trip (libpq's pipeline mode), for batches and transactions, sync and async.

psycopg's own `pipeline()` does the same, but looks at the socket after each command, and so adds six times as much
processor time to a transaction.  psycopg still opens the connections, waits for their sockets, and reads the rows.
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

# BEGIN and COMMIT are prepared, so that the server need not parse them each time.  ROLLBACK is not prepared, because it
# must work even if the server has lost the prepared statements.
BEGIN, COMMIT, ROLLBACK = prepared("BEGIN"), prepared("COMMIT"), Statement("ROLLBACK")

# Plain integers, because comparing enumerations is slow and happens for every result.
TUPLES_OK, FATAL_ERROR, PIPELINE_SYNC = map(
    int, (ExecStatus.TUPLES_OK, ExecStatus.FATAL_ERROR, ExecStatus.PIPELINE_SYNC)
)
IN_TRANSACTION = int(TransactionStatus.INTRANS)
UTF8 = (b"UTF8", b"UNICODE")  # names of the encoding, without - and _; a pooler may repeat the client's name for it

NOT_PREPARED, ALREADY_PREPARED, CHANGED_COLUMNS = "26000", "42P05", "0A000"
# The server has lost a prepared statement, or a table's columns have changed since it was prepared.
OUTDATED = {NOT_PREPARED, CHANGED_COLUMNS}


class AnswerTimeout(psycopg.OperationalError):
    """The answer did not come in time.  Nobody knows if the statements were carried out.  The connection is closed."""


class ConnectionState:
    """The ledger's data about one connection: its prepared statements, and the reader of its rows.

    Each user of the connection may deallocate the prepared statements; psycopg does so after its own rollback.  The
    server then refuses them, and the next exchange prepares them again under new names.
    """

    def __init__(self, connection: Any) -> None:
        encoding = connection.pgconn.parameter_status(b"client_encoding") or b"UTF8"  # psycopg assumes the same
        # In another encoding, the same key would be stored as different bytes, and its operation would run twice.
        if encoding.upper().replace(b"-", b"").replace(b"_", b"") not in UTF8:
            raise ConfigurationError(
                f"The connections are in {encoding.decode()}, but the ledger's texts are in UTF-8: give your pool or "
                "engine client_encoding=UTF8"
            )
        # The store sets these two if the connection is its own:
        self.configured = False  # whether the session was set up
        self.free_list: Any = None  # the list that gets the connection back
        self.prepared: dict[bytes, bytes] = {}  # the name on the server of each prepared statement, by its own name
        self.mark = prepared_mark(connection)  # psycopg's prepared statements before the latest exchange
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
        lock = self.connection.lock
        if lock.locked() and self.deadline is not None:
            # A task that the performer left behind may be in a long query.  Wait for it no longer than for an answer.
            try:
                async with asyncio.timeout(self.deadline - SYSTEM.monotonic()):
                    await lock.acquire()
            except TimeoutError as error:
                raise AnswerTimeout("the connection was in use") from error
        else:
            await lock.acquire()
        try:
            return await wait(self.connection, exchange(self.connection, self.queries, self.deadline))  # type: ignore[no-any-return]
        finally:
            lock.release()


def exchange(connection: Any, queries: Sequence[Query], deadline: float | None = None) -> PgGenerator[list[Rows]]:
    """Send *queries* in one pipeline, and return the rows of each.  `Connection.wait()` runs this generator.

    Precondition: the caller holds `connection.lock`.
    If a query fails, psycopg's exception for it is raised, and the server skips the queries after it, also a COMMIT.
    If the connection fails, or *deadline* (on the monotonic clock) passes, an OperationalError without `sqlstate` is
    raised and the connection is closed.  Nobody knows then if the queries were carried out.
    Statements with a name are prepared, unless `prepare_threshold` is None, which means that a pooler is in between.
    """
    pgconn, state = connection.pgconn, state_of(connection)
    if pgconn.transaction_status == IN_TRANSACTION:
        check_session(connection)
    if was_deallocated(connection, state.mark):  # for example after the performer rolled back to a savepoint
        state.prepared.clear()
    state.mark = prepared_mark(connection)
    names = dict(state.prepared) if connection.prepare_threshold is not None else None
    preparing: dict[int, tuple[bytes, bytes]] = {}  # the statements prepared now, by the position of their result
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
    except BaseException:  # also after an interrupt, because the next user must not get answers that still come
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
    """Return the result of each command, up to the end of the pipeline.

    Outside a transaction the server commits at the end of the pipeline.  If that fails, an error follows the last result.
    """
    results: list[PGresult] = []
    while pgconn.flush():
        yield WAIT_READ_OR_WRITE
        pgconn.consume_input()
        check_deadline(deadline)
    # Wait before the first look at the socket, because a look releases the interpreter lock to other threads.
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
    """Raise the server's reason if it has ended the session, and so rolled back the open transaction.

    libpq treats the server's message as a notice, because no query was sent.  Without this check, the next query would
    only find a closed connection, and nobody would know if a COMMIT in it was carried out.
    """
    reasons: list[psycopg.Error] = []

    def keep(notice: psycopg.errors.Diagnostic) -> None:  # reads the notice now, because it is not valid later
        if notice.severity_nonlocalized == "FATAL" and notice.sqlstate:
            reasons.append(psycopg.errors.lookup(notice.sqlstate)(notice.message_primary or ""))

    connection.add_notice_handler(keep)
    try:
        for _ in range(2):  # the first read gets the message, the second one the end of the stream
            connection.pgconn.consume_input()
            connection.pgconn.is_busy()  # parses the input
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
    """Return the BEGIN that psycopg would send with the connection's settings."""
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
    """Return a user's values as psycopg writes them in text.  PostgreSQL infers their types from the statement."""
    dumper = Transformer(connection).get_dumper
    dumped = [None if value is None else dumper(value, PyFormat.TEXT).dump(value) for value in values]
    return [None if value is None else bytes(value).decode() for value in dumped]


# Parameters

BYTEA = 17  # the type's number, which is the same on every server
NULL = struct.pack("!i", -1)
BINARY = (bytes, list)  # types that are sent in binary form; others are sent as text, and PostgreSQL infers the types


def encode_parameters(values: Sequence[Any]) -> tuple[list[bytes | None], list[int]]:
    """Return the values as libpq's parameters, and the format of each: 0 for text, 1 for binary."""
    parameters = [value.encode() if type(value) is str else encode_parameter(value) for value in values]
    return parameters, [int(isinstance(value, BINARY)) for value in values]


def encode_parameter(value: Any) -> bytes | None:
    if value is None or isinstance(value, bytes):
        return value
    return encode_bytea_array(value) if isinstance(value, list) else str(value).encode()


def encode_bytea_array(items: list[bytes | None]) -> bytes:
    """Return a bytea[] in its binary form."""
    parts = [struct.pack("!iiIii", 1, 1, BYTEA, len(items), 1)]
    for item in items:
        parts += (NULL,) if item is None else (struct.pack("!i", len(item)), item)
    return b"".join(parts)
