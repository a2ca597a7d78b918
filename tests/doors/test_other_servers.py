"""The recipes on the page about other servers, served unchanged, and `oncemore.web.http` by itself."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tornado.httpserver import HTTPServer
from tornado.netutil import bind_sockets

from oncemore import Contract, Guard, Rule
from oncemore.errors import StoreUnavailable
from oncemore.web.http import Idempotency, Request, Response, Streamed
from tests.docs.pages import BLOCKS

from .apps_aiohttp import serving
from .live import keyed

HEADERS = {"Authorization": "Bearer alice", "Content-Type": "application/json"}


@contextmanager
def in_a_loop(start: Callable[[Any], Any]) -> Iterator[str]:
    """Run *start*, which starts a server, on an event loop in a thread, and yield the server's URL."""
    loop = asyncio.new_event_loop()
    port, stop = loop.run_until_complete(start(loop))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        loop.call_soon_threadsafe(stop)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def tornado(app: Any) -> Any:
    async def start(loop: Any) -> Any:
        sockets = bind_sockets(0, "127.0.0.1")
        server = HTTPServer(app)
        server.add_sockets(sockets)
        return sockets[0].getsockname()[1], server.stop

    return in_a_loop(start)


def sanic(app: Any) -> Any:
    async def start(loop: Any) -> Any:
        listening = bind_sockets(0, "127.0.0.1")[0]
        server = await app.create_server(sock=listening, return_asyncio_server=True, access_log=False)
        await server.startup()
        await server.before_start()
        await server.after_start()
        return listening.getsockname()[1], server.close

    return in_a_loop(start)


SERVERS = {"aiohttp": (0, serving), "tornado": (1, tornado), "sanic": (2, sanic)}


@pytest.fixture(params=SERVERS)
def client(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[httpx.Client]:
    """A client of the recipe's app, under its own server."""
    number, serve = SERVERS[request.param]
    blocks = [each for each in BLOCKS if each.page.name == "other-servers.md" and each.language == "python"]
    monkeypatch.chdir(tmp_path)
    page: dict[str, Any] = {"__name__": "page"}
    exec(compile(blocks[number].code, "other-servers.md", "exec"), page)
    with serve(page["app"]) as url, httpx.Client(base_url=url, headers=HEADERS, timeout=20) as client:
        yield client


def test_recipe_guards_replays_refuses_and_looks_up(client: httpx.Client) -> None:
    order = {"amount": 100}
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: client.post("/refunds", json=order, headers=keyed("k")), range(8)))
    assert {answer.status_code for answer in answers} == {201}
    assert sorted(answer.headers["idempotency-status"] for answer in answers) == ["replayed"] * 7 + ["stored"]
    assert {answer.content for answer in answers} == {answers[0].content}
    assert answers[0].json()["id"] == "k"
    assert {answer.headers["content-type"] for answer in answers} == {answers[0].headers["content-type"]}
    mismatch = client.post("/refunds", json={"amount": 1}, headers=keyed("k"))
    missing = client.post("/refunds", json=order)
    assert (mismatch.status_code, missing.status_code) == (409, 400)
    assert missing.json()["error_code"] == "VALIDATION.idempotency.key_missing"
    found = client.get("/idempotency", params={"operation": "POST /refunds", "key": "k"})
    assert (found.status_code, found.json()["state"]) == (200, "settled")


# ── The parts themselves ──────────────────────────────────────────────────────────────────────────────────────────────


def asked(path: str = "/x", key: str = "k", method: str = "POST", body: bytes = b"{}") -> Request:
    headers = [("idempotency-key", key), ("authorization", "a"), ("content-type", "application/json")]
    return Request(method, path, "", headers, body)


def made(body: bytes = b"made") -> Response:
    return Response(201, [("X-Made", "yes")], body)


