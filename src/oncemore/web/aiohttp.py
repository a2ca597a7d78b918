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
from .._contract.rule import Rule, idempotent
from .._ledger.connect import naming_extras
from .._ledger.context import current_operation, running
from .._ledger.model import Operation
from .._runtime.loops import finish_despite_cancel
from .._runtime.plan import arun
from ..errors import ConfigurationError, PayloadTooLarge
from .discovery import rules_for, unsafe_methods
from .door import Exchange
from .etag import Etag
from .http import Idempotency, Response, Streamed, record
from .request import NOT_OF_A_GET, Fields, Request
from .shadow import Shadow
from .unserved import route_at, warn_of_routes

with naming_extras("oncemore.web.aiohttp"):
    from aiohttp import StreamReader, web
    from aiohttp.abc import AbstractStreamWriter
    from aiohttp.payload import Payload
    from multidict import CIMultiDict

__all__ = ["IdempotencyMiddleware", "current_operation", "idempotent"]

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

PARAMETER = re.compile(r"\{\w+\}")
# The key of a request's exchange, until its outcome is recorded.  Before 3.14, aiohttp's keys are texts.
EXCHANGE: Any = web.RequestKey("oncemore.exchange", Exchange) if hasattr(web, "RequestKey") else "oncemore.exchange"


