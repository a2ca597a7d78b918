"""`Guard("django:alias")` end to end: a project with a model, the middleware, and real servers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.doors.live import keyed
from tests.doors.served import gunicorn, uvicorn

from .conftest import emptied

APP = "tests.transactions.django_shop.settings"
SQLITE = ["gunicorn sync sqlite plain", "uvicorn async sqlite plain"]
POSTGRES = [
    "gunicorn sync postgres requests",
    "gunicorn sync postgres plain",
    "uvicorn sync postgres plain",
    "uvicorn async postgres plain",
]


class Caller:
    """Sends requests to the project's views of one *kind*, sync or async."""

    def __init__(self, client: httpx.Client, kind: str) -> None:
        self.client = client
        self.kind = kind

    def ask(self, what: str, key: str = "k", **body: Any) -> httpx.Response:
        return self.client.post(f"/{self.kind}/{what}", json={"id": key, **body}, headers=keyed(key))

    def seen(self) -> dict[str, Any]:
        return dict(self.client.get("/seen").json())


@pytest.fixture(params=[*SQLITE, *(pytest.param(each, marks=pytest.mark.server) for each in POSTGRES)])
def caller(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Caller]:
    """A caller of the project under each server, with each kind of view and database."""
    server, kind, database, atomic = request.param.split()
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    if database == "postgres":
        url = emptied(request.getfixturevalue("shops_url"))
    environment = {"DJANGO_SETTINGS_MODULE": APP, "DATABASE": url, "ATOMIC": atomic}
    if server == "gunicorn":
        served = gunicorn(f"{APP}:wsgi()", "--threads", "8", **environment)
    else:
        served = uvicorn(f"{APP}:asgi", "--factory", **environment)
    with served, httpx.Client(base_url=served.url, timeout=20) as client:
        yield Caller(client, kind)


def said(response: httpx.Response) -> str | None:
    return response.headers.get("idempotency-status")


def test_request_and_its_effects_commit_together(caller: Caller) -> None:
    """The cases share one server, and run one after the other."""
    first, again = caller.ask("refund"), caller.ask("refund")
    assert (first.status_code, said(first), again.status_code, said(again)) == (201, "stored", 201, "replayed")
    assert caller.seen()["refunds"] == caller.seen()["told"] == ["k, run 1"]

    failed = caller.ask("refund", "k2", status=503)
    assert (failed.status_code, said(failed)) == (503, "unstored")
    final, repeated = caller.ask("refund", "k3", status=422), caller.ask("refund", "k3", status=422)
    assert (final.status_code, said(final), said(repeated)) == (422, "stored", "replayed")
    assert caller.seen()["refunds"] == caller.seen()["told"] == ["k, run 1"]

    refused, retried = caller.ask("refund", "k4", refused=1), caller.ask("refund", "k4", refused=1)
    assert (refused.status_code, refused.json()["error_code"]) == (503, "DEPENDENCY.unavailable")
    assert refused.headers["retry-after"] == "1"
    assert (retried.status_code, said(retried), retried.json()) == (201, "stored", {"run": 5})

    stream, late = caller.ask("stream", "k6"), caller.ask("stream", "k6")
    assert (stream.status_code, said(stream), late.status_code) == (201, "unstored", 409)
    assert stream.text.startswith("begun The transaction is over")
    assert caller.seen()["refunds"] == ["k, run 1", "k4, run 5", "k6, run 6"]
    assert caller.seen()["told"] == ["k, run 1", "k4, run 5", "k6, run 6"]

    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: caller.ask("refund", "k7"), range(6)))
    assert sorted(map(str, map(said, answers))) == ["replayed"] * 5 + ["stored"]
    assert len(caller.seen()["refunds"]) == 4


def test_transaction_ended_by_the_view_is_noticed(caller: Caller, request: pytest.FixtureRequest) -> None:
    """With ATOMIC_REQUESTS, Django's savepoint is missing first, so Django answers with its own error page."""
    ended = caller.ask("refund", commit=True)
    assert (ended.status_code, said(ended) == "stored") == (500, False)
    if "requests" not in request.node.callspec.params["caller"]:
        assert ended.json()["error_code"] == "CONFIGURATION.transaction_ended"


def test_transaction_marked_for_rollback_is_no_success(caller: Caller, request: pytest.FixtureRequest) -> None:
    """With ATOMIC_REQUESTS only the view's block is marked: its effects are rolled back, and the outcome is kept."""
    marked = caller.ask("refund", mark=True)
    if "requests" in request.node.callspec.params["caller"]:
        assert (marked.status_code, said(marked)) == (201, "stored")
    else:
        assert (marked.status_code, marked.json()["error_code"]) == (500, "CONFIGURATION.transaction_ended")
    assert caller.seen()["refunds"] == []


@pytest.mark.server
@pytest.mark.parametrize("caller", POSTGRES, indirect=True)
def test_write_skew_is_503_and_the_retry_runs(caller: Caller) -> None:
    """SQLite has one writer at a time, so it has no write skew."""
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda name: caller.ask("leave", name), ("ann", "bob")))
    assert sorted(answer.status_code for answer in answers) == [200, 503]
    refused = "bob" if answers[0].status_code == 200 else "ann"
    assert (caller.seen()["on_call"], len(caller.seen()["bodies"])) == ([refused], 2)
    again = caller.ask("leave", refused)
    assert (again.status_code, said(again), caller.seen()["on_call"]) == (409, "stored", [refused])
