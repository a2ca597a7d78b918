"""The SQLite store: the contract on a real file, its tables, records and batches."""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from oncemore import Guard
from oncemore._ledger.model import Lease, Operation, Outcome, Record
from oncemore._ledger.store import Filter
from oncemore._runtime.plan import Plan, arun, run
from oncemore.errors import ConfigurationError, InvalidKey, InvalidPayload, OutcomeNotKept, StoreError
from oncemore.observe import Event
from oncemore.stores import schema
from oncemore.stores import sqlite as sqlite_store
from oncemore.stores.sqlite import SqliteStore, checkpoint_log, connect
from oncemore.stores.sqlite.batch import NO_RECORD, SqliteBatch
from oncemore.testing.machine import store_machine
from oncemore.testing.stores import StoreContract

from ..parts import DONE, HOUR, claimed, left_in_doubt, operation, settled


class TestSqlite(StoreContract):
    """The contract on a file."""


TestMachine = store_machine(lambda: connect("sqlite://")).TestCase


# Where the file is


@pytest.mark.parametrize(
    "url",
    [
        "sqlite:///",
        "sqlite:once.db",
        "sqlite://host/once.db",
        "sqlite:///once.db#part",
        "sqlite:///once.db?wait=1",
        "sqlite:///once.db?prefix=a-b",
        "sqlite:///once.db?prefix=",
        "sqlite:///once.db?synchronous=off",
        "sqlite:///once.db?thread=never",
        "sqlite:///once.db?create=perhaps",
    ],
)
def test_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError):
        connect(url)


def test_too_old_sqlite_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 26, 0))
    with pytest.raises(ConfigurationError, match="too old"):
        connect("sqlite://")


def test_relative_path_is_resolved_when_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that changes its working folder later must not start a second ledger there."""
    monkeypatch.chdir(tmp_path)
    store = connect("sqlite:///a%20b.db")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    claimed(store)
    store.close()
    assert (tmp_path / "a b.db").exists()


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:"])
def test_memory_database_belongs_to_one_store(url: str) -> None:
    first, second = connect(url), connect(url)
    claimed(first)
    claimed(second)
    assert run(first.stats()).running == 1
    first.close()
    second.close()


# The tables


def test_schema_script_creates_the_tables(path: Path, url: str) -> None:
    with sqlite3.connect(path) as connection:
        connection.executescript(schema(f"{url}?prefix=app_"))
    store = connect(f"{url}?prefix=app_&create=false")
    settled(store)
    assert run(store.stats()).settled == 1
    store.close()


def test_missing_tables_with_create_false_name_the_script(url: str) -> None:
    store = connect(f"{url}?create=false")
    with pytest.raises(ConfigurationError, match=r"oncemore\.stores\.schema"):
        claimed(store)


def test_two_prefixes_are_two_ledgers(url: str, store: SqliteStore) -> None:
    second = connect(f"{url}?prefix=second_")
    claimed(store)
    claimed(second)
    settled(second, "another")
    assert [run(each.stats()).settled for each in (store, second)] == [0, 1]
    second.close()


def test_tables_of_a_newer_version_are_left_alone(path: Path, url: str, store: SqliteStore) -> None:
    claimed(store)
    store.close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE oncemore_features SET version = 99")
    for each in (store, connect(f"{url}?create=false")):
        with pytest.raises(ConfigurationError, match="99, made by a newer release"):
            claimed(each)


def test_commits_are_synced_unless_the_url_says_otherwise(url: str, store: SqliteStore) -> None:
    """FULL is 2, and NORMAL is 1."""
    weaker = connect(f"{url}?synchronous=normal")
    levels = [each._writer.use(lambda c: c.execute("PRAGMA synchronous").fetchone()[0]) for each in (store, weaker)]
    assert levels == [2, 1]
    weaker.close()


# Tokens, clocks and records


def test_tokens_grow_across_restarts_and_deletions(url: str, store: SqliteStore) -> None:
    tokens = []
    for _ in range(3):
        tokens.append(settled(store).token)
        run(store.delete("scope", "key"))
        store.close()
    assert tokens == sorted(set(tokens))


def test_a_client_whose_clock_is_wrong_does_not_matter(
    store: SqliteStore, other: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store never compares Python's clock."""
    right = time.time
    claimed(store)
    monkeypatch.setattr(time, "time", lambda: right() + 10 * HOUR)
    assert isinstance(run(other.claim(Operation("scope", "key", "c1:aa"), lease=HOUR)), Record)


