"""A provider and a service in processes of their own, on SQLite and on PostgreSQL; a file's tests share one pair."""

from __future__ import annotations

import json
import secrets
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
from psycopg import sql

from examples.payments.processes import PaymentSystem, Provider, Service
from oncemore.client.deadlines import no_sleeping

from ..support.processes import ForkedServer
from .gateway import NetworkRoute, open_route

STORES = ["sqlite", pytest.param("postgres", marks=pytest.mark.server)]


class ForkedProvider(ForkedServer, Provider):
    """A provider from the forkserver."""


class ForkedService(ForkedServer, Service):
    """A service from the forkserver, because the tests that kill it start it often."""


class Shop(PaymentSystem):
    """The two processes, with direct access to the service's database and log."""

    def __init__(self, **settings: str) -> None:
        super().__init__(**settings)  # type: ignore[arg-type]
        self.provider = ForkedProvider(self.provider.webhooks)
        known = {**self.service.settings, "PAYMENTS_PROVIDER": self.provider.url}
        self.service = ForkedService(self.service.port, **known)

    def rows(self, text: str, *values: Any) -> list[tuple[Any, ...]]:
        url = self.service.settings["PAYMENTS_DATABASE"]
        if url.startswith("sqlite"):
            connection = sqlite3.connect(self.service.folder / "payments.db")
            try:
                return connection.execute(text, values).fetchall()
            finally:
                connection.close()
        with psycopg.connect(url, autocommit=True) as server:
            return server.execute(text.replace("?", "%s").encode(), values).fetchall()

    def logged(self, **fields: Any) -> list[dict[str, Any]]:
        """Return the lines of the service's log that have these fields."""
        lines = [json.loads(line) for line in self.service.log.splitlines() if line.startswith("{")]
        return [line for line in lines if all(line.get(name) == value for name, value in fields.items())]

    def counted(self, name: str) -> int:
        """Return the value of a counter of the service."""
        text = self.get("/metrics").text
        counts = dict(line.split() for line in text.splitlines())
        return int(counts.get(f"{name}_total", 0))


@pytest.fixture(scope="module", params=STORES)
def shop(request: pytest.FixtureRequest) -> Iterator[Shop]:
    """A provider and a service on each database in turn."""
    database = request.getfixturevalue("shop_database") if request.param == "postgres" else ""
    # Without the completer, because these tests count the requests of callers.
    with Shop(database=database, PAYMENTS_PROVIDER_TIMEOUT="1.5", PAYMENTS_COMPLETER="off") as shop:
        yield shop


@pytest.fixture(scope="module")
def shop_database(postgres_url: str) -> Iterator[str]:
    """A database for one shop, on the PostgreSQL of this worker."""
    with own_database(postgres_url) as url:
        yield url


@contextmanager
def own_database(postgres_url: str) -> Iterator[str]:
    """A new database on a server, which is dropped at the end."""
    name = f"t{secrets.token_hex(8)}"
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    yield urlsplit(postgres_url)._replace(path=f"/{name}").geturl()
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(sql.SQL("DROP DATABASE {} (FORCE)").format(sql.Identifier(name)))


@pytest.fixture
def name() -> str:
    """A random name, for the orders and keys of one test."""
    return f"t{secrets.token_hex(6)}"


@pytest.fixture
def route(shop: Shop) -> Iterator[NetworkRoute]:
    """A route to the shop that can be cut and blocked."""
    with open_route(shop) as route:
        yield route


@pytest.fixture
def skipped_sleeps() -> Iterator[list[float]]:
    """Skip the pauses between attempts; the list has their lengths."""
    with no_sleeping() as slept:
        yield slept
