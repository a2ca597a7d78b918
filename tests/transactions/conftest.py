"""A shop on each driver.  A worker's shops on PostgreSQL share one database, which is emptied before each test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest
from psycopg import sql

from .shops import ON_POSTGRES, ON_SQLITE, Shop

DATABASE = "oncemore_effects"


@pytest.fixture(scope="session")
def shops_url(postgres_url: str) -> str:
    """A database for shops."""
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} (FORCE)").format(sql.Identifier(DATABASE)))
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(DATABASE)))
    return urlsplit(postgres_url)._replace(path=f"/{DATABASE}").geturl()


def emptied(url: str) -> str:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
    return url


async def opened(kind: type[Shop], url: str) -> AsyncIterator[Shop]:
    shop = kind(url)
    await shop.open()
    yield shop
    await shop.close()
    if url.startswith("postgresql:"):
        await no_open_transactions(url.partition("?")[0])


OPEN = (
    "SELECT pid, query FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in transaction%'"
)


async def no_open_transactions(url: str) -> None:
    """Check that no transaction was left open, because its key would stay in progress until the process ends."""
    with psycopg.connect(url, autocommit=True) as connection:
        for _ in range(100):
            left = connection.execute(OPEN).fetchall()
            if not left:
                return
            await asyncio.sleep(0.02)
    raise AssertionError(left)


@pytest.fixture(params=[*ON_SQLITE, *(pytest.param(name, marks=pytest.mark.server) for name in ON_POSTGRES)])
async def shop(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Shop]:
    """A shop on each driver in turn."""
    if request.param in ON_SQLITE:
        kind, url = ON_SQLITE[request.param], f"sqlite:///{tmp_path / 'shop.db'}"
    else:
        kind, url = ON_POSTGRES[request.param], emptied(request.getfixturevalue("shops_url"))
    async for each in opened(kind, url):
        yield each


# One of each way to reach a database: a test of what a policy says, rather than of what a driver does, needs no more.
KINDS = ("sqlite3", "aiosqlite", "alchemy-pysqlite", "django-sqlite")
KINDS_ON_POSTGRES = ("psycopg-async", "asyncpg", "alchemy-psycopg2", "alchemy-asyncpg", "django-postgres-async")
on_each_kind = pytest.mark.parametrize(
    "shop", [*KINDS, *(pytest.param(name, marks=pytest.mark.server) for name in KINDS_ON_POSTGRES)], indirect=True
)


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.server) for name in ON_POSTGRES])
async def postgres_shop(request: pytest.FixtureRequest, shops_url: str) -> AsyncIterator[Shop]:
    """A shop on each driver for PostgreSQL."""
    async for each in opened(ON_POSTGRES[request.param], emptied(shops_url)):
        yield each
