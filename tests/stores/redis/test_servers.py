"""The Redis store when servers fail, move or refuse: no wrong answer, and no key is blocked past its lease."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis
from redis import exceptions

from oncemore._ledger.model import Lease, Outcome, Record
from oncemore._ledger.store import Filter
from oncemore._runtime.plan import Plan, arun, run
from oncemore.errors import ConfigurationError, StoreError, StoreUnavailable
from oncemore.stores import schema
from oncemore.stores.redis import RedisStore, connect
from oncemore.stores.redis.commands import error_code, reply_error, reply_text
from tests.support.servers import ValkeyServer

from ..parts import DONE, HOUR, operation
from .children import load
from .tls_front import tls_front

pytestmark = pytest.mark.server

Drive = Callable[[Plan[Any]], Any]


async def test_flushed_scripts_are_sent_again(store: RedisStore, valkey_url: str) -> None:
    settled: set[str] = set()
    with redis.Redis.from_url(valkey_url) as server:

        async def flush() -> None:
            for _ in range(30):
                server.script_flush()
                await asyncio.sleep(0.003)

        failures, _ = await asyncio.gather(load(store, 400, settled), flush())
    assert (failures, len(settled)) == (0, 400)
    assert (await arun(store.stats())).settled == 400
    await store.aclose()


@pytest.mark.chaos
async def test_server_killed_under_load_loses_nothing_acknowledged(own_valkey: ValkeyServer) -> None:
    """Every settled record stays settled, and no key is blocked past its lease."""
    store = connect(f"{own_valkey.url}?timeout=10s")
    settled: set[str] = set()
    lives = 0

    def crash() -> None:
        nonlocal lives
        for _ in range(3):
            time.sleep(0.3)
            own_valkey.restart(immediate=True)
            lives += 1

    killer = asyncio.create_task(asyncio.to_thread(crash))
    await load(store, 200, settled, until=killer.done)
    await killer
    assert lives == 3
    assert len(settled) > 100
    for key in settled:
        record = await arun(store.find("scope", key))
        assert record is not None
        assert (record.state, record.outcome) == ("settled", DONE)
    await asyncio.sleep(1.1)
    for record in (await arun(store.list(Filter(state="running"), limit=1000))).records:
        lease = await arun(store.claim(operation(record.key), lease=HOUR))
        assert isinstance(lease, Lease)
        assert lease.token > record.token
    await store.aclose()


@pytest.mark.chaos
def test_tokens_grow_across_restarts_and_deletes(own_valkey: ValkeyServer) -> None:
    store = connect(own_valkey.url)
    tokens = []
    for _ in range(3):
        lease = run(store.claim(operation("key"), lease=HOUR))
        assert isinstance(lease, Lease)
        tokens.append(lease.token)
        run(store.settle(lease, DONE, retention=HOUR))
        run(store.delete("scope", "key"))
        own_valkey.restart()
    store.close()
    assert tokens == sorted(set(tokens))


@pytest.mark.parametrize(
    ("fault", "cure"),
    [
        (["CONFIG", "SET", "busy-reply-threshold", "20"], ["SCRIPT", "KILL"]),
        (["REPLICAOF", "127.0.0.1", "1"], ["REPLICAOF", "NO", "ONE"]),
    ],
    ids=["busy", "read-only"],
)
def test_busy_or_read_only_server_is_retried(own_valkey: ValkeyServer, fault: list[str], cure: list[str]) -> None:
    store = connect(f"{own_valkey.url}?timeout=20s")
    run(store.claim(operation("before"), lease=HOUR))
    own_valkey.ask(*fault)
    if cure[0] == "SCRIPT":
        threading.Thread(target=spin, args=(own_valkey,)).start()
        time.sleep(0.2)
    timer = threading.Timer(0.3, lambda: own_valkey.ask(*cure))
    timer.start()
    assert isinstance(run(store.claim(operation("key"), lease=HOUR)), Lease)
    timer.join()
    store.close()


def spin(server: ValkeyServer) -> None:
    with contextlib.suppress(RuntimeError):  # it is killed
        server.ask("EVAL", "while true do end", "0")


@pytest.mark.parametrize(
    ("said", "word"),
    [
        ("READONLY You can't write against a read only replica.", "READONLY"),
        ("OOM command not allowed when used memory > 'maxmemory'.", "OOM"),
        ("NOREPLICAS Not enough good replicas to write.", "NOREPLICAS"),
    ],
)
def test_redis_6_error_within_a_script_is_recognised(said: str, word: str) -> None:
    """The text is that of Redis 6.2.14.  Newer servers send only the end of it."""
    within = "ERR Error running script (call to f_4929d58979d9): @user_script:72: @user_script: 72: -" + said
    for text in (said, within, within.removeprefix("ERR ")):  # redis-py removes the first word if it is ERR
        error = redis.ResponseError(text)
        assert (error_code(text), type(reply_error(error))) == (word, StoreUnavailable)
    other = "ERR Error running script (call to f_49): @user_script:9: bad argument -X"
    assert (error_code(other), type(reply_error(redis.ResponseError(other)))) == ("ERR", StoreError)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (exceptions.MovedError("3999 10.0.0.1:6381"), "MOVED 3999 10.0.0.1:6381"),
        (redis.ResponseError("MOVED 3999 10.0.0.1:6381"), "MOVED 3999 10.0.0.1:6381"),
        (exceptions.AskError("3999 10.0.0.1:6381"), "ASK 3999 10.0.0.1:6381"),
        (exceptions.NoScriptError("No matching script."), "NOSCRIPT No matching script."),
        (exceptions.MasterDownError("Link with MASTER is down"), "MASTERDOWN Link with MASTER is down"),
        (redis.ResponseError("BUSY Redis is busy"), "BUSY Redis is busy"),
    ],
)
def test_error_reply_reads_alike_in_all_redis_py_versions(error: redis.ResponseError, text: str) -> None:
    """Newer versions have classes for more errors, and remove the word that names the error."""
    assert reply_text(error) == text


def test_server_out_of_memory_refuses_and_changes_nothing(own_valkey: ValkeyServer) -> None:
    store = connect(f"{own_valkey.url}?timeout=1s")
    lease = run(store.claim(operation("key"), lease=HOUR))
    assert isinstance(lease, Lease)
    own_valkey.ask("CONFIG", "SET", "maxmemory", "1")
    with pytest.raises(StoreUnavailable, match="OOM"):
        run(store.claim(operation("other"), lease=HOUR))
    with pytest.raises(StoreUnavailable, match="OOM"):
        run(store.settle(lease, DONE, retention=HOUR))
    own_valkey.ask("CONFIG", "SET", "maxmemory", "0")
    run(store.settle(lease, DONE, retention=HOUR))
    store.close()


@pytest.mark.parametrize(("policy", "warned"), [("allkeys-lru", True), ("volatile-ttl", True), ("noeviction", False)])
def test_eviction_policy_is_warned_of_once(
    own_valkey: ValkeyServer, caplog: pytest.LogCaptureFixture, policy: str, warned: bool
) -> None:
    own_valkey.ask("CONFIG", "SET", "maxmemory-policy", policy)
    store = connect(own_valkey.url)
    with caplog.at_level(logging.WARNING, "oncemore"):
        run(store.claim(operation("a"), lease=HOUR))
        run(store.claim(operation("b"), lease=HOUR))
    store.close()
    assert [policy in message for message in caplog.messages] == [True] * warned


def test_acl_user_of_the_schema_can_use_every_verb(own_valkey: ValkeyServer) -> None:
    script = schema(f"{own_valkey.url}?prefix=app")
    (command,) = [
        line for line in script.splitlines() if not line.startswith("#")
    ]  # the client reads each line as one command
    own_valkey.ask(*command.replace("CHANGE-ME", "pw").split())
    store = connect(own_valkey.url.replace("//", "//app:pw@") + "?prefix=app&timeout=2s")
    leases: list[Any] = [run(store.claim(operation(str(n)), lease=HOUR)) for n in range(4)]
    run(store.settle(leases[0], DONE, retention=HOUR, audit=True))
    run(store.release(leases[1], retention=HOUR))
    run(store.hold(leases[2]))
    run(store.resolve("scope", "2", DONE, retention=HOUR))
    run(store.delete("scope", "2"))
    run(store.renew(leases[3], lease=0.0))
    run(store.watch(run(store.find("scope", "3"))))  # type: ignore[arg-type]
    while not own_valkey.ask("PUBSUB", "NUMSUB", "app:changes")[1]:
        time.sleep(0.01)
    store.shift = 2 * HOUR
    assert run(store.purge()) == 2
    assert (run(store.stats()).archived, len(run(store.list(Filter())).records)) == (1, 1)
    store.close()
    stranger = connect(own_valkey.url.replace("//", "//app:wrong@") + "?timeout=500ms")
    for verb in (stranger.find("scope", "3"), stranger.list(Filter()), stranger.stats(), stranger.purge()):
        with pytest.raises(ConfigurationError, match="login"):
            run(verb)


def test_unix_socket_url_is_served(tmp_path: Path) -> None:
    with ValkeyServer(fsync=False, unixsocket=tmp_path / "s") as server:
        store = connect(f"redis://{tmp_path}/s?db=3")
        run(store.claim(operation("key"), lease=HOUR))
        asyncio.run(use_and_close(store))
        assert server.ask("INFO", "keyspace").count("db3:keys=2") == 1


def test_tls_server_serves_threads_and_loops(valkey_url: str, redis_prefix: str, tmp_path: Path) -> None:
    with tls_front(urlsplit(valkey_url).port or 0, tmp_path) as (port, certificate):
        store = connect(f"rediss://127.0.0.1:{port}/0?prefix={redis_prefix}&ssl_ca_certs={certificate}")
        lease = run(store.claim(operation("key"), lease=HOUR))
        assert isinstance(lease, Lease)
        run(store.settle(lease, Outcome(body=b"x" * 300_000), retention=HOUR))
        asyncio.run(use_and_close(store))
        assert len(run(store.list(Filter())).records) == 2
        store.close()
        stranger = connect(f"rediss://127.0.0.1:{port}/0?timeout=1s")
        with pytest.raises(StoreUnavailable, match="certificate"):
            run(stranger.find("scope", "key"))


async def use_and_close(store: RedisStore) -> None:
    assert isinstance(await arun(store.claim(operation("another"), lease=HOUR)), Lease)
    await store.aclose()


def test_user_without_channel_right_is_warned_once_and_polls(
    own_valkey: ValkeyServer, caplog: pytest.LogCaptureFixture
) -> None:
    own_valkey.ask("ACL", "SETUSER", "deaf", "on", ">pw", "~*", "resetchannels", "+@all")
    store = connect(f"redis://deaf:pw@127.0.0.1:{own_valkey.port}")
    lease = run(store.claim(operation("key"), lease=HOUR))
    record = run(store.claim(operation("key"), lease=HOUR))
    assert isinstance(lease, Lease)
    assert isinstance(record, Record)
    run(store.watch(record))
    thread = store._listener._thread
    assert thread is not None
    thread.join(5)
    assert not thread.is_alive()
    assert ["NOPERM" in message for message in caplog.messages] == [True]
    assert store._listener.unavailable
    run(store.watch(record))
    run(store.settle(lease, DONE, retention=HOUR))
    store.close()