@pytest.mark.parametrize("column", ["outcome = x'c1'", "outcome = 'text'", "note = CAST(x'ff' AS TEXT)"])
def test_an_unreadable_record_is_answered_and_can_be_deleted(path: Path, store: SqliteStore, column: str) -> None:
    """The record neither raises nor blocks its key."""
    settled(store)
    with sqlite3.connect(path) as connection:
        connection.execute(f"UPDATE oncemore_records SET {column}")
    record = run(store.claim(Operation("scope", "key", "c1:aa"), lease=HOUR))
    assert isinstance(record, Record)
    if column.startswith("outcome"):
        assert (record.outcome, record.note) == (Outcome("tombstone"), "unreadable record")
    assert run(store.delete("scope", "key")) is True
    claimed(store)


def test_unreadable_outcome_is_reported_to_observers(path: Path, url: str, store: SqliteStore) -> None:
    settled(store, "k")
    with closing(sqlite3.connect(path)) as connection, connection:
        assert connection.execute("UPDATE oncemore_records SET outcome = x'c1c1'").rowcount == 1
    events: list[Event] = []
    with Guard(url, observers=[events.append]) as guard, pytest.raises(OutcomeNotKept):
        guard.run(operation("k"), lambda op: pytest.fail("performed again"))
    assert [event.code for event in events if event.kind == "failed"] == ["TRANSIENT.idempotency.record_corrupt"]


def test_audited_record_is_archived_with_all_columns(path: Path, store: SqliteStore) -> None:
    lease = settled(store, audit=True, note="seen")
    store.shift += 2 * HOUR
    assert run(store.purge()) == 1
    with sqlite3.connect(path) as connection:
        rows = connection.execute(
            "SELECT scope, key, token, status, response_hash, note FROM oncemore_archive"
        ).fetchall()
    assert rows == [("scope", "key", lease.token, 201, DONE.digest(), "seen")]


