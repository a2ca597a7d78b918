"""The URL of a ledger under a prefix of the test's own, and a plain connection to its server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis


@pytest.fixture
def url(valkey_url: str, redis_prefix: str) -> str:
    return f"{valkey_url}?prefix={redis_prefix}"


@pytest.fixture
def server(valkey_url: str) -> Iterator[redis.Redis]:
    """A connection past the store."""
    with redis.Redis.from_url(valkey_url) as client:
        yield client
