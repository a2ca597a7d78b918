"""A provider and a service, as real processes, on SQLite and on PostgreSQL: one pair of each for all tests of a file."""

from __future__ import annotations

import json
import secrets
import sqlite3
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
from psycopg import sql

from examples.payments.processes import Provider, Service, PaymentSystem
from oncemore.client.deadlines import no_sleeping

from ..support.processes import ForkedServer
from .gateway import Road, road_to

STORES = ["sqlite", pytest.param("postgres", marks=pytest.mark.server)]


class RaisedProvider(ForkedServer, Provider):
    """A service from the forkserver, because the tests of a killed service start it again and again."""


class RaisedService(ForkedServer, Service):
    """A provider from the forkserver."""


class Shop(PaymentSystem):
    """The two processes, and a look into the service's database and log that does not ask the service."""

    def __init__(self, **settings: str) -> None:
        super().__init__(**settings)  # type: ignore[arg-type]
        self.provider = RaisedProvider(self.provider.webhooks)
        known = {**self.service.settings, "PAYMENTS_PROVIDER": self.provider.url}
        self.service = RaisedService(self.service.port, **known)

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
        """The lines of the service's log that have these fields."""
        lines = [json.loads(line) for line in self.service.log.splitlines() if line.startswith("{")]
        return [line for line in lines if all(line.get(name) == value for name, value in fields.items())]

    def counted(self, name: str) -> int:
        """One of the service's counters."""
        text = self.get("/metrics").text
        counts = dict(line.split() for line in text.splitlines())
        return int(counts.get(f"{name}_total", 0))


@pytest.fixture(scope="module", params=STORES)
def shop(request: pytest.FixtureRequest) -> Iterator[Shop]:
    """A provider and a service on each database in turn."""
    database = request.getfixturevalue("shop_database") if request.param == "postgres" else ""
    # Without the completer: here it is the callers who ask again, and each of their requests counts.
    with Shop(database=database, PAYMENTS_PROVIDER_TIMEOUT="1.5", PAYMENTS_COMPLETER="off") as shop:
        yield shop


@pytest.fixture(scope="module")
def shop_database(postgres_url: str) -> Iterator[str]:
    """A database for one shop on the worker's PostgreSQL."""
    name = f"t{secrets.token_hex(8)}"
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    yield urlsplit(postgres_url)._replace(path=f"/{name}").geturl()
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(sql.SQL("DROP DATABASE {} (FORCE)").format(sql.Identifier(name)))


@pytest.fixture
def name() -> str:
    """A word of this test's own, for its orders and keys."""
    return f"t{secrets.token_hex(6)}"


@pytest.fixture
def road(shop: Shop) -> Iterator[Road]:
    """A road to the shop, to be cut and blocked."""
    with road_to(shop) as road:
        yield road


@pytest.fixture
def quiet() -> Iterator[list[float]]:
    """The pauses between attempts, noted and not slept."""
    with no_sleeping() as slept:
        yield slept
