"""The ASGI middleware: idempotency for any ASGI app, under any server.

app.add_middleware(IdempotencyMiddleware, guard=Guard("sqlite:///once.db"))
"""

from __future__ import annotations

import sys

from ..._contract.contract import Match
from ..._contract.paths import SAFE_METHODS
from ..._contract.rule import idempotent
from ..._ledger.context import CURRENT, current_operation
from ..._runtime.loops import finish_despite_cancel
from ..._runtime.plan import arun
from ...errors import ConfigurationError, OncemoreError
from ..discovery import declare_starlette
from ..door import Door
from ..etag import asgi_etag
from ..openapi import document, outermost
from ..problem import Response
from ..request import GUARDED, Fields, Request, check_length
from ..shadow import Shadow
from ..status import status_plan
from ..unserved import starlette_served, warn_of_routes
from .response import App, GuardedResponse, Message, Receive, Scope, Send, respond

__all__ = ["IdempotencyMiddleware", "current_operation", "idempotent"]


class IdempotencyMiddleware(Door[App]):
    """Guards the requests that the contract names; all others pass untouched.

    Rules may name a path with or without the prefix that the app is mounted at (root_path).
    The options are keyword parameters: `help(IdempotencyMiddleware)` describes each.
    """

    needs_app = True
    can_await = True
    _fault: ConfigurationError | TypeError | None = None
    _routes_checked = False
    _passed: frozenset[str] = frozenset()  # the methods that always pass; empty until the routes are known

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        op = CURRENT.get()
        if op is not None and scope.get(GUARDED) is not op:
            return await self._apart(scope, receive, send)
        if scope.get("method") in self._passed and not (self.status_path and scope["path"].endswith(self.status_path)):
            return await self.app(scope, receive, send)
        if not self._passed:  # only now, because routes may be added after the middleware
            await self._start(scope, receive, send)
        if scope["type"] != "http":
            return await self.app(scope, receive, self._noticing_start(scope, send))
        method, path = scope["method"], scope["path"]
        inner = inner_path(scope) if scope.get("root_path") else path
        if method in SAFE_METHODS and not (self.status_path in (path, inner) and method in ("GET", "HEAD")):
            return await self.app(scope, receive, send)
        headers = Fields(scope["headers"])
        if method in SAFE_METHODS:
            return await respond(send, await arun(status_plan(self, request_of(scope, headers))))
        try:
            match = self.match(method, path, headers, scope, inner)
        except OncemoreError as error:
            return await respond(send, self.refusal(error))
        if match is None:
            return await self.app(scope, receive, send)
        return await self._guard(match, headers, scope, receive, send)

    async def _apart(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Clear the running operation, which is of another request, and start again.

        Some servers start a pipelined request in the context of the previous request.
        """
        token = CURRENT.set(None)
        try:
            await self(scope, receive, send)
        finally:
            CURRENT.reset(token)

    def report_fault(self, error: ConfigurationError | TypeError) -> None:
        """Raise *error*, a fault in the options; inside a lifespan call, keep it for `_start` to raise.

        Starlette makes its middleware inside the lifespan call.  If it raises there, a server believes that the app has no
        lifespan, reports nothing, and starts to serve.
        """
        if not in_lifespan():
            raise error
        self._fault = error

    async def _start(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Find the rules on endpoints.  If the middleware cannot work, make the app's start fail with the reason."""
        try:
            if self._fault is not None:
                raise self._fault
            self._declare(scope)
        except (ConfigurationError, TypeError) as error:
            if scope["type"] == "lifespan":
                await receive()
                await send({"type": "lifespan.startup.failed", "message": f"{type(self).__name__}: {error}"})
            raise

    def _declare(self, scope: Scope) -> None:
        """Find the rules on the app's endpoints, and add the contract to the app's OpenAPI document if it makes one."""
        declare_starlette(self.contract, self.app)
        self.rules_declared()
        app = scope.get("app") or outermost(self.app) or self.app
        document(app, self.contract, status_path=self.status_path, problem_base=self.problem_base)
        if scope["type"] == "http":  # during the lifespan, or before a websocket, routes may still be added
            self._passed = SAFE_METHODS
            self._check_routes(scope)

    def _noticing_start(self, scope: Scope, send: Send) -> Send:
        """Return *send*; for a lifespan, one that finds and checks the rules when the app has started: its routes are known."""
        if scope["type"] != "lifespan":
            return send

        async def noticing(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                self._declare(scope)
                self._check_routes(scope)
            await send(message)

        return noticing

    def _check_routes(self, scope: Scope) -> None:
        """Warn once of each rule that no route of the app serves."""
        if not self._routes_checked:
            self._routes_checked = True
            prefix = scope.get("root_path", "").rstrip("/")
            warn_of_routes(self.contract, starlette_served(self.app), self.status_path, prefix)

    async def _guard(self, match: Match, headers: Fields, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the app once for this key; every other request with the key gets the stored response."""
        if not (self.enforce and match.rule.enforce):
            return await observe(self, match, headers, scope, receive, send)
        try:
            body = await read_body(receive, match, headers)
        except OncemoreError as error:
            return await respond(send, self.refusal(error, match))
        if body is None:
            return None  # the client left before its request was complete
        request = request_of(scope, headers, body)
        etag = asgi_etag(self.app, scope) if match.rule.if_match else None
        found = await arun(self.begin(match, request, etag, mount=scope.get("root_path", "")))
        if found is None:
            message: Message = {"type": "http.request", "body": body, "more_body": False}
            return await self.app(scope, receive_first([message], receive), send)
        if isinstance(found, Response):
            return await respond(send, found)
        return await GuardedResponse(found, request, receive, send).serve(self.app)


def in_lifespan() -> bool:
    """Whether an ASGI app called the running code in its lifespan: a calling frame has a `scope` of that type."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        scope = frame.f_locals.get("scope")
        if isinstance(scope, dict) and scope.get("type") == "lifespan":
            return True
    return False


def inner_path(scope: Scope) -> str:
    """Return the path without the prefix that the app is mounted at (root_path), as the app's own routes write it."""
    path: str = scope["path"]
    below = path.removeprefix(scope["root_path"].rstrip("/"))
    return below if below.startswith("/") else path


def request_of(scope: Scope, headers: Fields, body: bytes = b"") -> Request:
    query = scope["query_string"]
    return Request(scope["method"], scope["path"], str(query, "latin-1") if query else "", headers, body, scope)


async def read_body(receive: Receive, match: Match, headers: Fields) -> bytes | None:
    """Return the whole body, or None if the client left before its end."""
    declared = headers.first.get("content-length", "")
    if declared.isascii() and declared.isdigit() and len(declared) < 20:
        check_length(match.rule, int(declared))
    messages, body = await read_messages(receive, match.rule.max_request)
    if body is None and messages[-1]["type"] != "http.disconnect":
        check_length(match.rule, match.rule.max_request + 1)
    return body


async def read_messages(receive: Receive, most: int) -> tuple[list[Message], bytes | None]:
    """Return the messages of the request, and its body: None if it has more than *most* bytes, or the client has left."""
    messages: list[Message] = []
    chunks: list[bytes] = []
    length = 0
    while True:
        message = await receive()
        messages.append(message)
        chunk = message.get("body", b"")
        chunks.append(chunk)
        length += len(chunk)
        if message["type"] == "http.disconnect" or length > most:
            return messages, None
        if not message.get("more_body", False):
            return messages, chunk if len(chunks) == 1 else b"".join(chunks)


def receive_first(messages: list[Message], receive: Receive) -> Receive:
    """Return a `receive` that repeats the *messages* that were read, then passes on the client's next ones."""

    async def receive_again() -> Message:
        return messages.pop(0) if messages else await receive()

    return receive_again


# Shadow mode: the app is called as if there were no middleware, and the ledger notes the decision that would have been made.


async def observe(door: Door[App], match: Match, headers: Fields, scope: Scope, receive: Receive, send: Send) -> None:
    """Read the body, call the app with the same messages, and note the status of its response."""
    shadow, status = Shadow(door, match), None
    messages, body = await read_messages(receive, match.rule.max_request)

    async def note_status(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        await send(message)

    if body is not None:
        await arun(shadow.begin(request_of(scope, headers, body)))
    try:
        await door.app(scope, receive_first(messages, receive), note_status)
    except BaseException:
        await finish_despite_cancel(arun(shadow.end(None)))
        raise
    await finish_despite_cancel(arun(shadow.end(status)))
