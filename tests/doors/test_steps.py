"""Steps behind the HTTP middlewares: a retry, or the completer, continues a request that failed half-way."""

import asyncio
import json
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import httpx
import pytest
from fastapi import Depends, FastAPI
from flask import Flask
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from oncemore import Contract, Guard, Operation, Rule
from oncemore._ledger.completer import Completer, Tally
from oncemore._ledger.context import CURRENT
from oncemore._runtime.backoff import Backoff
from oncemore._runtime.plan import arun
from oncemore.web import asgi, fastapi, http, wsgi
from oncemore.web.redrive import RedriveAsgi, RedriveWsgi, kept_request
from tests.support.processes import Program

from .live import keyed, live

NO_PAUSE = Backoff(base=0.0, cap=0.0)


class Shop:
    """Takes orders, in an ASGI and a WSGI app.  *fails* are the places at which it fails, once each."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.fails: list[str] = []
        self.answer = 201
        self.guard = Guard("memory://")
        self.contract = Contract(Rule("POST /orders/{id}", name="orders.pay", key="required", effect="steps"))

    def do(self, what: str) -> str:
        self.log.append(what)
        return what

    def fail(self, where: str) -> None:
        if where in self.fails:
            self.fails.remove(where)
            raise RuntimeError(where)

    def asgi(self) -> Any:
        async def pay(request: Request) -> JSONResponse:
            op = CURRENT.get()
            if op is None or op.steps is None:
                return JSONResponse(self.do("without steps"))
            body = await request.json()
            seen = request.headers.get("authorization", "nobody")
            await op.step("reserve", lambda: self.do("reserve"), undo=lambda value: self.do(f"undo {value}"))
            self.fail("after reserve")
            await op.step("charge", lambda: self.do(f"charge {body['amount']} by {seen}"))
            self.fail("after charge")
            return JSONResponse({"order": request.path_params["id"], "q": str(request.query_params)}, self.answer)

        app = Starlette(routes=[Route("/orders/{id}", pay, methods=["POST"])])
        app.add_middleware(asgi.IdempotencyMiddleware, guard=self.guard, contract=self.contract)
        return app

    def wsgi(self) -> Any:
        app = Flask("shop")

        @app.post("/orders/<id>")
        def pay(id: str) -> Any:
            import flask

            op = CURRENT.get()
            if op is None or op.steps is None:
                return [self.do("without steps")]
            seen = flask.request.headers.get("authorization", "nobody")
            op.step("reserve", lambda: self.do("reserve"), undo=lambda value: self.do(f"undo {value}"))
            self.fail("after reserve")
            op.step("charge", lambda: self.do(f"charge {flask.request.json['amount']} by {seen}"))
            self.fail("after charge")
            return {"order": id, "q": flask.request.query_string.decode()}, self.answer

        app.wsgi_app = wsgi.IdempotencyMiddleware(  # type: ignore[method-assign]
            app.wsgi_app, guard=self.guard, contract=self.contract
        )
        return app


@pytest.fixture
def shop() -> Shop:
    return Shop()


def post(client: httpx.Client, amount: int = 5) -> httpx.Response:
    """A server closes the connection on which an app failed, so each request has its own."""
    return client.post("/orders/å7?x=1", json={"amount": amount}, headers=keyed("k", Connection="close"))


def served(shop: Shop, kind: str) -> Any:
    return live(shop.asgi()) if kind == "asgi" else live(shop.wsgi(), interface="wsgi")


def completed(shop: Shop, kind: str, mount: str = "", **options: Any) -> Tally:
    app: Any = shop.asgi() if kind == "asgi" else shop.wsgi()
    redrive: Any = RedriveAsgi if kind == "asgi" else RedriveWsgi
    headers = [("Authorization", "Bearer completer")]
    completer = Completer(shop.guard, {"orders.pay": redrive(app, headers, mount)}, pace=NO_PAUSE, **options)
    return asyncio.run(completer.arun_once())


KINDS = pytest.mark.parametrize("kind", ["asgi", "wsgi"])


@KINDS
def test_retry_continues_after_the_last_checkpoint(shop: Shop, kind: str) -> None:
    shop.fails = ["after reserve", "after charge"]
    with served(shop, kind) as client:
        assert [post(client).status_code for _ in range(4)] == [500, 500, 201, 201]
        assert post(client, 6).status_code == 409
        assert post(client).headers["idempotency-status"] == "replayed"
    assert shop.log == ["reserve", "charge 5 by Bearer alice"]


@KINDS
def test_completer_calls_the_app_with_the_kept_request(shop: Shop, kind: str) -> None:
    """The key still belongs to its owner, whose credentials are not stored."""
    shop.fails = ["after reserve"]
    with served(shop, kind) as client:
        assert post(client).status_code == 500
        assert completed(shop, kind) == Tally(completed=1)
        assert completed(shop, kind) == Tally()
        answer = post(client)
    assert answer.headers["idempotency-status"] == "replayed"
    assert answer.json() == {"order": "å7", "q": "x=1"}
    assert shop.log == ["reserve", "charge 5 by Bearer completer"]
    assert not any(b"alice" in record.outcome.body for record in shop.guard.list().records if record.outcome)


@KINDS
def test_a_final_failure_is_undone_before_it_is_answered(shop: Shop, kind: str) -> None:
    shop.answer = 422
    with served(shop, kind) as client:
        assert post(client).status_code == 422
        assert shop.log == ["reserve", "charge 5 by Bearer alice", "undo reserve"]
        assert post(client).headers["idempotency-status"] == "replayed"
    assert len(shop.log) == 3


@KINDS
def test_operation_fails_for_good_after_its_last_attempt(shop: Shop, kind: str) -> None:
    shop.fails = ["after reserve"]
    with served(shop, kind) as client:
        assert post(client).status_code == 500
        assert completed(shop, kind, attempts=1) == Tally(held=1)
        answer = post(client)
    assert (answer.status_code, answer.json()["error_code"]) == (409, "CONFLICT.idempotency.outcome_unknown")
    assert shop.log == ["reserve", "undo reserve"]


def test_blocking_endpoint_takes_steps_on_its_thread(shop: Shop, tmp_path: Path) -> None:
    guard = Guard(f"sqlite:///{tmp_path / 'once.db'}")
    app = FastAPI()
    app.add_middleware(fastapi.IdempotencyMiddleware, guard=guard, contract=shop.contract)

    def insert(connection: Any) -> str:
        connection.execute("CREATE TABLE IF NOT EXISTS orders (id TEXT)")
        connection.execute("INSERT INTO orders VALUES ('7')")
        return shop.do("reserve")

    @app.post("/orders/{id}")
    def pay(id: str, op: Annotated[fastapi.Op, Depends(fastapi.current_operation)]) -> list[str]:
        reserved = op.step("reserve", insert)
        shop.fail("after reserve")
        return [reserved, op.step("charge", lambda key: shop.do("charge"))]

    shop.fails = ["after reserve"]
    with live(app) as client:
        assert [post(client).status_code for _ in range(3)] == [500, 200, 200]
    assert shop.log == ["reserve", "charge"]
    with sqlite3.connect(tmp_path / "once.db") as connection:
        assert connection.execute("SELECT count(*) FROM orders").fetchone() == (1,)


def test_client_cannot_pose_as_the_completer(shop: Shop) -> None:
    with served(shop, "asgi") as client:
        answer = client.post("/orders/7", json={"amount": 1}, headers={"oncemore.redriven": "k"})
    assert answer.json()["error_code"] == "VALIDATION.idempotency.key_missing"


def test_resumed_request_has_no_disconnected_client(shop: Shop) -> None:
    """An app that stops for a lost client would never finish."""
    connected: list[bool] = []

    async def pay(request: Request) -> JSONResponse:
        await request.body()
        await asgi.current_operation().step("reserve", lambda: shop.do("reserve"))
        shop.fail("after reserve")
        connected.append(not await request.is_disconnected())
        return JSONResponse({})

    app = Starlette(routes=[Route("/orders/{id}", pay, methods=["POST"])])
    app.add_middleware(asgi.IdempotencyMiddleware, guard=shop.guard, contract=shop.contract)
    shop.asgi = lambda: app  # type: ignore[method-assign]
    shop.fails = ["after reserve"]
    with served(shop, "asgi") as client:
        assert post(client).status_code == 500
    assert completed(shop, "asgi") == Tally(completed=1)
    assert connected == [True]


@pytest.mark.parametrize(
    "name", ["authorization", "cookie", "x-api-key", "x-forwarded-access-token", "x-goog-iap-jwt-assertion"]
)
def test_credentials_are_not_stored_with_the_request(name: str) -> None:
    kept = kept_request(http.Request("POST", "/orders/7", "", [(name, "secret"), ("x-tenant", "t1")], b"{}"))
    assert kept["headers"] == [["x-tenant", "t1"]]


async def test_redriven_request_disconnects_after_its_response(shop: Shop) -> None:
    """An app that waits for its client to leave must not wait for ever."""
    over: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"", "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        over.append((await receive())["type"])

    request = kept_request(http.Request("POST", "/orders/7", "", [], b"{}"))
    async with asyncio.timeout(10):
        await arun(RedriveAsgi(app).drive(Operation("s", "k"), request))
    assert over == ["http.disconnect"]


CHANGED = [
    Contract(Rule("POST /orders/{id}", name="orders.pay", key="required", effect="lease")),
    Contract(),
    Contract(undeclared="pass"),
    Contract(Rule("POST /orders/{id}", name="orders.pay", idempotent=False)),
]


@KINDS
@pytest.mark.parametrize("contract", CHANGED)
def test_unfinished_operation_is_not_begun_anew_under_a_changed_rule(
    shop: Shop, kind: str, contract: Contract, caplog: pytest.LogCaptureFixture
) -> None:
    """Under the app's new rule it would be a new operation, and would be charged again."""
    shop.fails = ["after charge"]
    with served(shop, kind) as client:
        assert post(client).status_code == 500
    shop.contract = contract
    assert completed(shop, kind) == Tally(failing=1)
    assert shop.log == ["reserve", "charge 5 by Bearer alice"]
    assert "orders.pay 'k' was not continued" in caplog.text


