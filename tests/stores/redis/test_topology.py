"""The Redis store on replicas, sentinels and clusters: it finds the primary, and refuses writes that do not count."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis
from redis.crc import key_slot

from oncemore._ledger.model import Lease, Record
from oncemore._ledger.store import Filter
from oncemore._runtime.plan import Plan, arun, run
from oncemore.errors import StoreUnavailable
from oncemore.stores.redis import RedisStore, connect, schema
from oncemore.stores.redis.commands import ScriptItem
from oncemore.stores.redis.connection import Connector
from oncemore.stores.redis.scripts import UNCLAIM
from oncemore.stores.redis.topology import ClusterTopology, SentinelTopology, SlotRange, read_sentinel_view
from tests.support.servers import ValkeyCluster, ValkeySentinel, ValkeyServer

from ..parts import DONE, HOUR, operation
from .children import load

pytestmark = pytest.mark.server

Drive = Callable[[Plan[Any]], Any]


@pytest.mark.chaos
async def test_sentinel_failover_loses_nothing_that_the_replica_has(own_sentinel: ValkeySentinel) -> None:
    store = connect(f"{own_sentinel.url}?timeout=20s&wait_replicas=1")
    settled: set[str] = set()
    await load(store, 50, settled)
    await store.aclose()
    store = connect(f"{own_sentinel.url}?timeout=20s")
    failover = asyncio.create_task(asyncio.to_thread(own_sentinel.failover))
    await load(store, 50, set(), until=failover.done, prefix="during ")
    await failover
    records = [await arun(store.find("scope", key)) for key in settled]
    assert {record.state for record in records if record} == {"settled"}
    assert len(settled) == 50
    lease = await arun(store.claim(operation("after"), lease=HOUR))
    assert isinstance(lease, Lease)
    assert run(store.find("scope", "after")) is not None
    await store.aclose()


def test_write_on_too_few_replicas_is_unavailable(url: str) -> None:
    store = connect(f"{url}&wait_replicas=1&timeout=2s")
    with pytest.raises(StoreUnavailable, match="replicas"):
        run(store.claim(operation("key"), lease=HOUR))
    store.close()


def test_claim_on_too_few_replicas_is_undone(url: str, store: RedisStore) -> None:
    """The caller was refused and performed nothing.  If the claim lapsed, the operation would be held."""
    short = connect(f"{url}&wait_replicas=1&timeout=3s")
    with pytest.raises(StoreUnavailable, match="replicas"):
        run(short.claim(operation("key"), lease=HOUR))
    short.close()
    lease = run(store.claim(operation("key"), lease=HOUR))
    assert isinstance(lease, Lease)
    assert not lease.lapsed


def test_wait_replicas_on_a_demoted_primary_is_unavailable(own_valkey: ValkeyServer) -> None:
    """A replica refuses WAIT itself."""
    store = connect(f"{own_valkey.url}?wait_replicas=1&timeout=1s")
    own_valkey.ask("REPLICAOF", "127.0.0.1", "1")
    with pytest.raises(StoreUnavailable, match="READONLY"):
        run(store.claim(operation("key"), lease=HOUR))
    store.close()


def test_scan_does_not_wait_for_replicas(url: str, store: RedisStore) -> None:
    run(store.claim(operation("key"), lease=HOUR))
    short = connect(f"{url}&wait_replicas=1&timeout=1s")
    assert len(run(short.list(Filter())).records) == 1
    short.close()


@pytest.mark.chaos
def test_moving_slot_is_followed() -> None:
    """During the move, absent keys belong to the new node (ASK); afterwards all do (MOVED).  The ACL allows both."""
    with ValkeyCluster(fsync=False) as cluster:
        (command,) = [line for line in schema(cluster.url).splitlines() if not line.startswith("#")]
        for node in cluster.servers:
            node.ask(*command.replace("CHANGE-ME", "pw").split())
        store = connect(f"{cluster.url.replace('//', '//oncemore:pw@')}?timeout=5s")
        lease = run(store.claim(operation("key"), lease=HOUR))
        assert isinstance(lease, Lease)
        slot = key_slot(store._name(("scope", "key")).encode())
        source = cluster.servers[slot * 3 // 16_384]
        target = cluster.servers[(slot * 3 // 16_384 + 1) % 3]
        ids = {node: node.ask("CLUSTER", "MYID") for node in cluster.servers}
        target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source])
        source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
        moving = next(key for key in map(str, range(10**6)) if key_slot(store._name(("scope", key)).encode()) == slot)
        assert isinstance(run(store.claim(operation(moving), lease=HOUR)), Lease)
        assert target.ask("CLUSTER", "COUNTKEYSINSLOT", slot) == 1
        name = store._name(("scope", "key"))
        source.ask("MIGRATE", "127.0.0.1", target.port, name, 0, 5000)
        for node in (target, source):
            node.ask("CLUSTER", "SETSLOT", slot, "NODE", ids[target])
        run(store.settle(lease, DONE, retention=HOUR))
        assert isinstance(run(store.claim(operation("key"), lease=HOUR)), Record)
        assert len(run(store.list(Filter())).records) == 2
        store.close()


@pytest.mark.chaos
def test_slot_moving_to_a_failed_node_is_followed_back() -> None:
    with ValkeyCluster(fsync=False, cluster_node_timeout=60_000) as cluster:
        store = connect(f"{cluster.url}?timeout=4s")
        run(store.claim(operation("before"), lease=HOUR))
        slot = key_slot(store._name(("scope", "key")).encode())
        source, target = (cluster.servers[(slot * 3 // 16_384 + n) % 3] for n in range(2))
        source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", target.ask("CLUSTER", "MYID"))
        os.kill(target.pid, signal.SIGSTOP)
        back = threading.Timer(0.5, source.ask, ["CLUSTER", "SETSLOT", slot, "STABLE"])
        back.start()
        try:
            assert isinstance(run(store.claim(operation("key"), lease=HOUR)), Lease)
        finally:
            os.kill(target.pid, signal.SIGCONT)
            back.join()
        store.close()


@pytest.mark.chaos
def test_cluster_node_restart_is_waited_for() -> None:
    with ValkeyCluster(cluster_require_full_coverage="no") as cluster:
        store = connect(f"{cluster.url}?timeout=15s")
        leases: list[Any] = [run(store.claim(operation(str(n)), lease=HOUR)) for n in range(30)]
        cluster.servers[0].crash()
        threading.Timer(0.5, cluster.servers[0].start).start()
        for lease in leases:
            run(store.settle(lease, DONE, retention=HOUR))
        assert {run(store.find("scope", str(n))).state for n in range(30)} == {"settled"}  # type: ignore[union-attr]
        store.close()


def test_isolated_cluster_node_is_not_asked_for_ever(cluster_url: str, redis_prefix: str) -> None:
    with ValkeyServer(fsync=False, cluster_enabled="yes") as lost:
        lost.ask("CLUSTER", "ADDSLOTSRANGE", 0, 100)
        hosts = f"127.0.0.1:{lost.port},{urlsplit(cluster_url).netloc}"
        store = connect(f"redis+cluster://{hosts}?prefix={redis_prefix}&timeout=5s")
        theirs = (key for key in map(str, range(100)) if key_slot(store._name(("scope", key)).encode()) > 100)
        for _ in range(3):
            assert isinstance(run(store.claim(operation(next(theirs)), lease=HOUR)), Lease)
        store.close()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("redis+cluster://{}", "cluster support disabled"), ("redis+sentinel://{}/main", "unknown command")],
)
def test_wrong_kind_of_server_error_says_why(valkey_url: str, kind: str, reason: str) -> None:
    store = connect(f"{kind.format(urlsplit(valkey_url).netloc)}?timeout=2s")
    with pytest.raises(StoreUnavailable, match=reason):
        run(store.claim(operation("key"), lease=HOUR))
    store.close()


@pytest.mark.chaos
async def test_frozen_cluster_node_does_not_delay_other_nodes() -> None:
    """On threads and on a loop, callers that need the frozen node wait.  All others are answered immediately."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(24))
    with ValkeyCluster(cluster_require_full_coverage="no", cluster_node_timeout=60_000) as cluster:
        store = connect(f"{cluster.url}?timeout=8s")
        await asyncio.gather(*(arun(store.claim(operation(f"{n} before"), lease=HOUR)) for n in range(20)))
        run(store.claim(operation("before"), lease=HOUR))
        frozen = cluster.servers[0].pid
        os.kill(frozen, signal.SIGSTOP)
        try:
            for kind in ("loop", "threads"):
                healthy: list[asyncio.Task[Any]] = []
                ill: list[asyncio.Task[Any]] = []
                for key in (f"{kind} {n}" for n in range(24)):
                    slot = key_slot(store._name(("scope", key)).encode())
                    claim = store.claim(operation(key), lease=HOUR)
                    task = asyncio.create_task(arun(claim) if kind == "loop" else asyncio.to_thread(run, claim))
                    (ill if slot * 3 // 16_384 == 0 else healthy).append(task)
                done, _ = await asyncio.wait(healthy, timeout=4)
                assert [len(done), sum(task.done() for task in ill)] == [len(healthy), 0]
        finally:
            os.kill(frozen, signal.SIGCONT)
        assert all(isinstance(lease, Lease) for lease in await asyncio.gather(*ill))
        await store.aclose()


async def test_cluster_waiters_are_woken_by_every_node(cluster_url: str, redis_prefix: str) -> None:
    one, two = (connect(f"{cluster_url}?prefix={redis_prefix}") for _ in range(2))
    for n in range(6):
        lease = await arun(two.claim(operation(str(n)), lease=HOUR))
        record = await arun(one.claim(operation(str(n)), lease=HOUR))
        assert isinstance(lease, Lease)
        assert isinstance(record, Record)
        with one.wakeups.waiting(record.id) as waiter:
            await arun(one.watch(record))
            await waiter.wait(0.3).arun()
            await arun(two.settle(lease, DONE, retention=HOUR))
            async with asyncio.timeout(20):
                await waiter.wait(30).arun()
    await one.aclose()
    await two.aclose()


@pytest.mark.parametrize("drive", [run, lambda plan: asyncio.run(arun(plan))], ids=["run", "arun"])
def test_unreachable_sentinels_error_shows_no_password(drive: Drive) -> None:
    """The errors of some versions of redis-py contain the connection's options, with the password."""
    store = connect("redis+sentinel://user:secret1@127.0.0.1:1/service?sentinel_password=secret2&timeout=200ms")
    with pytest.raises(StoreUnavailable, match="No sentinel knows a primary for 'service'") as caught:
        drive(store.find("scope", "key"))
    assert "secret" not in "".join(traceback.format_exception(caught.value))
    store.close()


def test_undo_is_sent_with_claims_of_its_own_node(cluster_url: str, redis_prefix: str) -> None:
    """If the batches were shared and that node did not answer, the claims would have to wait for it."""
    store = connect(f"{cluster_url}?prefix={redis_prefix}")
    run(store.claim(operation("first"), lease=HOUR))
    here = store.topology.address(store._name(("scope", "first")))
    names = {key: store.topology.address(store._name(("scope", key))) for key in map(str, range(50))}
    there = [key for key, address in names.items() if address != here]
    lost = run(store.claim(operation(there[0]), lease=HOUR))
    assert isinstance(lost, Lease)
    holder = run(store.find("scope", there[0])).holder  # type: ignore[union-attr]
    store._pending_undos.append(ScriptItem(UNCLAIM, store._name(("scope", there[0])), (holder,)))
    run(store.claim(operation(next(key for key, address in names.items() if address == here)), lease=HOUR))
    assert len(store._pending_undos) == 1
    other = next(key for key in there[1:] if names[key] == names[there[0]])
    run(store.claim(operation(other), lease=HOUR))
    assert not store._pending_undos
    assert run(store.find("scope", there[0])) is None
    store.close()


@pytest.mark.parametrize(
    ("flags", "known"),
    [("master", True), ("s_down,master", False), ("s_down,o_down,master", False), ("slave", False)],
)
def test_primary_that_the_sentinel_holds_down_is_not_used(flags: str, known: bool) -> None:
    about = [b"name", b"main", b"ip", b"10.0.0.1", b"port", b"6380", b"flags", flags.encode()]
    view = read_sentinel_view([b"10.0.0.1", b"6380"], about)
    assert view.primary == (("10.0.0.1", 6380) if known else None)


def test_promoted_replica_is_used_before_the_failover_is_complete() -> None:
    about = [
        b"ip",
        b"10.0.0.1",
        b"port",
        b"6380",
        b"flags",
        b"master,o_down",
        b"config-epoch",
        b"3",
        b"num-slaves",
        b"2",
    ]
    assert read_sentinel_view([b"10.0.0.2", b"6380"], about) == (3, ("10.0.0.2", 6380), 2)


A, B = ("127.0.0.1", 1), ("127.0.0.1", 2)  # nodes of a cluster


def all_slots(epoch: int, primary: tuple[str, int], *replicas: tuple[str, int]) -> SlotRange:
    return SlotRange(epoch, 0, 16383, primary, replicas, len(replicas))


def test_older_view_of_a_cluster_never_replaces_a_newer_one() -> None:
    """A caller and the watcher may get different views at the same time."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(50):
            topology = ClusterTopology(Connector("redis://"), [A])
            topology._use([all_slots(1, A)], {A})
            barrier = threading.Barrier(2)

            def hear(
                view: SlotRange, topology: ClusterTopology = topology, barrier: threading.Barrier = barrier
            ) -> None:
                barrier.wait()
                topology._use([view], {A, B})

            with ThreadPoolExecutor(2) as pool:
                list(pool.map(hear, [all_slots(1, A, B), all_slots(2, B)]))
            assert topology.address("key") == B
            assert topology.changes == 1
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("port", range(2, 12))  # the order of views of the same epoch depends on their hashes
def test_replicas_that_join_and_leave_a_cluster_are_counted(port: int) -> None:
    replica = ("127.0.0.1", port)
    topology = ClusterTopology(Connector("redis://"), [A])
    counts = []
    for views in ([all_slots(1, A)], [all_slots(1, A), all_slots(1, A, replica)], [all_slots(1, A)]):
        topology._use(views, {A})
        counts.append(topology.replicas(A))
    assert counts == [0, 1, 0]


def test_redirection_by_a_node_behind_is_corrected() -> None:
    topology = ClusterTopology(Connector("redis://"), [A])
    topology._use([all_slots(1, A)], {A})
    topology.move(key_slot(b"key"), B)
    assert topology.address("key") == B
    topology._use([all_slots(1, A)], {A})  # all nodes give the same answer again
    assert topology.address("key") == A


@pytest.mark.chaos
@pytest.mark.parametrize("kind", ["sentinel", "cluster"])
def test_watch_goes_on_after_logins_were_refused(kind: str) -> None:
    """If it ended, nothing would start it again, and another primary would be noticed too late."""
    group: Any = ValkeySentinel() if kind == "sentinel" else ValkeyCluster()
    with group:
        ports = [group.sentinel.port] if kind == "sentinel" else [node.port for node in group.servers]
        admins = [redis.Redis(port=port) for port in ports]
        store = connect(group.url)
        run(store.claim(operation("key"), lease=HOUR))
        (watcher,) = store.topology.watchers
        thread = watcher._thread
        for admin in admins:
            admin.execute_command("ACL", "SETUSER", "default", "resetpass", ">new")
            admin.execute_command("CLIENT", "KILL", "SKIPME", "yes")
        time.sleep(2.0)  # some questions are refused
        for admin in admins:
            admin.execute_command("ACL", "SETUSER", "default", "nopass")
        assert thread is not None
        assert thread.is_alive()
        assert watcher._thread is thread
        store.close()
        for admin in admins:
            admin.close()


def test_sentinels_have_a_login_of_their_own() -> None:
    topology = connect("redis+sentinel://user:secret1@a,b:99/service/3?sentinel_password=secret2&tls=true").topology
    assert isinstance(topology, SentinelTopology)
    server, sentinel = (pool.connector.open(("host", 1), 1.0) for pool in (topology.pool, topology.sentinel_pool))
    assert (server.username, server.password, server.db) == ("user", "secret1", 3)
    assert (sentinel.username, sentinel.password, sentinel.db) == (None, "secret2", 0)
    assert (server.client_name, sentinel.client_name) == ("oncemore", None)
    assert type(server) is type(sentinel) is redis.SSLConnection
    assert topology.sentinels == [("a", 26379), ("b", 99)]
