"""Fixtures for all tests: servers that start at first use, one of each per worker, with a schema or prefix per test.

A test that uses one of these fixtures is marked `server`.  A test that fetches it at run time
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

from tests.support.brokers import MinistackServer, MockKafka, NatsCluster, NatsServer, RabbitServer
from tests.support.servers import PgBouncer, PostgresServer, ValkeyCluster, ValkeySentinel, ValkeyServer

SERVERS = {"postgres_url", "valkey_url", "pgbouncer_url", "cluster_url", "own_postgres", "own_valkey", "own_sentinel"}
SERVERS |= {"nats_url", "rabbit_url", "ministack", "kafka_url", "own_nats", "own_rabbit", "own_nats_cluster"}

# A shell that runs the tests in the background ignores interrupts for them and for each process that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline for examples, because a busy machine is slow.
settings.register_profile("oncemore", deadline=None, print_blob=True)
settings.load_profile("oncemore")


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that use a server."""
    for item in items:
        if SERVERS.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.server)


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """A PostgreSQL that this worker's tests share, or that of ONCEMORE_TEST_POSTGRES; use it with `postgres_schema`."""
    if existing := os.environ.get("ONCEMORE_TEST_POSTGRES"):
        yield existing
        return
    with PostgresServer(fsync=False) as server:
        yield server.url


@pytest.fixture(scope="session")
def valkey_url() -> Iterator[str]:
    """A Valkey that this worker's tests share, or the server of ONCEMORE_TEST_REDIS; use it with `redis_prefix`."""
    if existing := os.environ.get("ONCEMORE_TEST_REDIS"):
        yield existing
        return
    with ValkeyServer(fsync=False) as server:
        yield server.url


@pytest.fixture(scope="session")
def pgbouncer_url(postgres_url: str) -> Iterator[str]:
    """A PgBouncer in transaction mode in front of that PostgreSQL; if it is not installed, the test is skipped."""
    if PgBouncer.program() is None:
        pytest.skip("pgbouncer is not installed")
    with PgBouncer(postgres_url) as pooler:
        yield pooler.url


@pytest.fixture(scope="session")
def cluster_url() -> Iterator[str]:
    """A Valkey cluster of three nodes that this worker's tests share; use it with `redis_prefix`."""
    with ValkeyCluster(fsync=False) as cluster:
        yield cluster.url


@pytest.fixture(scope="session")
def nats_url() -> Iterator[str]:
    """A NATS server with JetStream that this worker's tests share; use a stream of the test's own."""
    with NatsServer() as server:
        yield server.url


@pytest.fixture(scope="session")
def rabbit_url() -> Iterator[str]:
    """A RabbitMQ that this worker's tests share; if it is not installed, the test is skipped."""
    if RabbitServer.program() is None:
        pytest.skip("rabbitmq-server is not installed")
    with RabbitServer() as server:
        yield server.url


@pytest.fixture(scope="session")
def ministack() -> Iterator[MinistackServer]:
    """An SQS that this worker's tests share."""
    with MinistackServer() as server:
        yield server


@pytest.fixture(scope="session")
def kafka_url() -> Iterator[str]:
    """A mock Kafka cluster in this process, which this worker's tests share."""
    with MockKafka() as cluster:
        yield cluster.url


@pytest.fixture
def postgres_schema(postgres_url: str) -> Iterator[str]:
    """A random name for a schema, which is dropped after the test if the test created it."""
    name = unique_name()
    yield name
    # Fail instead of waiting for ever if the test left a transaction open.
    with psycopg.connect(postgres_url, autocommit=True, options="-c lock_timeout=10s") as connection:
        connection.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(name)))


@pytest.fixture
def redis_prefix(valkey_url: str) -> Iterator[str]:
    """A random prefix for keys; keys that contain it are removed after the test."""
    name = unique_name()
    yield name
    with redis.Redis.from_url(valkey_url) as connection:
        for key in connection.scan_iter(match=f"*{name}*", count=1000):
            connection.unlink(key)


@pytest.fixture
def own_postgres() -> Iterator[PostgresServer]:
    """A durable PostgreSQL for one test, which may crash and restart it."""
    with PostgresServer() as server:
        yield server


@pytest.fixture
def own_valkey() -> Iterator[ValkeyServer]:
    """A durable Valkey for one test, which may crash and restart it."""
    with ValkeyServer() as server:
        yield server


@pytest.fixture
def own_nats() -> Iterator[NatsServer]:
    """A durable NATS server for one test, which may crash and restart it."""
    with NatsServer(fsync=True) as server:
        yield server


@pytest.fixture
def own_nats_cluster() -> Iterator[NatsCluster]:
    """Three NATS servers for one test, which may crash each of them."""
    with NatsCluster() as cluster:
        yield cluster


@pytest.fixture
def own_rabbit() -> Iterator[RabbitServer]:
    """A RabbitMQ for one test, which may crash and restart it; if it is not installed, the test is skipped."""
    if RabbitServer.program() is None:
        pytest.skip("rabbitmq-server is not installed")
    with RabbitServer() as server:
        yield server


@pytest.fixture
def own_sentinel() -> Iterator[ValkeySentinel]:
    """A Valkey primary, replica and sentinel for one test, which may let it fail over."""
    with ValkeySentinel() as trio:
        yield trio


def unique_name() -> str:
    return f"t{secrets.token_hex(8)}"
