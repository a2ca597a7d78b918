"""The Django middleware keeps the door contract: sync views under gunicorn, async ones under uvicorn, on two ledgers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .contract import DoorContract, OtherPairContract
from .served import door_schema, gunicorn, uvicorn

__all__ = ["door_schema"]  # a fixture

APP = "tests.doors.apps_django_contract"


class TestDjangoUnderGunicorn(DoorContract):
    """Every case, on sync views."""

    @pytest.fixture(scope="class")
    @classmethod
    def url(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
        store = f"sqlite:///{tmp_path_factory.mktemp('once')}/once.db"
        with gunicorn(f"{APP}:wsgi", "--threads", "24", STORE=store, VIEWS="sync") as server:
            yield server.url


class TestDjangoUnderUvicornOnPostgres(DoorContract):
    """Every case, on async views."""

    @pytest.fixture(scope="class")
    @classmethod
    def url(cls, door_schema: str) -> Iterator[str]:
        with uvicorn(f"{APP}:asgi", STORE=door_schema, VIEWS="async") as server:
            yield server.url


class TestDjangoUnderUvicorn(OtherPairContract):  # type: ignore[misc, valid-type]
    """The cases in which servers differ."""

    @pytest.fixture(scope="class")
    @classmethod
    def url(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
        store = f"sqlite:///{tmp_path_factory.mktemp('once')}/once.db"
        with uvicorn(f"{APP}:asgi", STORE=store, VIEWS="async") as server:
            yield server.url
