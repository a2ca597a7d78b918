"""Several statements in one round trip, on a connection of psycopg's: what goes with a BEGIN, and what with a COMMIT.

libpq's pipeline mode, by hand: psycopg's own looks at the socket after each command, which costs three times as much
processor time as the statements do.  What waits is psycopg's own, so interruptions and cancellations end as they do there.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Sequence
from typing import Any

import psycopg
from psycopg.adapt import Transformer
from psycopg.pq import ExecStatus
from psycopg.pq.abc import PGresult
from psycopg.waiting import Ready, Wait

from .postgres_link import Lost, Rejected, dump, failure
from .postgres_sql import Ask, Rows, Statement

Trip = Generator[Wait, Ready, list[Rows]]

COMMIT, ROLLBACK = Statement("COMMIT"), Statement("ROLLBACK")


class Kit:
    """What we know of a connection: its prepared statements, and how its rows are read.

    Whoever shares the connection may have them forgotten (DEALLOCATE ALL, as psycopg does after a rollback of its own).
    That is noticed by the server's refusal; then they are prepared anew, under names that were never used.
    """

    def __init__(self, connection: Any) -> None:
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


def trip(connection: Any, asks: Sequence[Ask]) -> Trip:
    """The rows of each statement; the first that fails is raised, and those behind it are not executed."""
    pgconn, kit = connection.pgconn, kit_of(connection)
    prepare = connection.prepare_threshold is not None  # else its owner says that nothing is, as behind a pooler
    try:
        pgconn.enter_pipeline_mode()
        names = dict(kit.names)
        for statement, values in asks:
            parameters = [dump(value) for value in values]
            texts, formats = [text for text, _ in parameters], [format for _, format in parameters]
            if prepare and statement.name:
                if statement.name not in names:
                    names[statement.name] = kit.fresh_name(statement)
                    pgconn.send_prepare(names[statement.name], statement.text.encode())
                pgconn.send_query_prepared(names[statement.name], texts, formats, 1)
            else:
                pgconn.send_query_params(statement.text.encode(), texts, None, formats, 1)
        pgconn.pipeline_sync()
        results = yield from answered(pgconn)
        pgconn.exit_pipeline_mode()
    except psycopg.OperationalError as error:
        raise Lost(str(error).strip()) from error
    for result in results:
        if result.status == ExecStatus.FATAL_ERROR:
            kit.names.clear()  # it may be one of these that the server does not know (any more)
            raise as_drivers(failure(pgconn, result))
    kit.names = names
    told = [result for result in results if result.status != ExecStatus.COMMAND_OK or result.command_status]
    return [read(kit, result) for result in told]


def answered(pgconn: Any) -> Generator[Wait, Ready, list[PGresult]]:
    """The last result of each command, up to the end of the pipeline."""
    results: list[PGresult] = []
    while pgconn.flush():
        if (yield Wait.RW) & Ready.R:
            pgconn.consume_input()
    while True:
        while pgconn.is_busy():
            yield Wait.R
            pgconn.consume_input()
        result = pgconn.get_result()
        if result is None:  # the end of one command
            continue
        if result.status == ExecStatus.PIPELINE_SYNC:
            return results
        results.append(result)


def as_drivers(error: Exception) -> Exception:
    """The error as psycopg would have raised it: it may be the borrower's own, of a constraint that waited."""
    if not isinstance(error, Rejected):
        return error
    try:
        return psycopg.errors.lookup(error.sqlstate)(str(error))
    except KeyError:
        return error


def read(kit: Kit, result: PGresult) -> Rows:
    if result.status != ExecStatus.TUPLES_OK:
        return ()
    kit.rows.set_pgresult(result)
    return kit.rows.load_rows(0, result.ntuples, tuple)


def begin(connection: Any) -> Statement:
    """The BEGIN that psycopg would send, by the connection's own settings."""
    parts = ["BEGIN"]
    if connection.isolation_level is not None:
        parts.append(f"ISOLATION LEVEL {connection.isolation_level.name.replace('_', ' ')}")
    if connection.read_only is not None:
        parts.append("READ ONLY" if connection.read_only else "READ WRITE")
    if connection.deferrable is not None:
        parts.append("DEFERRABLE" if connection.deferrable else "NOT DEFERRABLE")
    return Statement(" ".join(parts))
