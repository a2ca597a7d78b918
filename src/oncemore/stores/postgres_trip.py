"""Several statements in one round trip, on a connection of psycopg's: what goes with a BEGIN, and what with a COMMIT.

libpq's pipeline mode, by hand: psycopg's own looks at the socket after each command, which costs three times as much
processor time as the statements do.  What waits is psycopg's own, so interruptions and cancellations end as they do there.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import psycopg
from psycopg.adapt import Transformer
from psycopg.pq import ExecStatus
from psycopg.pq.abc import PGresult
from psycopg.waiting import Ready, Wait

from .postgres_link import Lost, dump, failure
from .postgres_sql import Ask, Rows, Statement

Trip = Generator[Wait, Ready, list[Rows]]

COMMIT = Statement("COMMIT")


class Kit:
    """What we know of a connection: its prepared statements, and how its rows are read."""

    def __init__(self, connection: Any) -> None:
        self.prepared: set[bytes] = set()
        self.rows = Transformer(connection)


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
        new = {statement.name: statement for statement, _ in asks if prepare and statement.name}
        for name in new.keys() - kit.prepared:
            pgconn.send_prepare(name, new[name].text.encode())
        for statement, values in asks:
            parameters = [dump(value) for value in values]
            texts, formats = [text for text, _ in parameters], [format for _, format in parameters]
            if prepare and statement.name:
                pgconn.send_query_prepared(statement.name, texts, formats, 1)
            else:
                pgconn.send_query_params(statement.text.encode(), texts, None, formats, 1)
        pgconn.pipeline_sync()
        results = yield from answered(pgconn)
        pgconn.exit_pipeline_mode()
    except psycopg.OperationalError as error:
        raise Lost(str(error).strip()) from error
    for result in results:
        if result.status == ExecStatus.FATAL_ERROR:
            kit.prepared.clear()  # it may be one of these that the server does not know (any more)
            raise failure(pgconn, result)
    kit.prepared.update(new)
    return [read(kit, result) for result in results[len(results) - len(asks) :]]


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
