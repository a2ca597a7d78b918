"""The crash points once more over HTTP: a server is killed there, starts again, and the client's retry is answered."""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from pathlib import Path

import httpx
import pytest

from oncemore.testing.crashes import POINTS
from tests.support.processes import ForkedServer
from tests.transactions.conftest import emptied

from .crashing import LEASE, opened
from .test_crash_matrix import IN_DOUBT, note

pytestmark = pytest.mark.chaos

EVERYWHERE = (*POINTS, "during response")
BODY = {"payment": "p1", "amount": "10.00"}


class Service(ForkedServer):
    """The refund service, in a process of its own, which dies at *point*."""

    def __init__(self, level: str, driver: str, store: str, point: str) -> None:
        super().__init__()
        self.level = level
        self.driver = driver
        self.store = store
        self.point = point

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        module = "tests.chaos.service"
        return [sys.executable, "-m", module, self.level, self.driver, self.store, str(self.port), self.point]

    def is_ready(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False

    def refund(self) -> httpx.Response:
        return httpx.post(f"{self.url}/refunds", json=BODY, headers={"Idempotency-Key": "k1"}, timeout=10)


@pytest.fixture
def store(driver: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if driver == "aiosqlite":
        return f"sqlite:///{tmp_path / 'shop.db'}"
    return emptied(request.getfixturevalue("shops_url"))


@pytest.mark.parametrize("point", EVERYWHERE)
@pytest.mark.parametrize("level", ["transaction", "lease, hold"])
@pytest.mark.parametrize("driver", ["aiosqlite", pytest.param("psycopg-async", marks=pytest.mark.server)])
def test_a_server_killed_there_answers_the_retry_and_refunds_once(
    level: str, driver: str, point: str, store: str
) -> None:
    shop = opened(driver, store)
    with Service(level, driver, store, point) as server:
        with pytest.raises(httpx.TransportError):
            server.refund()
        server.point = ""
        server.crash()  # it is dead already; this only tidies up
        server.start()
        if level != "transaction" and point in IN_DOUBT:
            time.sleep(LEASE)
        first, again = server.refund(), server.refund()
    refunds = shop.refunds()
    if level == "lease, hold" and point in IN_DOUBT:
        assert first.status_code == again.status_code == 409
        assert first.json()["error_code"] == "CONFLICT.idempotency.outcome_unknown"
        assert len(refunds) <= 1
    else:
        assert (first.status_code, first.json(), first.headers["location"]) == (201, {"refund": "k1"}, "/refunds/k1")
        assert (again.content, again.headers["idempotency-status"]) == (first.content, "replayed")
        assert refunds == ["k1"]
    if point == "during response":
        note(level, f"{driver} over HTTP", point, "replays", len(refunds))
