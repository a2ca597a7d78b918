"""Fixtures: the URL of a tiered ledger with its own schema and prefix, and a plain connection to its Redis."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import quote

import pytest
import redis


def tiered_url(postgres: str, valkey: str, schema: str = "public", prefix: str = "oncemore", **options: object) -> str:
    """Return the URL of a ledger in the schema, with copies under the prefix."""
    nested = quote(f"{valkey}?prefix={prefix}", safe="")
    extra = "".join(f"&{name}={value}" for name, value in options.items())
    return f"redis+{postgres}?schema={schema}&redis={nested}{extra}"


@pytest.fixture
def url(postgres_url: str, postgres_schema: str, valkey_url: str, redis_prefix: str) -> str:
    return tiered_url(postgres_url, valkey_url, postgres_schema, redis_prefix, budget="1s")


@pytest.fixture
def server(valkey_url: str) -> Iterator[redis.Redis]:
    """Yield a connection to Redis that bypasses the store."""
    with redis.Redis.from_url(valkey_url) as client:
        yield client
