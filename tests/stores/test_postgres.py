"""The PostgreSQL store keeps the contract on a real server: directly, in strict isolation, and behind a pooler."""

from __future__ import annotations

import asyncio
import gc
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test
from psycopg import sql

from oncemore.core.guard import Guard
from oncemore.core.model import Lease, Operation, Outcome, Record
from oncemore.core.plan import arun, run
from oncemore.core.policy import Policy
from oncemore.core.store import Filter
from oncemore.errors import (
    ConfigurationError,
    Fenced,
    InvalidKey,
    InvalidPayload,
    StoreError,
    StoreTimeout,
)
from oncemore.stores import connect, schema
from oncemore.stores import postgres_schema as tables
from oncemore.stores.postgres import PostgresStore
from oncemore.stores.postgres_rows import plain, safe
from oncemore.stores.postgres_sql import LOOK_UP
from oncemore.testing.store_contract import DONE, LEASE, RETENTION, StoreContract
from oncemore.testing.store_machine import store_machine

SERIALIZABLE = quote("-c default_transaction_isolation=serializable")


@pytest.fixture
def url(postgres_url: str, postgres_schema: str) -> str:
    """A URL with a schema of the test's own, which is not there yet."""
    return f"{postgres_url}?schema={postgres_schema}"


@pytest.fixture
def store(url: str) -> Iterator[PostgresStore]:
    store = PostgresStore(url)
    yield store
    store.close()


@pytest.fixture
def server(postgres_url: str) -> Iterator[psycopg.Connection[Any]]:
    """A connection past the store."""
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        yield connection


class TestPostgres(StoreContract):
    """CASES 52."""

    @pytest.fixture
    def store(self, url: str) -> PostgresStore:
        return PostgresStore(url)


class TestPooledPostgres(StoreContract):
    """CASES 54: behind PgBouncer in transaction mode, where each statement may meet another server process."""

    @pytest.fixture
    def store(self, pgbouncer_url: str, postgres_schema: str) -> PostgresStore:
        return PostgresStore(f"{pgbouncer_url}?schema={postgres_schema}")


class TestSerializablePostgres(StoreContract):
    """CASES 54: under the strictest isolation, where the server refuses whatever might collide."""

    @pytest.fixture
    def store(self, url: str) -> PostgresStore:
        return PostgresStore(f"{url}&options={SERIALIZABLE}")


def test_any_history_is_answered_as_the_model_answers_it(url: str) -> None:
    run(PostgresStore(url).stats())  # the tables are made once
    run_state_machine_as_test(store_machine(lambda: PostgresStore(f"{url}&listen=false"), examples=40))  # type: ignore[no-untyped-call]


# Many at once


async def test_what_one_flight_says_of_one_record_twice_is_done_in_order(store: PostgresStore) -> None:
    lease = await arun(store.claim(Operation("s", "k"), lease=LEASE))
    assert isinstance(lease, Lease)
    renewed, settled, again, held = await asyncio.gather(
        arun(store.renew(lease, lease=LEASE)),
        arun(store.settle(lease, DONE, retention=RETENTION)),
        arun(store.settle(lease, Outcome("response", 500), retention=RETENTION)),
        arun(store.hold(lease)),
        return_exceptions=True,
    )
    assert isinstance(renewed, Lease)
    assert (settled, again, type(held)) == (None, None, Fenced)
    record = await arun(store.find("s", "k"))
    assert record is not None
    assert record.outcome == DONE
    await store.aclose()


async def test_one_that_the_server_refuses_does_not_fail_its_neighbours(
    store: PostgresStore, server: psycopg.Connection[Any]
) -> None:
    await arun(store.stats())
    names = store.database.names
    server.execute(f"ALTER TABLE {names['records']} ADD CHECK (key <> 'bad')")
    keys = ["a", "b", "bad", "c", "d"]
    found = await asyncio.gather(
        *(arun(store.claim(Operation("s", key), lease=LEASE)) for key in keys), return_exceptions=True
    )
    assert [isinstance(each, Lease) for each in found] == [key != "bad" for key in keys]
    assert isinstance(found[2], StoreError)
    await store.aclose()


