"""The WSGI middleware keeps the door contract: Flask and a plain app, on real sockets, on SQLite and on PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .app import ContractApp
from .apps_wsgi import FRAMEWORKS
from .contract import DoorContract, OtherPairContract, Served
from .served import IN_A_THREAD, door_schema, gunicorn

__all__ = ["door_schema"]  # a fixture


def in_a_thread(server: str, framework: str) -> type[Served]:
    class ServedInAThread(OtherPairContract):  # type: ignore[misc, valid-type]
        @pytest.fixture(scope="class")
        @classmethod
        def url(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
            app = ContractApp(f"sqlite:///{tmp_path_factory.mktemp('once')}/once.db")
            with IN_A_THREAD[server](FRAMEWORKS[framework](app)) as url:
                yield url
            app.guard.close()

    return ServedInAThread


class TestFlaskUnderGunicornOnPostgres(DoorContract):
    """Every case."""

    @pytest.fixture(scope="class")
    @classmethod
    def url(cls, door_schema: str) -> Iterator[str]:
        with gunicorn(
            "tests.doors.apps_wsgi:make()", "--threads", "24", FRAMEWORK="flask", STORE=door_schema
        ) as server:
            yield server.url


class TestFlaskUnderWaitress(in_a_thread("waitress", "flask")):  # type: ignore[misc]
    """The cases in which servers differ."""


class TestFlaskUnderWerkzeug(in_a_thread("werkzeug", "flask")):  # type: ignore[misc]
    """Without two cases: this server takes a line break in a header for its end, and closes each connection."""

    test_key_with_line_break_or_zero_never_runs = None
    test_two_requests_on_one_connection_do_not_mix = None


class TestPlainUnderGunicorn(OtherPairContract):  # type: ignore[misc, valid-type]
    """The cases in which frameworks differ."""

    @pytest.fixture(scope="class")
    @classmethod
    def url(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
        store = f"sqlite:///{tmp_path_factory.mktemp('once')}/once.db"
        with gunicorn("tests.doors.apps_wsgi:make()", "--threads", "24", FRAMEWORK="plain", STORE=store) as server:
            yield server.url
