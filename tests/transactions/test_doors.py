"""`effect = "transaction"` through the middlewares on real sockets: committed before the first byte, or rolled back."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from oncemore import Contract, Guard, Rule
from oncemore.errors import ConfigurationError, MissingDriver
from oncemore.web import asgi, wsgi
from tests.doors.live import keyed, live
from tests.doors.served import under_waitress

from .conftest import emptied, opened
from .doors import CONTRACT, Refused, Work, behind_asgi, behind_wsgi
from .shops import ON_POSTGRES, ON_SQLITE, POLICY, Shop

DOORS: dict[str, tuple[Callable[..., Any], str]] = {
    "asgi-psycopg": (behind_asgi, "psycopg-async"),
    "asgi-around-psycopg": (partial(behind_asgi, outermost=True), "psycopg-async"),
    "asgi-alchemy": (behind_asgi, "alchemy-under-a-loop"),
    "asgi-aiosqlite": (behind_asgi, "aiosqlite"),
    "wsgi-psycopg": (behind_wsgi, "psycopg"),
    "wsgi-alchemy": (behind_wsgi, "alchemy-psycopg"),
    "wsgi-sqlite": (behind_wsgi, "sqlite3"),
}
NOT_KEPT = "CONFLICT.idempotency.outcome_not_kept"


@pytest.fixture(params=[pytest.param(name, marks=[] if "sqlite" in name else [pytest.mark.server]) for name in DOORS])
async def shop(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Shop]:
    """The shop behind each middleware."""
    name = DOORS[request.param][1]
    if name in ON_SQLITE:
        kind, url = ON_SQLITE[name], f"sqlite:///{tmp_path / 'shop.db'}"
    else:
        kind, url = ON_POSTGRES[name], emptied(request.getfixturevalue("shops_url"))
    async for each in opened(kind, url):
        yield each


@pytest.fixture
def work(shop: Shop) -> Work:
    return Work(shop)


@pytest.fixture
def client(request: pytest.FixtureRequest, shop: Shop, work: Work) -> Iterator[httpx.Client]:
    """An HTTP client of the shop."""
    behind, _ = DOORS[request.node.callspec.params["shop"]]
    with behind(work, shop.guard) as client:
        yield client


def ask(client: httpx.Client, path: str, key: str = "k", **body: Any) -> httpx.Response:
    return client.post(path, json={"id": key, **body}, headers=keyed(key))


def said(response: httpx.Response) -> str | None:
    return response.headers.get("idempotency-status")


def test_success_is_committed_with_its_record_and_replayed(client: httpx.Client, work: Work) -> None:
    first, again = ask(client, "/refund"), ask(client, "/refund")
    assert (first.status_code, said(first), again.status_code, said(again)) == (201, "stored", 201, "replayed")
    assert first.json() == again.json() == {"run": 1}
    assert work.shop.refunds() == ["k, run 1"]


@pytest.mark.parametrize("status", [500, 503, 429])
def test_response_that_is_not_final_is_rolled_back(client: httpx.Client, work: Work, status: int) -> None:
    first = ask(client, "/refund", status=status)
    assert (first.status_code, said(first)) == (status, "unstored")
    assert work.shop.refunds() == []
    assert ask(client, "/refund", status=status).json() == {"run": 2}


@pytest.mark.parametrize("way", ["status", "abort"])
def test_final_refusal_is_stored_and_its_rows_rolled_back(client: httpx.Client, work: Work, way: str) -> None:
    """The status decides, because a framework makes the same response from a raised error and a returned one."""
    first, again = ask(client, "/refund", **{way: 422}), ask(client, "/refund", **{way: 422})
    assert (first.status_code, said(first), again.status_code, said(again)) == (422, "stored", 422, "replayed")
    assert first.content == again.content
    assert (work.shop.refunds(), len(work.bodies)) == ([], 1)


def test_refusal_with_on_refusal_commit_keeps_its_rows(client: httpx.Client, work: Work) -> None:
    first, again = ask(client, "/attempt", status=402), ask(client, "/attempt", status=402)
    assert (first.status_code, said(first), again.status_code, said(again)) == (402, "stored", 402, "replayed")
    assert work.shop.refunds() == ["k, run 1"]


def test_refused_stream_is_rolled_back_before_it_begins(client: httpx.Client, work: Work) -> None:
    first, again = ask(client, "/stream", status=422), ask(client, "/stream", status=422)
    assert first.text.startswith("begun 0 The transaction is over")
    assert (again.status_code, again.json()["error_code"]) == (409, NOT_KEPT)
    assert work.shop.refunds() == []


def test_stream_begins_after_the_commit(client: httpx.Client, work: Work) -> None:
    """After the first chunk, another connection counts the rows, and the handler asks for op.connection."""
    first = ask(client, "/stream")
    assert (first.status_code, said(first)) == (201, "unstored")
    assert first.text.startswith("begun 1 The transaction is over")
    again = ask(client, "/stream")
    assert (again.status_code, again.json()["error_code"]) == (409, NOT_KEPT)
    assert work.shop.refunds() == ["k, run 1"]


def test_stream_that_is_not_final_is_rolled_back_first(client: httpx.Client, work: Work) -> None:
    first = ask(client, "/stream", status=503)
    assert first.status_code == 503
    assert first.text.startswith("begun 0 The transaction is over")
    assert work.shop.refunds() == []
    assert ask(client, "/stream", status=503).status_code == 503


def test_ten_concurrent_requests_perform_once(client: httpx.Client, work: Work) -> None:
    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda _: ask(client, "/refund"), range(10)))
    assert sorted(map(str, map(said, answers))) == ["replayed"] * 9 + ["stored"]
    assert len(work.shop.refunds()) == 1


def test_refused_statement_is_503_and_the_retry_runs(client: httpx.Client, work: Work) -> None:
    """The handler runs once for each request, also if Flask or Starlette has made an error page of the refusal."""
    first = ask(client, "/refund", refused=1)
    assert (first.status_code, first.json()["error_code"]) == (503, "DEPENDENCY.unavailable")
    assert first.headers["retry-after"] == "1"
    assert len(work.bodies) == 1
    assert work.shop.refunds() == []
    second, third = (ask(client, "/refund", refused=1) for _ in range(2))
    assert (second.status_code, said(second), second.json()) == (201, "stored", {"run": 2})
    assert (said(third), work.shop.refunds()) == ("replayed", ["k, run 2"])


# ── A real write skew ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def serializing(request: pytest.FixtureRequest, shop: Shop, work: Work) -> Iterator[httpx.Client]:
    """A client of a shop whose transactions are SERIALIZABLE and which has two doctors on call."""
    shop.execute("CREATE TABLE doctors (name text PRIMARY KEY, on_call boolean)")
    shop.execute("INSERT INTO doctors VALUES ('ann', true), ('bob', true)")
    shop.execute("ALTER DATABASE oncemore_effects SET default_transaction_isolation = serializable")
    behind, _ = DOORS[request.node.callspec.params["shop"]]
    try:
        with behind(work, shop.made()) as client:
            yield client
    finally:
        shop.execute("ALTER DATABASE oncemore_effects RESET default_transaction_isolation")


@pytest.mark.server
@pytest.mark.parametrize(
    "shop", [name for name in DOORS if "sqlite" not in name], indirect=True
)  # which has one writer
def test_write_skew_is_503_and_the_retry_runs(
    request: pytest.FixtureRequest, serializing: httpx.Client, work: Work
) -> None:
    """Each doctor sees the other on call and leaves.  The retry of the refused request sees one doctor, who stays."""
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda name: ask(serializing, "/leave", name), ("ann", "bob")))
    assert sorted(answer.status_code for answer in answers) == [200, 503]
    assert len(work.bodies) == 2
    refused = "bob" if answers[0].status_code == 200 else "ann"
    again = [ask(serializing, "/leave", refused) for _ in range(2)]
    assert [(answer.status_code, said(answer)) for answer in again] == [(409, "stored"), (409, "replayed")]
    assert work.shop.execute("SELECT name FROM doctors WHERE on_call") == [(refused,)]
    if request.node.callspec.params["shop"].startswith(
        "asgi"
    ):  # a background task for each answer, none for the refusal
        assert sorted(work.told) == ["ann", "bob"]


@pytest.mark.parametrize("status", [200, 500])
def test_asgi_app_that_catches_a_refused_commit_gets_503(tmp_path: Path, status: int) -> None:
    """The commit is refused in the app's last send.  The app sends another response, but its effect was rolled back."""
    shop = ON_SQLITE["aiosqlite"](f"sqlite:///{tmp_path / 'shop.db'}")
    runs: list[int] = []

    def refused() -> Any:
        raise Refused
        yield

    async def app(scope: Any, receive: Any, send: Any) -> None:
        op = asgi.current_operation()
        runs.append(op.attempt)
        await op.connection.execute(f"INSERT INTO refunds VALUES ('run {len(runs)}', 'x')")
        if len(runs) == 1:
            op.borrowed("").commit = refused  # type: ignore[method-assign]
        try:
            await send({"type": "http.response.start", "status": 201, "headers": []})
            await send({"type": "http.response.body", "body": b"made"})
        except BaseException:
            await send({"type": "http.response.start", "status": status, "headers": []})
            await send({"type": "http.response.body", "body": b"sorry"})

    with live(asgi.IdempotencyMiddleware(app, guard=shop.guard, contract=CONTRACT)) as client:
        first, second = ask(client, "/refund"), ask(client, "/refund")
    assert (first.status_code, first.headers["retry-after"]) == (503, "1")
    assert (second.status_code, said(second), second.text) == (201, "stored", "made")
    assert shop.refunds() == ["run 2"]


