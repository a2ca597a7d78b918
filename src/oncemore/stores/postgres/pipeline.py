"""Several statements in one round trip, on a connection of psycopg's: what goes with a BEGIN, and what with a COMMIT.

libpq's pipeline mode, by hand: psycopg's own looks at the socket after each command, which costs three times as much
processor time as the statements do.  What waits is psycopg's own, so interruptions and cancellations end as they do there.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Sequence
from typing import Any

import psycopg
from psycopg.adapt import PyFormat, Transformer
from psycopg.pq import ExecStatus
from psycopg.pq.abc import PGresult
from psycopg.waiting import Ready, Wait

from ...errors import ConfigurationError
from .connection import Lost, Rejected, dump_all, failure
from .statements import Ask, Rows, Statement, prepared

Trip = Generator[Wait, Ready, list[Rows]]

# Prepared like any other, so that the server need not read them anew; but a rollback must work whatever was forgotten.
BEGIN, COMMIT, ROLLBACK = prepared("BEGIN"), prepared("COMMIT"), Statement("ROLLBACK")

# Enumerations are slow to look into, and this is done for every result.
TUPLES_OK, FATAL_ERROR, PIPELINE_SYNC = map(
    int, (ExecStatus.TUPLES_OK, ExecStatus.FATAL_ERROR, ExecStatus.PIPELINE_SYNC)
)
WAIT_R = Wait.R
UTF8 = (b"UTF8", b"UNICODE")  # as the server calls it, and as it may be asked for, which is what a pooler repeats
# The server does not know a prepared statement any more, or a table's columns are of other types than when it was prepared.
OUTDATED = {"26000", "0A000"}


class Kit:
    """What we know of a connection: its prepared statements, and how its rows are read.

    Whoever shares the connection may have them forgotten (DEALLOCATE ALL, as psycopg does after a rollback of its own).
    That is noticed by the server's refusal; then they are prepared anew, under names that were never used.
    """

    def __init__(self, connection: Any) -> None:
        encoding = connection.pgconn.parameter_status(b"client_encoding") or b"UTF8"  # as psycopg has it
        # Else a key would be another key than on the next connection, and be performed once more.
        if encoding.upper().replace(b"-", b"").replace(b"_", b"") not in UTF8:
            raise ConfigurationError(
                f"The connections are in {encoding.decode()}, and the ledger's texts in UTF-8: give your pool or engine "
                "client_encoding=UTF8"
            )
        self.names: dict[bytes, bytes] = {}
        self.rows = Transformer(connection)
        self._count = itertools.count()

    def fresh_name(self, statement: Statement) -> bytes:
        return b"%s_%d" % (statement.name, next(self._count))


def kit_of(connection: Any) -> Kit:
    kit: Kit | None = getattr(connection, "_oncemore_kit", None)
    if kit is None:
        kit = connection._oncemore_kit = Kit(connection)
    return kit


def trip(connection: Any, asks: Sequence[Ask], *, wanted: bool = True) -> Trip:
    """The rows of each statement, if they are *wanted*; the first that fails is raised, and those behind it are not executed."""
    pgconn, kit = connection.pgconn, kit_of(connection)
    # None: the connection's owner says that nothing is prepared, as behind a pooler.
    names = kit.names if connection.prepare_threshold is not None else None
    preparing: dict[int, tuple[bytes, bytes]] = {}  # what is prepared on this trip, by the place of the answer to it
    sent = 0
    try:
        pgconn.enter_pipeline_mode()
        for statement, values in asks:
            texts, formats = dump_all(values)
            if names is None or not statement.name:
                pgconn.send_query_params(statement.text.encode(), texts, None, formats, 1)
            else:
                name = names.get(statement.name)
                if name is None:
                    name = kit.fresh_name(statement)
                    names = {**names, statement.name: name}
                    pgconn.send_prepare(name, statement.text.encode())
                    preparing[sent] = (statement.name, name)
                    sent += 1
                pgconn.send_query_prepared(name, texts, formats, 1)
            sent += 1
        pgconn.pipeline_sync()
        results = yield from answered(pgconn)
        pgconn.exit_pipeline_mode()
    except psycopg.OperationalError as error:
        raise Lost(str(error).strip()) from error
    rows: list[Rows] = []
    for place, result in enumerate(results):
        status = result.status
        if status == FATAL_ERROR:
            refused = as_drivers(failure(pgconn, result))
            if getattr(refused, "sqlstate", "") in OUTDATED:
                kit.names = {}
            raise refused
        if place in preparing:
            kit.names.update([preparing[place]])
        elif not wanted:
            continue
        elif status == TUPLES_OK:
            kit.rows.set_pgresult(result)
            rows.append(kit.rows.load_rows(0, result.ntuples, tuple))
        else:
            rows.append(())
    return rows


def answered(pgconn: Any) -> Generator[Wait, Ready, list[PGresult]]:
    """The result of each command, up to the end of the pipeline."""
    results: list[PGresult] = []
    while pgconn.flush():
        yield Wait.RW  # which of them it is does not matter, and is not told to one that goes on after a cancellation
        pgconn.consume_input()
    # Not before it has been waited for: to ask lets go of the interpreter, and other threads come in between.
    yield WAIT_R
    pgconn.consume_input()
    while True:
        while pgconn.is_busy():
            yield WAIT_R
            pgconn.consume_input()
        result = pgconn.get_result()
        if result is None:
            continue
        if result.status == PIPELINE_SYNC:
            return results
        results.append(result)
        pgconn.get_result()  # the command's end, which is known with its result


def as_drivers(error: Exception) -> Exception:
    """The error as psycopg would have raised it: it may be the borrower's own, of a constraint that waited."""
    if not isinstance(error, Rejected):
        return error
    try:
        return psycopg.errors.lookup(error.sqlstate)(str(error))
    except KeyError:
        return error


def adapted(connection: Any, ask: Ask) -> Ask:
    """The user's statement, each value as psycopg writes it; but of what type it is, PostgreSQL infers."""
    statement, values = ask
    dumper = kit_of(connection).rows.get_dumper
    dumped = [None if value is None else dumper(value, PyFormat.TEXT).dump(value) for value in values]
    return statement, [None if value is None else bytes(value).decode() for value in dumped]


def begin(connection: Any) -> Statement:
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
