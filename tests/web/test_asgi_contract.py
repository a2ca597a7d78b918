"""The ASGI door keeps the door contract under every server and in every framework, on real sockets."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import psycopg
import pytest
from psycopg import sql

from tests.doors.contract import BodyCases, Caller, DoorContract, FaultCases, LifecycleCases

from ..conftest import unique_name
from .servers import AsgiServer


def served(server: str, framework: str) -> type[DoorContract]:
    """All of CASES A, B and C for one pair of them, on SQLite."""

    class Served(DoorContract):
        @pytest.fixture(scope="class")
        @classmethod
        def url(cls) -> Iterator[str]:
            with AsgiServer(server, framework) as running:
                yield running.url

    return Served


class TestUvicornStarlette(served("uvicorn", "starlette")):  # type: ignore[misc]
    """The door is one of Starlette's own middlewares."""


class TestHypercornStarlette(served("hypercorn", "starlette")):  # type: ignore[misc]
    """The door is one of Starlette's own middlewares."""


class TestGranianStarlette(served("granian", "starlette")):  # type: ignore[misc]
    """The door is one of Starlette's own middlewares."""


class TestUvicornInPython(served("uvicorn-h11", "starlette")):  # type: ignore[misc]
    """Its other parser of HTTP, and its other loop."""


class TestEveryFramework(LifecycleCases, BodyCases, FaultCases):
    """CASES C, inside each framework; what is read from a request is read before any of them sees it."""

    @pytest.fixture(scope="class", params=["starlette-between", "fastapi", "litestar", "quart", "django"])
    @classmethod
    def url(cls, request: pytest.FixtureRequest) -> Iterator[str]:
        with AsgiServer("uvicorn", request.param) as running:
            yield running.url

    @pytest.fixture
    def caller(self, url: str) -> Iterator[Caller]:
        with Caller(url) as caller:
            yield caller


class TestEveryOtherPair(BodyCases):
    """CASES 19, 21–23: how messages, streams and farewells go through is where servers and frameworks differ."""

    @pytest.fixture(
        scope="class", params=itertools.product(["hypercorn", "granian"], ["fastapi", "litestar", "quart", "django"])
    )
    @classmethod
    def url(cls, request: pytest.FixtureRequest) -> Iterator[str]:
        with AsgiServer(*request.param) as running:
            yield running.url

    @pytest.fixture
    def caller(self, url: str) -> Iterator[Caller]:
        with Caller(url) as caller:
            yield caller


class TestOnPostgres(DoorContract):
    """CASES A, B, C, on the other kind of ledger."""

    @pytest.fixture(scope="class")
    @classmethod
    def url(cls, postgres_url: str) -> Iterator[str]:
        schema = unique_name()
        mark = "&" if "?" in postgres_url else "?"
        with AsgiServer("uvicorn", "starlette", f"{postgres_url}{mark}schema={schema}") as running:
            yield running.url
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            connection.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(schema)))
