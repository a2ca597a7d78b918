"""The middleware for aiohttp.web; needs `pip install 'oncemore[aiohttp]'`.

app = web.Application()
IdempotencyMiddleware(app, guard=Guard("sqlite:///once.db"))
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from .._contract.paths import SAFE_METHODS
from .._contract.rule import idempotent
from .._ledger.connect import naming_extras
from .._ledger.context import current_operation, running
from .._runtime.loops import finish_despite_cancel
from .._runtime.plan import arun
from ..errors import ConfigurationError, PayloadTooLarge
from .discovery import rules_for, unsafe_methods
from .etag import Etag
from .http import Exchange, Idempotency, Response, Streamed
from .request import NOT_OF_A_GET, Fields, Request
from .shadow import Shadow
from .unserved import route_at, warn_of_routes

with naming_extras("oncemore.web.aiohttp"):
    from aiohttp import web
    from aiohttp.abc import AbstractStreamWriter
    from aiohttp.payload import Payload
    from multidict import CIMultiDict

__all__ = ["IdempotencyMiddleware", "current_operation", "idempotent"]

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

PARAMETER = re.compile(r"\{\w+\}")
# In a request: its exchange, until the outcome is recorded.  Before 3.14, aiohttp has no keys but texts.
EXCHANGE: Any = web.RequestKey("oncemore.exchange", Exchange) if hasattr(web, "RequestKey") else "oncemore.exchange"


class IdempotencyMiddleware(Idempotency):
    """Guards the requests that the contract, or a decorator on their handler, names; all others pass untouched.

    Making it adds it to the app's middlewares, after those that are there: add authentication first.  A response is held back
    and stored if it is complete when the handler returns, or its length is known.  A `StreamResponse` that the handler prepares
    by itself is a stream: that it happened is recorded before its first byte.
    """

    __middleware_version__ = 1  # by which aiohttp knows its middlewares
    needs_app = True

    def prepare(self) -> None:
        if not isinstance(self.app, web.Application):
            raise ConfigurationError(f"app is a {type(self.app).__name__}: give an aiohttp.web.Application")
        self.app.middlewares.append(self)
        self.app.on_response_prepare.append(self._before_headers)
        self.app.on_startup.append(self._declare)

    async def _declare(self, app: web.Application) -> None:
        """Find the rules on the app's handlers, and hold all rules against its routes."""
        for route in app.router.routes():
            methods = unsafe_methods(route.handler) if route.method == "*" else sorted({route.method} - SAFE_METHODS)
            for rule, served in rules_for(route.handler, methods):
                self.contract.add(rule.at(f"{'|'.join(served)} {path_of(route)}"))
        self.contract.check()
        self.rules_declared()
        routes = (route_at(path_of(route), {route.method}) for route in app.router.routes())
        warn_of_routes(self.contract, routes, self.status_path)

    async def __call__(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        headers = Fields([(name.lower(), value) for name, value in request.raw_headers])
        limit = self.body_limit(request.method, request.path, headers)
        if limit is None:
            return await handler(request)
        if (request.content_length or 0) > limit and request.method not in SAFE_METHODS:
            return to_aiohttp(self.refusal(PayloadTooLarge(f"The body may have {limit} bytes")))
        # Copied now, because a request that has been read cannot be.
        as_get = request_as_get(request) if "if-match" in headers.first else None
        query = request.rel_url.raw_query_string
        asked = Request(request.method, request.path, query, headers, await request.read(), request)
        return await finish_despite_cancel(self._guard(asked, request, handler, as_get))

    async def _guard(
        self, asked: Request, request: web.Request, handler: Handler, as_get: web.Request | None
    ) -> web.StreamResponse:
        """Call the handler once for this key; every other request with the key gets the stored response."""
        exchange = await arun(self.begin_exchange(asked, partial(current_etag, as_get)))
        if exchange is None:
            return await handler(request)
        if isinstance(exchange, Response):
            return to_aiohttp(exchange)
        if isinstance(exchange, Shadow):
            return await arun(exchange.around(asked, partial(handler, request), lambda response: response.status))
        request[EXCHANGE] = exchange
        raised: web.HTTPException | None = None
        try:
            with running(exchange.attempt.op):
                try:
                    response = await handler(request)
                except web.HTTPException as error:  # a response, too
                    response = raised = error
                body = await self._body(exchange, response)
        except Answered as instead:
            return to_aiohttp(instead.response)
        except BaseException as error:
            refused = await arun(self.fail(exchange.attempt, exchange.match, error))
            if refused is None:
                raise
            return to_aiohttp(refused)
        if response.prepared:  # a stream of the handler's own, which has ended
            await arun(exchange.attempt.release())  # does nothing if a tombstone was settled
            return response
        if body is None:  # recorded when aiohttp prepares it, before the first byte
            return response
        del request[EXCHANGE]
        answer = await arun(exchange.finish(Response(response.status, list(response.headers.items()), body)))
        assert isinstance(answer, Response)
        if answer.body is not body:  # not this response: another attempt's, or a refusal
            return to_aiohttp(answer)
        add_headers(response, answer.headers)
        if raised is not None:
            raise raised
        return response

    async def _body(self, exchange: Exchange, response: web.StreamResponse) -> bytes | None:
        """The complete body of a response that has not been sent; None if it is a stream, or too long to be held back."""
        if response.prepared or not isinstance(response, web.Response):
            return None
        body = response.body
        if not isinstance(body, Payload):
            return bytes(body or b"")
        rule = exchange.match.rule
        length = response.content_length if response.content_length is not None else body.size
        if length is None and rule.streams != "store":
            return None
        if length is not None and length > rule.max_response:
            return None
        collector = Collector()
        await body.write(collector)
        whole = b"".join(collector.chunks)
        response.body = whole
        return whole

    async def _before_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Called by aiohttp before the first byte: record that a streamed response happened."""
        exchange: Exchange | None = request.get(EXCHANGE)
        if exchange is None:
            return
        del request[EXCHANGE]
        answer = await arun(exchange.finish(Streamed(response.status, list(response.headers.items()))))
        if isinstance(answer, Response):
            raise Answered(answer)
        add_headers(response, answer.headers)


class Answered(Exception):
    """Raised through a handler that prepares its stream, if the client is to get another response."""

    def __init__(self, response: Response) -> None:
        super().__init__(response.status)
        self.response = response


class Collector(AbstractStreamWriter):
    """Takes what a payload writes, instead of a connection."""

    def __init__(self) -> None:
        self.chunks: list[bytes] = []

    async def write(self, chunk: Any) -> None:
        self.chunks.append(bytes(chunk))

    async def write_eof(self, chunk: bytes = b"") -> None:
        self.chunks.append(chunk)

    async def drain(self) -> None:
        pass

    def enable_compression(self, *_: Any, **__: Any) -> None:
        pass

    def enable_chunking(self) -> None:
        pass

    async def write_headers(self, *_: Any) -> None:
        pass


def to_aiohttp(response: Response) -> web.Response:
    """A response of ours as aiohttp's."""
    made = web.Response(status=response.status, body=response.body or None)
    for name, value in response.headers:
        if name.lower() == "content-type":
            made.headers[name] = value
        else:
            made.headers.add(name, value)
    return made


def add_headers(response: web.StreamResponse, headers: list[tuple[str, str]]) -> None:
    """Add those of *headers* that the response does not have."""
    for name, value in headers:
        if name not in response.headers:
            response.headers[name] = value


def request_as_get(request: web.Request) -> web.Request:
    """The same request, but a GET, without the headers that describe its body."""
    kept = [(name, value) for name, value in request.headers.items() if name.lower() not in NOT_OF_A_GET]
    return request.clone(method="GET", headers=CIMultiDict(kept))


async def current_etag(request: web.Request | None) -> Etag:
    """Status and ETag of the handler's answer to a GET; *request* is None if If-Match was not sent."""
    if request is None:
        return 0, ""
    found = await request.app.router.resolve(request)
    response: web.StreamResponse
    try:
        response = await found.handler(request)
    except web.HTTPException as error:
        response = error
    return response.status, response.headers.get("ETag", "")


def path_of(route: web.AbstractRoute) -> str:
    """The path of a route as a contract writes it: `/things/{id}`; `/files/{rest:path}` if the parameter takes slashes."""
    path = route.resource.canonical if route.resource is not None else "/{rest}"
    pattern = route.resource.get_info().get("pattern") if route.resource is not None else None
    head, brace, last = path.rpartition("{")
    if brace and last.endswith("}") and (pattern is None or pattern.fullmatch(PARAMETER.sub("x", head) + "x/x")):
        return f"{path[:-1]}:path}}"
    return path
