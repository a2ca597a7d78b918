"""Servers and environments that the runners need."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests.support.brokers import RabbitServer
from tests.support.servers import ValkeyServer
from tests.workers.stage import ROOT


@pytest.fixture(autouse=True)
def signals_as_they_were() -> Iterator[None]:
    """Restore the signal handlers, because a worker that runs in this process replaces them."""
    found = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)}
    yield
    for each, handler in found.items():
        signal.signal(each, handler)


@pytest.fixture
def redis_broker() -> Iterator[str]:
    """Start a Valkey for one test, because a runner's keys have no prefix."""
    with ValkeyServer(fsync=False) as server:
        yield server.url


@pytest.fixture(scope="session")
def rabbit_broker() -> Iterator[str]:
    """Start a RabbitMQ that the tests of this folder share.  Skip them if it is not installed."""
    if RabbitServer.program() is None:
        pytest.skip("rabbitmq-server is not installed")
    with RabbitServer() as server:
        yield server.url


@pytest.fixture
def own_database(postgres_url: str) -> Iterator[str]:
    """Make a database for one test, because procrastinate's tables have no schema."""
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("DROP DATABASE IF EXISTS procrastinate WITH (FORCE)")
        connection.execute("CREATE DATABASE procrastinate")
        info = psycopg.conninfo.conninfo_to_dict(postgres_url)
        yield psycopg.conninfo.make_conninfo(**{**info, "dbname": "procrastinate"})
        connection.execute("DROP DATABASE IF EXISTS procrastinate WITH (FORCE)")


@pytest.fixture(scope="session")
def arq_python() -> str:
    """Return a Python with arq, which needs an older redis-py than Celery.  Its environment is made once and kept."""
    folder = (
        Path(tempfile.gettempdir()) / f"oncemore-arq-{sys.version_info.major}{sys.version_info.minor}-{os.geteuid()}"
    )
    python = folder / "bin" / "python"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process of the tests may be making it
        if not (folder / "complete").exists():
            commands = (
                [sys.executable, "-m", "venv", "--clear", str(folder)],
                [str(python), "-m", "pip", "install", "--quiet", f"{ROOT}[arq]"],
            )
            for command in commands:
                done = subprocess.run(command, capture_output=True, text=True, timeout=110)
                if done.returncode:
                    pytest.skip(f"arq cannot be installed: {done.stderr.strip()[-500:]}")
            (folder / "complete").touch()
    return str(python)