def test_purge_slices_shrink_while_they_are_slow(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim that shares a slice's commit waits for the slice."""
    slices: list[int] = []
    purge = SqliteBatch.purge

    def noting(batch: SqliteBatch, most: int) -> int:
        slices.append(most)
        monkeypatch.setattr(sqlite_store, "SLICE_SECONDS", 60.0 if len(slices) < 3 else 0.0)
        return purge(batch, most)

    monkeypatch.setattr(SqliteBatch, "purge", noting)
    for n in range(501):
        settled(store, str(n))
    store.shift += 2 * HOUR
    assert run(store.purge()) == 501
    assert slices == [50, 100, 200, 100, 50, 50]


def test_purge_over_several_slices_counts_all_records(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_store, "LARGEST_SLICE", 50)
    for n in range(130):
        settled(store, str(n))
    store.shift += 2 * HOUR
    assert run(store.purge(batch=120)) == 120
    assert run(store.purge()) == 10
    assert run(store.purge()) == 0


def test_purge_checkpoints_the_write_ahead_log(path: Path, store: SqliteStore) -> None:
    """A claim that must checkpoint a long log takes ten times as long as others."""
    store._writer.use(lambda connection: connection.execute("PRAGMA wal_autocheckpoint = 0").fetchall())
    for n in range(120):
        settled(store, str(n))
    assert path.with_name("once.db-wal").stat().st_size > 500 * 4096
    store.shift += 2 * HOUR
    assert run(store.purge()) == 120
    claimed(store, "after")  # it begins the log anew
    with closing(sqlite3.connect(path)) as connection:
        _, pages, _ = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
    assert pages < 100


def test_record_expiring_during_purge_is_archived_or_left(path: Path, store: SqliteStore) -> None:
    """The two statements, to archive and to delete, use the same time, although time passes between them."""
    run(store.settle(claimed(store), DONE, retention=0.3, audit=True))
    connection = store._writer._connection
    assert connection is not None
    connection.set_trace_callback(lambda text: time.sleep(0.4) if text.startswith("DELETE") else None)
    assert run(store.purge()) == 0
    connection.set_trace_callback(None)
    assert run(store.purge()) == 1
    with closing(sqlite3.connect(path)) as file:
        assert file.execute("SELECT count(*) FROM oncemore_archive").fetchall() == [(1,)]


@pytest.mark.parametrize("cursor", ["seven", "-1", "\u0667", "9" * 30])
def test_invalid_cursor_is_refused(store: SqliteStore, cursor: str) -> None:
    with pytest.raises(InvalidPayload, match="is not a cursor"):
        run(store.list(Filter(), cursor=cursor))


def test_next_page_continues_after_changes_in_between(store: SqliteStore) -> None:
    for n in range(9):
        settled(store, str(n))
    first = run(store.list(Filter(), limit=3))
    run(store.delete("scope", "1"))
    claimed(store, "new")
    rest = run(store.list(Filter(), limit=100, cursor=first.cursor))
    assert [record.key for record in (*first.records, *rest.records)] == [*"012345678", "new"]


def test_replay_writes_nothing(path: Path, store: SqliteStore) -> None:
    """A claim that finds a record costs no commit, and so no sync."""
    settled(store)
    log = Path(f"{path}-wal")
    before = (log.stat().st_size, log.stat().st_mtime_ns)
    for _ in range(3):
        assert isinstance(run(store.claim(Operation("scope", "key", "c1:aa"), lease=HOUR)), Record)
    assert (log.stat().st_size, log.stat().st_mtime_ns) == before


# Groups


async def test_unstorable_item_fails_alone_in_its_batch(store: SqliteStore) -> None:
    keys = ["a", "\ud800", "b", "c"]
    claims = [arun(store.claim(Operation("scope", key), lease=HOUR)) for key in keys]
    answers = await asyncio.gather(*claims, return_exceptions=True)
    assert [type(answer) for answer in answers] == [Lease, InvalidKey, Lease, Lease]
    good = [answer for answer in answers if isinstance(answer, Lease)]
    notes = ["fine", "\udfff", "fine"]
    settles = [
        arun(store.settle(lease, DONE, retention=HOUR, note=note)) for lease, note in zip(good, notes, strict=True)
    ]
    assert [type(answer) for answer in await asyncio.gather(*settles, return_exceptions=True)] == [
        type(None),
        StoreError,
        type(None),
    ]
    await store.aclose()


async def test_two_writes_of_one_record_keep_their_order(store: SqliteStore) -> None:
    lease = await arun(store.claim(Operation("scope", "key"), lease=HOUR))
    assert isinstance(lease, Lease)
    asks: list[Any] = [
        store.release(lease, retention=HOUR),
        store.claim(Operation("scope", "key"), lease=HOUR),
        store.claim(Operation("scope", "key"), lease=HOUR),
        store.claim(Operation("scope", "other"), lease=HOUR),
        store.delete("scope", "none"),
    ]
    answers = await asyncio.gather(*(arun(ask) for ask in asks))
    assert [type(answer) for answer in answers] == [type(None), Lease, Record, Lease, bool]
    assert answers[1].token == answers[2].token
    await store.aclose()


@pytest.mark.parametrize("count", [1, 2, 3, 5, 64, 300])
async def test_each_item_of_a_batch_of_any_size_is_answered(store: SqliteStore, count: int) -> None:
    operations = [Operation("scope", str(n)) for n in range(count)]
    leases = await asyncio.gather(*(arun(store.claim(each, lease=HOUR)) for each in operations))
    assert len({lease.token for lease in leases}) == count
    outcomes = [Outcome(body=str(n).encode()) for n in range(count)]
    settles = zip(leases, outcomes, strict=True)
    await asyncio.gather(*(arun(store.settle(lease, outcome, retention=HOUR)) for lease, outcome in settles))
    records = await asyncio.gather(*(arun(store.claim(each, lease=HOUR)) for each in operations))
    assert [record.outcome for record in records] == outcomes
    await store.aclose()


async def test_unknown_outcome_stays_unknown_after_cancelled_claim(store: SqliteStore) -> None:
    """If it were released, the next caller would repeat an effect that may have happened."""
    told = await left_in_doubt(store, (0.0, 0.0005, 0.001, 0.002))
    assert set(told) == {True}
    await store.aclose()


@pytest.mark.parametrize("way", ["loop", "threads"])
def test_file_stops_growing_under_traffic_with_short_retention(path: Path, store: SqliteStore, way: str) -> None:
    """No purge runs, but each batch of claims removes as many expired records."""
    numbers = itertools.count()

    def one() -> Plan[None]:
        lease = yield from store.claim(operation(str(next(numbers))), lease=HOUR)
        assert isinstance(lease, Lease)
        yield from store.settle(lease, Outcome("response", 200, (), bytes(2000)), retention=0.001)

    def write(count: int) -> int:
        """Settle operations, sixteen at a time, and return the size of the file."""
        if way == "threads":
            with ThreadPoolExecutor(16) as pool:
                list(pool.map(lambda _: run(one()), range(count)))
        else:

            async def work() -> None:
                for _ in range(count // 16):
                    await asyncio.gather(*(arun(one()) for _ in range(16)))

            asyncio.run(work())
        run(store._change(NO_RECORD, lambda batch: None))
        checkpoint_log(sqlite3.connect(path))
        return path.stat().st_size

    write(800)
    size = write(1600)
    for _ in range(20):  # a group may be small for a while, on a busy machine
        before, size = size, write(1600)
        if size <= before:
            break
    assert size <= before
    assert run(store.stats()).settled < next(numbers) / 2


def test_lone_caller_removes_no_expired_records(store: SqliteStore) -> None:
    """The caller would have to wait for the removal."""
    for n in range(5):
        settled(store, str(n))
    store.shift += 2 * HOUR
    claimed(store, "lone")
    assert run(store.stats()).expired == 5


def test_overdue_audited_records_are_archived_twice_as_fast(store: SqliteStore, other: SqliteStore) -> None:
    for n in range(20):
        settled(other, str(n), audit=True)
    store.shift += 1.5 * HOUR  # they expired half an hour ago

    async def claims(*keys: str) -> None:
        await asyncio.gather(*(arun(store.claim(operation(key), lease=HOUR)) for key in keys))

    asyncio.run(claims("a", "b", "c"))
    assert run(store.stats()).archived == 3
    store.shift += HOUR
    asyncio.run(claims("d", "e", "f"))
    assert run(store.stats()).archived == 9
    assert run(store.stats()).settled == 11


@pytest.mark.parametrize("where", [Filter(scope="a", state="released"), Filter(state="held"), Filter(lapsed=True)])
def test_unfinished_records_are_listed_by_an_index(tmp_path: Path, where: Filter) -> None:
    store = connect(f"sqlite:///{tmp_path}/once.db")
    run(store.stats())
    text, values = store.sql.page(where)
    with closing(sqlite3.connect(tmp_path / "once.db")) as connection:
        plan = connection.execute(f"EXPLAIN QUERY PLAN {text}", (0.0, 0, 10, *values)).fetchall()
    store.close()
    assert "SEARCH" in plan[0][3], plan
    assert "USING INDEX" in plan[0][3], plan
