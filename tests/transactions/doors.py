"""A shop behind the HTTP middlewares: the same handlers in Starlette and Flask, on real sockets, with any driver."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import flask
import httpx
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from oncemore import Contract, Guard, Rule
from oncemore._ledger.context import Op
from oncemore._ledger.transactions import Do
from oncemore._runtime.plan import arun, run
from oncemore.errors import TransactionEnded
from oncemore.web import asgi, wsgi
from tests.doors.live import live
from tests.doors.served import under_waitress

from .shops import Shop

CONTRACT = Contract(
    Rule("POST /{what}", key="required", effect="transaction"),
    Rule("POST /attempt", key="required", effect="transaction", on_refusal="commit"),
)
Working = Generator[Any, Any, Any]


class Refused(Exception):
    """Stands for a driver's error when the database refuses a transaction because of another one."""

    sqlstate = "40001"
    sqlite_errorcode = 5


class Work:
    """The handlers' work on the operation's connection, and notes about it."""

    def __init__(self, shop: Shop) -> None:
        self.shop = shop
        self.bodies: list[Any] = []  # what each run was asked
        self.told: list[str] = []  # what background tasks say
        self.meeting = threading.Barrier(2)

    def refund(self, op: Op, body: dict[str, Any]) -> Working:
        """Insert a row, and return the status that the body asks for.  The first `refused` runs are refused."""
        self.bodies.append(body)
        yield self.shop.insert(op, f"{body['id']}, run {len(self.bodies)}")
        if len(self.bodies) <= body.get("refused", 0):
            raise Refused
        return body.get("status", 201)

    def meet(self) -> None:
        """Wait for the other request, which does not come if the database has refused it before."""
        with suppress(threading.BrokenBarrierError):
            self.meeting.wait(5)

    def leave(self, op: Op, body: dict[str, Any]) -> Working:
        """Take a doctor off call if the other one stays: a write skew if two requests do it concurrently."""
        self.bodies.append(body)
        there = yield self.shop.ask(op, "SELECT count(*) FROM doctors WHERE on_call")
        if len(self.bodies) <= 2:
            yield Do(self.meet, None)  # both have read before either writes
        if there > 1:
            yield self.shop.sql(op, f"UPDATE doctors SET on_call = false WHERE name = '{body['id']}'")
        return 200 if there > 1 else 409


@contextmanager
def behind_asgi(work: Work, guard: Guard, *, outermost: bool = False) -> Iterator[httpx.Client]:
    """Serve with Starlette.  *outermost* puts the middleware around the whole app and its error pages."""

    def handler(what: Any) -> Any:
        async def handle(request: Request) -> JSONResponse:
            op, body = asgi.current_operation(), await request.json()
            status = await arun(what(op, body))
            if "abort" in body:
                raise HTTPException(body["abort"], "as it was asked to")
            task = BackgroundTask(work.told.append, body["id"])
            return JSONResponse({"run": len(work.bodies)}, status, {"x-id": body["id"]}, background=task)

        return handle

    async def stream(request: Request) -> StreamingResponse:
        op, body = asgi.current_operation(), await request.json()
        status = await arun(work.refund(op, body))

        async def chunks() -> AsyncIterator[str]:
            yield "begun "
            yield f"{len(work.shop.refunds())} "
            yield late(op)

        return StreamingResponse(chunks(), status)

    routes = {
        "/refund": handler(work.refund),
        "/attempt": handler(work.refund),
        "/leave": handler(work.leave),
        "/stream": stream,
    }
    app: Any = Starlette(routes=[Route(path, endpoint, methods=["POST"]) for path, endpoint in routes.items()])
    if outermost:
        app = asgi.IdempotencyMiddleware(app, guard=guard, contract=CONTRACT)
    else:
        app.add_middleware(asgi.IdempotencyMiddleware, guard=guard, contract=CONTRACT)
    with live(app) as client:
        yield client


@contextmanager
def behind_wsgi(work: Work, guard: Guard) -> Iterator[httpx.Client]:
    """Serve with Flask."""
    app = flask.Flask(__name__)

    def handle(what: str) -> Any:
        op, body = wsgi.current_operation(), flask.request.get_json()
        status = run((work.leave if what == "leave" else work.refund)(op, body))
        if "abort" in body:
            flask.abort(body["abort"])
        if what != "stream":
            return {"run": len(work.bodies)}, status, {"x-id": body["id"]}

        def chunks() -> Iterator[str]:
            yield "begun "
            yield f"{len(work.shop.refunds())} "
            yield late(op)

        return chunks(), status

    app.post("/<what>")(handle)
    app.wsgi_app = wsgi.IdempotencyMiddleware(app.wsgi_app, guard=guard, contract=CONTRACT)  # type: ignore[method-assign]
    with under_waitress(app) as url:
        with httpx.Client(base_url=url, timeout=20, headers={"Authorization": "Bearer alice"}) as client:
            yield client


def late(op: Op) -> str:
    """Ask for the connection after the response has started, and return it or the error as text."""
    try:
        return repr(op.connection)
    except TransactionEnded as error:
        return error.detail
