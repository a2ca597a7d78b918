"""The matchmaking service in a process of its own, on each pair of database and ledger, and its users."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import httpx
import pytest

from examples.matchmaking.processes import Matchmaking

from ..support.processes import ForkedServer
from .conftest import own_database

LEDGERS = [
    "sqlite",
    pytest.param("postgres", marks=pytest.mark.server),
    pytest.param("redis", marks=pytest.mark.server),
]
PATIENCE = 60.0  # seconds to wait for an effect, on a busy machine


class ForkedMatchmaking(ForkedServer, Matchmaking):
    """A service from the forkserver, because the tests that kill it start it often."""


def settings_of(request: pytest.FixtureRequest, ledger: str) -> dict[str, str]:
    """Return the settings of a service on *ledger*: SQLite, PostgreSQL, or SQLite with its keys in Redis."""
    if ledger == "postgres":
        stack = ExitStack()
        request.addfinalizer(stack.close)
        return {"MATCHMAKING_DATABASE": stack.enter_context(own_database(request.getfixturevalue("postgres_url")))}
    if ledger == "redis":
        prefix = f"t{secrets.token_hex(8)}"
        return {"MATCHMAKING_LEDGER": f"{request.getfixturevalue('valkey_url')}?prefix={prefix}"}
    return {}


@pytest.fixture(scope="module", params=LEDGERS)
def dating(request: pytest.FixtureRequest) -> Iterator[Matchmaking]:
    """The service on each pair of database and ledger in turn."""
    with ForkedMatchmaking(**settings_of(request, request.param)) as service:
        yield service


@pytest.fixture
def ann(dating: Matchmaking) -> str:
    return dating.sign_in(f"ann-{secrets.token_hex(4)}")


@pytest.fixture
def bob(dating: Matchmaking) -> str:
    return dating.sign_in(f"bob-{secrets.token_hex(4)}")


def code(answer: httpx.Response) -> str:
    """Return the error code of a refusal."""
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    assert answer.json()["status"] == answer.status_code
    found: str = answer.json()["error_code"]
    return found


def until(true: Callable[[], bool]) -> None:
    ends = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < ends, "an effect that the test waits for did not happen"
        time.sleep(0.05)
