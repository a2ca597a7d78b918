"""One libpq exchange carries claims and transactions, on threads and on event loops."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import psycopg
import pytest

from oncemore._runtime.clock import SYSTEM
from oncemore.errors import ConfigurationError
from oncemore.stores.postgres import pipeline
from oncemore.stores.postgres.pipeline import (
    BEGIN,
    COMMIT,
    ROLLBACK,
    AnswerTimeout,
    Pipeline,
    adapt_values,
    begin_statement,
    state_of,
)
from oncemore.stores.postgres.statements import Query, Statement, prepared

Send = Callable[..., list[Any]]


def plain(text: str, *values: Any) -> Query:
    return Statement(text), values


def named(text: str, *values: Any) -> Query:
    return prepared(text), values


class Sender:
    """A connection, sync or async, behind the same two functions."""

    def __init__(self, connection: Any, wait: Callable[[Awaitable[Any]], Any] | None) -> None:
        self.connection = connection
        self.wait = wait

    def __call__(self, *queries: Query, deadline: float | None = None) -> list[Sequence[Any]]:
        effect = Pipeline(self.connection, queries, deadline)
        return effect.run() if self.wait is None else self.wait(effect.arun())


@pytest.fixture(params=["run", "arun"])
def send(request: pytest.FixtureRequest, postgres_url: str) -> Iterator[Sender]:
    if request.param == "run":
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            yield Sender(connection, None)
        return
    with asyncio.Runner() as runner:
        aconnection = runner.run(psycopg.AsyncConnection.connect(postgres_url, autocommit=True))
        yield Sender(aconnection, runner.run)
        runner.run(aconnection.close())


@pytest.fixture
def table(server: psycopg.Connection[Any], postgres_schema: str) -> str:
    server.execute(f"CREATE SCHEMA {postgres_schema}")  # type: ignore[arg-type]
    server.execute(f"CREATE TABLE {postgres_schema}.t (n int PRIMARY KEY)")  # type: ignore[arg-type]
    return f"{postgres_schema}.t"


def numbers(server: psycopg.Connection[Any], table: str) -> list[int]:
    return [n for (n,) in server.execute(f"SELECT n FROM {table} ORDER BY n").fetchall()]  # type: ignore[arg-type]


def test_pipeline_returns_rows_of_each_query_in_order(send: Sender, table: str) -> None:
    rows = send(
        named("SELECT $1::int, $2::text, $3::bytea", 7, "ž\\", b"\0\xff"),
        plain(f"INSERT INTO {table} VALUES (1)"),
        named("SELECT n FROM unnest($1::bytea[]) AS n", [b"a", None]),
    )
    assert rows == [[(7, "ž\\", b"\0\xff")], (), [(b"a",), (None,)]]
    assert send() == []


def test_pipeline_first_error_skips_the_commit_behind_it(
    send: Sender, table: str, server: psycopg.Connection[Any]
) -> None:
    with pytest.raises(psycopg.errors.DivisionByZero) as raised:
        send((BEGIN, ()), plain(f"INSERT INTO {table} VALUES (1)"), plain("SELECT 1 / 0"), plain("oops"), (COMMIT, ()))
    assert raised.value.diag.message_primary == "division by zero"
    send((ROLLBACK, ()))
    assert numbers(server, table) == []
    send((BEGIN, ()), plain(f"INSERT INTO {table} VALUES (2)"), (COMMIT, ()))
    assert numbers(server, table) == [2]


def test_pipeline_outside_transaction_fails_as_a_whole(
    send: Sender, table: str, server: psycopg.Connection[Any]
) -> None:
    with pytest.raises(psycopg.errors.UniqueViolation):
        send(*(named(f"INSERT INTO {table} VALUES ($1)", n) for n in (1, 1)))
    assert numbers(server, table) == []


def test_pipeline_error_at_implicit_commit_is_raised(send: Sender, table: str, server: psycopg.Connection[Any]) -> None:
    """The rows arrive before the server commits, so they are valid only after the end of the pipeline."""
    server.execute(f"ALTER TABLE {table} ADD FOREIGN KEY (n) REFERENCES {table} DEFERRABLE INITIALLY DEFERRED")  # type: ignore[arg-type]
    server.execute(f"ALTER TABLE {table} ADD COLUMN m int REFERENCES {table} DEFERRABLE INITIALLY DEFERRED")  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(psycopg.errors.ForeignKeyViolation):
            send(named(f"INSERT INTO {table} VALUES (1, 9) RETURNING n"))
    assert numbers(server, table) == []
    assert send(named(f"INSERT INTO {table} VALUES (1, 1) RETURNING n")) == [[(1,)]]


def test_pipeline_statements_are_prepared_once_per_connection(send: Sender) -> None:
    for _ in range(3):
        send(named("SELECT 1"), named("SELECT 1"), named("SELECT 2"), plain("SELECT 3"))
    ((count,),) = send(plain("SELECT count(*) FROM pg_prepared_statements"))[0]
    assert count == 2


def test_pipeline_deallocated_statements_are_prepared_again(send: Sender) -> None:
    send(named("SELECT 1"))
    send(plain("DEALLOCATE ALL"))
    with pytest.raises(psycopg.errors.InvalidSqlStatementName):
        send(named("SELECT 1"))
    assert send(named("SELECT 1")) == [[(1,)]]


def test_pipeline_without_prepare_threshold_prepares_nothing(send: Sender) -> None:
    send.connection.prepare_threshold = None
    assert send(named("SELECT 1")) == [[(1,)]]
    assert state_of(send.connection).prepared == {}


def test_pipeline_past_its_deadline_closes_the_connection(send: Sender) -> None:
    begun = time.monotonic()
    with pytest.raises(AnswerTimeout) as raised:
        send(plain("SELECT pg_sleep(20)"), deadline=SYSTEM.monotonic() + 0.3)
    assert raised.value.sqlstate is None
    assert time.monotonic() - begun < 10
    with pytest.raises(psycopg.OperationalError):
        send(plain("SELECT 1"))


def test_pipeline_larger_than_the_socket_buffers_is_answered(send: Sender) -> None:
    """Both sides send more than the buffers hold, so reading and writing must overlap."""
    large = bytes(6_000_000)
    rows = send(*(plain("SELECT $1::bytea", large) for _ in range(4)))
    assert [row[0][0] for row in rows] == [large] * 4


def test_pipeline_on_terminated_connection_raises_without_sqlstate(
    send: Sender, server: psycopg.Connection[Any]
) -> None:
    server.execute("SELECT pg_terminate_backend(%s, 5000)", [send.connection.info.backend_pid])
    with pytest.raises(psycopg.OperationalError) as raised:
        send(plain("SELECT 1"))
    assert raised.value.sqlstate is None


async def test_pipeline_cancelled_leaves_connection_usable(postgres_url: str) -> None:
    async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as connection:
        task = asyncio.create_task(Pipeline(connection, [plain("SELECT pg_sleep(20)")]).arun())
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await Pipeline(connection, [plain("SELECT 1")]).arun() == [[(1,)]]


def test_pipeline_interrupted_while_sending_closes_the_connection(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a pipeline was sent, and the next one must not get its answers."""

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    with psycopg.connect(postgres_url, autocommit=True) as connection:
        monkeypatch.setattr(pipeline, "read_results", interrupt)
        with pytest.raises(KeyboardInterrupt):
            Pipeline(connection, [plain("SELECT 1")]).run()
        monkeypatch.undo()
        with pytest.raises(psycopg.OperationalError):
            Pipeline(connection, [plain("SELECT 2")]).run()


def test_pipeline_in_another_encoding_is_refused(postgres_url: str) -> None:
    with (
        psycopg.connect(postgres_url, client_encoding="latin1") as connection,
        pytest.raises(ConfigurationError, match="LATIN1"),
    ):
        Pipeline(connection, [plain("SELECT 1")]).run()


def test_begin_statement_follows_the_connections_settings(postgres_url: str) -> None:
    with psycopg.connect(postgres_url) as connection:
        assert begin_statement(connection) is BEGIN
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.read_only, connection.deferrable = True, False
        text = begin_statement(connection).text
        assert text == "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY NOT DEFERRABLE"


def test_adapted_values_of_any_type_are_text(postgres_url: str) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        values = adapt_values(connection, [None, 5, [1, 2], True])
        assert Pipeline(connection, [plain("SELECT $1::int, $2::int, $3::int[], $4::bool", *values)]).run() == [
            [(None, 5, [1, 2], True)]
        ]
