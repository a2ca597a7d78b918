"""The Redis store in many processes and loops: wake-ups, races, forks and event loops that end."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import redis

from oncemore import Guard
from oncemore._ledger.context import Op
from oncemore._ledger.model import Lease, Operation, Record
from oncemore._runtime.plan import arun, run
from oncemore.stores import redis as redis_store
from oncemore.stores.redis import RedisStore, connect
from oncemore.stores.redis.commands import ScriptItem
from oncemore.stores.redis.scripts import FIND
from tests.support.proxy import FaultProxy

from ...support.processes import separate_processes
from ..parts import DONE, HOUR, OPERATION, blocked, claimed, in_a_fork, settled
from . import children

pytestmark = pytest.mark.server


# Wake-ups


def woken_by(store: RedisStore, then: Callable[[], object], key: str = "key") -> bool:
    """Return whether *then* woke the waiter well before its time was up."""
    with store.wakeups.waiting(("scope", key)) as waiter, redis.Redis.from_url(store.url.partition("?")[0]) as server:
        run(store.watch(blocked(store, key)))
        while not dict(server.pubsub_numsub(store.channel))[store.channel.encode()]:
            time.sleep(0.01)
        waiter.wait(0.2).run()  # a listener that has just subscribed wakes all waiters
        began = time.monotonic()
        then()
        waiter.wait(30.0).run()
        return time.monotonic() - began < 20.0


@pytest.mark.parametrize("verb", ["settle", "release", "hold", "lapse", "resolve", "delete"])
def test_waiter_is_woken_by_verbs_of_another_process(store: RedisStore, other: RedisStore, verb: str) -> None:
    lease = claimed(other)
    verbs: dict[str, Callable[[], Any]] = {
        "settle": lambda: other.settle(lease, DONE, retention=HOUR),
        "release": lambda: other.release(lease, retention=HOUR),
        "hold": lambda: other.hold(lease),
        "lapse": lambda: other.renew(lease, lease=0.0),
        "resolve": lambda: other.resolve(*OPERATION.id, None, retention=HOUR),
        "delete": lambda: other.delete(*OPERATION.id),
    }

    def act() -> None:
        if verb in ("resolve", "delete"):  # these verbs need a lapsed lease
            other.shift = 2 * HOUR
        run(verbs[verb]())

    assert woken_by(store, act)


def test_waiter_is_answered_by_another_process(url: str) -> None:
    """The poll is far too long to wake it."""
    processes = separate_processes()
    mine, theirs = processes.Pipe()
    process = processes.Process(target=children.settle_when_told, args=(url, theirs))
    process.start()
    assert mine.recv() == "claimed"
    store = connect(url)
    with store.wakeups.waiting(OPERATION.id) as waiter:
        run(store.watch(blocked(store)))
        mine.send("settle")
        deadline = time.monotonic() + 20.0
        while not isinstance(found := run(store.claim(OPERATION, lease=HOUR)), Record) or found.state != "settled":
            waiter.wait(30.0).run()
            assert time.monotonic() < deadline
    process.join()
    store.close()


def subscribed(store: RedisStore, server: Any) -> bool:
    return bool(dict(server.pubsub_numsub(store.channel))[store.channel.encode()])


@pytest.mark.parametrize("heard", [True, False])
def test_record_deleted_by_another_process_is_not_replayed(
    store: RedisStore, other: RedisStore, server: Any, heard: bool
) -> None:
    """A message clears the guard's cache, even if nobody waits in this process.  So does a cut subscription."""
    guard, performed = Guard(store), []

    def perform(op: Op) -> int:
        performed.append(op)
        return len(performed)

    guard.run(OPERATION, perform)
    until = time.monotonic() + 10
    while not subscribed(store, server) and time.monotonic() < until:
        time.sleep(0.01)
    guard.run(OPERATION, perform)
    assert len(performed) == 1
    if not heard:
        server.client_kill_filter(_type="pubsub")
    assert Guard(other).delete(*OPERATION.id)
    while len(performed) < 2 and time.monotonic() < until:
        guard.run(OPERATION, perform)
    assert len(performed) == 2


def test_listener_reconnects_and_wakes_all_waiters(store: RedisStore, other: RedisStore, server: Any) -> None:
    lease = claimed(other)
    assert woken_by(store, lambda: server.client_kill_filter(_type="pubsub"))
    assert woken_by(store, lambda: run(other.settle(lease, DONE, retention=HOUR)))


def test_closed_store_can_be_used_again(store: RedisStore, other: RedisStore) -> None:
    lease = claimed(other)
    run(store.watch(blocked(store)))
    store.close()
    store.close()
    assert woken_by(store, lambda: run(other.settle(lease, DONE, retention=HOUR)))


# Other processes, loops and forks


def test_16_processes_claim_one_key_and_one_wins(url: str) -> None:
    processes = separate_processes()
    with processes.Manager() as manager, processes.Pool(16) as pool:
        start = manager.Barrier(16)
        found = pool.starmap(children.claim, [(start, url)] * 16, chunksize=1)
    assert sum(won for won, _ in found) == 1
    assert len({token for _, token in found}) == 1


@pytest.mark.chaos
@pytest.mark.parametrize("verb", ["renew", "settle", "release", "hold"])
def test_holder_frozen_past_its_lease_is_fenced(url: str, store: RedisStore, verb: str) -> None:
    processes = separate_processes()
    mine, theirs = processes.Pipe()
    process = processes.Process(target=children.hold_then_write, args=(url, verb, theirs))
    process.start()
    token = mine.recv()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(0.35)
    taken = run(store.claim(Operation("frozen", verb), lease=HOUR))
    assert isinstance(taken, Lease)
    assert (taken.lapsed, taken.token > token) == (True, True)
    os.kill(process.pid, signal.SIGCONT)
    mine.send("go on")
    assert mine.recv() == "fenced"
    process.join()
    run(store.settle(taken, DONE, retention=HOUR))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
