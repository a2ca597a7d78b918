"""Fixtures for every test: private servers, started on first use, one of each per worker, and a corner of it per test.

A test that asks for a server by one of these fixtures is marked `server`.  One that fetches it at run time
(`request.getfixturevalue`) marks the parameter itself: `pytest.param("postgres", marks=pytest.mark.server)`.
"""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Iterator

import psycopg
import pytest
import redis
from hypothesis import settings
from psycopg import sql

from tests.support.servers import PgBouncer, PostgresServer, ValkeyCluster, ValkeySentinel, ValkeyServer

SERVERS = {"postgres_url", "valkey_url", "pgbouncer_url", "cluster_url", "own_postgres", "own_valkey", "own_sentinel"}

# Whoever runs the tests in the background may ignore interrupts, and so would every process that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The machine's pace is not under test, so no example is too slow.
settings.register_profile("oncemore", deadline=None, print_blob=True)
settings.load_profile("oncemore")

# Those that ask servers in processes of their own, over real sockets, and those that run whole programs: they need no
# PostgreSQL and no Valkey, but more time than a quick check has.
LONGER = {
    "client": (
        "test_httpx.py",
        "test_libraries.py",
        "test_resume.py",
        "test_transports.py",
        "test_written_down.py",
    ),
    "effects": ("test_django.py", "test_doors.py"),
    "examples": (),
    "sqlite": ("test_processes.py",),
    "tests": ("test_pages.py", "test_types.py"),
    "tools": ("test_cli.py",),
    "web": (
        "test_asgi_contract.py",
        "test_asgi_fuzz.py",
        "test_asgi_principals.py",
        "test_asgi_servers.py",
        "test_django.py",
        "test_django_contract.py",
        "test_fastapi.py",
        "test_flask.py",
        "test_wsgi.py",
        "test_wsgi_contract.py",
    ),
}


@pytest.hookimpl(tryfirst=True)  # before pytest itself picks by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that use a server, and those that take longer."""
    for item in items:
        if SERVERS.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.server)
        files = LONGER.get(item.path.parent.name)
        if files is not None and (not files or item.path.name in files):
            item.add_marker(pytest.mark.longer)


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """A PostgreSQL shared by this worker's tests, or that which ONCEMORE_TEST_POSTGRES names; use `postgres_schema`."""
    if existing := os.environ.get("ONCEMORE_TEST_POSTGRES"):
        yield existing
        return
    with PostgresServer(fsync=False) as server:
        yield server.url


@pytest.fixture(scope="session")
def valkey_url() -> Iterator[str]:
    """A Valkey shared by this worker's tests, or the server that ONCEMORE_TEST_REDIS names; use `redis_prefix`."""
    if existing := os.environ.get("ONCEMORE_TEST_REDIS"):
        yield existing
        return
    with ValkeyServer(fsync=False) as server:
        yield server.url


@pytest.fixture(scope="session")
def pgbouncer_url(postgres_url: str) -> Iterator[str]:
    """A transaction-mode PgBouncer before that PostgreSQL; the test is skipped where the program is not installed."""
    if PgBouncer.program() is None:
        pytest.skip("pgbouncer is not installed")
    with PgBouncer(postgres_url) as pooler:
        yield pooler.url


@pytest.fixture(scope="session")
def cluster_url() -> Iterator[str]:
    """A Valkey cluster of three, shared by this worker's tests; use `redis_prefix`."""
    with ValkeyCluster(fsync=False) as cluster:
        yield cluster.url


@pytest.fixture
def postgres_schema(postgres_url: str) -> Iterator[str]:
    """A schema's name that nobody else uses; the schema is not created, but dropped afterwards if the test made it."""
    name = unique_name()
    yield name
    # A test that left a transaction open would make this wait for ever: let it fail instead.
    with psycopg.connect(postgres_url, autocommit=True, options="-c lock_timeout=10s") as connection:
        connection.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(name)))


@pytest.fixture
def redis_prefix(valkey_url: str) -> Iterator[str]:
    """A prefix that nobody else's keys have; keys that contain it are removed afterwards."""
    name = unique_name()
    yield name
    with redis.Redis.from_url(valkey_url) as connection:
        for key in connection.scan_iter(match=f"*{name}*", count=1000):
            connection.unlink(key)


@pytest.fixture
def own_postgres() -> Iterator[PostgresServer]:
    """A durable PostgreSQL for this test alone: it may be crashed and restarted."""
    with PostgresServer() as server:
        yield server


@pytest.fixture
def own_valkey() -> Iterator[ValkeyServer]:
    """A durable Valkey for this test alone: it may be crashed and restarted."""
    with ValkeyServer() as server:
        yield server


@pytest.fixture
def own_sentinel() -> Iterator[ValkeySentinel]:
    """A Valkey primary, replica and sentinel for this test alone: it may fail over."""
    with ValkeySentinel() as trio:
        yield trio


def unique_name() -> str:
    return f"t{secrets.token_hex(8)}"