def test_wsgi_app_that_catches_a_refused_commit_gets_503(tmp_path: Path) -> None:
    """The commit is refused in the app's own write.  The app goes on writing, but its effect was rolled back."""
    shop = ON_SQLITE["sqlite3"](f"sqlite:///{tmp_path / 'shop.db'}")
    runs: list[int] = []

    def refused() -> Any:
        raise Refused
        yield

    def app(environ: Any, start_response: Any) -> Any:
        op = wsgi.current_operation()
        runs.append(op.attempt)
        op.connection.execute(f"INSERT INTO refunds VALUES ('run {len(runs)}', 'x')")
        if len(runs) == 1:
            op.borrowed("").commit = refused  # type: ignore[method-assign]
        write = start_response("201 Created", [])
        for part in (b"made ", b"in ", b"the "):
            with suppress(BaseException):
                write(part)
        return [f"run {len(runs)}".encode()]

    with under_waitress(wsgi.IdempotencyMiddleware(app, guard=shop.guard, contract=CONTRACT)) as url:
        first, second = (httpx.post(f"{url}/refund", headers=keyed("k")) for _ in range(2))
    assert (first.status_code, first.headers["retry-after"]) == (503, "1")
    assert (second.status_code, second.text) == (201, "made in the run 2")
    assert shop.refunds() == ["run 2"]