def test_a_row_that_someone_keeps_locked_does_not_hold_up_the_others_for_long(
    url: str, server: psycopg.Connection[Any]
) -> None:
    store = PostgresStore(f"{url}&timeout=3s")
    locked = run(store.claim(Operation("s", "locked"), lease=LEASE))
    free = run(store.claim(Operation("s", "free"), lease=LEASE))
    names = store.database.names
    with server.transaction(), ThreadPoolExecutor(3) as pool:
        server.execute(f"SELECT * FROM {names['records']} WHERE key = 'locked' FOR UPDATE")
        settles = [pool.submit(run, store.settle(lease, DONE, retention=RETENTION)) for lease in (free, locked, locked)]
        assert settles[0].result() is None
        for settle in settles[1:]:
            with pytest.raises(StoreTimeout):
                settle.result()
    run(store.settle(locked, DONE, retention=RETENTION))
    store.close()


# Text and limits


@given(st.text(st.characters(), max_size=20), st.text(st.characters(), max_size=20))
def test_safe_text_is_told_apart_and_comes_back(one: str, two: str) -> None:
    assert plain(safe(one)) == one
    assert (safe(one) == safe(two)) == (one == two)
    assert "\0" not in safe(one)
    safe(one).encode()


@pytest.mark.parametrize("awkward", ["\0", "a\0b", "\ud800", "\\0", "\\\\0", "\\ud800", "\x1f", "🙂"])
def test_text_that_postgresql_cannot_hold_is_held_all_the_same(store: PostgresStore, awkward: str) -> None:
    """CASES 11: hostile input has a defined answer."""
    operation = Operation(awkward, awkward, awkward, awkward)
    run(store.settle(run(store.claim(operation, lease=LEASE)), DONE, retention=RETENTION, note=awkward))
    record = run(store.claim(operation, lease=LEASE))
    assert isinstance(record, Record)
    assert (record.id, record.fingerprint, record.name, record.note) == (operation.id, awkward, awkward, awkward)
    assert run(store.list(Filter(scope=awkward, key=awkward, name=awkward))).records[0].id == operation.id
    assert run(store.delete(*operation.id)) is True


def test_a_name_that_no_index_has_room_for_is_refused(store: PostgresStore) -> None:
    random = secrets.token_hex(1300)  # a repetitive one might be compressed into an entry
    assert isinstance(run(store.claim(Operation("", random), lease=LEASE)), Lease)
    with pytest.raises(InvalidKey, match="2601 bytes"):
        run(store.claim(Operation("x", random), lease=LEASE))


def test_a_span_longer_than_the_calendar_is_cut(store: PostgresStore) -> None:
    lease = run(store.claim(Operation("s", "k"), lease=1e15))
    run(store.settle(lease, DONE, retention=1e15))
    assert run(store.find("s", "k")).remaining > 1e9


@pytest.mark.parametrize("callers", ["threads", "tasks"])
def test_large_outcomes_at_once_come_back_as_they_were(store: PostgresStore, callers: str) -> None:
    """CASES 19: more than fits into one message to the server."""
    leases = [run(store.claim(Operation("s", str(n)), lease=LEASE)) for n in range(4)]
    bodies = [secrets.token_bytes(5_000_000) for _ in leases]
    settles = [
        store.settle(lease, Outcome("response", 200, (), body), retention=RETENTION)
        for lease, body in zip(leases, bodies, strict=True)
    ]

    async def at_once() -> None:
        await asyncio.gather(*map(arun, settles))
        await store.aclose()

    if callers == "tasks":
        asyncio.run(at_once())
    else:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(run, settles))
    for n, body in enumerate(bodies):
        assert run(store.find("s", str(n))).outcome.body == body


