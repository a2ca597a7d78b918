"""The ASGI door through kills and freezes of its process, on ledgers that outlive it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.doors.contract import CrashCases
from tests.doors.servers import AsgiServer


class TestOnSqlite(CrashCases):
    """On a file."""

    @pytest.fixture
    def server(self) -> Iterator[AsgiServer]:
        with AsgiServer("uvicorn") as server:
            yield server

    @pytest.fixture
    def second(self, server: AsgiServer) -> Iterator[AsgiServer]:
        with AsgiServer("uvicorn", store=server.store) as second:
            yield second


class TestOnPostgres(CrashCases):
    """On a server."""

    @pytest.fixture
    def store(self, postgres_url: str, postgres_schema: str) -> str:
        return f"{postgres_url}{'&' if '?' in postgres_url else '?'}schema={postgres_schema}"

    @pytest.fixture
    def server(self, store: str) -> Iterator[AsgiServer]:
        with AsgiServer("uvicorn", store=store) as server:
            yield server

    @pytest.fixture
    def second(self, store: str) -> Iterator[AsgiServer]:
        with AsgiServer("hypercorn", store=store) as second:
            yield second
