"""The servers for tests: durability, crashes, restarts, and that they end with the test run."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest
import redis

from examples import process
from oncemore.errors import MissingDriver
from tests.support.postgres import copied, newest_programs
from tests.support.servers import PgBouncer, PostgresServer, Server, ValkeyCluster, ValkeySentinel, ValkeyServer

from . import postgres

pytestmark = pytest.mark.server

ALL = [PostgresServer, ValkeyServer]


def is_alive(pid: int) -> bool:
    """Return whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(holds: Callable[[], bool], seconds: float = 30) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)
    return holds()


@pytest.mark.chaos
@pytest.mark.parametrize("immediate", [True, False])
def test_postgres_keeps_port_and_rows_after_restart(own_postgres: PostgresServer, immediate: bool) -> None:
    url = own_postgres.url
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE kept (n int)")
    with psycopg.connect(url) as connection:
        connection.execute("INSERT INTO kept VALUES (1)")
        connection.commit()
        connection.execute("INSERT INTO kept VALUES (2)")
        own_postgres.restart(immediate=immediate)
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT n FROM kept").fetchall() == [(1,)]
    assert ("was not properly shut down" in own_postgres.log) is immediate


@pytest.mark.chaos
def test_valkey_keeps_port_and_writes_after_kill(own_valkey: ValkeyServer) -> None:
    with redis.Redis.from_url(own_valkey.url) as before:
        before.set("kept", "1")
    own_valkey.restart()
    with redis.Redis.from_url(own_valkey.url) as after:
        assert after.get("kept") == b"1"


@pytest.mark.chaos
def test_valkey_without_fsync_is_empty_after_crash() -> None:
    with ValkeyServer(fsync=False) as server:
        server.ask("SET", "kept", "1")
        server.restart()
        assert server.ask("GET", "kept") is None


def test_fsync_is_on_by_default(postgres_url: str, own_postgres: PostgresServer) -> None:
    with psycopg.connect(own_postgres.url) as durable:
        assert durable.execute("SHOW fsync").fetchone() == ("on",)


def test_settings_reach_the_server() -> None:
    with ValkeyServer(maxmemory_policy="noeviction", maxmemory="64mb") as valkey:
        assert valkey.ask("CONFIG", "GET", "maxmemory") == ["maxmemory", str(64 * 2**20)]


def test_postgres_requires_its_password(own_postgres: PostgresServer) -> None:
    with pytest.raises(psycopg.OperationalError, match="password"):
        psycopg.connect(f"postgresql://postgres:wrong@127.0.0.1:{own_postgres.port}/postgres")


@pytest.mark.chaos
@pytest.mark.parametrize("kind", ALL)
def test_crashed_server_refuses_connections_until_started(kind: type[Server]) -> None:
    with kind() as server:
        port = server.port
        server.crash()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        with pytest.raises(RuntimeError, match="not running"):
            server.crash()
        assert server.start().port == port


@pytest.mark.parametrize("kind", ALL)
def test_stopped_server_leaves_no_process_or_folder(kind: type[Server]) -> None:
    with kind() as server:
        folder, pid = server.folder, server.pid
        with pytest.raises(RuntimeError, match="already running"):
            server.start()
    assert not folder.exists()
    assert not is_alive(pid)
    server.stop()


ORPHAN = """
import sys, time
from tests.support import servers
server = getattr(servers, sys.argv[1])().start()
print(server.pid, server.folder, flush=True)
time.sleep(600)
"""


@pytest.mark.chaos
@pytest.mark.parametrize("kind", ["PostgresServer", "ValkeyServer"])
def test_server_ends_with_a_killed_test_run(kind: str) -> None:
    command = [sys.executable, "-c", ORPHAN, kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as tests:
        assert tests.stdout is not None
        pid, folder = tests.stdout.readline().split()
        assert is_alive(int(pid))
        os.kill(tests.pid, signal.SIGKILL)
    assert wait_for(lambda: not is_alive(int(pid)) and not Path(folder).exists())


@pytest.mark.parametrize("kind", ALL)
def test_taken_port_is_replaced(kind: type[Server], monkeypatch: pytest.MonkeyPatch) -> None:
    with ValkeyServer(fsync=False) as other:
        ports = iter([other.port, other.port, process.free_port(), process.free_port(), process.free_port()])
        monkeypatch.setattr(process, "free_port", lambda: next(ports))
        with kind() as server:
            assert server.port != other.port


def test_server_that_cannot_start_shows_its_log() -> None:
    with pytest.raises(RuntimeError, match="no_such_setting"):
        PostgresServer(no_such_setting="1").start()


def test_missing_wheel_names_the_install_command() -> None:
    with pytest.raises(MissingDriver, match="no-such-distribution is not installed"):
        process.in_wheel("no-such-distribution", "*")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_programs_in_a_private_folder_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private = tmp_path / "private"
    programs = copied(newest_programs(), private)
    private.chmod(0o700)
    monkeypatch.setattr(postgres, "newest_programs", lambda: programs)
    with PostgresServer() as server, psycopg.connect(server.url) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)
    assert private.stat().st_mode & 0o777 == 0o700


def test_cluster_serves_every_slot(cluster_url: str) -> None:
    first = cluster_url.removeprefix("redis+cluster://").split(",")[0]
    host, port = first.split(":")
    with redis.RedisCluster(host=host, port=int(port)) as cluster:
        for number in range(50):
            cluster.set(f"key{number}", number)
        assert len(cluster.get_primaries()) == 3


@pytest.mark.chaos
def test_cluster_recovers_after_a_node_restarts() -> None:
    with ValkeyCluster(fsync=False) as cluster:
        cluster.servers[1].restart()
        assert wait_for(cluster.is_whole)


@pytest.mark.chaos
def test_replica_takes_over_from_a_crashed_primary(own_sentinel: ValkeySentinel) -> None:
    own_sentinel.primary.ask("SET", "kept", "1")
    own_sentinel.primary.ask("WAIT", "1", "5000")
    own_sentinel.failover()
    watch = redis.Sentinel([("127.0.0.1", own_sentinel.sentinel.port)])  # type: ignore[no-untyped-call]
    assert watch.master_for("oncemore").get("kept") == b"1"  # type: ignore[no-untyped-call]


def test_pgbouncer_shares_server_connections_between_transactions(pgbouncer_url: str) -> None:
    clients = [psycopg.connect(pgbouncer_url, autocommit=True, prepare_threshold=None) for _ in range(20)]
    backends = {client.execute("SELECT pg_backend_pid()").fetchone() for client in clients}
    for client in clients:
        client.close()
    assert len(backends) < len(clients)


def test_missing_pgbouncer_names_the_install_command(monkeypatch: pytest.MonkeyPatch, postgres_url: str) -> None:
    monkeypatch.setattr(PgBouncer, "program", staticmethod(lambda: None))
    with pytest.raises(FileNotFoundError, match="apt-get install pgbouncer"):
        PgBouncer(postgres_url).start()
