"""A client killed at any point, and the next process that continues under the same key: one effect."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from oncemore.client.retry import Retry
from tests.client import clients
from tests.client.clients import CLIENTS
from tests.client.server import Act, Server, Visit, answer, effect, performed, response, then
from tests.support import processes

from .killed_client import BODY, CREDENTIALS

pytestmark = pytest.mark.chaos

RETRY = Retry(base=0.01, budget=None)


def kill(visit: Visit) -> None:
    """Kill the client that sent this, and wait until it is gone."""
    os.kill(int(visit.headers["x-pid"]), signal.SIGKILL)


def half_an_answer(visit: Visit) -> None:
    visit.send(response(201, {}, b'{"id": "r1"}')[:30])


# The points at which the client dies, and how many effects there are before the request is resumed.
IN_THE_CLIENT = {"before the claim": 0, "after the claim": 0, "before settling": 1, "after settling": 1}
ON_THE_WIRE: dict[str, Act] = {
    "before the effect": kill,
    "after the effect": then(effect, kill),
    "in the middle of the answer": then(effect, half_an_answer, kill),
    "between two attempts": answer(503),
}


def run_killed(library: str, point: str, url: str, path: Path) -> None:
    command = [sys.executable, "-m", "tests.chaos.killed_client", library, point, url, str(path)]
    ended = processes.run_to_end(command)
    assert ended.returncode == -signal.SIGKILL, ended.stderr


def resumed(library: str, path: Path) -> tuple[list[Any], list[Any]]:
    client = CLIENTS[library](RETRY, f"sqlite:///{path}")
    client.headers = CREDENTIALS
    return clients.resumed(client)


@pytest.mark.parametrize("library", CLIENTS)
@pytest.mark.parametrize("point", ["after the claim", "before settling"])
def test_client_killed_at_keyring_call_is_resumed(library: str, point: str, tmp_path: Path) -> None:
    with Server() as server:
        run_killed(library, point, server.url, tmp_path / "keys.db")
        assert len(server.effects) == IN_THE_CLIENT[point]
        before, results = resumed(library, tmp_path / "keys.db")
    assert [entry.state for entry in before] == ["sending"]
    assert [result.error for result in results] == [None]
    assert_one_operation(server)


@pytest.mark.parametrize("library", CLIENTS)
@pytest.mark.parametrize("moment", ["before the effect", "after the effect", "in the middle of the answer"])
def test_client_killed_while_sending_is_resumed(library: str, moment: str, tmp_path: Path) -> None:
    with Server(ON_THE_WIRE[moment], default=performed()) as server:
        run_killed(library, "on the wire", server.url, tmp_path / "keys.db")
        _, results = resumed(library, tmp_path / "keys.db")
    assert [result.error for result in results] == [None]
    assert len(server.visits) == 2
    assert_one_operation(server)


def test_client_killed_between_attempts_is_resumed(tmp_path: Path) -> None:
    with Server(answer(503), then(answer(503), kill), default=performed()) as server:
        run_killed("httpx", "on the wire", server.url, tmp_path / "keys.db")
        resumed("httpx", tmp_path / "keys.db")
    assert_one_operation(server)


@pytest.mark.parametrize(("point", "effects"), [("before the claim", 0), ("after settling", 1)])
def test_outside_these_points_nothing_is_left_to_resume(point: str, effects: int, tmp_path: Path) -> None:
    with Server() as server:
        run_killed("httpx", point, server.url, tmp_path / "keys.db")
        assert resumed("httpx", tmp_path / "keys.db") == ([], [])
    assert list(server.effects.values()) == [1] * effects


def test_credentials_are_not_written_down(tmp_path: Path) -> None:
    """Resuming goes through the client, which has its own."""
    with Server() as server:
        run_killed("httpx", "after the claim", server.url, tmp_path / "keys.db")
        written = b"".join(file.read_bytes() for file in tmp_path.iterdir())
        assert BODY in written
        assert b"secret" not in written
        resumed("httpx", tmp_path / "keys.db")
    assert server.visits[0].headers["authorization"] == CREDENTIALS["Authorization"]
    assert all(file.stat().st_mode & 0o077 == 0 for file in tmp_path.iterdir())


def test_living_process_keeps_its_entries(tmp_path: Path) -> None:
    path = tmp_path / "keys.db"
    looked = []
    with Server(then(lambda visit: looked.append(resumed("httpx", path)), performed())) as server:
        command = [sys.executable, "-m", "tests.chaos.killed_client", "httpx", "never", server.url, str(path)]
        processes.run_to_end(command).check_returncode()
    assert looked == [([], [])]
    assert len(server.visits) == 1


def assert_one_operation(server: Server) -> None:
    assert list(server.effects.values()) == [1]
    assert {(visit.key, visit.body, visit.headers["content-type"]) for visit in server.visits} == {
        (server.visits[0].key, BODY, "application/json")
    }
