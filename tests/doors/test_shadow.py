"""Shadow mode: with `enforce=False` no answer changes, and verdicts are reported."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import flask
import httpx
import pytest
from aiohttp import web
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from oncemore import Contract, Guard, Rule
from oncemore._ledger.events import Event
from oncemore._ledger.shadow import count_verdicts
from oncemore._runtime.plan import run
from oncemore.errors import StoreUnavailable
from oncemore.observe.metrics import guard_measurements
from oncemore.stores.memory import MemoryStore
from oncemore.web import aiohttp, asgi, aws_lambda, http, wsgi
from tests.tools.command import oncemore

from .apps_aiohttp import serving
from .live import keyed, live
from .served import under_waitress

RULES = (Rule("POST /pay", name="pay", key="required"), Rule("POST /fail", name="fail"))


class Service:
    """Counts its runs; `/fail` fails at the first."""

    def __init__(self) -> None:
        self.runs = 0

    def answer(self, path: str, body: bytes) -> tuple[dict[str, Any], int]:
        self.runs += 1
        return {"run": self.runs, "body": body.decode()}, 503 if path == "/fail" and self.runs == 1 else 201


@contextmanager
def starlette(service: Service, **options: Any) -> Iterator[str]:
    async def view(request: Request) -> JSONResponse:
        body, status = service.answer(request.url.path, await request.body())
        return JSONResponse(body, status)

    app = Starlette(routes=[Route(path, view, methods=["GET", "POST"]) for path in ("/pay", "/fail", "/idempotency")])
    app.add_middleware(asgi.IdempotencyMiddleware, **options)
    with live(app) as client:
        yield str(client.base_url)


@contextmanager
def in_flask(service: Service, **options: Any) -> Iterator[str]:
    app = flask.Flask(__name__)

    @app.route("/<path:what>", methods=["GET", "POST"])
    def view(what: str) -> Any:
        return service.answer(f"/{what}", flask.request.get_data())

    app.wsgi_app = wsgi.IdempotencyMiddleware(app.wsgi_app, **options)  # type: ignore[method-assign]
    with under_waitress(app) as url:
        yield url


@contextmanager
def in_aiohttp(service: Service, **options: Any) -> Iterator[str]:
    async def view(request: web.Request) -> web.Response:
        body, status = service.answer(request.path, await request.read())
        return web.json_response(body, status=status)

    app = web.Application()
    aiohttp.IdempotencyMiddleware(app, **options)
    app.router.add_route("*", "/{what:.*}", view)
    with serving(app) as url:
        yield url


SERVERS: dict[str, Callable[..., Any]] = {"asgi": starlette, "wsgi": in_flask, "aiohttp": in_aiohttp}


@pytest.fixture(params=SERVERS)
def serve(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return SERVERS[request.param]


@pytest.mark.parametrize("where", ["middleware", "rule"])
def test_shadow_changes_no_answer_and_reports_verdicts(serve: Callable[..., Any], where: str, tmp_path: Path) -> None:
    """The same requests with and without the middleware get the same answers, header by header."""
    events: list[Event] = []
    url = f"sqlite:///{tmp_path}/once.db"
    guard = Guard(url, observers=[events.append])
    rules = RULES if where == "middleware" else [Rule(rule.match, **{**rule.given, "enforce": False}) for rule in RULES]
    options = {"guard": guard, "contract": Contract(*rules), "enforce": where == "rule"}
    service = Service()

    def ask(client: httpx.Client, path: str, key: str | None, amount: int) -> tuple[int, Any, set[str]]:
        answer = client.post(path, json={"amount": amount}, headers=keyed(key) if key else {})
        return answer.status_code, answer.json()["run"], {name for name in answer.headers if name.startswith("idem")}

    with serve(service, **options) as base, httpx.Client(base_url=base, headers={"Authorization": "a"}) as client:
        story = [("/fail", "f", 1), ("/fail", "f", 1), ("/pay", "k", 1), ("/pay", "k", 1), ("/pay", "k", 2)]
        answers = [ask(client, *step) for step in [*story, ("/pay", None, 1)]]
        if where == "middleware":
            assert client.get("/idempotency").json()["run"] == 7  # the app's own route
    assert answers == [(503, 1, set()), *((201, run, set()) for run in range(2, 7))]
    shadowed = [(event.operation.name, event.detail, event.code) for event in events]
    assert shadowed == [
        ("pay", "replayed", ""),
        ("pay", "refused", "CONFLICT.idempotency.payload_mismatch"),
        ("pay", "refused", "VALIDATION.idempotency.key_missing"),
    ]
    assert {event.kind for event in events} == {"shadowed"}
    measured = [each.values for event in events for each in guard_measurements(event) if "shadowed" in each.metric.name]
    assert measured == [("pay", "replayed"), ("pay", "refused"), ("pay", "refused")]
    assert oncemore("stats", "--store", url, "--json").json["shadow"] == {
        "replayed": {"pay": 1},
        "refused": {"pay": 2},
    }
    assert "would have been" in oncemore("stats", "--store", url).out


def test_shadow_request_while_the_first_runs_would_wait(tmp_path: Path) -> None:
    guard = Guard("memory://")
    idempotency = http.Idempotency(guard=guard, contract=Contract(*RULES), enforce=False)
    headers = [("idempotency-key", "k"), ("authorization", "a")]
    asked = http.Request("POST", "/pay", "", headers, b"{}")
    made = http.Response(201, [], b"made")

    def twice() -> http.Response:
        assert idempotency.run(asked, lambda: made) == made
        return made

    assert idempotency.run(asked, twice) == made
    assert run(count_verdicts(guard.store)) == {"waited": {"pay": 1}}


def test_shadow_records_are_not_replayed_once_the_rule_is_enforced() -> None:
    guard = Guard("memory://")
    asked = http.Request("POST", "/pay", "", [("idempotency-key", "k"), ("authorization", "a")], b"{}")
    bodies = []
    for enforce, body in ((False, b"observed"), (True, b"first"), (True, b"second")):
        door = http.Idempotency(guard=guard, contract=Contract(*RULES), enforce=enforce)
        answer = door.run(asked, lambda body=body: http.Response(201, [], body))  # type: ignore[misc]
        assert isinstance(answer, http.Response)
        bodies.append(answer.body)
    assert bodies == [b"observed", b"first", b"first"]


class Upstream(Exception):
    status = 404  # as clients' errors tell what another server has answered


def test_shadow_error_with_a_status_is_no_response() -> None:
    events: list[Event] = []
    guard = Guard("memory://", observers=[events.append])
    door = http.Idempotency(guard=guard, contract=Contract(*RULES), enforce=False)
    asked = http.Request("POST", "/pay", "", [("idempotency-key", "k"), ("authorization", "a")], b"{}")

    def fail() -> http.Response:
        raise Upstream

    for _ in range(2):
        with pytest.raises(Upstream):
            door.run(asked, fail)
    assert events == []  # an enforced rule would have performed both times


async def test_shadow_cancels_the_app_as_without_a_middleware() -> None:
    door = http.Idempotency(guard=Guard("memory://"), contract=Contract(*RULES), enforce=False)
    asked = http.Request("POST", "/pay", "", [("idempotency-key", "k"), ("authorization", "a")], b"{}")
    begun = asyncio.Event()

    async def wait() -> http.Response:
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    task = asyncio.create_task(door.arun(asked, wait))
    await begun.wait()
    task.cancel()
    assert await asyncio.wait([task], timeout=20) == ({task}, set())
    assert task.cancelled()


def test_shadow_passes_long_bodies_on_in_aiohttp() -> None:
    async def size(request: web.Request) -> web.Response:
        return web.Response(text=str(sum([len(chunk) async for chunk in request.content.iter_any()])))

    app = web.Application(client_max_size=2000)
    contract = Contract(Rule("POST /size", max_request=1000))
    aiohttp.IdempotencyMiddleware(app, guard=Guard("memory://"), contract=contract, enforce=False)
    app.router.add_post("/size", size)
    with serving(app) as url, httpx.Client(base_url=url, headers={"Authorization": "a", **keyed("k")}) as client:
        assert [client.post("/size", content=b"x" * length).text for length in (10, 5000)] == ["10", "5000"]
        assert client.post("/size", content=iter([b"x" * 5000])).text == "5000"


def test_shadow_leaves_bodies_and_cancellation_to_django() -> None:
    command = [sys.executable, "-m", "tests.doors.observed_django"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(ran.stdout) == [5000, 0, "replayed", 0, "cancelled"]


def test_shadow_survives_a_ledger_that_is_down(tmp_path: Path) -> None:
    guard = Guard(f"sqlite:///{tmp_path}/missing/once.db")
    door = http.Idempotency(guard=guard, contract=Contract(*RULES), enforce=False)
    asked = http.Request("POST", "/pay", "", [("idempotency-key", "k"), ("authorization", "a")], b"{}")
    assert door.run(asked, lambda: http.Response(201, [], b"made")).status == 201


def test_shadow_pauses_while_the_ledger_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one request in a while asks a ledger that is down, because it waits for the timeout."""
    now, asked = 1000.0, 0

    class Down(MemoryStore):
        def claim(self, *args: Any, **options: Any) -> Any:
            nonlocal asked
            asked += 1
            raise StoreUnavailable("away")

    class Clock:
        def monotonic(self) -> float:
            return now

    monkeypatch.setattr("oncemore.web.shadow.SYSTEM", Clock())
    door = http.Idempotency(guard=Guard(Down()), contract=Contract(*RULES), enforce=False)
    request = http.Request("POST", "/pay", "", [("idempotency-key", "k"), ("authorization", "a")], b"{}")
    for seconds, expected in ((0, 1), (1, 1), (28, 1), (31, 2), (1, 2)):
        now += seconds
        assert door.run(request, lambda: http.Response(201, [], b"made")).status == 201
        assert asked == expected


def test_shadow_of_a_lambda_function_passes_its_answer() -> None:
    runs: list[int] = []

    def function(event: Any, context: Any) -> Any:
        runs.append(1)
        return {"statusCode": 201, "body": json.dumps({"run": len(runs)})}

    guard = Guard("memory://")
    door = aws_lambda.IdempotencyMiddleware(function, guard=guard, contract=Contract(*RULES), enforce=False)
    event = {
        "version": "2.0",
        "rawPath": "/pay",
        "rawQueryString": "",
        "headers": {"idempotency-key": "k", "authorization": "a"},
        "requestContext": {"http": {"method": "POST", "path": "/pay"}, "stage": "$default"},
        "body": "{}",
        "isBase64Encoded": False,
    }
    answers = [door(event, None) for _ in range(2)]
    assert [json.loads(answer["body"])["run"] for answer in answers] == [1, 2]
    assert "headers" not in answers[1]
    assert run(count_verdicts(guard.store)) == {"replayed": {"pay": 1}}
