"""Failovers of Redis under load: no key is performed twice, and calls under way go on with the new primary."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from redis.crc import key_slot

from oncemore._ledger.model import Lease, Record
from oncemore._runtime.plan import Plan, arun, run
from oncemore.errors import StoreError
from oncemore.stores.redis import RedisStore, connect, warnings
from oncemore.stores.redis.topology import QUESTION_PAUSE
from tests.support.servers import ValkeyCluster, ValkeySentinel, ValkeyServer
from tests.support.valkey import SERVICE, wait_until

from ..parts import DONE, HOUR, in_a_fork, operation

pytestmark = [pytest.mark.server, pytest.mark.chaos]


class Effects:
    """Counts how often each key is performed, by callers of several stores that all want the same keys."""

    def __init__(self, *urls: str) -> None:
        self.stores = [connect(url) for url in urls]
        self.counts: Counter[str] = Counter()
        self.settled: set[str] = set()
        self.over = False
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Effects:
        self._task = asyncio.create_task(self._load())
        await self.progress(20)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.over = True
        assert self._task is not None
        await self._task
        for store in self.stores:
            await store.aclose()

    async def progress(self, keys: int) -> None:
        """Return when *keys* more keys are settled."""
        target = len(self.settled) + keys
        async with asyncio.timeout(60):
            while len(self.settled) < target:
                await asyncio.sleep(0.02)

    async def _load(self) -> None:
        await asyncio.gather(*(self._caller(store, n) for store in self.stores for n in range(8)))

    async def _caller(self, store: RedisStore, number: int) -> None:
        turn = 0
        while not self.over:
            turn += 1
            for _ in range(100):  # the retries of one client; then it gives up
                if self.over or await self._perform(store, f"{number}.{turn}"):
                    break
                await asyncio.sleep(0.02)

    async def _perform(self, store: RedisStore, key: str) -> bool:
        """Claim, count the effect, and settle.  Return whether the client has an answer."""
        try:
            found = await arun(store.claim(operation(key), lease=HOUR))
        except StoreError:
            return False
        if isinstance(found, Record):
            return found.state == "settled"
        self.counts[key] += 1
        while not self.over:
            try:
                await arun(store.settle(found, DONE, retention=HOUR))
            except StoreError:
                await asyncio.sleep(0.02)
            else:
                self.settled.add(key)
                return True
        return True

    def doubled(self) -> list[str]:
        return [key for key, count in self.counts.items() if count > 1]


@contextmanager
def frozen(server: ValkeyServer) -> Iterator[None]:
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


def begin_failover(group: ValkeySentinel) -> bool:
    """Ask for a failover.  Return whether the sentinel has begun: it needs a while to know the replica well enough."""
    try:
        return bool(group.sentinel.ask("SENTINEL", "FAILOVER", SERVICE) == "OK")
    except RuntimeError:
        return False


async def until(holds: object, what: str) -> None:
    await asyncio.to_thread(wait_until, holds, what)  # type: ignore[arg-type]


async def test_planned_failover_performs_each_key_once(own_sentinel: ValkeySentinel) -> None:
    url = f"{own_sentinel.url}?timeout=3s&wait_replicas=all"
    async with Effects(url, url) as effects:
        await until(lambda: begin_failover(own_sentinel), "the replica to be known")
        await until(lambda: own_sentinel.primary_port() == own_sentinel.replica.port, "the failover")
        await until(lambda: len(own_sentinel.replica.ask("ROLE")[2]) == 1, "the demotion")
        await effects.progress(50)
    assert effects.doubled() == []


async def test_frozen_and_woken_primary_performs_no_key_again(own_sentinel: ValkeySentinel) -> None:
    url = f"{own_sentinel.url}?timeout=3s&wait_replicas=all"
    async with Effects(url, url) as effects:
        with frozen(own_sentinel.primary):
            await until(lambda: own_sentinel.primary_port() == own_sentinel.replica.port, "the failover")
        await effects.progress(50)
    assert effects.doubled() == []


async def test_replicas_cut_off_before_a_crash_cost_no_second_effect(own_sentinel: ValkeySentinel) -> None:
    """Writes that only the primary has are lost with it, so they must not have counted."""
    url = f"{own_sentinel.url}?timeout=1s&wait_replicas=all"
    async with Effects(url, url) as effects:
        with frozen(own_sentinel.replica):
            await asyncio.sleep(2)
            await asyncio.to_thread(own_sentinel.primary.crash)
        await until(lambda: own_sentinel.primary_port() == own_sentinel.replica.port, "the failover")
        await asyncio.to_thread(own_sentinel.primary.start)  # comes back as a replica
        await effects.progress(50)
    assert effects.doubled() == []


@pytest.mark.parametrize("kind", ["sentinel", "cluster"])
def test_woken_primary_grants_nothing_to_an_idle_process(kind: str) -> None:
    """The process has open connections to it, and has asked nothing since the primary was replaced."""
    group = ValkeySentinel() if kind == "sentinel" else ValkeyCluster(replica=True)
    with group, ThreadPoolExecutor(1) as pool:
        first = group.primary if isinstance(group, ValkeySentinel) else group.servers[0]
        idle, busy = (connect(f"{group.url}?timeout=20s") for _ in range(2))
        names = [key for key in map(str, range(200)) if key_slot(idle._name(("scope", key)).encode()) < 16_384 // 3]
        effects: Counter[str] = Counter()

        def perform(store: RedisStore, key: str) -> None:
            found = run(store.claim(operation(key), lease=HOUR))
            if isinstance(found, Lease):
                effects[key] += 1
                run(store.settle(found, DONE, retention=HOUR))

        for store in (idle, busy):
            perform(store, names[0])
            pool.submit(perform, store, names[0]).result()
        with frozen(first):
            for key in names[1:20]:
                perform(busy, key)
            wait_until(lambda: ("127.0.0.1", first.port) not in idle.topology.primaries(), "the news")
        for key in names[1:20]:
            perform(idle, key)
        assert {effects[key] for key in names[:20]} == {1}
        for store in (idle, busy):
            store.close()


@pytest.mark.parametrize("end", ["close", "fork"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_woken_primary_grants_nothing_after_close_or_fork(own_sentinel: ValkeySentinel, end: str) -> None:
    """No thread of the process has asked the sentinels meanwhile."""
    store = connect(f"{own_sentinel.url}?timeout=20s")
    run(store.claim(operation("before"), lease=HOUR))

    def fail_over_and_claim() -> None:
        other = connect(f"{own_sentinel.url}?timeout=20s")
        with frozen(own_sentinel.primary):
            assert isinstance(run(other.claim(operation("key"), lease=HOUR)), Lease)
        assert isinstance(run(store.claim(operation("key"), lease=HOUR)), Record)

    if end == "close":
        store.close()
        fail_over_and_claim()
    else:
        assert in_a_fork(fail_over_and_claim) == 0
    store.close()


async def test_calls_under_way_are_sent_to_the_new_primary(own_sentinel: ValkeySentinel) -> None:
    """On threads and on a loop, long before they would give up the frozen server."""
    store = connect(f"{own_sentinel.url}?timeout=400s")
    await arun(store.claim(operation("loop before"), lease=HOUR))
    await asyncio.to_thread(run, store.claim(operation("thread before"), lease=HOUR))
    with frozen(own_sentinel.primary):
        on_loop = asyncio.create_task(arun(store.claim(operation("loop"), lease=HOUR)))
        on_thread = asyncio.create_task(asyncio.to_thread(run, store.claim(operation("thread"), lease=HOUR)))
        done, _ = await asyncio.wait([on_loop, on_thread], timeout=60)
        assert len(done) == 2
        assert all(isinstance(task.result(), Lease) for task in done)
    await store.aclose()


def test_primary_without_replicas_is_not_believed(own_sentinel: ValkeySentinel) -> None:
    """After NOREPLICAS the sentinels are asked, and the claim goes to the server that they name."""
    store = connect(f"{own_sentinel.url}?timeout=20s")
    with ValkeyServer(fsync=False, min_replicas_to_write=1) as lonely:
        run(store.find("scope", "key"))
        store.topology.primary = ("127.0.0.1", lonely.port)
        assert isinstance(run(store.claim(operation("key"), lease=HOUR)), Lease)
    store.close()


def test_sentinel_that_missed_a_failover_is_not_believed(own_sentinel: ValkeySentinel) -> None:
    """The other sentinel answers with a higher epoch.  The order of the questions does not matter."""
    with ValkeySentinel() as others:
        wait_until(lambda: begin_failover(own_sentinel), "the replica to be known")
        wait_until(lambda: own_sentinel.primary_port() == own_sentinel.replica.port, "the failover")
        ports = (others.sentinel.port, own_sentinel.sentinel.port)
        for first, second in (ports, ports[::-1]):
            store = connect(f"redis+sentinel://127.0.0.1:{first},127.0.0.1:{second}/{SERVICE}?timeout=20s")
            assert isinstance(run(store.claim(operation(f"{first}"), lease=HOUR)), Lease)  # from now on it listens
            time.sleep(3 * QUESTION_PAUSE)
            assert store.topology.primary == ("127.0.0.1", own_sentinel.replica.port)
            assert store.topology.changes == 0
            store.close()


def test_cluster_node_that_was_replaced_is_not_believed(cluster_url: str) -> None:
    """A process that starts now asks all nodes, and the first one still takes itself for the primary of all slots."""
    with ValkeyServer(fsync=False, cluster_enabled="yes") as replaced:
        replaced.ask("CLUSTER", "ADDSLOTSRANGE", 0, 16_383)  # since epoch 0
        wait_until(lambda: "cluster_state:ok" in replaced.ask("CLUSTER", "INFO"), "the node")
        store = connect(cluster_url.replace("://", f"://127.0.0.1:{replaced.port},") + "?prefix=replaced")
        for key in map(str, range(20)):
            assert isinstance(run(store.claim(operation(key), lease=HOUR)), Lease)
        assert replaced.ask("DBSIZE") == 0
        store.close()


async def test_cluster_writes_wait_for_all_replicas() -> None:
    with ValkeyCluster(replica=True) as cluster:
        store = connect(f"{cluster.url}?timeout=1s&wait_replicas=all")
        slots = {key: key_slot(store._name(("scope", key)).encode()) * 3 // 16_384 for key in map(str, range(40))}
        for key in slots:
            assert isinstance(run(store.claim(operation(f"before {key}"), lease=HOUR)), Lease)
        refused = set()
        with frozen(cluster.servers[3]):
            for key in slots:  # new ones, because a claim that writes nothing need not wait
                try:
                    run(store.claim(operation(key), lease=HOUR))
                except StoreError:
                    refused.add(key)
        assert refused == {key for key, node in slots.items() if node == 0}
        await store.aclose()


def test_verb_sent_again_waits_for_replicas_too(own_sentinel: ValkeySentinel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server counts the replicas that have the connection's own writes, so the second call has to write something."""
    store = connect(f"{own_sentinel.url}?timeout=1s&wait_replicas=all")
    leases = {verb: run(store.claim(operation(verb), lease=HOUR)) for verb in ("settle", "release", "hold", "resolve")}
    assert all(isinstance(lease, Lease) for lease in leases.values())
    run(store.renew(leases["resolve"], lease=0))
    run(store.settle(run(store.claim(operation("delete"), lease=HOUR)), DONE, retention=HOUR))
    monkeypatch.setattr(store.holder, "next", lambda: "the same name each time")
    verbs: dict[str, Callable[[], Plan[Any]]] = {
        "settle": lambda: store.settle(leases["settle"], DONE, retention=HOUR),
        "release": lambda: store.release(leases["release"], retention=0),
        "hold": lambda: store.hold(leases["hold"]),
        "resolve": lambda: store.resolve("scope", "resolve", DONE, retention=HOUR),
        "delete": lambda: store.delete("scope", "delete"),
    }
    counted = []
    with frozen(own_sentinel.replica):
        for _ in range(2):
            for name, verb in verbs.items():
                with suppress(StoreError):
                    run(verb())
                    counted.append(name)
    assert counted == []
    for verb in verbs.values():
        run(verb())
    store.close()


def test_warnings_name_what_a_failover_or_restart_forgets(
    own_sentinel: ValkeySentinel, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "oncemore"):
        for options in ("", "&wait_replicas=all"):
            store = connect(f"{own_sentinel.url}?timeout=20s{options}")
            run(store.claim(operation(f"key{options}"), lease=HOUR))
            store.close()
    text = caplog.text
    assert (text.count("min-replicas-to-write 0"), text.count("wait_replicas=0"), text.count("appendonly")) == (2, 1, 0)
    told = list(warnings(b"aof_enabled:0\r\nmaxmemory_policy:allkeys-lru\r\nconnected_slaves:0\r\n", 0))
    assert ["allkeys-lru" in told[0], "appendonly no" in told[1], len(told)] == [True, True, 2]
