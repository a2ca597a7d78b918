"""The SQLite ledger: the store contract on a real file, and what only a file shared by processes has to prove."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from oncemore.core.guard import Guard
from oncemore.core.model import Lease, Operation, Outcome, Record
from oncemore.core.plan import arun, run
from oncemore.core.store import Filter
from oncemore.errors import ConfigurationError, InvalidKey, StoreError, StoreTimeout
from oncemore.stores import schema
from oncemore.stores.sqlite import SqliteStore, connect
from oncemore.testing.store_contract import StoreContract
from oncemore.testing.store_machine import store_machine

from . import sqlite_child
from .sqlite_child import DONE, HOUR, child, together


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "once.db"


@pytest.fixture
def url(path: Path) -> str:
    return f"sqlite:///{path}"


@pytest.fixture
def store(url: str) -> Iterator[SqliteStore]:
    store = connect(url)
    yield store
    store.close()


@pytest.fixture
def other(url: str) -> Iterator[SqliteStore]:
    """A second store on the same file, as another process would have it."""
    store = connect(url)
    yield store
    store.close()


def claimed(store: SqliteStore, key: str = "key", lease: float = HOUR) -> Lease:
    found = run(store.claim(Operation("scope", key, "c1:aa", "refunds.create"), lease=lease))
    assert isinstance(found, Lease)
    return found


def settled(store: SqliteStore, key: str = "key", **options: Any) -> Lease:
    lease = claimed(store, key)
    run(store.settle(lease, DONE, retention=HOUR, **options))
    return lease


class TestSqlite(StoreContract):
    """CASES 52: the contract, on a file."""


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
        "sqlite:///once.db?create=perhaps",
    ],
)
def test_a_url_that_cannot_be_meant_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError):
        connect(url)


def test_a_sqlite_that_is_too_old_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 26, 0))
    with pytest.raises(ConfigurationError, match="too old"):
        connect("sqlite://")


def test_a_relative_path_is_that_of_the_moment_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that changes its folder afterwards must not begin a second ledger there."""
    monkeypatch.chdir(tmp_path)
    store = connect("sqlite:///a%20b.db")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    claimed(store)
    store.close()
    assert (tmp_path / "a b.db").exists()


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:"])
def test_memory_belongs_to_one_store_alone(url: str) -> None:
    first, second = connect(url), connect(url)
    claimed(first)
    claimed(second)
    assert run(first.stats()).running == 1
    first.close()
    second.close()


# The tables


def test_the_script_makes_what_is_needed(path: Path, url: str) -> None:
    with sqlite3.connect(path) as connection:
        connection.executescript(schema(f"{url}?prefix=app_"))
    store = connect(f"{url}?prefix=app_&create=false")
    settled(store)
    assert run(store.stats()).settled == 1
    store.close()


def test_without_tables_and_leave_to_make_them_the_error_names_the_script(url: str) -> None:
    store = connect(f"{url}?create=false")
    with pytest.raises(ConfigurationError, match=r"oncemore\.stores\.schema"):
        claimed(store)


def test_two_prefixes_are_two_ledgers(url: str, store: SqliteStore) -> None:
    second = connect(f"{url}?prefix=second_")
    claimed(store)
    claimed(second)
    second.close()


def test_tables_of_a_newer_version_are_left_alone(path: Path, url: str, store: SqliteStore) -> None:
    claimed(store)
    store.close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE oncemore_meta SET version = 99")
    for each in (store, connect(f"{url}?create=false")):
        with pytest.raises(ConfigurationError, match="99, newer than"):
            claimed(each)


def test_commits_are_synced_unless_the_url_says_otherwise(url: str, store: SqliteStore) -> None:
    """FULL is 2, and NORMAL is 1."""
    weaker = connect(f"{url}?synchronous=normal")
    levels = [each._writer.use(lambda c: c.execute("PRAGMA synchronous").fetchone()[0]) for each in (store, weaker)]
    assert levels == [2, 1]
    weaker.close()


# Tokens, clocks and records


def test_tokens_grow_across_a_restart_whatever_was_deleted(url: str, store: SqliteStore) -> None:
    """CASES 53."""
    tokens = []
    for _ in range(3):
        tokens.append(settled(store).token)
        run(store.delete("scope", "key"))
        store.close()
    assert tokens == sorted(set(tokens))


