"""Retries for aiohttp: `ClientSession(middlewares=[RetryMiddleware(...)])`."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from contextvars import ContextVar
from typing import Any

import aiohttp
from aiohttp import ClientHandlerType, ClientRequest, ClientResponse, ClientSession
from aiohttp.base_protocol import BaseProtocol
from yarl import URL

from .._runtime.plan import Call, Effect, Plan, arun
from .bodies import MAX_BODY, manner_by
from .continuing import AsyncContinuing
from .deadline import is_distrust
from .effects import Within
from .engine import Engine
from .errors import OutcomeUnknown, RetriesExhausted
from .exchange import Errors
from .keyring import KeyringPlace
from .keyring.entry import Entry, Resumed, host_of
from .retry import Retry
from .verdict import Fault, Reply


# Not of aiohttp's OSErrors: those it would ask again by itself, all attempts over.
class RequestExhausted(RetriesExhausted, aiohttp.ClientConnectionError):
    """Every attempt failed; the last one without an answer."""


class RequestTimedOut(RetriesExhausted, aiohttp.ServerTimeoutError):
    """Every attempt failed; the last one ran out of time."""


class RequestUnknown(OutcomeUnknown, aiohttp.ClientError):
    """It may have been performed, and asking again is no longer safe."""


ERRORS = Errors(RequestExhausted, RequestTimedOut, RequestUnknown)

# The first that fits; "sent" is said of everything after the connection stood.
FAULTS: list[tuple[type[Exception], Fault]] = [
    (aiohttp.ConnectionTimeoutError, Fault("timeout", sent=False)),
    (aiohttp.ClientConnectorError, Fault("connection", sent=False)),
    (TimeoutError, Fault("timeout")),
    (aiohttp.ServerFingerprintMismatch, Fault("error", sent=False, fatal=True)),
    (aiohttp.ClientConnectionError, Fault("connection")),
    (aiohttp.ClientPayloadError, Fault("connection")),
    (aiohttp.ClientHttpProxyError, Fault("connection", sent=False)),
    (aiohttp.ClientResponseError, Fault("connection")),  # what came was no HTTP
    (OSError, Fault("connection")),
]

# Where a redirect that keeps the method leads, with which body, and under which key: aiohttp builds the next request without
# our headers, and with the same body; what the caller posts there meanwhile has one of its own.
_redirected: ContextVar[tuple[str, URL, Any, str] | None] = ContextVar("oncemore_redirected", default=None)


class AiohttpWire:
    """One request of a session, sent by the next middleware or the session itself."""

    errors = ERRORS
    ready = False

    def __init__(self, request: ClientRequest, handler: ClientHandlerType) -> None:
        self.request = request
        self.handler = handler
        self.method = request.method
        self.url = str(request.url)
        self.host = host_of(request.url.scheme, request.url.host or "", request.url.port)
        self.headers = request.headers
        self._attempts = 0

    def body(self) -> Plan[bytes | None]:
        content: bytes | None = yield Call(self._body)
        return content

    async def _body(self) -> bytes | None:
        payload = self.request.body
        if not isinstance(payload, aiohttp.Payload):
            return payload
        # What aiohttp compresses on the way out cannot be told from what was asked; it is sent, but not written down.
        if payload.size is None or payload.size > MAX_BODY or self.request.compress:
            return None
        content = await payload.as_bytes()
        if not isinstance(payload, aiohttp.BytesPayload):
            await self.request.update_body(content)
        return content

    def resendable(self) -> bool:
        payload = self.request.body
        return not (isinstance(payload, aiohttp.Payload) and payload.consumed)

    def send(self, limit: float, keyed: bool) -> Effect[Reply]:
        return Within(self._sending(limit, keyed), limit, aiohttp.ServerTimeoutError)

    def _sending(self, limit: float, keyed: bool) -> Plan[Reply]:
        reply: Reply = yield Call(self._attempt, limit, keyed)
        return reply

    async def _attempt(self, limit: float, keyed: bool) -> Reply:
        ends = asyncio.get_running_loop().time() + limit
        if self._attempts:
            await self.request.close()  # lets the last attempt's writer end, so that the body can be rewound
        self._attempts += 1
        response = await self.handler(self.request)
        try:
            body = await self._read(response, keyed, ends)
        except BaseException:
            response.close()
            raise
        return Reply(response.status, response.headers, body, response)

    async def _read(self, response: ClientResponse, keyed: bool, ends: float) -> bytes:
        """The body, if reading it belongs to the attempt; otherwise it is the caller's, but only until the deadline."""
        manner = manner_by(response.status, response.headers)
        if manner == "endless":
            return b""
        if manner == "document" or (keyed and "Content-Length" not in response.headers):
            body = await response.read()
            if body:
                response.content = _again(body)
            return body
        loop = asyncio.get_running_loop()
        timer = loop.call_at(ends, _cut, response)
        response.content.on_eof(timer.cancel)
        return b""

    def drop(self, reply: Reply) -> Effect[None]:
        return Call(reply.response.release)

    def fault(self, error: Exception) -> Fault:
        name = type(error).__name__
        for kind, fault in FAULTS:
            if isinstance(error, kind):
                return Fault(fault.name, fault.sent, fault.fatal or is_distrust(error), name)
        return Fault("error", fatal=True, note=name)


