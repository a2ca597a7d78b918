"""The PostgreSQL store keeps the contract on a real server: directly, in strict isolation, and behind a pooler."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from oncemore._ledger.model import Claim, Lease, Operation, Outcome, Record, encode_outcome
from oncemore._ledger.store import Filter
from oncemore._runtime.plan import Plan, arun, run
from oncemore.errors import (
    Fenced,
    InvalidKey,
    InvalidPayload,
    StoreError,
    StoreTimeout,
)
from oncemore.stores.postgres import PostgresStore, session
from oncemore.stores.postgres.pipeline import Pipeline
from oncemore.stores.postgres.rows import Item, escape_text, unescape_text
from oncemore.testing.machine import store_machine
from oncemore.testing.stores import DONE, LEASE, RETENTION, StoreContract

SERIALIZABLE = quote("-c default_transaction_isolation=serializable")


class TestPostgres(StoreContract):
    @pytest.fixture
    def store(self, url: str) -> PostgresStore:
        return PostgresStore(url)


class TestPooledPostgres(StoreContract):
    """Behind PgBouncer in transaction mode, each statement may run in another server process."""

    @pytest.fixture
    def store(self, pgbouncer_url: str, postgres_schema: str) -> PostgresStore:
        return PostgresStore(f"{pgbouncer_url}?schema={postgres_schema}")


class TestSerializablePostgres(StoreContract):
    """In the strictest isolation, the server refuses every possible conflict."""

    @pytest.fixture
    def store(self, url: str) -> PostgresStore:
        return PostgresStore(f"{url}&options={SERIALIZABLE}")


def test_any_history_is_answered_like_the_model(url: str) -> None:
    run(PostgresStore(url).stats())  # the tables are made once
    run_state_machine_as_test(store_machine(lambda: PostgresStore(f"{url}&listen=false"), examples=40))  # type: ignore[no-untyped-call]


# Batches


async def test_changes_of_one_record_in_one_batch_keep_order(store: PostgresStore) -> None:
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


async def test_refused_item_does_not_fail_its_batch(store: PostgresStore, server: psycopg.Connection[Any]) -> None:
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


def test_locked_row_does_not_hold_up_its_batch(url: str, server: psycopg.Connection[Any]) -> None:
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


@pytest.mark.parametrize("pooled", [False, True])
async def test_calls_beside_locked_records_do_not_wait(
    url: str, server: psycopg.Connection[Any], request: pytest.FixtureRequest, postgres_schema: str, pooled: bool
) -> None:
    """A transaction has inserted one record and locked another.  Calls for these wait, and other calls return."""
    place = f"{request.getfixturevalue('pgbouncer_url')}?schema={postgres_schema}" if pooled else url
    store = PostgresStore(f"{place}&timeout=100s&listen=false")
    mine = await arun(store.claim(Operation("s", "mine"), lease=LEASE))
    names = store.database.names
    numbers = itertools.count()

    async def time_others() -> float:
        """Claim and settle other keys, eight at a time, and return how long it took."""
        begun = time.monotonic()
        for _ in range(40):
            new = [Operation("s", str(next(numbers))) for _ in range(8)]
            leases = await asyncio.gather(*(arun(store.claim(operation, lease=LEASE)) for operation in new))
            await asyncio.gather(*(arun(store.settle(lease, DONE, retention=RETENTION)) for lease in leases))
        return time.monotonic() - begun

    usual = await time_others()
    with server.transaction():
        server.execute(f"SELECT FROM {names['records']} WHERE key = 'mine' FOR UPDATE")
        server.execute(
            f"""INSERT INTO {names["records"]} (scope, key, name, fingerprint, state, token, holder, attempts, created_at,
                lease_until) VALUES ('s', 'k', '', '', 'running', 1, 'another', 1, now(), now() + interval '1 hour')"""
        )
        claim = asyncio.create_task(arun(store.claim(Operation("s", "k"), lease=LEASE)))
        settle = asyncio.create_task(arun(store.settle(mine, DONE, retention=RETENTION)))
        assert await time_others() < 2 * usual + 1.0
        assert not claim.done()
        assert not settle.done()
    found = await claim
    assert isinstance(found, Record)
    assert found.holder == "another"
    await settle
    record = await arun(store.find("s", "mine"))
    assert record is not None
    assert record.outcome == DONE
    await store.aclose()


async def test_later_calls_for_a_locked_record_join_no_batch(
    store: PostgresStore, server: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each such call would delay its batch."""
    mine = await arun(store.claim(Operation("s", "mine"), lease=LEASE))
    run_batch, batched = store._writes.run_batch, list[str]()

    def noting(items: list[Item]) -> Plan[Sequence[Any]]:
        batched.extend(item.row.key for item in items)
        return run_batch(items)

    monkeypatch.setattr(store._writes, "run_batch", noting)
    with server.transaction():
        server.execute(f"SELECT FROM {store.database.names['records']} WHERE key = 'mine' FOR UPDATE")
        first = asyncio.create_task(arun(store.settle(mine, DONE, retention=RETENTION)))
        async with asyncio.timeout(10):
            while not store._locked:
                await asyncio.sleep(0.01)
        later = asyncio.create_task(arun(store.settle(mine, DONE, retention=RETENTION)))
        await asyncio.sleep(0.1)
    await first
    await later
    await arun(store.settle(mine, DONE, retention=RETENTION))
    assert batched == ["mine", "mine"]


