"""Retries for aiohttp: `ClientSession(middlewares=[RetryMiddleware(...)])`."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from typing import Any

import aiohttp
from aiohttp import ClientHandlerType, ClientRequest, ClientResponse, ClientSession
from aiohttp.base_protocol import BaseProtocol
from yarl import URL

from .._runtime.plan import Call, Effect, Plan, arun
from ._compat import base_url
from .bodies import MAX_BODY, read_mode
from .deadlines import with_deadline
from .engine import AsyncPendingOperations, Engine, LibraryErrors, RetryableRequest
from .errors import OutcomeUnknown, RetriesExhausted
from .hosts import has_origin, host_name
from .keyring import KeyringPlace
from .keyring.entry import Entry, Resumed
from .retry import Retry
from .verdict import Fault, HttpReply, find_fault


# Not one of aiohttp's OSErrors: after such an error, aiohttp itself repeats the request, with all our attempts.
class RequestExhausted(RetriesExhausted, aiohttp.ClientConnectionError):
    """All attempts failed, the last one without an answer."""


class RequestTimedOut(RetriesExhausted, aiohttp.ServerTimeoutError):
    """All attempts failed, the last one because it took too long."""


class RequestUnknown(OutcomeUnknown, aiohttp.ClientError):
    """The request may have been performed, and sending it again is no longer safe."""


ERRORS = LibraryErrors(RequestExhausted, RequestTimedOut, RequestUnknown)

# The first class that matches decides.  Every error after the connection was made counts as sent.
FAULTS: list[tuple[type[BaseException], Fault]] = [
    (aiohttp.ConnectionTimeoutError, Fault("timeout", sent=False)),
    (aiohttp.ClientConnectorError, Fault("connection", sent=False)),
    (TimeoutError, Fault("timeout")),
    (aiohttp.ServerFingerprintMismatch, Fault("error", sent=False, fatal=True)),
    (aiohttp.ClientConnectionError, Fault("connection")),
    (aiohttp.ClientPayloadError, Fault("connection")),
    (aiohttp.ClientHttpProxyError, Fault("connection", sent=False)),
    (aiohttp.ClientResponseError, Fault("connection")),  # the response was not HTTP
    (OSError, Fault("connection")),
]

# Method, URL, body and key of the request that follows a redirect: aiohttp builds it from the same body, but without our
# headers.  Another request of the caller to the same URL has another body, and gets a key of its own.
_redirected: ContextVar[tuple[str, URL, Any, str] | None] = ContextVar("oncemore_redirected", default=None)


class AiohttpRequest(RetryableRequest):
    """One request of a session, sent by the next middleware or the session itself."""

    errors = ERRORS

    def __init__(self, request: ClientRequest, handler: ClientHandlerType) -> None:
        self.request = request
        self.handler = handler
        self.method = request.method
        self.url = str(request.url)
        self.name = host_name(request.url.scheme, request.url.host or "", request.url.port)
        self.headers = request.headers
        self._attempts = 0

    def body(self) -> Plan[bytes | None]:
        content: bytes | None = yield Call(self._body)
        return content

    async def _body(self) -> bytes | None:
        payload = self.request.body
        if not isinstance(payload, aiohttp.Payload):
            return payload
        # A body that aiohttp compresses while it sends it is not stored: it would be compressed again when it is resumed.
        if payload.size is None or payload.size > MAX_BODY or self.request.compress:
            return None
        content = await payload.as_bytes()
        if not isinstance(payload, aiohttp.BytesPayload):
            await self.request.update_body(content)
        return content

    def resendable(self) -> bool:
        payload = self.request.body
        return not (isinstance(payload, aiohttp.Payload) and payload.consumed)

    def send(self, timeout: float) -> Effect[HttpReply]:
        return Call(self._send, timeout)

    async def _send(self, timeout: float) -> HttpReply:
        return await with_deadline(self._attempt(timeout), timeout, aiohttp.ServerTimeoutError)

    async def _attempt(self, timeout: float) -> HttpReply:
        ends = asyncio.get_running_loop().time() + timeout
        if self._attempts:
            await self.request.close()  # ends the last attempt's writer, so that the body can be rewound
        self._attempts += 1
        response = await self.handler(self.request)
        try:
            body = await self._read(response, ends)
        except BaseException:
            response.close()
            raise
        return HttpReply(response.status, response.headers, body, response)

    async def _read(self, response: ClientResponse, ends: float) -> bytes:
        """Read the body if it is part of the attempt.  Otherwise the caller can read it until the deadline."""
        mode = read_mode(response.status, response.headers)
        if mode == "endless":
            return b""
        if mode == "whole" or (self.key is not None and "Content-Length" not in response.headers):
            body = await response.read()
            if body:
                response.content = _stream_of(body)
            return body
        loop = asyncio.get_running_loop()
        timer = loop.call_at(ends, _cut, response)
        response.content.on_eof(timer.cancel)
        return b""

    def close(self, reply: HttpReply) -> Effect[None]:
        return Call(reply.response.release)

    def fault(self, error: Exception) -> Fault:
        return find_fault(error, FAULTS)


def _stream_of(body: bytes) -> aiohttp.StreamReader:
    """Return a stream of a body that was read, for callers that read it as a stream."""
    loop = asyncio.get_running_loop()
    stream = aiohttp.StreamReader(BaseProtocol(loop), len(body), loop=loop)
    stream.feed_data(body)
    stream.feed_eof()
    return stream


def _cut(response: ClientResponse) -> None:
    """Cut a body that is not complete at the deadline.  Its reader gets a timeout."""
    response.content.set_exception(aiohttp.ServerTimeoutError("the deadline has passed"))
    response.close()


class RetryMiddleware(AsyncPendingOperations):
    """A client middleware that retries each request under one key.  `response.oncemore` is its story.

    *options* are arguments of `Engine`.  The session's own total timeout (5 minutes, unless you set it) still holds for
    all attempts together.
    """

    def __init__(self, retry: Retry | None = None, keyring: KeyringPlace | None = None, **options: Any) -> None:
        self.engine = Engine(retry, keyring, **options)

    async def __call__(self, request: ClientRequest, handler: ClientHandlerType) -> ClientResponse:
        self._carry_key(request)
        sent = AiohttpRequest(request, handler)
        self.engine.prepare(sent)
        response: Any = (await arun(self.engine.send(sent))).response
        response.oncemore = sent.story
        if response.status in (307, 308) and sent.key is not None:
            with suppress(ValueError):  # aiohttp does not follow a redirect without a valid address
                target = request.url.join(URL(response.headers.get("Location", "")))
                _redirected.set((request.method, target.with_fragment(None), request.body, sent.key))
        return response  # type: ignore[no-any-return]

    def _carry_key(self, request: ClientRequest) -> None:
        """Give a redirected request the key of the first one, because it is the same operation."""
        before, _ = _redirected.get(), _redirected.set(None)
        if before and before[:2] == (request.method, request.url) and before[2] is request.body:
            request.headers.setdefault(self.engine.header, before[3])

    async def resume(self, session: ClientSession, *, opened: bool = False) -> list[Resumed]:
        """Send each unfinished operation of a dead process again, under its own key, and return the results.

        *session* sends them, because the keyring stores no credentials.  With *opened*, operations in
        state `open` are sent again too: their callers know that the outcome is unknown.
        """

        async def send(entry: Entry) -> ClientResponse:
            data = entry.body or None  # aiohttp would send an empty body with Content-Type: application/octet-stream
            response = await session.request(entry.method, entry.url, headers=entry.kept_headers, data=data)
            await response.read()
            return response

        return await self._resume(send, opened, partial(has_origin, base_url(session)))

    def close(self) -> None:
        """Close the keyring's files and connections."""
        self.engine.close()

    async def aclose(self) -> None:
        """Close the keyring, including its connections on the running event loop."""
        await self.engine.aclose()
