"""One httpx request on its way: its body read or refused, its answer read within the limit, its errors understood."""

from __future__ import annotations

import time
import zlib
from collections.abc import Awaitable
from functools import lru_cache
from typing import Any, Literal

import httpx

from .._runtime.plan import Effect, Plan
from .bodies import MAX_BODY, READ_AHEAD, Manner, manner_for
from .deadline import Allowance, is_distrust
from .effects import Either, with_deadline
from .errors import OutcomeUnknown, RetriesExhausted
from .exchange import Errors
from .httpx_bodies import Body, OnceBody
from .keyring.entry import host_of
from .verdict import Fault, Reply


class RequestExhausted(RetriesExhausted, httpx.TransportError):
    """Every attempt failed; the last one without an answer."""


class RequestTimedOut(RetriesExhausted, httpx.TimeoutException):
    """Every attempt failed; the last one ran out of time."""


class RequestUnknown(OutcomeUnknown, httpx.TransportError):
    """It may have been performed, and asking again is no longer safe."""


NO_TIMEOUTS: dict[str, float | None] = dict.fromkeys(("connect", "read", "write", "pool"))
ERRORS = Errors(RequestExhausted, RequestTimedOut, RequestUnknown)


@lru_cache(maxsize=1024)
def host_named(scheme: str, host: bytes, port: int | None) -> str:
    return host_of(scheme, host.decode("ascii"), port)


class HttpxWire:
    """One request of httpx.Client or httpx.AsyncClient, sent by *transport*."""

    errors = ERRORS

    def __init__(self, request: httpx.Request, transport: Any) -> None:
        self.request = request
        self.transport = transport
        self.method = request.method
        url = request.url
        self.host = host_named(url.scheme, url.raw_host, url.port)
        self.headers = request.headers
        self.extensions = request.extensions
        self.ready = isinstance(request.stream, httpx.ByteStream)

    @property
    def url(self) -> str:
        return str(self.request.url)

    def body(self) -> Plan[bytes | None]:
        if self.ready:
            return self.request.read()  # at hand already, also for async clients
        length = self.headers.get("Content-Length", "")
        if length.isdigit() and int(length) <= MAX_BODY:
            content: bytes = yield Either(self.request, "read", "aread")
            return content
        self.request.stream = OnceBody(self.request.stream)
        return None

    def resendable(self) -> bool:
        return not (isinstance(self.request.stream, OnceBody) and self.request.stream.begun)

    def send(self, limit: float, keyed: bool) -> Effect[Reply]:
        return Sending(self, limit, keyed)

    def drop(self, reply: Reply) -> Effect[None]:
        return Either(reply.response, "close", "aclose")

    def fault(self, error: Exception) -> Fault:
        return fault_of(error)