@pytest.fixture
def idempotency() -> Idempotency:
    rules = (Rule("POST /x", max_request=10), Rule("POST /if", if_match=True), Rule("POST /again", streams="release"))
    return Idempotency(guard=Guard("memory://"), contract=Contract(*rules, undeclared="pass"))


def test_http_run_performs_once_and_replays(idempotency: Idempotency) -> None:
    runs: list[int] = []

    def perform() -> Response:
        runs.append(1)
        return made()

    first, again = (idempotency.run(asked(), perform) for _ in range(2))
    assert isinstance(again, Response)
    assert (again.status, again.body, len(runs)) == (201, b"made", 1)
    assert ("x-made", "yes") in again.headers
    assert ("idempotency-status", "stored") in first.headers
    assert ("idempotency-status", "replayed") in again.headers


def test_http_body_limit_tells_what_is_guarded(idempotency: Idempotency) -> None:
    key = [("idempotency-key", "k")]
    limits = [idempotency.body_limit(*what, key) for what in (("POST", "/x"), ("POST", "/y"), ("GET", "/x"))]
    assert limits == [10, None, None]
    assert idempotency.body_limit("GET", "/idempotency", []) == 0
    assert idempotency.run(asked(body=b"x" * 11), made).status == 413
    assert idempotency.run(asked("/y"), made) == made()


def test_http_failed_perform_frees_the_key(idempotency: Idempotency) -> None:
    def failing() -> Response:
        raise LookupError

    with pytest.raises(LookupError):
        idempotency.run(asked(), failing)
    assert idempotency.run(asked(), made).status == 201


def test_http_streamed_response_is_not_repeated(idempotency: Idempotency) -> None:
    stream = Streamed(200, [])
    first = idempotency.run(asked(), lambda: stream)
    assert ("idempotency-reason", "streaming") in first.headers
    assert idempotency.run(asked(), lambda: stream).status == 409
    for _ in range(2):
        assert isinstance(idempotency.run(asked("/again"), lambda: stream), Streamed)


def test_http_if_match_asks_the_etag_function(idempotency: Idempotency) -> None:
    request = asked("/if")
    request.headers.append(("if-match", '"v1"'))  # type: ignore[attr-defined]
    assert idempotency.run(request, made).status == 500  # and the log says to pass etag=
    assert idempotency.run(request, made, etag=lambda: (200, '"v2"')).status == 412
    assert idempotency.run(request, made, etag=lambda: (200, '"v1"')).status == 201


async def test_http_arun_finishes_after_its_caller_is_cancelled(idempotency: Idempotency) -> None:
    begun, gate = asyncio.Event(), asyncio.Event()

    async def perform() -> Response:
        begun.set()
        await gate.wait()
        return made()

    task = asyncio.create_task(idempotency.arun(asked(), perform))
    await begun.wait()
    task.cancel()
    await asyncio.sleep(0)
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task

    async def never() -> Response:
        raise AssertionError

    assert ("idempotency-status", "replayed") in (await idempotency.arun(asked(), never)).headers


def test_http_database_refusal_is_503(tmp_path: Path) -> None:
    contract = Contract(Rule("POST /x", effect="transaction"))
    idempotency = Idempotency(guard=Guard(f"sqlite:///{tmp_path}/once.db"), contract=contract)

    class Refused(Exception):
        sqlite_errorcode = 5

    def refused() -> Response:
        raise Refused

    assert idempotency.run(asked(), refused).status == StoreUnavailable.status == 503
    assert idempotency.run(asked(), made).status == 201


def test_perform_that_gives_no_response_frees_the_key() -> None:
    door = Idempotency(guard=Guard("memory://"))
    asked = Request("POST", "/pay", "", [("idempotency-key", "k"), ("authorization", "a")], b"{}")
    with pytest.raises(TypeError, match="return a Response or a Streamed"):
        door.run(asked, lambda: None)  # type: ignore[arg-type, return-value]
    assert door.run(asked, lambda: Response(201, [], b"made")).status == 201