def test_a_client_whose_clock_is_wrong_does_not_matter(
    store: SqliteStore, other: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CASES 53: what Python takes for the time is never compared."""
    right = time.time
    claimed(store)
    monkeypatch.setattr(time, "time", lambda: right() + 10 * HOUR)
    assert isinstance(run(other.claim(Operation("scope", "key", "c1:aa"), lease=HOUR)), Record)


@pytest.mark.parametrize("column", ["outcome = x'c1'", "outcome = 'text'", "note = CAST(x'ff' AS TEXT)"])
def test_an_unreadable_record_is_answered_and_can_be_deleted(path: Path, store: SqliteStore, column: str) -> None:
    """CASES 28: it neither fails nor wedges."""
    settled(store)
    with sqlite3.connect(path) as connection:
        connection.execute(f"UPDATE oncemore_records SET {column}")
    record = run(store.claim(Operation("scope", "key", "c1:aa"), lease=HOUR))
    assert isinstance(record, Record)
    if column.startswith("outcome"):
        assert (record.outcome, record.note) == (Outcome("tombstone"), "unreadable record")
    assert run(store.delete("scope", "key")) is True
    claimed(store)


def test_an_audited_record_is_archived_whole(path: Path, store: SqliteStore) -> None:
    lease = settled(store, audit=True, note="seen")
    store.shift += 2 * HOUR
    assert run(store.purge()) == 1
    with sqlite3.connect(path) as connection:
        rows = connection.execute(
            "SELECT scope, key, token, status, response_hash, note FROM oncemore_archive"
        ).fetchall()
    assert rows == [("scope", "key", lease.token, 201, DONE.digest(), "seen")]


def test_a_purge_larger_than_a_slice_counts_them_all(store: SqliteStore) -> None:
    for n in range(130):
        settled(store, str(n))
    store.shift += 2 * HOUR
    assert run(store.purge(batch=120)) == 120
    assert run(store.purge()) == 10
    assert run(store.purge()) == 0


def test_a_page_continues_where_it_ended_whatever_happens_meanwhile(store: SqliteStore) -> None:
    for n in range(9):
        settled(store, str(n))
    first = run(store.list(Filter(), limit=3))
    run(store.delete("scope", "1"))
    claimed(store, "new")
    rest = run(store.list(Filter(), limit=100, cursor=first.cursor))
    assert [record.key for record in (*first.records, *rest.records)] == [*"012345678", "new"]


def test_nothing_is_written_for_a_replay(path: Path, store: SqliteStore) -> None:
    """A claim that finds a record costs no commit, and so no sync."""
    settled(store)
    log = Path(f"{path}-wal")
    before = (log.stat().st_size, log.stat().st_mtime_ns)
    for _ in range(3):
        assert isinstance(run(store.claim(Operation("scope", "key", "c1:aa"), lease=HOUR)), Record)
    assert (log.stat().st_size, log.stat().st_mtime_ns) == before


# Groups


async def test_one_that_cannot_be_stored_does_not_fail_its_neighbours(store: SqliteStore) -> None:
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


async def test_two_of_the_same_record_in_one_group_keep_their_order(store: SqliteStore) -> None:
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
async def test_a_group_of_any_size_gets_an_answer_each(store: SqliteStore, count: int) -> None:
    operations = [Operation("scope", str(n)) for n in range(count)]
    leases = await asyncio.gather(*(arun(store.claim(each, lease=HOUR)) for each in operations))
    assert len({lease.token for lease in leases}) == count
    outcomes = [Outcome(body=str(n).encode()) for n in range(count)]
    settles = zip(leases, outcomes, strict=True)
    await asyncio.gather(*(arun(store.settle(lease, outcome, retention=HOUR)) for lease, outcome in settles))
    records = await asyncio.gather(*(arun(store.claim(each, lease=HOUR)) for each in operations))
    assert [record.outcome for record in records] == outcomes
    await store.aclose()


async def test_a_doubtful_operation_stays_in_doubt_when_its_claimer_goes_away(store: SqliteStore) -> None:
    """Were it released, the next caller would perform what may have happened already."""
    operation = Operation("scope", "key")
    for delay in (0.0, 0.0005, 0.001, 0.002):
        await arun(store.claim(operation, lease=0.0))
        task = asyncio.create_task(arun(store.claim(operation, lease=HOUR)))
        await asyncio.sleep(delay)
        task.cancel()
        await asyncio.wait([task])
        if task.cancelled():
            async with asyncio.timeout(5):
                while not isinstance(found := await arun(store.claim(operation, lease=0.0)), Lease):
                    await asyncio.sleep(0.01)
            assert found.lapsed
        store.shift += 2 * HOUR
    await store.aclose()


# Other processes


def test_16_processes_claim_one_key_and_one_wins(url: str) -> None:
    """CASES 52; they also make the tables, all at once."""
    found = [line for [line] in together(16, sqlite_child.claim, url, "key")]
    assert sorted(line.split()[0] for line in found) == ["Lease"] + ["Record"] * 15
    assert len({line.split()[1] for line in found}) == 1


@pytest.mark.timeout(400)  # some eight thousand commits, each as slow as the disk
def test_16_processes_with_500_operations_each_never_see_a_lock(url: str, store: SqliteStore) -> None:
    """CASES 54."""
    assert together(16, sqlite_child.work, url, 500) == [[]] * 16
    assert run(store.stats()).settled == 16 * 250 + 250


def test_a_lock_that_does_not_end_is_a_timeout_and_delays_no_replay(path: Path, url: str, store: SqliteStore) -> None:
    """CASES 27: the caller is told; and what needs no write is answered all the while."""
    settled(store)
    impatient = connect(f"{url}?timeout=200ms")
    locker = sqlite3.connect(path, isolation_level=None)
    locker.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreTimeout, match="locked"):
        claimed(impatient, "another")
    assert isinstance(run(impatient.claim(Operation("scope", "key", "c1:aa"), lease=HOUR)), Record)
    assert run(impatient.find("scope", "key")) is not None
    locker.execute("ROLLBACK")
    claimed(impatient, "another")
    locker.close()
    impatient.close()


def test_who_meets_another_at_the_file_gives_way(store: SqliteStore, other: SqliteStore) -> None:
    """CASES 54: otherwise one that writes all the time could keep the others out for ever."""
    done = threading.Event()
    hog = threading.Thread(target=lambda: [claimed(store, str(n)) for n in range(100_000) if not done.is_set()])
    hog.start()
    try:
        for n in range(50):
            claimed(other, f"other {n}")
    finally:
        done.set()
        hog.join()
    assert store._writer._crowded_until > 0
    assert other._writer._crowded_until > 0


def test_a_waiter_sees_what_another_process_settles(store: SqliteStore, other: SqliteStore) -> None:
    """CASES 17: no bell rings between processes, but the waiter looks."""
    operation = Operation("scope", "key", "c1:aa", "refunds.create")
    lease = claimed(store)
    timer = threading.Timer(0.3, lambda: run(store.settle(lease, DONE, retention=HOUR)))
    timer.start()
    answer = Guard(other).run(operation, lambda op: Outcome(body=b"a second effect"))
    timer.join()
    assert (answer.outcome, answer.how) == (DONE, "replayed")


@pytest.mark.chaos
@pytest.mark.parametrize("verb", ["renew", "settle", "release", "hold"])
def test_a_holder_frozen_past_its_lease_is_fenced(url: str, store: SqliteStore, verb: str) -> None:
    """CASES 24."""
    with child(sqlite_child.hold_then_write, url, verb) as holder:
        token = int(holder.says())
        holder.send_signal(signal.SIGSTOP)
        time.sleep(0.35)
        taken = run(store.claim(Operation("frozen", verb), lease=HOUR))
        assert isinstance(taken, Lease)
        assert (taken.lapsed, taken.token > token) == (True, True)
        holder.send_signal(signal.SIGCONT)
        holder.tell()
        assert holder.says().startswith("Fenced")
    run(store.settle(taken, DONE, retention=HOUR))


@pytest.mark.chaos
def test_a_process_killed_in_mid_load_leaves_a_good_file(url: str, path: Path, store: SqliteStore) -> None:
    """CASES 25, 26: all that was told to be settled is settled, and nothing else is."""
    for _ in range(3):
        with child(sqlite_child.settle_for_ever, url) as victim:
            lines = [victim.says() for _ in range(101)]
            victim.kill()
            while line := victim.says():
                lines.append(line)
        for line in lines:
            verb, _, key = line.partition(" ")
            record = run(store.find("victim", key))
            assert record is not None
            assert record.state == "settled" or verb == "claimed"
        with sqlite3.connect(path) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            connection.execute("DELETE FROM oncemore_records")


def in_a_fork(work: Callable[[], None]) -> int:
    """The exit status of a forked child that did *work*: 0 where it went well."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_parent_and_child_of_a_fork_both_go_on(store: SqliteStore) -> None:
    """As under gunicorn with preload: both use the store that the parent had opened."""
    lease = claimed(store, "parent's")
    asyncio.run(arun(store.find("scope", "none")))  # so that there is a thread to be lost

    def child() -> None:
        assert run(store.find("scope", "parent's")) is not None
        settled(store, "child's")
        asyncio.run(use_and_close())

    async def use_and_close() -> None:
        assert isinstance(await arun(store.claim(Operation("scope", "awaited"), lease=HOUR)), Lease)
        await store.aclose()

    assert in_a_fork(child) == 0
    run(store.settle(lease, DONE, retention=HOUR))
    assert run(store.stats()).settled == 2
    claimed(store, "afterwards")


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_in_mid_load_waits_for_the_commit(store: SqliteStore, path: Path) -> None:
    """The child begins with no connection, and the parent's commits are all there."""
    done = threading.Event()
    told: list[str] = []

    def load() -> None:
        n = 0
        while not done.is_set():
            n += 1
            settled(store, str(n))
            told.append(str(n))

    loader = threading.Thread(target=load)
    loader.start()
    try:
        statuses = [in_a_fork(lambda n=n: settled(store, f"child {n}")) for n in range(5)]  # type: ignore[misc]
    finally:
        done.set()
        loader.join()
    assert statuses == [0] * 5
    assert run(store.stats()).settled == len(told) + 5
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


# Ending


async def test_it_can_be_closed_twice_and_used_again(store: SqliteStore) -> None:
    await arun(store.claim(Operation("scope", "key"), lease=HOUR))
    await store.aclose()
    await store.aclose()
    assert await arun(store.find("scope", "key")) is not None
    await store.aclose()
    assert not [thread for thread in threading.enumerate() if thread.name == f"oncemore-sqlite {store.path}"]


def test_a_store_that_nobody_closed_takes_its_threads_and_loops_with_it(url: str) -> None:
    store = connect(url)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(arun(store.claim(Operation("scope", "key"), lease=HOUR)))
    loop.close()
    name = f"oncemore-sqlite {store.path}"
    threads = [thread for thread in threading.enumerate() if thread.name == name]
    assert threads
    gone = weakref.ref(loop)
    del loop
    gc.collect()
    assert gone() is None
    del store
    gc.collect()
    for thread in threads:
        thread.join(timeout=5)
        assert not thread.is_alive()


@pytest.mark.parametrize("delay", [0.0, 0.0003, 0.0006, 0.001, 0.002])
def test_claims_in_flight_when_the_loop_is_shut_down_are_given_back(url: str, delay: float) -> None:
    """A commit cannot be stopped; but nobody is left to perform, so the next claimer need not wait for the leases."""
    store = connect(url)
    operations = [Operation("scope", str(n)) for n in range(8)]
    run(store.claim(Operation("scope", "first"), lease=HOUR))  # so that the file is open

    async def main() -> list[asyncio.Task[Any]]:
        tasks = [asyncio.create_task(arun(store.claim(each, lease=HOUR))) for each in operations]
        await asyncio.sleep(delay)
        return tasks

    tasks = asyncio.run(main())
    for task, operation in zip(tasks, operations, strict=True):
        if task.cancelled():
            found = run(store.claim(operation, lease=HOUR))
            assert isinstance(found, Lease)
            assert found.lapsed is False
    store.close()
