"""The contract's app in each framework, behind the ASGI door: as its own middleware, or wrapped from outside."""

import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from oncemore._runtime.plan import arun
from oncemore.web.asgi import IdempotencyMiddleware

from .app import ContractApp, Reply

METHODS = ["GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE"]


def text(headers: Any) -> list[tuple[str, str]]:
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]


def raw(reply: Reply) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in reply.headers]


def starlette_view(contract_app: ContractApp) -> Any:
    from starlette.requests import Request
    from starlette.responses import Response, StreamingResponse

    async def view(request: Request) -> Response:
        asked = (request.method, request.url.path, request.url.query, text(request.headers.raw), await request.body())
        reply = await arun(contract_app.perform(*asked))
        made = (
            StreamingResponse(reply.achunks(), reply.status) if reply.streamed else Response(reply.body, reply.status)
        )
        made.raw_headers += raw(reply)
        return made

    return view


def starlette(contract_app: ContractApp) -> Any:
    """With files, a websocket and a lifespan besides."""
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.requests import Request
    from starlette.responses import FileResponse, JSONResponse
    from starlette.routing import Route, WebSocketRoute
    from starlette.websockets import WebSocket

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[dict[str, str]]:
        yield {"alive": "yes"}

    async def file(request: Request) -> FileResponse:
        return FileResponse(__file__)

    async def alive(request: Request) -> JSONResponse:
        return JSONResponse(request.state.alive)

    async def echo(socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_text(await socket.receive_text())
        await socket.close()

    routes = [
        Route("/{rule}/file", file, methods=["POST"]),
        Route("/alive", alive),
        WebSocketRoute("/ws", echo),
        Route("/{path:path}", starlette_view(contract_app), methods=METHODS),
    ]
    door = Middleware(IdempotencyMiddleware, guard=contract_app.guard, contract=contract_app.contract)
    return Starlette(routes=routes, middleware=[door], lifespan=lifespan)


def starlette_between(contract_app: ContractApp) -> Any:
    """With a BaseHTTPMiddleware inside the door and another outside: they cut every response into pieces."""
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.base import BaseHTTPMiddleware
    from starlette.routing import Route

    async def pass_on(request: Any, call_next: Any) -> Any:
        return await call_next(request)

    between = Middleware(BaseHTTPMiddleware, dispatch=pass_on)
    door = Middleware(IdempotencyMiddleware, guard=contract_app.guard, contract=contract_app.contract)
    routes = [Route("/{path:path}", starlette_view(contract_app), methods=METHODS)]
    return Starlette(routes=routes, middleware=[between, door, between])


def fastapi(contract_app: ContractApp) -> Any:
    from fastapi import FastAPI, Request

    view = starlette_view(contract_app)

    async def endpoint(request: Any) -> Any:
        return await view(request)

    endpoint.__annotations__ = {"request": Request}
    app = FastAPI()
    app.add_middleware(IdempotencyMiddleware, guard=contract_app.guard, contract=contract_app.contract)
    app.api_route("/{path:path}", methods=METHODS)(endpoint)
    return app


def litestar(contract_app: ContractApp) -> Any:
    from litestar import HttpMethod, Litestar, Request, Response, route
    from litestar.response import Stream
    from litestar.response.base import ASGIResponse

    class Whole(Response[bytes]):
        """Litestar's own keeps its headers in a dictionary, which has no two of one name."""

        def __init__(self, reply: Reply) -> None:
            super().__init__(reply.body, status_code=reply.status)
            self.reply = reply

        def to_asgi_response(self, *_: Any, **__: Any) -> Any:
            return ASGIResponse(body=self.content, status_code=self.status_code, encoded_headers=raw(self.reply))

    async def view(request: Any) -> Any:
        query = request.url.query
        asked = (request.method, request.url.path, query, text(request.scope["headers"]), await request.body())
        reply = await arun(contract_app.perform(*asked))
        if reply.streamed:
            return Stream(reply.achunks(), status_code=reply.status, headers=dict(reply.headers))
        return Whole(reply)

    view.__annotations__ = {"request": Request, "return": Response}
    methods = [HttpMethod(method) for method in METHODS if method != "OPTIONS"]
    app = Litestar([route(["/", "/{path:path}"], http_method=methods)(view)], openapi_config=None)
    return IdempotencyMiddleware(app, guard=contract_app.guard, contract=contract_app.contract)


def quart(contract_app: ContractApp) -> Any:
    from quart import Quart, Response, request

    app = Quart(__name__, static_folder=None)

    async def view(path: str) -> Response:
        query = request.query_string.decode("latin-1")
        asked = (request.method, request.path, query, list(request.headers.items()), await request.get_data())
        reply = await arun(contract_app.perform(*asked))
        made = Response(reply.achunks() if reply.streamed else reply.body, reply.status)
        made.headers.pop("content-type")
        made.headers.extend(list(reply.headers))
        return made

    app.add_url_rule("/<path:path>", view_func=view, methods=METHODS, provide_automatic_options=False)
    app.asgi_app = IdempotencyMiddleware(app.asgi_app, guard=contract_app.guard, contract=contract_app.contract)  # type: ignore[assignment]
    return app


def django(contract_app: ContractApp) -> Any:
    from django.conf import settings
    from django.core.asgi import get_asgi_application
    from django.http import HttpRequest, HttpResponse, HttpResponseBase, StreamingHttpResponse
    from django.urls import re_path

    async def view(request: HttpRequest) -> HttpResponseBase:
        query = request.META["QUERY_STRING"]
        asked = (str(request.method), request.path, query, list(request.headers.items()), request.body)
        reply = await arun(contract_app.perform(*asked))
        made: HttpResponseBase = (
            StreamingHttpResponse(reply.achunks(), status=reply.status)
            if reply.streamed
            else HttpResponse(reply.body, status=reply.status)
        )
        del made.headers["Content-Type"]
        for name, value in reply.headers:
            if name == "set-cookie":
                made.cookies.load(value)
            else:
                made.headers[name] = f"{made.headers[name]}, {value}" if name in made.headers else value
        return made

    settings.configure(SECRET_KEY="-", ROOT_URLCONF=__name__, ALLOWED_HOSTS=["*"], MIDDLEWARE=[], LOGGING_CONFIG=None)
    sys.modules[__name__].urlpatterns = [re_path("", view)]  # type: ignore[attr-defined]
    return IdempotencyMiddleware(get_asgi_application(), guard=contract_app.guard, contract=contract_app.contract)


FRAMEWORKS: dict[str, Callable[[ContractApp], Any]] = {
    "starlette": starlette,
    "starlette-between": starlette_between,
    "fastapi": fastapi,
    "litestar": litestar,
    "quart": quart,
    "django": django,
}