async def test_fork_parent_and_child_both_use_the_store(store: RedisStore, other: RedisStore) -> None:
    """As under gunicorn with preload, both use the store that the parent has opened, and both listen."""
    lease = await arun(store.claim(Operation("scope", "parent's"), lease=HOUR))
    run(store.find("scope", "none"))
    held = claimed(other)
    run(store.watch(blocked(store)))

    def child() -> None:
        gc.collect()
        assert not store._claims.for_key("none")._loops.things  # they wait for the parent's batches
        settled(store, "child's")
        fresh = connect(store.url)
        own = claimed(fresh, "own")
        assert woken_by(store, lambda: run(fresh.settle(own, DONE, retention=HOUR)), "own")
        asyncio.run(use_and_close())

    async def use_and_close() -> None:
        await arun(store.claim(Operation("scope", "loop's"), lease=HOUR))
        await store.aclose()

    assert in_a_fork(child) == 0
    assert isinstance(lease, Lease)
    await arun(store.settle(lease, DONE, retention=HOUR))
    assert run(store.find("scope", "child's")) is not None
    assert woken_by(store, lambda: run(other.settle(held, DONE, retention=HOUR)))
    await store.aclose()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_loop_ended_without_aclose_is_not_kept(store: RedisStore) -> None:
    async def use() -> weakref.ref[asyncio.AbstractEventLoop]:
        await asyncio.gather(*(arun(store.claim(Operation("scope", str(n)), lease=HOUR)) for n in range(3)))
        return weakref.ref(asyncio.get_running_loop())

    ended = [asyncio.run(use()) for _ in range(3)]
    gc.collect()
    assert [loop() is None for loop in ended[:2]] == [True, True]  # the next use removes ended loops


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_loop_ended_during_a_claim_is_not_kept(url: str, valkey_url: str) -> None:
    async def leave() -> weakref.ref[asyncio.AbstractEventLoop]:
        task = asyncio.create_task(arun(store.claim(Operation("scope", "stalled"), lease=HOUR)))
        await asyncio.sleep(0.1)
        assert not task.done()
        return weakref.ref(asyncio.get_running_loop())

    with FaultProxy.before(valkey_url) as proxy:
        store = connect(proxy.url(url))
        asyncio.run(use(store))
        proxy.stall()
        ended = asyncio.run(leave())
        proxy.heal()
        asyncio.run(use(store))
        gc.collect()
        assert ended() is None


async def use(store: RedisStore) -> None:
    await asyncio.gather(*(arun(store.find("scope", str(n))) for n in range(3)))
    await arun(store.claim(Operation("scope", f"{time.monotonic()}"), lease=HOUR))
    await store.aclose()


async def test_aclose_waits_for_claims_under_way(store: RedisStore) -> None:
    tasks = [asyncio.create_task(arun(store.claim(Operation("scope", str(n)), lease=HOUR))) for n in range(100)]
    await asyncio.sleep(0)
    await store.aclose()
    assert all(task.done() and isinstance(task.result(), Lease) for task in tasks)


async def test_concurrent_acloses_both_return(store: RedisStore) -> None:
    """Two guards on one store do this when a service ends."""
    task = asyncio.create_task(arun(store.claim(OPERATION, lease=HOUR)))
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await asyncio.gather(store.aclose(), store.aclose())
    assert isinstance(task.result(), Lease)


def test_many_loops_can_start_concurrently(store: RedisStore) -> None:
    """Each loop has its own queue, and making one looks at all the others."""
    failures: list[BaseException] = []

    def begin() -> None:
        try:
            for _ in range(100):
                asyncio.run(enqueue())
        except BaseException as error:
            failures.append(error)

    async def enqueue() -> None:
        store._writes.for_key("none").asubmit(ScriptItem(FIND, "none")).cancel()  # type: ignore[attr-defined]

    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=begin) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(switch)
    assert not failures


def test_listener_without_a_thread_starts_later(
    store: RedisStore, other: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    lease = claimed(other)
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", none_left)
        run(store.watch(blocked(store)))
        store.close()
    assert woken_by(store, lambda: run(other.settle(lease, DONE, retention=HOUR)))


def test_listener_replaces_a_silent_connection(
    url: str, valkey_url: str, other: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that died without notice is detected and replaced.  A live connection is kept."""
    monkeypatch.setattr(redis_store, "QUIET", 0.1)
    lease = claimed(other)
    with FaultProxy.before(valkey_url) as proxy, redis.Redis.from_url(valkey_url) as server:
        store = connect(f"{proxy.url(url)}&client_name=listener")
        run(store.watch(blocked(store)))
        while not (first := listeners(server)):
            time.sleep(0.01)
        time.sleep(0.5)
        assert listeners(server) == first
        with store.wakeups.waiting(OPERATION.id) as waiter:
            proxy.stall()
            time.sleep(0.5)
            proxy.heal()
            run(other.settle(lease, DONE, retention=HOUR))
            began = time.monotonic()
            waiter.wait(30.0).run()
            assert time.monotonic() - began < 20.0
        store.close()


def listeners(server: Any) -> set[str]:
    return {client["id"] for client in server.client_list(_type="pubsub") if client["name"] == "listener"}