def _again(body: bytes) -> aiohttp.StreamReader:
    """What was read, for those who stream it."""
    loop = asyncio.get_running_loop()
    stream = aiohttp.StreamReader(BaseProtocol(loop), len(body), loop=loop)
    stream.feed_data(body)
    stream.feed_eof()
    return stream


def _cut(response: ClientResponse) -> None:
    """End a body that still trickles at the deadline; whoever reads it gets a timeout."""
    response.content.set_exception(aiohttp.ServerTimeoutError("the deadline has passed"))
    response.close()


class RetryMiddleware(AsyncContinuing):
    """A client middleware that asks once more, under one key; options are those of `Engine`.

    The session's own total timeout (5 minutes, unless you set it) still holds for all attempts together.
    """

    def __init__(self, retry: Retry | None = None, keyring: KeyringPlace | None = None, **options: Any) -> None:
        self.engine = Engine(retry, keyring, **options)

    async def __call__(self, request: ClientRequest, handler: ClientHandlerType) -> ClientResponse:
        self._carry_key(request)
        exchange = self.engine.exchange(AiohttpWire(request, handler))
        reply = await arun(self.engine.perform(exchange))
        response: Any = reply.response
        response.oncemore = exchange.story
        if response.status in (307, 308) and exchange.key is not None:
            with suppress(ValueError):  # a redirect to nowhere is not followed
                target = request.url.join(URL(response.headers.get("Location", "")))
                _redirected.set((request.method, target.with_fragment(None), request.body, exchange.key))
        return response  # type: ignore[no-any-return]

    def _carry_key(self, request: ClientRequest) -> None:
        """One operation, one key, however often it is redirected."""
        before, _ = _redirected.get(), _redirected.set(None)
        if before and before[:2] == (request.method, request.url) and before[2] is request.body:
            request.headers.setdefault(self.engine.header, before[3])

    async def resume(self, session: ClientSession, *, opened: bool = False) -> list[Resumed]:
        """What came of the operations that a dead process left behind; *session* adds the credentials, kept nowhere."""

        async def send(entry: Entry) -> ClientResponse:
            data = entry.body or None  # of an empty one, aiohttp would say that it is an octet-stream
            response = await session.request(entry.method, entry.url, headers=entry.kept_headers, data=data)
            await response.read()
            return response

        return await self._resume(send, opened)

    def close(self) -> None:
        """Let go of the keyring's files and connections."""
        self.engine.close()

    async def aclose(self) -> None:
        """As `close`, for what belongs to the running event loop too."""
        await self.engine.aclose()
