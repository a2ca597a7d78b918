"""A process forks while the guard's own connections to a SQLite file are open or in use: neither side loses anything."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oncemore import Guard, Operation, Policy
from oncemore._ledger.context import Op
from oncemore.errors import ConfigurationError
from oncemore.stores.sqlite.transactions import SqliteNoCommit, SqliteSource
from tests.stores.sqlite.test_processes import in_a_fork

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

TRANSACTION = Policy(effect="transaction", wait=5)
POLICIES = {"lease": Policy(), "transaction": TRANSACTION}


def asked(key: str) -> Operation:
    return Operation("scope", key, "f")


def value(op: Op) -> str:
    return op.key


async def awaited(op: Op) -> str:
    return op.key


def in_a_thread(guard: Guard) -> None:
    guard.run(asked("before"), value, policy=TRANSACTION)


def on_a_loop(guard: Guard) -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    loop.run_until_complete(guard.arun(asked("before"), awaited, policy=TRANSACTION))
    return loop


@pytest.mark.parametrize("opened", [in_a_thread, on_a_loop])
@pytest.mark.parametrize("level", POLICIES)
def test_childs_stored_outcome_survives_its_parent_closing_the_file(
    opened: Callable[[Guard], Any], level: str, tmp_path: Path
) -> None:
    """Under gunicorn with preload: the guard was used before the fork, and the master ends first."""
    url = f"sqlite:///{tmp_path / 'once.db'}"
    guard = Guard(url)
    loop = opened(guard)
    begun, closed = os.pipe(), os.pipe()

    def child() -> None:
        guard.run(asked("first"), value, policy=POLICIES[level])  # it has opened the file
        os.write(begun[1], b"1")
        os.read(closed[0], 1)
        assert guard.run(asked("second"), value, policy=POLICIES[level]).how == "stored"

    statuses: list[int] = []
    forking = threading.Thread(target=lambda: statuses.append(in_a_fork(child)))
    forking.start()
    os.read(begun[0], 1)
    if loop is not None:
        loop.run_until_complete(guard.aclose())
        loop.close()
    guard.close()
    os.write(closed[1], b"1")
    forking.join()
    assert statuses == [0]
    kept = Guard(url)
    assert [kept.find("scope", key) is not None for key in ("before", "first", "second")] == [True, True, True]
    kept.close()


def refused(guard: Guard) -> None:
    """In a child: the file was in use when it was forked, so that nothing may be written here."""
    for key in ("slow", "other"):
        with pytest.raises(ConfigurationError, match=r"once\.db: it was in use .* Fork before serving"):
            guard.run(asked(key), value, policy=TRANSACTION)


def test_fork_during_another_threads_transaction_refuses_in_the_child(tmp_path: Path) -> None:
    guard = Guard(f"sqlite:///{tmp_path / 'once.db'}")
    performing, forked = threading.Event(), threading.Event()

    def slow(op: Op) -> str:
        op.connection.execute("SELECT 1")
        performing.set()
        forked.wait(10)
        return op.key

    other = threading.Thread(target=lambda: guard.run(asked("slow"), slow, policy=TRANSACTION))
    other.start()
    assert performing.wait(10)
    assert in_a_fork(lambda: refused(guard)) == 0
    forked.set()
    other.join()
    assert guard.run(asked("slow"), value, policy=TRANSACTION).how == "replayed"
    assert guard.run(asked("after"), value, policy=TRANSACTION).how == "stored"
    guard.close()


async def test_fork_during_a_loops_transaction_refuses_in_the_child(tmp_path: Path) -> None:
    guard = Guard(f"sqlite:///{tmp_path / 'once.db'}")
    performing, forked = asyncio.Event(), asyncio.Event()

    async def slow(op: Op) -> str:
        await op.connection.execute("SELECT 1")
        performing.set()
        await forked.wait()
        return op.key

    other = asyncio.create_task(guard.arun(asked("slow"), slow, policy=TRANSACTION))
    await performing.wait()
    assert await asyncio.to_thread(in_a_fork, lambda: refused(guard)) == 0
    forked.set()
    await other
    assert (await guard.arun(asked("after"), awaited, policy=TRANSACTION)).how == "stored"
    await guard.aclose()


class SlowConnect:
    """`sqlite3.connect` that, once, has opened the file of a transaction and does not return until *forked*."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.connect, self.connecting, self.forked = sqlite3.connect, threading.Event(), threading.Event()
        monkeypatch.setattr(sqlite3, "connect", self)

    def __call__(self, *args: Any, **options: Any) -> sqlite3.Connection:
        connection = self.connect(*args, **options)
        if options.get("factory") is SqliteNoCommit and not self.connecting.is_set():
            self.connecting.set()
            assert self.forked.wait(20)
        return connection