@pytest.mark.parametrize("bytes_", [b"", b"\xc1", b"\x94\xa5other", b"nonsense"])
def test_an_outcome_that_cannot_be_read_is_a_tombstone(
    store: PostgresStore, server: psycopg.Connection[Any], bytes_: bytes
) -> None:
    """CASES 28: a defined answer, never an eternal conflict."""
    operation = Operation("s", "k")
    run(store.settle(run(store.claim(operation, lease=LEASE)), DONE, retention=RETENTION))
    server.execute(f"UPDATE {store.database.names['records']} SET outcome = %s", [bytes_])
    record = run(store.claim(operation, lease=LEASE))
    assert (record.state, record.outcome, record.note) == ("settled", Outcome("tombstone"), "unreadable record")


def test_a_cursor_of_someone_elses_making_is_refused(store: PostgresStore) -> None:
    with pytest.raises(InvalidPayload):
        run(store.list(Filter(), cursor="17"))


# Clocks, tokens


def test_the_clients_clock_does_not_matter(store: PostgresStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """CASES 53: an hour ahead or behind, leases live by the server's clock."""
    operation = Operation("s", "k")
    right = time.time()
    lease = run(store.claim(operation, lease=LEASE))
    for wrong in (right - 3600, right + 3600):
        monkeypatch.setattr(time, "time", lambda wrong=wrong: wrong)
        assert run(store.claim(operation, lease=LEASE)).state == "running"
    assert abs(lease.expires_at - right - LEASE) < 60


def test_tokens_come_from_a_sequence_that_outlives_the_records(
    store: PostgresStore, server: psycopg.Connection[Any]
) -> None:
    """CASES 53."""
    names = store.database.names
    first = run(store.claim(Operation("s", "k"), lease=LEASE))
    server.execute(f"TRUNCATE {names['records']}")
    assert run(store.claim(Operation("s", "k"), lease=LEASE)).token > first.token


# Speed of look-ups


@pytest.mark.parametrize("rows", [0, 2, 40, 3000])
def test_kept_plans_look_rows_up_by_key_however_small_the_table_was(
    store: PostgresStore, server: psycopg.Connection[Any], rows: int
) -> None:
    """A plan that reads the whole table is good for a small one, and ruinous when it has grown."""
    run(store.stats())
    names = store.database.names
    fill(server, names, rows)
    server.execute(f"ANALYZE {names['records']}")
    server.execute(f"SELECT set_config(name, value, false) FROM (VALUES {LOOK_UP.lstrip(', ')}) AS s (name, value)")
    known = store.database.sql
    several, alone = "'[]', 0", ", ".join(["NULL"] * 12)
    statements = {
        known.claim: several,
        known.claim_one: alone[: 7 * 6 - 2],
        known.move: f"{several}, '{{}}'",
        known.move_one: alone,
        known.find: several,
        known.touch: several,
        known.watch: several,
    }
    for statement, values in statements.items():
        plan = explain(server, statement.text, values)
        assert plan.count(" on oncemore_records_pkey ") == plan.count("Index Scan on"), plan
        assert plan.count("Bitmap Heap Scan") == plan.count("Scan on oncemore_records ") == 1, plan


def explain(server: psycopg.Connection[Any], text: str, values: str) -> str:
    server.execute(f"PREPARE p AS {text}")
    plan = "\n".join(row[0] for row in server.execute(f"EXPLAIN EXECUTE p({values})").fetchall())
    server.execute("DEALLOCATE p")
    return plan


def test_the_purge_and_the_list_of_open_records_use_their_index(
    store: PostgresStore, server: psycopg.Connection[Any]
) -> None:
    run(store.stats())
    names = store.database.names
    fill(server, names, 3000)
    server.execute(f"ANALYZE {names['records']}")
    plan = explain(server, store.database.sql.purge.text, "0, 100")
    assert "records_expires_at" in plan
    assert "Seq Scan" not in plan
    listing, _ = store.database.sql.list(Filter(state="held"), None, limit=10, shift=0.0)
    assert "records_expires_at" in explain(server, listing.text, "0, 'held', 10")


def fill(server: psycopg.Connection[Any], names: dict[str, str], rows: int) -> None:
    server.execute(
        f"""INSERT INTO {names["records"]} (scope, key, name, fingerprint, state, token, holder, attempts, created_at,
                lease_until, expires_at)
            SELECT 'user:' || mod(n, 50), md5(n::text), 'name', 'fp', 'settled', n, 'holder', 1, now(), now(),
                now() + n * interval '1 minute' FROM generate_series(1, %s) AS n""",
        [rows],
    )


def test_renewing_a_lease_changes_no_index(store: PostgresStore, server: psycopg.Connection[Any]) -> None:
    lease = run(store.claim(Operation("s", "k"), lease=LEASE))
    for _ in range(5):
        run(store.renew(lease, lease=LEASE))
    store.close()  # a server process that ends reports what it has done
    counts = "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_all_tables WHERE relid = %s::regclass"
    assert until(lambda: server.execute(counts, [store.database.names["records"]]).fetchone() == (5, 5))


# The schema


def test_the_script_makes_what_the_store_needs(url: str, server: psycopg.Connection[Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"oncemore\.stores\.schema\(url\)"):
        run(PostgresStore(f"{url}&create=false").stats())
    server.execute(schema(url))
    server.execute(schema(url))  # also where it is there already
    store = PostgresStore(f"{url}&create=false")
    assert isinstance(run(store.claim(Operation("s", "k"), lease=LEASE)), Lease)
    store.close()


def test_names_can_be_chosen(url: str, server: psycopg.Connection[Any], postgres_schema: str) -> None:
    store = connect(f"{url}&prefix=my_")
    run(store.stats())
    store.close()
    found = server.execute("SELECT to_regclass(%s)::text", [f"{postgres_schema}.my_records"]).fetchone()
    assert found != (None,)


@pytest.mark.parametrize("query", ["schema=a-b", "schema=", 'schema="', "prefix=A", "prefix=1a", "prefix=" + "x" * 41])
def test_names_that_are_none_are_refused(query: str) -> None:
    with pytest.raises(ConfigurationError, match=query.partition("=")[0]):
        connect(f"postgresql://localhost/?{query}")


@pytest.mark.parametrize("query", ["nonsense=1", "timeout=0", "timeout=soon", "create=maybe"])
def test_options_that_are_none_are_refused(query: str) -> None:
    with pytest.raises(ConfigurationError, match=query.partition("=")[0]):
        connect(f"postgresql://localhost/?{query}")


def test_no_password_is_shown() -> None:
    store = connect("postgresql://user:secret1@localhost/db?password=secret2&sslpassword=secret3&poll=2s")
    assert store.url == "postgresql://user:***@localhost/db?password=***&sslpassword=***&poll=2s"
    assert store.poll == 2.0


def test_without_the_right_to_create_the_error_names_the_script(
    postgres_url: str, server: psycopg.Connection[Any], postgres_schema: str
) -> None:
    role, password = f"r{postgres_schema}", secrets.token_hex(8)
    server.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}").format(sql.Identifier(role), sql.Literal(password)))
    try:
        poor = psycopg.conninfo.conninfo_to_dict(postgres_url)
        url = f"postgresql://{role}:{password}@{poor['host']}:{poor['port']}/{poor['dbname']}?schema={postgres_schema}"
        store = PostgresStore(url)
        with pytest.raises(ConfigurationError, match=r"permission denied.*oncemore\.stores\.schema\(url\)"):
            run(store.claim(Operation("s", "k"), lease=LEASE))
        server.execute(schema(url))
        with pytest.raises(ConfigurationError, match="permission denied"):
            run(store.claim(Operation("s", "k"), lease=LEASE))
        names = tables.names(postgres_schema, "oncemore_")
        server.execute(f"""
            GRANT USAGE ON SCHEMA {names["schema"]} TO {role};
            GRANT SELECT, INSERT, UPDATE, DELETE ON {names["records"]}, {names["archive"]} TO {role};
            GRANT SELECT ON {names["version"]} TO {role};
            GRANT USAGE ON SEQUENCE {names["tokens"]} TO {role}""")
        lease = run(store.claim(Operation("s", "k"), lease=LEASE))  # what the script lists is enough
        run(store.settle(lease, DONE, retention=RETENTION, audit=True))
        store.shift += RETENTION + 1
        assert run(store.purge()) == 1
        assert run(store.stats()).archived == 1
        store.close()
    finally:
        server.execute(sql.SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(sql.Identifier(role)))


def test_tables_that_have_gone_are_missed_by_name(store: PostgresStore, server: psycopg.Connection[Any]) -> None:
    run(store.claim(Operation("s", "k"), lease=LEASE))
    server.execute(f"DROP TABLE {store.database.names['records']}")
    for verb in (store.claim(Operation("s", "k"), lease=LEASE), store.stats(), store.find("s", "k")):
        with pytest.raises(ConfigurationError, match=r"oncemore_records.*oncemore\.stores\.schema\(url\)"):
            run(verb)


def test_tables_of_a_newer_release_are_left_alone(store: PostgresStore, server: psycopg.Connection[Any]) -> None:
    run(store.stats())
    server.execute(f"UPDATE {store.database.names['version']} SET version = 99")
    with pytest.raises(ConfigurationError, match="99, made by a newer release"):
        run(PostgresStore(same(store)).stats())


def same(store: PostgresStore) -> str:
    """A URL for the same ledger."""
    settings = psycopg.conninfo.conninfo_to_dict(store.database.claims.conninfo)
    place = f"{settings['user']}:{settings['password']}@{settings['host']}:{settings['port']}/{settings['dbname']}"
    return f"postgresql://{place}?schema={store.database.names['schema'].strip(chr(34))}"


def test_an_older_schema_is_brought_up_to_date_once(
    store: PostgresStore, server: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(store.stats())
    more = "ALTER TABLE {records} ADD COLUMN more integer NOT NULL DEFAULT 7;\n"
    monkeypatch.setattr(tables, "SCRIPTS", (*tables.SCRIPTS, more))
    stores = [PostgresStore(same(store)) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda each: run(each.stats()), stores))
    assert server.execute(f"SELECT version FROM {store.database.names['version']}").fetchone() == (2,)
    for each in stores:
        each.close()


# Waking up


def test_a_waiter_hears_at_once_of_what_another_process_does(url: str) -> None:
    mine, other = PostgresStore(url), PostgresStore(url)  # each with a bell of its own, as in two processes
    for verb in ("settle", "release", "hold", "lapse", "resolve"):
        operation = Operation("s", verb)
        lease = run(other.claim(operation, lease=LEASE))
        record = run(mine.claim(operation, lease=LEASE))
        with mine.bell.waiting(operation.id) as waiter:
            run(mine.watch(record))
            do = {
                "settle": lambda lease=lease: other.settle(lease, DONE, retention=RETENTION),
                "release": lambda lease=lease: other.release(lease, retention=RETENTION),
                "hold": lambda lease=lease: other.hold(lease),
                "lapse": lambda lease=lease: other.renew(lease, lease=0.0),
                "resolve": lambda lease=lease: resolved(other, lease),
            }[verb]
            assert rings(waiter, lambda do=do: run(do())), verb
    mine.close()
    other.close()


def resolved(store: PostgresStore, lease: Lease) -> Any:
    store.shift += LEASE + 1
    record = yield from store.resolve(*lease.operation.id, None, retention=RETENTION)
    return record


def rings(waiter: Any, act: Callable[[], object]) -> bool:
    """Whether the bell rings within half a second of the act; not before."""
    time.sleep(0.3)  # the ear has begun to listen, and said so
    waiter.disarm()
    act()
    begun = time.monotonic()
    run(forward(waiter.wait(10.0)))
    return time.monotonic() - begun < 5.0


def forward(effect: Any) -> Any:
    return (yield effect)


def test_watching_what_is_over_already_rings_at_once(url: str) -> None:
    mine, other = PostgresStore(url), PostgresStore(url)
    operation = Operation("s", "k")
    lease = run(other.claim(operation, lease=LEASE))
    record = run(mine.claim(operation, lease=LEASE))
    run(other.settle(lease, DONE, retention=RETENTION))
    with mine.bell.waiting(operation.id) as waiter:
        run(mine.watch(record))
        assert waiter.arm(lambda: None) is False
    mine.close()
    other.close()


def test_nothing_is_sent_where_nobody_in_another_process_waits(url: str, postgres_url: str) -> None:
    store = PostgresStore(url)
    operation = Operation("s", "k")
    lease = run(store.claim(operation, lease=LEASE))
    run(store.watch(run(store.claim(operation, lease=LEASE))))  # its owner is in this process
    with psycopg.connect(postgres_url, autocommit=True) as ear:
        ear.execute(sql.SQL("LISTEN {}").format(sql.Identifier(store._ear.channel)))
        run(store.settle(lease, DONE, retention=RETENTION))
        assert list(ear.notifies(timeout=0.5)) == []
    store.close()


async def test_a_deletion_in_another_process_empties_the_cache(url: str) -> None:
    mine, other = Guard(url), PostgresStore(url)
    operation = Operation("s", "k", "fp")
    performed = 0

    def perform(_: object) -> Outcome:
        nonlocal performed
        performed += 1
        return DONE

    await mine.arun(operation, perform)
    await mine.arun(operation, perform)
    assert performed == 1
    await asyncio.sleep(0.3)
    await arun(other.delete(*operation.id))
    async with asyncio.timeout(10):
        while mine.cache.get(operation.id) is not None:
            await asyncio.sleep(0.01)
    await mine.arun(operation, perform)
    assert performed == 2
    await mine.aclose()
    await other.aclose()


def test_a_message_that_is_none_is_ignored(store: PostgresStore, server: psycopg.Connection[Any]) -> None:
    other = PostgresStore(same(store))
    lease = run(other.claim(Operation("s", "k"), lease=LEASE))
    record = run(store.claim(Operation("s", "k"), lease=LEASE))
    with store.bell.waiting(("s", "k")) as waiter:
        run(store.watch(record))
        for text in ("", "{}", "[1]", '["x", 7]'):
            server.execute("SELECT pg_notify(%s, %s)", [store._ear.channel, text])
        assert rings(waiter, lambda: run(other.settle(lease, DONE, retention=RETENTION)))
    other.close()


def test_long_messages_are_split(store: PostgresStore, server: psycopg.Connection[Any]) -> None:
    ids = [("s" * 1000, f"{n}" * 500) for n in range(100, 130)]
    messages = list(store._ear.messages(ids))
    assert 1 < len(messages) < 30
    for message in messages:
        server.execute("SELECT pg_notify('anything', %s)", [message])


# Poolers


def test_behind_a_pooler_waiters_look_for_themselves(pgbouncer_url: str, postgres_schema: str) -> None:
    """CASES 54: messages would not arrive, so a waiter polls, and gets its answer all the same."""
    guards = [Guard(f"{pgbouncer_url}?schema={postgres_schema}") for _ in range(2)]
    operation, begun = Operation("s", "k"), threading.Event()

    def perform(_: object) -> Outcome:
        begun.set()
        time.sleep(0.7)
        return DONE

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(guards[0].run, operation, perform)
        begun.wait()
        second = guards[1].run(operation, perform)
        assert (first.result().how, second.how) == ("stored", "replayed")
    deadline = time.monotonic() + 10
    while guards[1].store.poll != 0.25 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert guards[1].store.poll == 0.25
    for guard in guards:
        guard.close()


@pytest.mark.parametrize("verb", ["DEALLOCATE ALL", "SELECT 1"])
def test_a_pooler_that_hides_itself_is_found_out(store: PostgresStore, verb: str) -> None:
    """CASES 54: a prepared statement that is missing, or there already, is no failure; the statement is sent again."""
    run(store.claim(Operation("s", "before"), lease=LEASE))
    link = store.database.claims.link
    assert link is not None
    assert link.alone
    link.pgconn.exec_(verb.encode())  # as if another server process had the statements that we think we prepared,
    if verb == "SELECT 1":
        link._prepared.clear()  # or this one had them from another client of the pooler
    assert isinstance(run(store.claim(Operation("s", "after"), lease=LEASE)), Lease)
    assert store.database.claims.link is link
    assert link.alone is (verb == "SELECT 1")


# Coming and going


def connections(server: psycopg.Connection[Any], name: str) -> int:
    row = server.execute("SELECT count(*) FROM pg_stat_activity WHERE application_name = %s", [name]).fetchone()
    assert row is not None
    return int(row[0])


def until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


async def test_closing_ends_every_connection_and_thread(url: str, server: psycopg.Connection[Any]) -> None:
    name = f"closing{secrets.token_hex(4)}"
    store = PostgresStore(f"{url}&application_name={name}")
    lease = await arun(store.claim(Operation("s", "k"), lease=LEASE))
    await asyncio.to_thread(run, store.settle(lease, DONE, retention=RETENTION))
    await arun(store.stats())
    assert until(lambda: connections(server, name) == 4)  # two of the loop's, one of the threads', and the ear's
    ear = store._ear._thread
    assert ear is not None
    await store.aclose()
    assert until(lambda: connections(server, name) == 0)
    assert until(lambda: not ear.is_alive())
    await arun(store.stats())  # and it can be used again
    await store.aclose()


def test_event_loops_that_are_gone_leave_nothing_behind(url: str, server: psycopg.Connection[Any]) -> None:
    name = f"loops{secrets.token_hex(4)}"
    store = PostgresStore(f"{url}&application_name={name}&listen=false")
    for n in range(5):
        lease = asyncio.run(arun(store.claim(Operation("s", str(n)), lease=LEASE)))
        assert isinstance(lease, Lease)
    gc.collect()
    assert len(store.database.claims.loops) <= 1
    store.close()
    gc.collect()
    assert until(lambda: connections(server, name) == 0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_connections_of_its_own(store: PostgresStore) -> None:
    """As under gunicorn with preload: parent and child go on, each with its own answers."""
    run(store.claim(Operation("s", "before"), lease=LEASE))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            won = [isinstance(run(store.claim(Operation("s", f"c{n}"), lease=LEASE)), Lease) for n in range(50)]
            store.close()
            code = 0 if all(won) else 2
        finally:
            os._exit(code)
    won = [isinstance(run(store.claim(Operation("s", f"p{n}"), lease=LEASE)), Lease) for n in range(50)]
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert all(won)
    found = run(store.list(Filter(scope="s"), limit=1000)).records
    assert len(found) == len({record.token for record in found}) == 101


def test_a_guard_waits_for_another_process_without_polling_it_to_death(url: str) -> None:
    """CASES 17: a duplicate in another process gets the outcome."""
    guards = [Guard(url, policy=Policy(wait=20)) for _ in range(2)]
    begun = threading.Event()

    def perform(_: object) -> Outcome:
        begun.set()
        time.sleep(1.0)
        return DONE

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(guards[0].run, Operation("s", "k"), perform)
        begun.wait()
        assert guards[1].run(Operation("s", "k"), perform).how == "replayed"
        assert first.result().how == "stored"
    for guard in guards:
        guard.close()
