"""An event loop writes by itself while the disk is fast and the file is free; otherwise a thread writes for it."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oncemore import Guard, Policy
from oncemore._ledger.model import Lease, Operation
from oncemore._runtime.plan import arun, run
from oncemore.errors import InvalidKey, Suspected
from oncemore.stores.sqlite import SqliteStore, connect, writer
from oncemore.stores.sqlite.batch import NO_RECORD
from oncemore.testing.stores import StoreContract

from ..parts import DONE, HOUR


@pytest.fixture
def store(url: str) -> Iterator[SqliteStore]:
    store = connect(url)
    run(store.ready())
    yield store
    store.close()


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the limit of a brief write, for slow machines."""
    monkeypatch.setattr(writer, "BRIEF", 0.2)


class TestThreaded(StoreContract):
    """The contract, with all writes on a thread."""

    @pytest.fixture
    def url(self, path: Path) -> str:
        return f"sqlite:///{path}?thread=always"


async def place(store: SqliteStore, seconds: float = 0.0) -> str:
    """Do a write that takes *seconds*, and return the name of its thread."""

    def look(batch: object) -> str:
        time.sleep(seconds)
        return threading.current_thread().name

    return str(await arun(store._change(NO_RECORD, look)))


async def longest_pause(until: asyncio.Future[Any]) -> float:
    """Return the longest time for which the loop stood still before *until* was done."""
    longest, last = 0.0, time.monotonic()
    while not until.done():
        await asyncio.sleep(0.001)
        longest, last = max(longest, time.monotonic() - last), time.monotonic()
    return longest


async def test_loop_writes_by_itself_while_the_disk_is_fast(store: SqliteStore) -> None:
    here, elsewhere = threading.current_thread().name, f"oncemore-sqlite {store.path}_0"
    assert await place(store, 0.3) == here  # nobody could have known
    assert await place(store) == elsewhere
    assert await place(store) == here


async def test_first_write_creates_the_tables_on_a_thread(url: str) -> None:
    store = connect(url)
    assert await place(store) != threading.current_thread().name
    await store.aclose()


async def test_thread_always_writes_on_a_thread(url: str) -> None:
    store = connect(f"{url}?thread=always")
    await arun(store.ready())
    assert [await place(store) for _ in range(2)] == [f"oncemore-sqlite {store.path}_0"] * 2
    await store.aclose()


async def test_loop_continues_while_another_process_locks_the_file(store: SqliteStore, path: Path) -> None:
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    asyncio.get_running_loop().call_later(0.4, other.execute, "COMMIT")
    began = time.monotonic()
    claim = asyncio.create_task(arun(store.claim(Operation("scope", "key"), lease=HOUR)))
    pause = await longest_pause(claim)
    assert isinstance(claim.result(), Lease)
    assert time.monotonic() - began > 0.35
    assert pause < 0.3
    assert await place(store) == threading.current_thread().name
    other.close()


async def test_loop_continues_while_a_thread_holds_the_file(store: SqliteStore) -> None:
    entered = threading.Event()

    def slow(batch: object) -> None:
        entered.set()
        time.sleep(0.4)

    thread = threading.Thread(target=lambda: run(store._change(NO_RECORD, slow)))
    thread.start()
    entered.wait(5)
    claim = asyncio.create_task(arun(store.claim(Operation("scope", "key"), lease=HOUR)))
    assert await longest_pause(claim) < 0.3
    assert isinstance(claim.result(), Lease)
    thread.join()


@pytest.mark.parametrize("verb", ["settle", "release", "hold"])
async def test_settle_is_written_though_cancelled_before_its_turn(store: SqliteStore, path: Path, verb: str) -> None:
    """The effect has happened, and its outcome waits while another batch is under way."""
    lease = await arun(store.claim(Operation("scope", "key"), lease=HOUR))
    assert isinstance(lease, Lease)
    words = {
        "settle": lambda: store.settle(lease, DONE, retention=HOUR),
        "release": lambda: store.release(lease, retention=HOUR),
        "hold": lambda: store.hold(lease),
    }
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    ahead = asyncio.create_task(arun(store.claim(Operation("scope", "ahead"), lease=HOUR)))
    await asyncio.sleep(0.05)
    owner = asyncio.create_task(arun(words[verb]()))
    await asyncio.sleep(0.05)
    owner.cancel()
    other.execute("COMMIT")
    await ahead
    with pytest.raises(asyncio.CancelledError):
        await owner
    await store._batcher.drain()
    record = await arun(store.find("scope", "key"))
    assert record is not None
    assert record.state == {"settle": "settled", "release": "released", "hold": "held"}[verb]
    other.close()


async def test_write_without_a_thread_is_done_by_the_loop(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If no thread can start, the claim still succeeds, and the executor's queue does not repeat it later."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    store, places = connect(f"{url}?thread=always"), list[str]()
    add = arun(store._change(NO_RECORD, lambda batch: places.append(threading.current_thread().name)))
    with monkeypatch.context() as short:
        short.setattr(threading.Thread, "start", refuse)
        await add
        assert isinstance(await arun(store.claim(Operation("scope", "key"), lease=HOUR)), Lease)
        with pytest.raises(InvalidKey):
            await arun(store.claim(Operation("scope", "\ud800"), lease=HOUR))
    assert await place(store) != threading.current_thread().name
    assert places == [threading.current_thread().name]
    await store.aclose()


async def test_write_while_the_store_is_closing_is_done(store: SqliteStore) -> None:
    """`close` may come from another thread, between two lines of a write."""
    store._writer._thread.shutdown()
    store._writer.threaded = True
    assert isinstance(await arun(store.claim(Operation("scope", "key"), lease=HOUR)), Lease)


async def test_cancelled_claim_keeps_the_failures_retention(store: SqliteStore, path: Path) -> None:
    """After a failure, the key still refuses another request."""
    operation = Operation("scope", "key", "c1:aa")
    lease = await arun(store.claim(operation, lease=HOUR))
    assert isinstance(lease, Lease)
    await arun(store.release(lease, retention=HOUR))
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    retry = asyncio.create_task(arun(store.claim(operation, lease=HOUR)))
    await asyncio.sleep(0.05)
    retry.cancel()
    other.execute("COMMIT")
    await store._batcher.drain()
    record = await arun(store.find("scope", "key"))
    assert record is not None
    assert (record.state, record.attempts) == ("released", 2)
    assert record.remaining > HOUR / 2
    other.close()


async def test_twin_of_an_abandoned_claim_is_found(store: SqliteStore, path: Path) -> None:
    """A caller that gave up while the file was locked asks again: its second request must meet the same checks."""
    guard, performed = Guard(store, policy=Policy(suspect="reject")), []
    twins = [Operation("scope", key, "c1:aa") for key in ("one", "other")]
    await guard.arun(twins[0], performed.append)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    gone = asyncio.create_task(guard.arun(twins[1], performed.append))
    await asyncio.sleep(0.05)
    gone.cancel()
    other.execute("COMMIT")
    await store._batcher.drain()
    other.close()
    with pytest.raises(Suspected):
        await guard.arun(twins[1], performed.append)
    assert len(performed) == 1