def test_forgotten_streams_with_transaction_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="'refuse' or 'store'"):
        Contract(Rule("POST /x", effect="transaction", streams="release"))


async def test_background_task_is_dropped_if_the_transaction_was_rolled_back(tmp_path: Path) -> None:
    """The handler has ended the transaction itself, so its work is rolled back, and the client gets an error."""
    told: list[str] = []

    async def pay(request: Request) -> JSONResponse:
        await asgi.current_operation().connection.execute("ROLLBACK")
        return JSONResponse({}, 201, background=BackgroundTask(told.append, "paid"))

    guard = Guard(f"sqlite:///{tmp_path}/once.db")
    app = Starlette(routes=[Route("/refunds", pay, methods=["POST"])])
    transport = httpx.ASGITransport(app=asgi.IdempotencyMiddleware(app, guard=guard, contract=CONTRACT))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        answer = await client.post("/refunds", headers={"Idempotency-Key": "k1", "Authorization": "Bearer t"})
    await guard.aclose()
    assert (answer.status_code, told) == (500, [])


@pytest.mark.parametrize("middleware", [asgi.IdempotencyMiddleware, wsgi.IdempotencyMiddleware])
def test_transaction_rule_on_memory_is_refused_at_start(middleware: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"The rule 'POST /.what.' cannot be applied: .* lends no connection"):
        middleware(lambda *_: None, guard=Guard("memory://", policy=POLICY), contract=CONTRACT)


def test_asgi_transaction_without_aiosqlite_is_refused_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "aiosqlite", None)
    guard = Guard(f"sqlite:///{tmp_path}/once.db")
    with pytest.raises(MissingDriver, match=r"pip install 'oncemore\[aiosqlite\]'"):
        asgi.IdempotencyMiddleware(lambda *_: None, guard=guard, contract=CONTRACT)  # type: ignore[arg-type]
    wsgi.IdempotencyMiddleware(lambda *_: [], guard=guard, contract=CONTRACT)  # on threads, no driver is needed
