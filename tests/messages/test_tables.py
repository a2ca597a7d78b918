"""Tables of features beside the user's tables: in transactions of every driver, and in our own."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from oncemore import Guard, Operation, connect
from oncemore._ledger.tables import Feature, Sql, Tables
from oncemore._runtime.plan import Plan, arun, run
from oncemore.errors import ConfigurationError, StoreError
from oncemore.stores import schema
from oncemore.testing.clock import Clock
from tests.messages.places import in_own_transaction
from tests.transactions.shops import OnDjango, OnEngine, Shop

THINGS = Feature(
    "things",
    "CREATE TABLE IF NOT EXISTS {p}things (id text PRIMARY KEY, data bytea, made_at timestamptz NOT NULL);\n"
    "CREATE INDEX IF NOT EXISTS {prefix}things_made ON {p}things (made_at);",
)
ADD = Sql("INSERT INTO {p}things (id, data, made_at) VALUES ($2, $3, {now})")
IDS = Sql("SELECT id FROM {p}things ORDER BY id")
AGES = Sql("SELECT EPOCH({now} - made_at) FROM {p}things")
RENAME = Sql("UPDATE {p}things SET id = $2 WHERE id = $1")


def things_of(shop: Shop) -> Tables:
    return Tables(shop.guard.store, THINGS)


def adding(tables: Tables, id: str) -> Any:
    return lambda place: tables.execute_in(place, tables.query(ADD, id, b"\x00data"))


async def ids(tables: Tables) -> list[str]:
    (rows,) = await arun(tables.execute(tables.query(IDS)))
    return [row[0] for row in rows]


async def test_row_in_operation_commits_with_it(shop: Shop) -> None:
    tables = things_of(shop)

    def perform(op: Any) -> Plan[None]:
        yield shop.insert(op, "r1")
        yield from adding(tables, "in op")(op)

    await shop.run(Operation("s", "k1"), perform)
    assert await ids(tables) == ["in op"]
    assert shop.refunds() == ["r1"]


async def test_row_in_failed_operation_is_rolled_back(shop: Shop) -> None:
    tables = things_of(shop)

    def perform(op: Any) -> Plan[None]:
        yield shop.insert(op, "r1")
        yield from adding(tables, "in op")(op)
        raise LookupError

    with pytest.raises(LookupError):
        await shop.run(Operation("s", "k1"), perform)
    assert await ids(tables) == []


async def test_row_in_users_transaction_commits_or_rolls_back(shop: Shop) -> None:
    tables = things_of(shop)
    for kind in ("connection", "session") if isinstance(shop, OnEngine) else ("connection",):
        await in_own_transaction(shop, adding(tables, "lost"), kind=kind, fails=True)
        await in_own_transaction(shop, adding(tables, kind), kind=kind)
        await in_own_transaction(shop, adding(tables, "lost too"), kind=kind, fails=True)
        assert kind in await ids(tables)
    assert not {"lost", "lost too"} & {*await ids(tables)}


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.server)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'things.db'}"
    return str(request.getfixturevalue("own_schema"))


@pytest.fixture
def guard(url: str) -> Iterator[Guard]:
    guard = Guard(url)
    yield guard
    guard.close()


def test_own_transaction_in_steps_commits_and_rolls_back(guard: Guard) -> None:
    tables = Tables(guard.store, THINGS)

    def work(*, fails: bool) -> Plan[Any]:
        transaction = yield from tables.open()
        rows = yield from transaction.begin(tables.query(ADD, f"{fails}", None), tables.query(IDS))
        yield from transaction.execute(tables.query(RENAME, f"{fails}", f"{fails} too"))
        if fails:
            yield from transaction.rollback()
        else:
            yield from transaction.commit(tables.query(ADD, "last", None))
        return rows

    assert [row[0] for row in run(work(fails=True))] == ["True"]
    assert [row[0] for row in run(work(fails=False))] == ["False"]
    (rows,) = run(tables.execute(tables.query(IDS)))
    assert [row[0] for row in rows] == ["False too", "last"]


async def test_own_transaction_in_steps_on_event_loop(guard: Guard) -> None:
    tables = Tables(guard.store, THINGS)

    def work() -> Plan[Any]:
        transaction = yield from tables.open()
        yield from transaction.begin(tables.query(ADD, "a", None))
        yield from transaction.commit(tables.query(ADD, "b", None))

    await arun(work())
    assert await ids(tables) == ["a", "b"]
    await guard.aclose()


def test_statements_of_one_transaction_fail_together(guard: Guard) -> None:
    tables = Tables(guard.store, THINGS)
    with pytest.raises(StoreError):
        run(tables.execute(tables.query(ADD, "same", None), tables.query(ADD, "same", None)))
    (rows,) = run(tables.execute(tables.query(IDS)))
    assert list(rows) == []


def test_clock_of_tests_moves_the_time_of_rows(guard: Guard) -> None:
    tables = Tables(guard.store, THINGS)
    run(tables.execute(tables.query(ADD, "a", None)))
    Clock(guard.store).advance(3600)
    (((age,),),) = run(tables.execute(tables.query(AGES)))
    assert 3600 <= age < 3900


def test_tables_are_not_made_if_create_is_false(url: str) -> None:
    guard = Guard(url)
    guard.stats()  # makes those of the ledger
    guard.close()
    strict = Guard(url + ("&" if "?" in url else "?") + "create=false")
    tables = Tables(strict.store, THINGS)
    with pytest.raises(ConfigurationError, match=r"tables of the things are missing.*create=false.*schema\(url\)"):
        run(tables.execute(tables.query(IDS)))
    strict.close()


def test_newer_tables_are_refused(guard: Guard, url: str) -> None:
    old = Tables(guard.store, THINGS)
    more = "ALTER TABLE {p}things ADD COLUMN more integer;"
    tables = Tables(guard.store, Feature("things", *THINGS.postgres, more))
    run(tables.execute(tables.query(IDS)))
    another = Guard(connect(url))
    with pytest.raises(ConfigurationError, match="version 2, made by a newer release"):
        run(Tables(another.store, THINGS).execute(old.query(IDS)))
    another.close()


def test_tables_are_migrated_by_the_scripts_that_are_new(guard: Guard, url: str) -> None:
    tables = Tables(guard.store, THINGS)
    run(tables.execute(tables.query(ADD, "a", None)))
    more = "ALTER TABLE {p}things ADD COLUMN more integer;"
    another = Guard(connect(url))
    newer = Tables(another.store, Feature("things", *THINGS.postgres, more))
    (rows,) = run(newer.execute(newer.query(Sql("SELECT id, more FROM {p}things"))))
    assert [tuple(row) for row in rows] == [("a", None)]
    another.close()


@pytest.mark.parametrize("url", ["memory://", "redis://127.0.0.1:1/0"])
def test_store_without_tables_is_refused_with_a_remedy(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"no tables.*postgresql://, sqlite:///file"):
        Tables(Guard(url).store, THINGS)


def test_schema_script_has_the_tables_of_features(url: str) -> None:
    assert "oncemore_outbox" in schema(url)


def test_schema_script_makes_tables_that_are_used_without_create(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'made.db'}?create=false"
    with sqlite3.connect(tmp_path / "made.db") as connection:
        connection.executescript(schema(url))
    assert Guard(url).stats().running == 0


# Places that are no transaction


def test_autocommit_sqlite_connection_is_refused(tmp_path: Path) -> None:
    guard = Guard(f"sqlite:///{tmp_path / 'x.db'}")
    tables = Tables(guard.store, THINGS)
    connection = sqlite3.connect(tmp_path / "x.db", isolation_level=None)
    with pytest.raises(ConfigurationError, match="is in no transaction"):
        run(adding(tables, "a")(connection))
    connection.execute("BEGIN")
    run(adding(tables, "a")(connection))
    connection.execute("COMMIT")
    connection.close()
    guard.close()


def test_connection_to_another_sqlite_file_is_refused(tmp_path: Path) -> None:
    tables = Tables(Guard(f"sqlite:///{tmp_path / 'x.db'}").store, THINGS)
    with sqlite3.connect(tmp_path / "y.db") as connection, pytest.raises(ConfigurationError, match="one file"):
        run(adding(tables, "a")(connection))


async def test_autocommit_postgres_connections_are_refused(own_schema: str, postgres_url: str) -> None:
    guard = Guard(own_schema)
    tables = Tables(guard.store, THINGS)
    plain = postgres_url
    with psycopg.connect(plain, autocommit=True) as connection:
        with pytest.raises(ConfigurationError, match="is in no transaction"):
            run(adding(tables, "a")(connection))
        with connection.transaction():
            run(adding(tables, "in a block")(connection))
    one = await asyncpg.connect(plain)
    with pytest.raises(ConfigurationError, match="is in no transaction"):
        await arun(adding(tables, "a")(one))
    await one.close()
    engine = create_engine(plain.replace("postgresql", "postgresql+psycopg"), isolation_level="AUTOCOMMIT")
    with engine.connect() as connected, pytest.raises(ConfigurationError, match="is in no transaction"):
        run(adding(tables, "a")(connected))
    with Session(engine) as session, pytest.raises(ConfigurationError, match="is in no transaction"):
        run(adding(tables, "a")(session))
    engine.dispose()
    assert await ids(tables) == ["in a block"]
    await guard.aclose()


async def test_row_is_written_in_the_users_psycopg_pipeline(own_schema: str, postgres_url: str) -> None:
    guard = Guard(own_schema)
    tables = Tables(guard.store, THINGS)
    with psycopg.connect(postgres_url) as connection, connection.pipeline():
        connection.execute("SELECT 1")
        run(adding(tables, "a")(connection))
    assert await ids(tables) == ["a"]
    await guard.aclose()


@pytest.mark.parametrize("shop", ["django-sqlite"], indirect=True)
def test_django_alias_outside_atomic_is_refused(shop: Shop) -> None:
    assert isinstance(shop, OnDjango)
    with pytest.raises(ConfigurationError, match="is in no transaction"):
        run(adding(things_of(shop), "a")(shop.alias))


def test_object_that_has_no_transaction_is_refused(tmp_path: Path) -> None:
    tables = Tables(Guard(f"sqlite:///{tmp_path / 'x.db'}").store, THINGS)
    for place in (object(), None, create_engine("sqlite://")):
        with pytest.raises(ConfigurationError, match="give the Op, or your open connection"):
            run(adding(tables, "a")(place))