async def test_cancelled_claims_are_undone_and_cancelled_writes_are_kept(
    store: PostgresStore, server: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim is undone, and the released attempt before it is remembered; an owner's write is carried out."""
    monkeypatch.setattr(session, "LOCK_WAIT", 60.0)  # so that the batches are still under way when their callers leave
    operation, ahead = Operation("s", "k", "c1:aa"), Operation("s", "ahead")
    held = await arun(store.claim(operation, lease=LEASE))
    await arun(store.release(held, retention=RETENTION))
    owned = [await arun(store.claim(each, lease=LEASE)) for each in (ahead, Operation("s", "owned"))]
    with server.transaction():
        server.execute(f"SELECT * FROM {store.database.names['records']} WHERE key IN ('k', 'ahead') FOR UPDATE")
        gone = [asyncio.create_task(arun(store.claim(operation, lease=LEASE)))]
        gone.append(asyncio.create_task(arun(store.renew(owned[0], lease=LEASE))))
        await asyncio.sleep(0.2)  # both batches are under way, and wait for the rows
        gone.append(asyncio.create_task(arun(store.settle(owned[1], DONE, retention=RETENTION))))
        await asyncio.sleep(0.05)
        for task in gone:
            task.cancel()
    await asyncio.gather(*gone, return_exceptions=True)
    for batcher in (store._claims, store._writes):
        await batcher.drain()
    assert (await arun(store.find("s", "owned"))).state == "settled"
    record = await arun(store.find("s", "k"))
    assert (record.state, record.attempts) == ("released", 2)
    assert record.remaining > 600
    await store.aclose()


# Text and limits


@given(st.text(st.characters(), max_size=20), st.text(st.characters(), max_size=20))
def test_escaped_text_is_distinct_and_comes_back(one: str, two: str) -> None:
    assert unescape_text(escape_text(one)) == one
    assert (escape_text(one) == escape_text(two)) == (one == two)
    assert "\0" not in escape_text(one)
    escape_text(one).encode()


@pytest.mark.parametrize("awkward", ["\0", "a\0b", "\ud800", "\\0", "\\\\0", "\\ud800", "\x1f", "🙂"])
def test_text_that_postgresql_cannot_store_comes_back(store: PostgresStore, awkward: str) -> None:
    """NUL and lone surrogates in a key are escaped, so they do not fail a claim."""
    operation = Operation(awkward, awkward, awkward, awkward)
    run(store.settle(run(store.claim(operation, lease=LEASE)), DONE, retention=RETENTION, note=awkward))
    record = run(store.claim(operation, lease=LEASE))
    assert isinstance(record, Record)
    assert (record.id, record.fingerprint, record.name, record.note) == (operation.id, awkward, awkward, awkward)
    assert run(store.list(Filter(scope=awkward, key=awkward, name=awkward))).records[0].id == operation.id
    assert run(store.delete(*operation.id)) is True


def test_key_too_long_for_the_index_is_refused(store: PostgresStore) -> None:
    random = secrets.token_hex(1300)  # a repetitive one might be compressed into an entry
    assert isinstance(run(store.claim(Operation("", random), lease=LEASE)), Lease)
    with pytest.raises(InvalidKey, match="2601 bytes"):
        run(store.claim(Operation("x", random), lease=LEASE))


def test_span_longer_than_the_calendar_is_shortened(store: PostgresStore) -> None:
    lease = run(store.claim(Operation("s", "k"), lease=1e15))
    run(store.settle(lease, DONE, retention=1e15))
    assert run(store.find("s", "k")).remaining > 1e9


@pytest.mark.parametrize("callers", ["threads", "tasks"])
def test_large_outcomes_in_one_batch_come_back(store: PostgresStore, callers: str) -> None:
    """The outcomes together are larger than one message to the server may be."""
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
def test_unreadable_outcome_is_a_tombstone(
    store: PostgresStore, server: psycopg.Connection[Any], bytes_: bytes
) -> None:
    """The key must not refuse all requests for ever."""
    operation = Operation("s", "k")
    run(store.settle(run(store.claim(operation, lease=LEASE)), DONE, retention=RETENTION))
    server.execute(f"UPDATE {store.database.names['records']} SET outcome = %s", [bytes_])
    record = run(store.claim(operation, lease=LEASE))
    assert (record.state, record.outcome, record.note) == ("settled", Outcome("tombstone"), "unreadable record")


def test_invalid_cursor_is_refused(store: PostgresStore) -> None:
    with pytest.raises(InvalidPayload):
        run(store.list(Filter(), cursor="17"))


def test_statements_run_inside_a_users_transaction(store: PostgresStore, server: psycopg.Connection[Any]) -> None:
    """The statements are text with numbered parameters, so any driver can run them."""
    run(store.stats())
    known, cursor = store.database.sql, psycopg.RawCursor(server)
    asked = ["s", "k", "name", "c1:aa", "my holder", LEASE, 0.0, "1000", b"asked"]
    with server.transaction(force_rollback=True):
        cursor.execute(known.claim_here.text, asked)
        assert cursor.rowcount == 1
    assert run(store.find("s", "k")) is None
    with server.transaction():
        ((token, *_),) = cursor.execute(known.claim_here.text, asked).fetchall()
        done = ["s", "k", token, RETENTION, 0.0, 201, encode_outcome(DONE), DONE.digest(), "", False]
        cursor.execute(known.settle_here.text, done)
    record = run(store.find("s", "k"))
    assert (record.state, record.outcome, record.token, record.request) == ("settled", DONE, token, b"")


# Clocks, tokens


def test_clients_clock_does_not_matter(store: PostgresStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases follow the server's clock, even if the client's is an hour ahead or behind."""
    operation = Operation("s", "k")
    right = time.time()
    lease = run(store.claim(operation, lease=LEASE))
    for wrong in (right - 3600, right + 3600):
        monkeypatch.setattr(time, "time", lambda wrong=wrong: wrong)
        assert run(store.claim(operation, lease=LEASE)).state == "running"
    assert abs(lease.expires_at - right - LEASE) < 60


def test_unclaimed_first_attempt_stays_gone_if_clock_goes_back(store: PostgresStore) -> None:
    operation = Operation("s", "k", "c1:aa")
    run(store.claim(operation, lease=LEASE))
    run(store.unclaim([Claim(operation, run(store.find("s", "k")).holder, LEASE)]))
    store.shift -= 3600
    assert run(store.find("s", "k")) is None
    assert run(store.delete("s", "k")) is False
    assert run(store.claim(Operation("s", "k", "c1:other"), lease=LEASE)).attempt == 1


def test_tokens_grow_after_records_were_deleted(store: PostgresStore, server: psycopg.Connection[Any]) -> None:
    names = store.database.names
    first = run(store.claim(Operation("s", "k"), lease=LEASE))
    server.execute(f"TRUNCATE {names['records']}")
    assert run(store.claim(Operation("s", "k"), lease=LEASE)).token > first.token


def test_interrupted_batch_leaves_no_lease_without_owner(store: PostgresStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal comes after one of two claims was granted, while the other is looked up: no caller gets an answer."""
    run(store.claim(Operation("s", "taken"), lease=LEASE))
    send = Pipeline.run

    def interrupted(pipeline: Pipeline) -> Any:
        if pipeline.queries[0][0] is store.database.sql.find:
            monkeypatch.setattr(Pipeline, "run", send)
            raise KeyboardInterrupt
        return send(pipeline)

    items = [next(store.claim(Operation("s", key), lease=LEASE)).item for key in ("free", "taken")]  # type: ignore[attr-defined]
    monkeypatch.setattr(Pipeline, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(store._claims.execute(items))
    assert run(store.find("s", "free")).state == "running"
    store._claims.orphans += items
    run(store._claims.repair())
    assert run(store.find("s", "free")) is None
    assert run(store.find("s", "taken")).state == "running"
