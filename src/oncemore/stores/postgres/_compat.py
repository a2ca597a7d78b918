"""The parts of psycopg that are public by name but not in its manual, each used here alone.

Known for psycopg 3.2 and 3.3.  `tests/stores/postgres/test_compat.py` fails by name if an upgrade moves or changes one.
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

# A generator that yields Wait.R or Wait.RW whenever it must wait for the socket.  It is resumed when the socket is ready,
# and also every tenth of a second, so it can watch a deadline.  After an interruption it is resumed with None.
PgGenerator = Generator[Wait, Ready, T]
WAIT_READ, WAIT_READ_OR_WRITE = Wait.R, Wait.RW


def wait(connection: Any, generator: PgGenerator[T]) -> Any:
    """Run *generator* to its end: returns its value on a Connection, and an awaitable of it on an AsyncConnection.

    If the caller is interrupted or cancelled, psycopg asks the server to cancel, and then lets the generator finish.
    """
    return connection.wait(generator)


def error_from_result(result: PGresult) -> psycopg.Error:
    """The exception that psycopg itself would raise for *result*, with its class, `sqlstate` and `diag`."""
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
    """How many statements psycopg itself has ever prepared on the connection, and the oldest that is still prepared."""
    manager = connection._prepared
    return manager._prepared_idx, next(iter(manager._names), None)


def was_deallocated(connection: Any, mark: Mark) -> bool:
    """Whether psycopg may have sent DEALLOCATE ALL since *mark*, which drops our prepared statements too.

    It does so when a transaction or savepoint is rolled back, if it has prepared any statement itself.
    """
    count, oldest = mark
    manager = connection._prepared
    return oldest not in manager._names if oldest is not None else bool(manager._prepared_idx != count)
