"""Fixtures: the URL of a ledger with a prefix for each test, and a plain connection to its server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis


@pytest.fixture
def url(valkey_url: str, redis_prefix: str) -> str:
    return f"{valkey_url}?prefix={redis_prefix}"


@pytest.fixture
def server(valkey_url: str) -> Iterator[redis.Redis]:
    """Yield a connection that bypasses the store."""
    with redis.Redis.from_url(valkey_url) as client:
        yield client
