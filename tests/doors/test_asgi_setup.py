"""The set-up of the ASGI middleware: its options, its rules on endpoints, and a middleware inside another."""

from __future__ import annotations

import asyncio
import re
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.endpoints import HTTPEndpoint
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from uvicorn import Config
from uvicorn.lifespan.on import LifespanOn

from oncemore import Guard
from oncemore._contract.contract import Contract
from oncemore._contract.rule import Rule
from oncemore.errors import ConfigurationError, CorruptRecord, StoreUnavailable
from oncemore.stores.memory import MemoryStore
from oncemore.web.asgi import IdempotencyMiddleware, current_operation, idempotent

from .wire import Counted, Wire


@pytest.fixture
def guard() -> Guard:
    return Guard("memory://")


# What it is given


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"guard": "sqlite:///once.db"}, r"guard is a str: make a Guard"),
        ({"contract": "oncemore.toml"}, r"contract is a str: make a Contract"),
        ({"principal": "user"}, "principal is a str: give a function"),
        ({"tenant": 7}, "tenant is a int: give a function"),
        ({"redact": "body"}, "redact is a str: give a function"),
        ({"keep_headers": "Content-Type"}, r"write \['Content-Type'\]"),
        ({"status_path": "status"}, "write '/status'"),
        ({"secrets": [b"short"]}, "16 random bytes"),
    ],
)
def test_setup_fault_is_raised_immediately(guard: Guard, given: Any, told: str) -> None:
    """For example, a text in place of a list of headers would silently drop every header of a replay."""
    with pytest.raises(ConfigurationError, match=told):
        IdempotencyMiddleware(Counted(), **{"guard": guard, **given})


@idempotent(key="required", effect="transaction")
async def transfer(request: Request) -> Response:
    return Response()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"contract": Contract(Rule("POST /things", effect="transaction"))}, "lends no connection"),
        ({}, "lends no connection"),  # the rule is on the endpoint
        ({"contract": "oncemore.toml"}, r"make a Contract, as in Contract\.load"),
        ({"garud": 1}, "unexpected keyword argument 'garud'"),
    ],
)
async def test_setup_fault_fails_the_start_under_uvicorn(guard: Guard, options: Any, told: str) -> None:
    """Starlette makes its middleware in the lifespan call; uvicorn takes an exception there for an app without lifespan."""
    app = Starlette(routes=[Route("/things", transfer, methods=["POST"])])
    app.add_middleware(IdempotencyMiddleware, guard=guard, **options)
    lifespan = LifespanOn(Config(app))
    await lifespan.startup()
    assert lifespan.should_exit
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "lifespan.startup"}

    async def send(message: Any) -> None:
        sent.append(message)

    with pytest.raises((ConfigurationError, TypeError), match=told):  # test clients raise it
        await app({"type": "lifespan"}, receive, send)
    assert [message["type"] for message in sent] == ["lifespan.startup.failed"]
    assert re.search(told, sent[0]["message"])


async def test_unreadable_record_is_not_treated_as_store_down() -> None:
    """The record exists, so the effect may have happened; `store_down = "run"` is for a store that does not answer."""

    class Failing(MemoryStore):
        error: Exception

        def claim(self, *_: Any, **__: Any) -> Any:
            raise self.error

    store, app = Failing(), Counted()
    contract = Contract(Rule("POST /things", store_down="run"))
    door = IdempotencyMiddleware(app, guard=Guard(store), contract=contract)
    store.error = CorruptRecord("sealed with another key")
    assert ((await Wire().through(door)).status, app.runs) == (503, 0)
    store.error = StoreUnavailable("away")
    assert ((await Wire().through(door)).status, app.runs) == (201, 1)


# Where it finds its rules


@idempotent(key="required")
class Whole(HTTPEndpoint):
    """An endpoint class with a rule for all methods."""

    async def get(self, request: Request) -> Response:
        return Response("got")

    async def post(self, request: Request) -> Response:
        return Response("posted")

    async def put(self, request: Request) -> Response:
        return Response("put")


class Single(HTTPEndpoint):
    """An endpoint class with a rule for one method."""

    @idempotent(key="required")
    async def put(self, request: Request) -> Response:
        return Response("put")

    async def post(self, request: Request) -> Response:
        return Response("posted")


