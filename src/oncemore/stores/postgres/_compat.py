"""The parts of psycopg that its manual does not describe.  `pipeline.py` also uses `Transformer` itself.

They work with psycopg 3.2 and 3.3.  A test in `tests/stores/postgres/test_compat.py` fails for each part that an
upgrade moves or changes.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeVar

import psycopg
from psycopg.adapt import Transformer
from psycopg.pq.abc import PGresult
from psycopg.waiting import Ready, Wait

T = TypeVar("T")

KNOWN_VERSIONS = ("3.2", "3.3")

# A generator that yields Wait.R or Wait.RW whenever it must wait for the socket.  psycopg resumes it when the socket is
# ready, and also every tenth of a second, so it can watch a deadline.  After an interruption it is resumed with None.
PgGenerator = Generator[Wait, Ready, T]
WAIT_READ, WAIT_READ_OR_WRITE = Wait.R, Wait.RW


def wait(connection: Any, generator: PgGenerator[T]) -> Any:
    """Run *generator* to its end.  Return its value on a Connection, and an awaitable of it on an AsyncConnection.

    If the caller is interrupted or cancelled, psycopg asks the server to cancel, and then lets the generator finish.
    """
    return connection.wait(generator)


def error_from_result(result: PGresult) -> psycopg.Error:
    """Return the exception that psycopg itself would raise for *result*, with its class, `sqlstate` and `diag`."""
    return psycopg.errors.error_from_result(result)


class RowReader:
    """Reads the rows of results with the adapters of one connection."""

    def __init__(self, connection: Any) -> None:
        self._transformer = Transformer(connection)

    def read(self, result: PGresult) -> list[tuple[Any, ...]]:
        self._transformer.set_pgresult(result)
        return self._transformer.load_rows(0, result.ntuples, tuple)


Mark = tuple[int, Any]


def prepared_mark(connection: Any) -> Mark:
    """Return how many statements psycopg has ever prepared on the connection, and the oldest that is still prepared."""
    manager = connection._prepared
    return manager._prepared_idx, next(iter(manager._names), None)


def was_deallocated(connection: Any, mark: Mark) -> bool:
    """Whether psycopg may have sent DEALLOCATE ALL since *mark*, which drops the ledger's prepared statements too.

    psycopg sends it when it rolls back a transaction or savepoint, if it has prepared any statement itself.
    """
    count, oldest = mark
    manager = connection._prepared
    return oldest not in manager._names if oldest is not None else bool(manager._prepared_idx != count)
