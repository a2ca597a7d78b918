"""Faults of Redis: each operation still happens once, and all callers get the same answer."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import socketserver
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import psycopg
import pytest
import redis

from oncemore import Guard, Policy
from oncemore._runtime.plan import arun, run
from oncemore.stores import TieredStore, connect, schema
from tests.support.processes import separate_processes
from tests.support.proxy import FaultProxy
from tests.support.servers import PostgresServer, ValkeySentinel, ValkeyServer

from ..parts import OPERATION, blocked, claimed, operation, settled
from .children import ask_repeatedly
from .conftest import tiered_url
from .test_store import eventually, is_hit, warmed

pytestmark = [pytest.mark.server, pytest.mark.chaos]

LOAD_SECONDS = 60.0 if os.environ.get("FULL") else 12.0
PROCESSES, KEYS = 6, 3000


def freeze(server: ValkeyServer) -> None:
    os.kill(server.pid, signal.SIGSTOP)
    time.sleep(0.5)
    os.kill(server.pid, signal.SIGCONT)


def crash(server: ValkeyServer) -> None:
    server.crash()
    time.sleep(0.3)
    server.start()  # empty, because it stores nothing on disk


def poison(server: ValkeyServer) -> None:
    """Write nonsense, an empty text, and values of another type to the names of copies."""
    names = server.ask("KEYS", "*:copy:*")[:50]
    for name in names:
        value = random.choice(["nonsense", ""])
        server.ask("SET", name, value, "KEEPTTL")
    for name in names[:5]:
        server.ask("DEL", name)
        with suppress(RuntimeError):  # a process has just written the copy again
            server.ask("RPUSH", name, "a list")


def fill(server: ValkeyServer) -> None:
    """Let the server evict values or refuse writes for a while."""
    server.ask("CONFIG", "SET", "maxmemory-policy", random.choice(["allkeys-random", "noeviction"]))
    server.ask("CONFIG", "SET", "maxmemory", "1mb")
    time.sleep(0.3)
    server.ask("CONFIG", "SET", "maxmemory", "0")


def make_read_only(server: ValkeyServer) -> None:
    server.ask("REPLICAOF", "127.0.0.1", "1")
    time.sleep(0.3)
    server.ask("REPLICAOF", "NO", "ONE")


FAULTS: list[Callable[[ValkeyServer], Any]] = [
    lambda server: server.ask("FLUSHALL"),
    freeze,
    crash,
    poison,
    fill,
    make_read_only,
]


def test_faults_of_redis_under_load_leave_one_effect_each(tmp_path: Path) -> None:
    with PostgresServer() as postgres, ValkeyServer(fsync=False) as valkey:
        with psycopg.connect(postgres.url, autocommit=True) as connection:
            connection.execute("CREATE TABLE effects (key text, process int)")
        url = tiered_url(postgres.url, valkey.url)
        connect(url).close()
        run(connect(url).stats())  # creates the tables
        context = separate_processes()
        children = [
            context.Process(
                target=ask_repeatedly,
                args=(url, postgres.url, "public", KEYS, LOAD_SECONDS, str(tmp_path), number),
                daemon=True,
            )
            for number in range(PROCESSES)
        ]
        for child in children:
            child.start()
        ends = time.monotonic() + LOAD_SECONDS
        while time.monotonic() < ends:
            random.choice(FAULTS)(valkey)
            time.sleep(random.uniform(0.1, 0.6))
        for child in children:
            child.join(120)
            assert child.exitcode == 0
        with psycopg.connect(postgres.url) as connection:
            effects = Counter(key for (key,) in connection.execute("SELECT key FROM effects"))
    answers: dict[str, set[str]] = defaultdict(set)
    hows: Counter[str] = Counter()
    hits = 0
    for number in range(PROCESSES):
        for line in (tmp_path / f"answers-{number}").read_text().splitlines():
            key, body, how = json.loads(line)
            if not key:
                hits += int(how)
            elif body is None:
                hows[how] += 1
            else:
                answers[key].add(body)
                hows[how] += 1
    assert {key: count for key, count in effects.items() if count != 1} == {}
    assert {key: bodies for key, bodies in answers.items() if len(bodies) != 1} == {}
    assert answers.keys() == effects.keys()
    assert set(hows) == {"stored", "replayed"}, hows  # no caller noticed the fault
    assert hits, "Redis has answered nothing, so nothing was tested"


def test_frozen_redis_is_left_alone_and_used_again(
    postgres_url: str, postgres_schema: str, own_valkey: ValkeyServer, caplog: pytest.LogCaptureFixture
) -> None:
    store = warmed(connect(tiered_url(postgres_url, own_valkey.url, postgres_schema)))  # type: ignore[arg-type]
    settled(store)
    eventually(lambda: is_hit(store))
    os.kill(own_valkey.pid, signal.SIGSTOP)
    try:
        eventually(lambda: is_hit(store) or store.tiers.open)
        assert blocked(store).tier == "database"
    finally:
        os.kill(own_valkey.pid, signal.SIGCONT)
    eventually(lambda: is_hit(store))
    assert not store.tiers.open
    said = [record.getMessage() for record in caplog.records if "Redis" in record.getMessage()]
    assert [message.split(",")[0] for message in said] == ["Redis is left alone", "Redis answers again"]
    assert "did not answer in time" in said[0]
    store.close()


def test_repeat_that_extends_retention_does_not_await_frozen_redis(
    postgres_url: str, postgres_schema: str, own_valkey: ValkeyServer
) -> None:
    guard = Guard(tiered_url(postgres_url, own_valkey.url, postgres_schema), policy=Policy(ttl_from="access"), cache=0)
    warmed(cast("TieredStore", guard.store))
    guard.run(OPERATION, lambda op: "done")
    os.kill(own_valkey.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        for _ in range(10):
            assert guard.run(OPERATION, lambda op: "again").value == "done"
        assert time.monotonic() - began < 5.0, "each has waited for Redis for a second"
    finally:
        os.kill(own_valkey.pid, signal.SIGCONT)
    guard.close()


@pytest.mark.parametrize("how", ["full", "read-only"])
def test_redis_that_refuses_copies_is_logged_once_and_used_again(
    how: str, postgres_url: str, postgres_schema: str, own_valkey: ValkeyServer, caplog: pytest.LogCaptureFixture
) -> None:
    store = warmed(connect(tiered_url(postgres_url, own_valkey.url, postgres_schema)))  # type: ignore[arg-type]
    settled(store)
    eventually(lambda: is_hit(store))
    if how == "full":
        own_valkey.ask("CONFIG", "SET", "maxmemory", "1")
    else:
        own_valkey.ask("REPLICAOF", "127.0.0.1", "1")
    for number in range(30):
        settled(store, f"refused {number}")
        time.sleep(0.02)
    if how == "full":
        own_valkey.ask("CONFIG", "SET", "maxmemory", "0")
    else:
        own_valkey.ask("REPLICAOF", "NO", "ONE")
    eventually(lambda: is_hit(store, operation("refused 0")) and "again" in caplog.text)
    said = [record.getMessage() for record in caplog.records if "Redis" in record.getMessage()]
    assert [message.partition(":")[0] for message in said] == [
        "Redis takes no copies for now",
        "Redis takes copies again",
    ]
    store.close()


def test_busy_event_loop_is_not_taken_for_a_slow_redis(
    postgres_url: str, postgres_schema: str, own_valkey: ValkeyServer
) -> None:
    """The program keeps its loop busy for longer than the budget, although the reply has arrived."""

    async def keep_busy() -> None:
        while True:
            time.sleep(0.25)
            await asyncio.sleep(0)

    async def repeat() -> None:
        store = connect(tiered_url(postgres_url, own_valkey.url, postgres_schema, budget="200ms"))
        assert isinstance(store, TieredStore)
        settled(warmed(store))
        async with asyncio.timeout(30):
            while not store.tiers.hits:
                await arun(store.claim(OPERATION, lease=0.0))
                await asyncio.sleep(0.01)
            busy, before = asyncio.create_task(keep_busy()), store.tiers
            for _ in range(10):
                await arun(store.claim(OPERATION, lease=0.0))
        busy.cancel()
        assert store.tiers.hits > before.hits
        assert store.tiers.errors == before.errors
        await store.aclose()

    asyncio.run(repeat())


def test_refused_login_to_redis_is_not_noticed(
    postgres_url: str, postgres_schema: str, own_valkey: ValkeyServer, caplog: pytest.LogCaptureFixture
) -> None:
    """The password is changed, and all connections are cut.  The operations extend their retention at each repeat."""
    guard = Guard(tiered_url(postgres_url, own_valkey.url, postgres_schema), policy=Policy(ttl_from="access"), cache=0)
    store = warmed(cast("TieredStore", guard.store))
    guard.run(operation("old"), lambda op: "done")
    with redis.Redis.from_url(own_valkey.url) as server:
        server.config_set("requirepass", "new")
        server.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        for number in range(20):
            guard.run(operation(f"new {number}"), lambda op: "done")
            assert guard.run(operation("old"), lambda op: "again").value == "done"
        eventually(lambda: store.tiers.open or guard.run(operation(f"{time.monotonic()}"), lambda op: 1) is None)
        server.config_set("requirepass", "")
    settled(store)
    eventually(lambda: is_hit(store))
    assert not [record for record in caplog.records if "no messages arrive" in record.getMessage()]
    guard.close()


def test_redis_user_with_few_rights_has_copies(
    postgres_url: str, postgres_schema: str, own_valkey: ValkeyServer
) -> None:
    """The rights that `oncemore init --print-schema` prints for Redis are enough."""
    (command,) = (line for line in schema(own_valkey.url).splitlines() if line.startswith("ACL"))
    own_valkey.ask(*command.replace(">CHANGE-ME", ">pw").split())
    login = own_valkey.url.replace("redis://", "redis://oncemore:pw@")
    store = warmed(connect(tiered_url(postgres_url, login, postgres_schema)))  # type: ignore[arg-type]
    settled(store)
    eventually(lambda: is_hit(store))
    assert run(store.delete("scope", "key"))
    assert store.tiers.errors == 0
    store.close()


def test_partition_from_redis_is_not_noticed(postgres_url: str, postgres_schema: str, own_valkey: ValkeyServer) -> None:
    with FaultProxy.before(own_valkey.url) as proxy:
        store = warmed(connect(tiered_url(postgres_url, proxy.url(own_valkey.url), postgres_schema)))  # type: ignore[arg-type]
        settled(store)
        eventually(lambda: is_hit(store))
        proxy.stall()
        for number in range(20):
            settled(store, f"new {number}")
        eventually(lambda: store.tiers.open or settled(store, f"later {time.monotonic()}") is None)
        proxy.heal()
        eventually(lambda: is_hit(store))
        store.close()


class Nonsense(socketserver.BaseRequestHandler):
    """Answers every packet with the same reply."""

    reply = b""

    def handle(self) -> None:
        while self.request.recv(65536):
            self.request.sendall(self.reply)


@pytest.mark.parametrize(
    "reply", [b"+OK\r\n", b":7\r\n", b"*1\r\n*0\r\n", b"*0\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n"]
)
def test_server_that_answers_nonsense_is_not_noticed(reply: bytes, postgres_url: str, postgres_schema: str) -> None:
    handler = type("Handler", (Nonsense,), {"reply": reply})
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = tiered_url(postgres_url, f"redis://127.0.0.1:{server.server_address[1]}/0", postgres_schema, budget="1s")
        guard = Guard(url, cache=0)
        store = cast("TieredStore", guard.store)
        for number in range(20):
            assert guard.run(operation(f"{number}"), lambda op: "done").value == "done"
            assert guard.run(operation(f"{number}"), lambda op: "again").value == "done"
            time.sleep(0.02)
        assert store.tiers.hits == 0
        guard.close()
        server.shutdown()


def test_server_that_answers_pings_only_is_left_alone(postgres_url: str, postgres_schema: str) -> None:
    class PingsOnly(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            while request := self.request.recv(65536):
                if b"MGET" not in request:
                    self.request.sendall(b"+OK\r\n" * request.count(b"*"))

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), PingsOnly) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        store = connect(tiered_url(postgres_url, f"redis://127.0.0.1:{server.server_address[1]}/0", postgres_schema))
        assert isinstance(store, TieredStore)
        claimed(store)

        def is_left_alone() -> bool:
            assert blocked(store).tier == "database"
            return store.tiers.open

        eventually(is_left_alone)
        store.close()
        server.shutdown()


def test_primary_down_is_an_error_and_copies_are_unused(own_postgres: PostgresServer, own_valkey: ValkeyServer) -> None:
    store = warmed(connect(tiered_url(own_postgres.url, own_valkey.url, timeout="1s")))  # type: ignore[arg-type]
    settled(store)
    eventually(lambda: is_hit(store))
    own_postgres.crash()
    eventually(lambda: store._copies.watch.namespace() is None)
    guard = Guard(store, cache=0)
    with pytest.raises(Exception, match="PostgreSQL cannot be reached"):
        guard.run(OPERATION, lambda op: 1)
    own_postgres.start()
    eventually(lambda: is_hit(store))
    store.close()


def test_outcomes_that_a_restored_primary_lost_are_not_replayed(own_valkey: ValkeyServer) -> None:
    with PostgresServer(restore_command="false", archive_mode="off") as postgres:
        store = warmed(connect(tiered_url(postgres.url, own_valkey.url)))  # type: ignore[arg-type]
        settled(store, "before")
        data, backup = postgres.folder / "data", postgres.folder / "backup"
        postgres._end(postgres.polite_signal)
        shutil.copytree(data, backup)
        for path in (backup, *backup.rglob("*")):
            if postgres.user:
                shutil.chown(path, postgres.user)
        postgres.start()
        settled(store)  # the failover will lose it
        eventually(lambda: is_hit(store))
        postgres._end(postgres.polite_signal)
        shutil.rmtree(data)
        backup.rename(data)
        data.chmod(0o700)
        (data / "recovery.signal").touch()
        postgres.start()
        with psycopg.connect(postgres.url, autocommit=True) as connection:
            in_recovery = "SELECT pg_is_in_recovery()"
            eventually(lambda: connection.execute(in_recovery).fetchone() == (False,))
            row = connection.execute("SELECT left(pg_walfile_name(pg_current_wal_lsn()), 8)").fetchone()
        assert row == ("00000002",), "the timeline has not changed, so nothing is tested"
        assert copies_of(own_valkey), "the copy is gone, so nothing is tested"
        eventually(lambda: store._copies.watch.namespace())
        claimed(store)  # the operation runs again
        assert blocked(store, "before").outcome is not None
        store.close()


def copies_of(server: ValkeyServer) -> list[str]:
    return [name for name in server.ask("KEYS", "*:copy:*") if server.ask("GET", name)]


def test_redis_that_is_missing_at_the_start_is_warned_of(
    postgres_url: str, postgres_schema: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The first operation notices it, and there is one warning."""
    store = connect(tiered_url(postgres_url, "redis://127.0.0.1:1/0", postgres_schema))
    assert isinstance(store, TieredStore)
    settled(store)
    eventually(lambda: store.tiers.open)
    for number in range(20):
        settled(store, f"{number}")
        time.sleep(0.1)
    assert caplog.text.count("Redis is left alone, and every request asks PostgreSQL") == 1
    store.close()


def test_copies_follow_the_primary_of_redis(
    postgres_url: str, postgres_schema: str, own_sentinel: ValkeySentinel
) -> None:
    store = warmed(connect(tiered_url(postgres_url, own_sentinel.url, postgres_schema)))  # type: ignore[arg-type]
    settled(store)
    eventually(lambda: is_hit(store))
    own_sentinel.failover()
    settled(store, "after")
    eventually(lambda: is_hit(store))
    store.close()


def test_copies_lie_on_the_nodes_of_a_cluster(postgres_url: str, postgres_schema: str, cluster_url: str) -> None:
    store = warmed(connect(tiered_url(postgres_url, cluster_url, postgres_schema, postgres_schema)))  # type: ignore[arg-type]
    for number in range(20):
        settled(store, f"{number}")
    for number in range(20):
        eventually(lambda number=number: is_hit(store, operation(f"{number}")))
    assert run(store.delete("scope", "7"))
    claimed(store, "7")
    store.close()