class IdempotencyMiddleware(Idempotency):
    """Guards the requests that the contract, or a decorator on their handler, names; all others pass untouched.

    The constructor appends it to the app's middlewares, so add authentication first.  A response is held back and stored if
    it is complete when the handler returns, or its length is known.  A `StreamResponse` that the handler prepares itself is
    a stream: a tombstone is recorded before its first byte.
    """

    __middleware_version__ = 1  # tells aiohttp that this is a new-style middleware
    needs_app = True

    def prepare(self) -> None:
        if not isinstance(self.app, web.Application):
            raise ConfigurationError(f"app is a {type(self.app).__name__}: give an aiohttp.web.Application")
        self.app.middlewares.append(self)
        self.app.on_response_prepare.append(self._before_headers)
        self.app.on_startup.append(self._declare)

    async def _declare(self, app: web.Application) -> None:
        """Find the rules on the app's handlers, and warn of rules that no route serves."""
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
        if limit is None or not self._can_read(request, limit):
            return await handler(request)
        if (request.content_length or 0) > limit and request.method not in SAFE_METHODS:
            too_large = f"The body is longer than the {limit} bytes that are accepted; nothing was done"
            return to_aiohttp(self.refusal(PayloadTooLarge(too_large)))
        # Copied now, because a request cannot be copied after it was read.
        as_get = request_as_get(request) if "if-match" in headers.first else None
        query, body = request.rel_url.raw_query_string, await request.read()
        put_back(request, body)
        asked = Request(request.method, request.path, query, headers, body, request)
        exchange = await arun(self.begin_exchange(asked, partial(current_etag, as_get)))
        if exchange is None:
            return await handler(request)
        if isinstance(exchange, Response):
            return to_aiohttp(exchange)
        if isinstance(exchange, Shadow):
            perform = partial(answer_of, handler, request)
            response, raised = await arun(exchange.around(asked, perform, lambda answer: answer[0].status))
            if raised is not None:
                raise raised
            return response  # type: ignore[no-any-return]
        return await finish_despite_cancel(self._perform(exchange, request, handler))

    def _can_read(self, request: web.Request, limit: int) -> bool:
        """Whether the body may be read here.  In shadow mode, a body that may be too long is left to the handler."""
        found = self.contract.match(request.method, request.path)
        if found is None or self.enforces(found.rule) or not request.can_read_body:
            return True
        length = request.content_length  # None if the body is chunked
        return length is not None and length <= min(limit, request.client_max_size or limit)

    async def _perform(self, exchange: Exchange, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Call the handler once for this key; every other request with the key gets the stored response."""
        request[EXCHANGE] = exchange
        try:
            with running(exchange.attempt.op):
                response, raised = await answer_of(handler, request)
                made = await to_record(response, exchange.rule)
        except ResponseReplaced as instead:
            return to_aiohttp(instead.response)
        except BaseException as error:
            refused = await arun(exchange.fail(error))
            if refused is None:
                raise
            return to_aiohttp(refused)
        finally:
            request.pop(EXCHANGE, None)  # a response that is sent from now on is not the handler's own stream
        if response.prepared:  # the handler's own stream, which has ended
            await arun(exchange.attempt.release())  # does nothing if a tombstone was settled
            return response
        # Recorded now, because aiohttp never prepares the response if the caller is cancelled.
        recorded = await arun(record(exchange, made))
        await arun(exchange.attempt.release())  # does nothing unless it is a stream that the rule does not keep
        if isinstance(recorded, Response):  # a successor's response, or a refusal
            return to_aiohttp(recorded)
        add_headers(response, recorded)
        if raised is not None:
            raise raised
        return response

    def is_guarded(self, operation: Operation, native: web.Request) -> bool:
        outer: Exchange | None = native.get(EXCHANGE)  # set by an app that this app is mounted in
        return outer is not None and outer.attempt.operation.id == operation.id

    async def _before_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Record the tombstone of the handler's own stream.  Called by aiohttp before the first byte of each response."""
        exchange: Exchange | None = request.get(EXCHANGE)
        if exchange is None:
            return
        del request[EXCHANGE]
        recorded = await arun(record(exchange, Streamed(response.status, list(response.headers.items()))))
        if isinstance(recorded, Response):
            raise ResponseReplaced(recorded)
        add_headers(response, recorded)


class ResponseReplaced(Exception):
    """Raised through a handler that prepares its stream, if the client gets another response."""

    def __init__(self, response: Response) -> None:
        super().__init__(response.status)
        self.response = response


class Collector(AbstractStreamWriter):
    """Collects the bytes that a payload writes, in place of a connection."""

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


async def to_record(response: web.StreamResponse, rule: Rule) -> Response | Streamed:
    """Return the response to record: `Streamed` if its body was sent, is a stream, or is too long to be held back."""
    headers, length = list(response.headers.items()), response.content_length
    if isinstance(response, web.Response) and not response.prepared:
        body = response.body
        if not isinstance(body, Payload):
            return Response(response.status, headers, bytes(body or b""))
        length = body.size if length is None else length
        if length <= rule.max_response if length is not None else rule.streams == "store":
            collector = Collector()
            await body.write(collector)
            response.body = whole = b"".join(collector.chunks)
            return Response(response.status, headers, whole)
    if length is not None or isinstance(response, web.FileResponse):  # aiohttp adds the header later
        headers.append(("content-length", ""))
    return Streamed(response.status, headers)


async def answer_of(handler: Handler, request: web.Request) -> tuple[web.StreamResponse, web.HTTPException | None]:
    """Return the handler's response; if the handler raised it, return it twice: as response and as exception."""
    try:
        return await handler(request), None
    except web.HTTPException as error:
        return error, error


def put_back(request: web.Request, body: bytes) -> None:
    """Let the handler read the body again: without this, `multipart()`, `post()` and `content` would find nothing.

    `_payload` is a private part of aiohttp, known for 3.13 and 3.14.
    """
    if body:
        again = StreamReader(request.protocol, limit=len(body))
        again.feed_data(body)
        again.feed_eof()
        request._payload = again


def to_aiohttp(response: Response) -> web.Response:
    """Return a response of the middleware as one of aiohttp's."""
    made = web.Response(status=response.status, body=response.body or None)
    for name, value in response.headers:
        if name.lower() == "content-type":
            made.headers[name] = value
        else:
            made.headers.add(name, value)
    return made


def add_headers(response: web.StreamResponse, headers: list[tuple[str, str]]) -> None:
    """Add the *headers* that the response does not have yet."""
    for name, value in headers:
        if name not in response.headers:
            response.headers[name] = value


def request_as_get(request: web.Request) -> web.Request:
    """Return a copy of the request as a GET, without the headers that describe its body or condition."""
    kept = [(name, value) for name, value in request.headers.items() if name.lower() not in NOT_OF_A_GET]
    return request.clone(method="GET", headers=CIMultiDict(kept))


async def current_etag(request: web.Request | None) -> Etag:
    """Return the status and ETag of the handler's answer to a GET; *request* is None if If-Match was not sent."""
    if request is None:
        return 0, ""
    found = await request.app.router.resolve(request)
    response, _ = await answer_of(found.handler, request)
    return response.status, response.headers.get("ETag", "")


def path_of(route: web.AbstractRoute) -> str:
    """Return a route's path as a contract writes it: `/things/{id}`, or `/files/{rest:path}` if it accepts slashes."""
    path = route.resource.canonical if route.resource is not None else "/{rest}"
    pattern = route.resource.get_info().get("pattern") if route.resource is not None else None
    head, brace, last = path.rpartition("{")
    if brace and last.endswith("}") and (pattern is None or pattern.fullmatch(PARAMETER.sub("x", head) + "x/x")):
        return f"{path[:-1]}:path}}"
    return path
