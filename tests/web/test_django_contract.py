"""The Django door keeps the door contract: sync views under gunicorn, async ones under uvicorn, on SQLite and PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.doors.contract import DoorContract

from .served import door_schema, gunicorn, uvicorn

__all__ = ["door_schema"]  # a fixture

APP = "tests.web.apps_django_contract"


class TestDjangoUnderGunicorn(DoorContract):
    @pytest.fixture(scope="class")
    @classmethod
    def url(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
        store = f"sqlite:///{tmp_path_factory.mktemp('once')}/once.db"
        with gunicorn(f"{APP}:wsgi", "--threads", "24", STORE=store, VIEWS="sync") as server:
            yield server.url


class TestDjangoUnderUvicorn(DoorContract):
    @pytest.fixture(scope="class")
    @classmethod
    def url(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
        store = f"sqlite:///{tmp_path_factory.mktemp('once')}/once.db"
        with uvicorn(f"{APP}:asgi", STORE=store, VIEWS="async") as server:
            yield server.url


class TestDjangoOnPostgres(DoorContract):
    @pytest.fixture(scope="class")
    @classmethod
    def url(cls, door_schema: str) -> Iterator[str]:
        with uvicorn(f"{APP}:asgi", STORE=door_schema, VIEWS="async") as server:
            yield server.url
