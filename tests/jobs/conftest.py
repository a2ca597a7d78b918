"""Fixtures: a guard on each kind of store."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from oncemore import Guard

STORES = [
    "memory",
    "sqlite",
    pytest.param("postgres", marks=pytest.mark.server),
    pytest.param("redis", marks=pytest.mark.server),
]


def store_url(kind: str, request: pytest.FixtureRequest, folder: Path) -> str:
    if kind == "memory":
        return "memory://"
    if kind == "sqlite":
        return f"sqlite:///{folder}/once.db"
    if kind == "postgres":
        url, schema = request.getfixturevalue("postgres_url"), request.getfixturevalue("postgres_schema")
        return f"{url}{'&' if '?' in url else '?'}schema={schema}"
    url, prefix = request.getfixturevalue("valkey_url"), request.getfixturevalue("redis_prefix")
    return f"{url}{'&' if '?' in url else '?'}prefix={prefix}"


@pytest.fixture(params=STORES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URL of an empty ledger on each store."""
    return store_url(request.param, request, tmp_path)


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.server)])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URL of an empty ledger with transactions."""
    return store_url(request.param, request, tmp_path)


@pytest.fixture
def guard(url: str) -> Iterator[Guard]:
    made = Guard(url)
    yield made
    asyncio.run(made.aclose())
    made.close()