@KINDS
def test_an_app_may_be_mounted_below_a_prefix(shop: Shop, kind: str) -> None:
    app: Any = shop.asgi() if kind == "asgi" else mounted(shop.wsgi())
    shop.fails = ["after reserve"]
    with live(
        app, interface=f"{kind}{3 if kind == 'asgi' else ''}", root_path="/api" if kind == "asgi" else ""
    ) as client:
        answer = client.post("/api/orders/7" if kind == "wsgi" else "/orders/7", json={"amount": 5}, headers=keyed("k"))
        assert answer.status_code == 500
    assert completed(shop, kind) == Tally(failing=1)
    assert completed(shop, kind, mount="/api") == Tally(completed=1)
    assert shop.log == ["reserve", "charge 5 by Bearer completer"]


def mounted(app: Any) -> Any:
    """Calls the app like a server that has it below a prefix."""

    def below(environ: Any, start_response: Any) -> Any:
        path = environ["PATH_INFO"].removeprefix("/api")
        return app({**environ, "SCRIPT_NAME": "/api", "PATH_INFO": path}, start_response)

    return below


def test_an_async_app_needs_the_awaited_forms(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    shop.fails = ["after reserve"]
    with served(shop, "asgi") as client:
        assert post(client).status_code == 500
    completer = Completer(shop.guard, {"orders.pay": RedriveAsgi(shop.asgi())}, pace=NO_PAUSE)
    assert completer.run_once() == Tally(failing=1)
    assert "arun_once" in caplog.text


@KINDS
def test_completer_continues_a_django_request(kind: str) -> None:
    command = [sys.executable, "-m", "tests.doors.redriven_django", kind]
    with Program(command, stdout=subprocess.PIPE) as process:
        assert json.loads(process.communicate(timeout=60)[0]) == [500, 1, ["reserve", "charge"]]
