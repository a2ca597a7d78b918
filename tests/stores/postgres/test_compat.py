"""The parts of psycopg that its manual does not describe behave as `_compat.py` expects.

If one of these fails after an upgrade of psycopg, `stores/postgres/_compat.py` is the file to change.
"""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg
import pytest

from oncemore.stores.postgres._compat import (
    KNOWN_VERSIONS,
    WAIT_READ,
    PgGenerator,
    error_from_result,
    prepared_mark,
    wait,
    was_deallocated,
)


def test_psycopg_version_is_known() -> None:
    version = ".".join(psycopg.__version__.split(".")[:2])
    assert version in KNOWN_VERSIONS, f"psycopg {version}: check _compat.py, then add the version to KNOWN_VERSIONS"


def three_ticks() -> PgGenerator[list[Any]]:
    """Yield three times, and end although the socket never becomes ready."""
    ticks: list[Any] = []
    for _ in range(3):
        ticks.append((yield WAIT_READ))
    return ticks


def test_psycopg_connection_wait_resumes_generator_without_data(server: psycopg.Connection[Any]) -> None:
    assert [int(tick) for tick in wait(server, three_ticks())] == [0, 0, 0]


async def test_psycopg_async_connection_wait_resumes_generator_without_data(postgres_url: str) -> None:
    async with await psycopg.AsyncConnection.connect(postgres_url) as connection:
        assert [int(tick) for tick in await wait(connection, three_ticks())] == [0, 0, 0]


async def test_psycopg_async_connection_wait_finishes_generator_after_cancellation(postgres_url: str) -> None:
    async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as connection:
        task = asyncio.create_task(connection.execute("SELECT pg_sleep(20)"))
        await asyncio.sleep(0.2)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert (await (await connection.execute("SELECT 1")).fetchone()) == (1,)


def test_psycopg_error_from_result_is_the_drivers_own(server: psycopg.Connection[Any]) -> None:
    error = error_from_result(server.pgconn.exec_(b"SELECT 1 / 0"))
    assert isinstance(error, psycopg.errors.DivisionByZero)
    assert (error.sqlstate, error.diag.message_primary) == ("22012", "division by zero")


@pytest.mark.server
def test_psycopg_marks_the_statements_that_it_has_prepared(postgres_url: str) -> None:
    """It uses `_prepared`, `_prepared_idx` and `_names` of a connection, which psycopg 3.2 and 3.3 have."""
    with psycopg.connect(postgres_url) as connection:
        before = prepared_mark(connection)
        assert (before, was_deallocated(connection, before)) == ((0, None), False)
        with connection.transaction():
            for _ in range(8):
                connection.execute("SELECT 1")
        assert was_deallocated(connection, before)
        after = prepared_mark(connection)
        assert not was_deallocated(connection, after)
        with pytest.raises(psycopg.errors.DivisionByZero), connection.transaction():
            connection.execute("SELECT 1 / 0")
        assert was_deallocated(connection, after)