async def test_rules_are_found_on_classes_and_their_methods(guard: Guard) -> None:
    """An endpoint whose rule is not found would run unguarded."""
    app = Starlette(routes=[Route("/whole", Whole), Route("/single", Single)])
    door = IdempotencyMiddleware(app, guard=guard)

    async def status(path: str, method: str) -> int:
        return (await Wire(path, method=method, key=None).through(door)).status

    assert [await status("/whole", method) for method in ("GET", "POST", "PUT")] == [200, 400, 400]
    assert [await status("/single", method) for method in ("POST", "PUT")] == [200, 400]


async def test_endpoint_rule_without_principal_warns_once(guard: Guard) -> None:
    """The middleware finds the rule only after it was made."""

    @idempotent(scope="global")
    async def pay(request: Request) -> Response:
        return Response("paid")

    class Routed(Counted):
        routes = [Route("/payments", pay, methods=["POST"])]  # noqa: RUF012

    door = IdempotencyMiddleware(Routed(), guard=guard)
    with pytest.warns(UserWarning, match="POST /payments"):
        await door({"type": "lifespan"}, Wire().receive, Wire().send)
    with warnings.catch_warnings(action="error"):
        assert (await Wire("/payments").through(door)).said == "stored"


async def test_rules_on_routes_added_at_startup_are_found(guard: Guard) -> None:
    """The middleware gets the lifespan call before the app does."""

    @idempotent(key="required")
    async def pay(request: Request) -> Response:
        return Response("paid")

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.router.routes.append(Route("/payments", pay, methods=["POST"]))
        yield

    app = Starlette(lifespan=lifespan, middleware=[Middleware(IdempotencyMiddleware, guard=guard)])
    messages = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]
    await app({"type": "lifespan"}, Wire(messages=messages).receive, Wire().send)
    assert (await Wire("/payments", key=None).through(app)).status == 400


# Where it meets another


async def test_inner_middleware_leaves_the_operation_to_the_outer(guard: Guard) -> None:
    """With one in an app and one in its mounted app, the inner would wait for the outer, which waits for the inner."""

    async def pay(request: Request) -> Response:
        return Response(current_operation().key)

    door = Middleware(IdempotencyMiddleware, guard=guard)
    inner = Starlette(routes=[Route("/payments", pay, methods=["POST"])], middleware=[door])
    app = Starlette(routes=[Mount("/api", app=inner)], middleware=[door])
    first = await asyncio.wait_for(Wire("/api/payments").through(app), 5)
    assert (first.status, first.said, first.body) == (200, "stored", b"k")
    assert (await Wire("/api/payments").through(app)).said == "replayed"


async def test_second_call_with_the_same_scope_is_guarded(guard: Guard) -> None:
    """It is guarded even while the first, abandoned call is running."""
    runs: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        runs.append(1)
        await asyncio.sleep(0.1)
        await Counted()(scope, receive, send)

    door, wire = IdempotencyMiddleware(app, guard=guard), Wire()
    for _ in range(3):
        wire.messages, wire.sent = [{"type": "http.request", "body": b"{}"}], []
        with suppress(TimeoutError):
            await asyncio.wait_for(wire.through(door), 0.02 if not runs else 5)
    assert (wire.said, len(runs)) == ("replayed", 1)


async def test_unguarding_inner_middleware_shows_the_outer_operation(guard: Guard) -> None:
    class Asks(Counted):
        async def work(self, receive: Any) -> None:
            assert current_operation().key == "k"

    inner = IdempotencyMiddleware(Asks(), guard=guard, contract=Contract(undeclared="pass"))
    assert (await Wire().through(IdempotencyMiddleware(inner, guard=guard))).said == "stored"


async def test_handlers_request_to_another_app_is_its_own_operation(guard: Guard) -> None:
    """The request has its own operation, and afterwards the handler's operation is the current one again."""
    seen: list[str] = []

    class Inner(Counted):
        async def work(self, receive: Any) -> None:
            with pytest.raises(ConfigurationError):
                current_operation()

    inner = IdempotencyMiddleware(Inner(), guard=Guard("memory://"))

    class Outer(Counted):
        async def work(self, receive: Any) -> None:
            await Wire(key=None).through(inner)
            await Wire("/others", method="GET", key=None).through(inner)
            seen.append(current_operation().key)

    await Wire().through(IdempotencyMiddleware(Outer(), guard=guard))
    assert seen == ["k"]