def test_fork_while_a_threads_transaction_connects_refuses_in_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowConnect(monkeypatch)
    guard = Guard(f"sqlite:///{tmp_path / 'once.db'}")
    other = threading.Thread(target=lambda: guard.run(asked("slow"), value, policy=TRANSACTION))
    other.start()
    assert slow.connecting.wait(20)
    assert in_a_fork(lambda: refused(guard)) == 0
    slow.forked.set()
    other.join()
    assert guard.run(asked("slow"), value, policy=TRANSACTION).how == "replayed"
    guard.close()


async def test_fork_while_a_loops_transaction_connects_refuses_in_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowConnect(monkeypatch)
    guard = Guard(f"sqlite:///{tmp_path / 'once.db'}")
    other = asyncio.create_task(guard.arun(asked("slow"), awaited, policy=TRANSACTION))
    assert await asyncio.to_thread(slow.connecting.wait, 20)
    assert await asyncio.to_thread(in_a_fork, lambda: refused(guard)) == 0
    slow.forked.set()
    assert (await other).how == "stored"
    await guard.aclose()


async def test_a_loop_goes_on_while_a_fork_keeps_its_connection(tmp_path: Path) -> None:
    """It may take a while, where another borrower is waited for: on the same loop, say, which must be able to end."""
    guard = Guard(f"sqlite:///{tmp_path / 'once.db'}")
    await guard.arun(asked("before"), awaited, policy=TRANSACTION)
    assert isinstance(guard.store.lender, SqliteSource)
    writer = guard.store.lender._loops.get()
    writer._lock.acquire()
    end_of_block = threading.Timer(20, writer._lock.release)  # a loop that waits for the lock would wait until then
    end_of_block.start()
    gone, other = (asyncio.create_task(guard.arun(asked(key), awaited, policy=TRANSACTION)) for key in ("k1", "k2"))
    await asyncio.sleep(0.1)
    assert end_of_block.is_alive()
    end_of_block.cancel()
    gone.cancel()  # it has had its turn already, and leaves it to the next
    await asyncio.sleep(0.1)
    writer._lock.release()
    assert (await other).how == "stored"
    assert gone.cancelled()
    await guard.aclose()


@pytest.mark.parametrize("awaiting", [False, True])
async def test_a_performer_that_forks_itself_is_not_waited_for(awaiting: bool, tmp_path: Path) -> None:
    guard = Guard(f"sqlite:///{tmp_path / 'once.db'}")
    began = time.monotonic()

    def perform(op: Op) -> str:
        assert in_a_fork(lambda: None) == 0
        return op.key

    async def aperform(op: Op) -> str:
        return perform(op)

    if awaiting:
        answer = await guard.arun(asked("k"), aperform, policy=TRANSACTION)
    else:
        answer = await asyncio.to_thread(guard.run, asked("k"), perform, policy=TRANSACTION)
    assert answer.how == "stored"
    assert time.monotonic() - began < 2
    assert guard.find("scope", "k") is not None
    await guard.aclose()


@pytest.mark.parametrize("opened", [in_a_thread, on_a_loop])
def test_fork_in_child_does_not_wait_for_parents_transactions(opened: Callable[[Guard], Any], tmp_path: Path) -> None:
    """A preloaded worker may start processes of its own, and its parent's transactions never end there."""
    guard = Guard(f"sqlite:///{tmp_path / 'once.db'}")
    loop = opened(guard)

    def child() -> None:
        began = time.monotonic()
        assert in_a_fork(lambda: check(guard.run(asked("before"), value, policy=TRANSACTION).how == "replayed")) == 0
        assert time.monotonic() - began < 2  # and not the five seconds that a borrower is waited for

    statuses: list[int] = []
    forking = threading.Thread(target=lambda: statuses.append(in_a_fork(child)))  # not on the loop's own thread
    forking.start()
    forking.join()
    assert statuses == [0]
    if loop is not None:
        loop.run_until_complete(guard.aclose())
        loop.close()
    guard.close()


def check(holds: bool) -> None:
    assert holds
