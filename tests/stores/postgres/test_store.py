"""The PostgreSQL store keeps the contract on a real server: directly, in strict isolation, and behind a pooler."""

from __future__ import annotations

import asyncio
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from oncemore._ledger.model import Lease, Operation, Outcome, Record, encode_outcome
from oncemore._ledger.store import Filter
from oncemore._runtime.plan import arun, run
from oncemore.errors import (
    Fenced,
    InvalidKey,
    InvalidPayload,
    StoreError,
    StoreTimeout,
)
from oncemore.stores.postgres import PostgresStore
from oncemore.stores.postgres.line import Send
from oncemore.stores.postgres.rows import plain, safe
from oncemore.testing.store_contract import DONE, LEASE, RETENTION, StoreContract
from oncemore.testing.store_machine import store_machine

SERIALIZABLE = quote("-c default_transaction_isolation=serializable")


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


async def test_callers_that_go_away_leave_behind_what_they_should(
    store: PostgresStore, server: psycopg.Connection[Any]
) -> None:
    """A claim is given back, and a failure before it is not forgotten sooner; what an owner says is written."""
    operation, ahead = Operation("s", "k", "c1:aa"), Operation("s", "ahead")
    held = await arun(store.claim(operation, lease=LEASE))
    await arun(store.release(held, retention=RETENTION))
    owned = [await arun(store.claim(each, lease=LEASE)) for each in (ahead, Operation("s", "owned"))]
    with server.transaction():
        server.execute(f"SELECT * FROM {store.database.names['records']} WHERE key IN ('k', 'ahead') FOR UPDATE")
        gone = [asyncio.create_task(arun(store.claim(operation, lease=LEASE)))]
        gone.append(asyncio.create_task(arun(store.renew(owned[0], lease=LEASE))))
        await asyncio.sleep(0.2)  # both lanes fly, and wait for the rows
        gone.append(asyncio.create_task(arun(store.settle(owned[1], DONE, retention=RETENTION))))
        await asyncio.sleep(0.05)
        for task in gone:
            task.cancel()
    await asyncio.gather(*gone, return_exceptions=True)
    for lane in (store._claims, store._writes):
        await lane.drain()
    assert (await arun(store.find("s", "owned"))).state == "settled"
    record = await arun(store.find("s", "k"))
    assert (record.state, record.attempts) == ("released", 2)
    assert record.remaining > 600
    await store.aclose()


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


def test_the_statements_run_on_a_connection_of_the_users_within_its_transaction(
    store: PostgresStore, server: psycopg.Connection[Any]
) -> None:
    """They are text with positional parameters: whoever can execute that can claim and settle with a commit of its own."""
    run(store.stats())
    known, cursor = store.database.sql, psycopg.RawCursor(server)
    asked = ["s", "k", "name", "c1:aa", "my holder", LEASE, 0.0]
    with server.transaction(force_rollback=True):
        cursor.execute(known.claim_one.text, asked)
        assert cursor.rowcount == 1
    assert run(store.find("s", "k")) is None
    with server.transaction():
        ((_, token, *_),) = cursor.execute(known.claim_one.text, asked).fetchall()
        done = ["s", "k", token, "settled", None, RETENTION, 201, DONE.digest(), "", False, 0.0, encode_outcome(DONE)]
        cursor.execute(known.move_one.text, done)
    record = run(store.find("s", "k"))
    assert (record.state, record.outcome, record.token) == ("settled", DONE, token)


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


def test_a_flight_that_is_interrupted_leaves_no_lease_that_nobody_has(store: PostgresStore) -> None:
    """One of two was won, and while the other was looked up, a signal came: both callers were told of a failure."""
    run(store.claim(Operation("s", "taken"), lease=LEASE))
    asks = [next(store.claim(Operation("s", key), lease=LEASE)) for key in ("free", "taken")]
    flight = store._claims.run_batch([ask.item for ask in asks])  # type: ignore[attr-defined]
    effect = next(flight)
    while not (isinstance(effect, Send) and effect.statement is store.database.sql.find):
        effect = flight.send(effect.run())
    with pytest.raises(KeyboardInterrupt):
        flight.throw(KeyboardInterrupt())
    assert run(store.find("s", "free")).state == "running"
    run(store.claim(Operation("s", "next"), lease=LEASE))
    assert run(store.find("s", "free")).state == "released"
    assert run(store.find("s", "taken")).state == "running"