class Sending:
    """One attempt: the request sent in at most *limit* seconds, and so much of the answer read as belongs to it."""

    __slots__ = ("_ends", "_keyed", "_limit", "_steps", "_wire")

    _ends: float
    _steps: dict[str, Allowance]

    def __init__(self, wire: HttpxWire, limit: float, keyed: bool) -> None:
        self._wire = wire
        self._limit = limit
        self._keyed = keyed

    def run(self) -> Reply:
        wire = self._wire
        request = wire.request
        request.extensions = self._begun()
        try:
            response = wire.transport.handle_request(request)
        finally:
            request.extensions = wire.extensions  # the caller may send the same request again
        try:
            manner = manner_of(response)
            if manner == "short":
                content: bytes | None = b"".join(response.stream)
                response.stream.close()
            else:
                body = self._body(response, manner)
                content = None if body is None else body.run()
        except BaseException:
            response.close()
            raise
        return reply_of(response, content)

    def arun(self) -> Awaitable[Reply]:
        return with_deadline(self._sent(), self._limit, httpx.ReadTimeout)

    async def _sent(self) -> Reply:
        wire = self._wire
        request = wire.request
        request.extensions = self._begun()
        try:
            response = await wire.transport.handle_async_request(request)
        finally:
            request.extensions = wire.extensions
        try:
            manner = manner_of(response)
            if manner == "short":
                content: bytes | None = b"".join([chunk async for chunk in response.stream])
                await response.stream.aclose()
            else:
                body = self._body(response, manner)
                content = None if body is None else await body.arun()
        except BaseException:
            await response.aclose()
            raise
        return reply_of(response, content)

    def _begun(self) -> dict[str, Any]:
        """The request's extensions, whose timeouts (mostly four times the same number) know when the attempt must end."""
        extensions, limit = self._wire.extensions, self._limit
        self._ends = ends = time.monotonic() + limit
        steps: dict[str, float | None] = extensions.get("timeout") or NO_TIMEOUTS
        step = steps.get("read")
        if steps == dict.fromkeys(NO_TIMEOUTS, step):
            self._steps = dict.fromkeys(NO_TIMEOUTS, Allowance.until(ends, limit, step))
        else:
            self._steps = {name: Allowance.until(ends, limit, steps.get(name)) for name in NO_TIMEOUTS}
        return {**extensions, "timeout": self._steps}

    def _body(self, response: httpx.Response, manner: Manner) -> Body | None:
        """The body, if reading it belongs to the attempt."""
        if manner == "endless":
            for allowance in self._steps.values():
                allowance.lift()
            return None
        response.stream = body = Body(response.stream, self._ends)
        return body if self._keyed or manner == "document" else None


def reply_of(response: httpx.Response, content: bytes | None) -> Reply:
    """The answer, for judgement and for the caller, who reads what was read once more."""
    status, complaint = response.status_code, b""
    if content is not None:
        response.stream = httpx.ByteStream(content)
        if status >= 400:
            complaint = plain(response, content)
    return Reply(status, response.headers, complaint, response)


# The first that fits; "sent" is said of everything after the connection stood.
FAULTS: list[tuple[type[Exception], Fault]] = [
    (httpx.ConnectTimeout, Fault("timeout", sent=False)),
    (httpx.PoolTimeout, Fault("timeout", sent=False)),
    (httpx.TimeoutException, Fault("timeout")),
    (httpx.ConnectError, Fault("connection", sent=False)),
    (httpx.ProxyError, Fault("connection", sent=False)),
    (httpx.UnsupportedProtocol, Fault("error", sent=False, fatal=True)),
    (httpx.LocalProtocolError, Fault("error", fatal=True)),
    (httpx.TransportError, Fault("connection")),
]


def fault_of(error: Exception) -> Fault:
    """What an error of httpx means."""
    name = type(error).__name__
    for kind, fault in FAULTS:
        if isinstance(error, kind):
            return Fault(fault.name, fault.sent, fault.fatal or is_distrust(error), name)
    return Fault("error", fatal=True, note=name)


def manner_of(response: httpx.Response) -> Manner | Literal["short"]:
    """How the body is to be read; one walk over the fields, for httpx looks each name up by walking over all of them."""
    length = kind = b""
    for name, value in response.headers.raw:
        size = len(name)
        if size == 14 and name.lower() == b"content-length":
            length = value
        elif size == 12 and name.lower() == b"content-type":
            kind = value
    return manner_of_fields(response.status_code, kind, length)


# The same few answers come again and again, also those that differ in their lengths.
@lru_cache(maxsize=1024)
def manner_of_fields(status: int, kind: bytes, length: bytes) -> Manner | Literal["short"]:
    """As `manner_for`; a *short* document has said that it is, so that it need not be counted while it is read."""
    manner = manner_for(status, kind.decode("latin-1"), length.decode("latin-1"))
    return "short" if manner == "document" and length.isdigit() and int(length) <= READ_AHEAD else manner


def plain(response: httpx.Response, body: bytes) -> bytes:
    """The body without its compression, as far as judging needs it: never more than 64 KiB."""
    if response.headers.get("Content-Encoding", "").lower() not in ("gzip", "deflate"):
        return body
    try:
        return zlib.decompressobj(47).decompress(body, 64 * 1024)
    except zlib.error:
        return b""
