"""A ledger under a prefix of the test's own, and a way past it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from oncemore.stores.redis import RedisStore, connect


@pytest.fixture
def url(valkey_url: str, redis_prefix: str) -> str:
    return f"{valkey_url}?prefix={redis_prefix}"


@pytest.fixture
def store(url: str) -> Iterator[RedisStore]:
    store = connect(url)
    yield store
    store.close()


@pytest.fixture
def other(url: str) -> Iterator[RedisStore]:
    """A second store on the same records, as another process would have it."""
    store = connect(url)
    yield store
    store.close()


@pytest.fixture
def server(valkey_url: str) -> Iterator[redis.Redis]:
    """A connection past the store."""
    with redis.Redis.from_url(valkey_url) as client:
        yield client
