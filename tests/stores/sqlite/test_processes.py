"""SQLite with several processes, threads and event loops, which share the file, fork, are killed, or end."""

from __future__ import annotations

import asyncio
import gc
import signal
import sqlite3
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest

from oncemore._ledger.guard import Guard
from oncemore._ledger.model import Lease, Operation, Outcome, Record
from oncemore._runtime.plan import arun, run
from oncemore.errors import StoreTimeout
from oncemore.stores.sqlite import SqliteStore, connect

from ..parts import DONE, HOUR, claimed, in_a_fork, settled
from . import children
from .children import child, together

# Other processes


def test_16_processes_claim_one_key_and_one_wins(url: str) -> None:
    """They also create the tables concurrently."""
    found = [line for [line] in together(16, children.claim, url, "key")]
    assert sorted(line.split()[0] for line in found) == ["Lease"] + ["Record"] * 15
    assert len({line.split()[1] for line in found}) == 1


@pytest.mark.timeout(400)  # some eight thousand commits, each as slow as the disk
def test_16_processes_with_500_operations_each_never_see_a_lock(url: str, store: SqliteStore) -> None:
    assert together(16, children.work, url, 500) == [[]] * 16
    assert run(store.stats()).settled == 16 * 250 + 250


def test_busy_writer_does_not_starve_another_process(store: SqliteStore, other: SqliteStore) -> None:
    done = threading.Event()
    hog = threading.Thread(target=lambda: [claimed(store, str(n)) for n in range(100_000) if not done.is_set()])
    hog.start()
    try:
        longest = 0.0
        for n in range(100):
            start = time.monotonic()
            claimed(other, f"other {n}")
            longest = max(longest, time.monotonic() - start)
    finally:
        done.set()
        hog.join()
    assert longest < 4  # the store's timeout is 5 s


def test_endless_lock_is_a_timeout_and_delays_no_replay(path: Path, url: str, store: SqliteStore) -> None:
    """The caller gets an error, and calls that write nothing are answered meanwhile."""
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


def test_waiter_gets_outcome_settled_by_another_process(store: SqliteStore, other: SqliteStore) -> None:
    """Other processes send no notifications, but the waiter looks by itself."""
    operation = Operation("scope", "key", "c1:aa", "refunds.create")
    lease = claimed(store)
    timer = threading.Timer(0.3, lambda: run(store.settle(lease, DONE, retention=HOUR)))
    timer.start()
    answer = Guard(other).run(operation, lambda op: Outcome(body=b"a second effect"))
    timer.join()
    assert (answer.outcome, answer.how) == (DONE, "replayed")


@pytest.mark.chaos
@pytest.mark.parametrize("verb", ["renew", "settle", "release", "hold"])
def test_holder_frozen_past_its_lease_is_fenced(url: str, store: SqliteStore, verb: str) -> None:
    with child(children.hold_then_write, url, verb) as holder:
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
def test_process_killed_under_load_leaves_an_intact_file(url: str, path: Path, store: SqliteStore) -> None:
    """All keys that were reported as settled are settled, and no others."""
    for _ in range(3):
        with child(children.settle_for_ever, url) as victim:
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


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_parent_and_child_of_a_fork_both_continue(store: SqliteStore) -> None:
    """Both use the store that the parent opened before the fork, as under gunicorn with preload."""
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
def test_fork_under_load_waits_for_the_commit(store: SqliteStore, path: Path) -> None:
    """The child starts without a connection, and finds all of the parent's commits."""
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


class Interrupted(sqlite3.Connection):
    """A connection whose close() ends with an interrupt."""

    def close(self) -> None:
        super().close()
        signal.raise_signal(signal.SIGINT)


def test_interrupt_during_fork_leaves_the_file_usable(
    store: SqliteStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """os.fork swallows the interrupt.  Other threads must not wait for ever, and this one must get a new connection."""
    ignored: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda told: ignored.append(told.exc_type))
    claimed(store, "before")
    store._writer.close()
    store._writer._connection = sqlite3.connect(
        path, isolation_level=None, check_same_thread=False, factory=Interrupted
    )
    assert in_a_fork(lambda: None) == 0
    assert ignored == [KeyboardInterrupt]
    other = threading.Thread(target=claimed, args=(store, "another thread's"), daemon=True)
    other.start()
    other.join(10)
    assert not other.is_alive()
    assert run(store.find("scope", "another thread's")) is not None
    claimed(store, "this thread's")


# Ending


async def test_store_can_be_closed_twice_and_used_again(store: SqliteStore) -> None:
    await arun(store.claim(Operation("scope", "key"), lease=HOUR))
    await store.aclose()
    await store.aclose()
    assert await arun(store.find("scope", "key")) is not None
    await store.aclose()
    assert not [thread for thread in threading.enumerate() if thread.name == f"oncemore-sqlite {store.path}"]


def test_collected_store_ends_its_threads(url: str) -> None:
    store = connect(url)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(arun(store.claim(Operation("scope", "key"), lease=HOUR)))
    loop.close()
    name = f"oncemore-sqlite {store.path}_0"
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


@pytest.mark.parametrize("thread", ["auto", "always"])
@pytest.mark.parametrize("delay", [0.0, 0.0003, 0.0006, 0.001, 0.002])
def test_claims_under_way_at_loop_shutdown_are_undone(url: str, delay: float, thread: str) -> None:
    """A commit cannot be stopped, but nobody is left to perform, so the next claim must not wait for the leases."""
    store = connect(f"{url}?thread={thread}")
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
