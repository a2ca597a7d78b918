"""One httpx request on its way: its body read or refused, its answer read within the limit, its errors understood."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator
from functools import lru_cache
from typing import Any

import httpx

from ..core.plan import Effect, Plan
from .bodies import MAX_BODY, READ_AHEAD, Manner, manner_for
from .deadline import Allowance, is_distrust
from .effects import Either, within
from .entry import host_of
from .errors import OutcomeUnknown, RetriesExhausted
from .exchange import Errors
from .judge import Fault, Reply


class RequestExhausted(RetriesExhausted, httpx.TransportError):
    """Every attempt failed; the last one without an answer."""


class RequestTimedOut(RetriesExhausted, httpx.TimeoutException):
    """Every attempt failed; the last one ran out of time."""


class RequestUnknown(OutcomeUnknown, httpx.TransportError):
    """It may have been performed, and asking again is no longer safe."""


NO_TIMEOUTS: dict[str, float | None] = dict.fromkeys(("connect", "read", "write", "pool"))
ERRORS = Errors(RequestExhausted, RequestTimedOut, RequestUnknown)


class OnceBody(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A request body that can be sent only once; it knows whether that has begun."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.begun = False

    def __iter__(self) -> Iterator[bytes]:
        self.begun = True
        yield from self._stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        self.begun = True
        async for chunk in self._stream:
            yield chunk


class Body(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A response body.  As an effect it is read ahead; as a stream it passes that on, and then the rest until *ends*."""

    def __init__(self, source: Any, ends: float) -> None:
        self._source = source
        self._ends = ends
        self._chunks: list[bytes] = []
        self._rest: Any = None

    def run(self) -> bytes | None:
        """The whole body, if it is no longer than what is read ahead."""
        size = 0
        self._rest = iter(self._source)
        for chunk in self._rest:
            self._chunks.append(chunk)
            size += len(chunk)
            if size > READ_AHEAD:
                return None
        self._source.close()
        return b"".join(self._chunks)

    async def arun(self) -> bytes | None:
        size = 0
        self._rest = aiter(self._source)
        async for chunk in self._rest:
            self._chunks.append(chunk)
            size += len(chunk)
            if size > READ_AHEAD:
                return None
        await self._source.aclose()
        return b"".join(self._chunks)

    def __iter__(self) -> Iterator[bytes]:
        yield from self._chunks
        for chunk in self._rest or self._source:
            if time.monotonic() > self._ends:
                raise httpx.ReadTimeout("the deadline has passed")
            yield chunk

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self._chunks:
            yield chunk
        rest = self._rest or aiter(self._source)
        while (more := await self._next(rest)) is not None:
            yield more

    async def _next(self, rest: AsyncIterator[bytes]) -> bytes | None:
        try:
            async with asyncio.timeout(self._ends - time.monotonic()):
                return await anext(rest, None)
        except TimeoutError:
            raise httpx.ReadTimeout("the deadline has passed") from None

    def close(self) -> None:
        self._source.close()

    async def aclose(self) -> None:
        await self._source.aclose()


@lru_cache(maxsize=1024)
def host_named(scheme: str, host: bytes, port: int | None) -> str:
    return host_of(scheme, host.decode("ascii"), port)


class HttpxWire:
    """One request of httpx.Client or httpx.AsyncClient, sent by *transport*."""

    errors = ERRORS
    parallel = True

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

    __slots__ = ("_allowances", "_ends", "_keyed", "_limit", "_wire")

    def __init__(self, wire: HttpxWire, limit: float, keyed: bool) -> None:
        self._wire = wire
        self._limit = limit
        self._keyed = keyed
        self._ends = 0.0
        self._allowances: Iterable[Allowance] = ()

    def run(self) -> Reply:
        wire = self._wire
        self._begin()
        try:
            response = wire.transport.handle_request(wire.request)
        finally:
            wire.request.extensions = wire.extensions  # the caller may send the same request again
        try:
            body = self._body(response)
            content = None if body is None else body.run()
        except BaseException:
            response.close()
            raise
        return reply_of(response, content)

    def arun(self) -> Awaitable[Reply]:
        return within(self._sent(), self._limit, httpx.ReadTimeout)

    async def _sent(self) -> Reply:
        wire = self._wire
        self._begin()
        try:
            response = await wire.transport.handle_async_request(wire.request)
        finally:
            wire.request.extensions = wire.extensions
        try:
            body = self._body(response)
            content = None if body is None else await body.arun()
        except BaseException:
            await response.aclose()
            raise
        return reply_of(response, content)

    def _begin(self) -> None:
        """Let the request's timeouts, which are mostly four times the same number, know when the attempt must end."""
        wire, limit = self._wire, self._limit
        self._ends = time.monotonic() + limit
        steps: dict[str, float | None] = wire.extensions.get("timeout") or NO_TIMEOUTS
        values = set(steps.values())
        if len(values) == 1 and len(steps) == len(NO_TIMEOUTS):
            one = Allowance.within(limit, values.pop())
            self._allowances = (one,)
            limits = {"connect": one, "read": one, "write": one, "pool": one}
        else:
            limits = {name: Allowance.within(limit, steps.get(name)) for name in NO_TIMEOUTS}
            self._allowances = limits.values()
        wire.request.extensions = {**wire.extensions, "timeout": limits}

    def _body(self, response: httpx.Response) -> Body | None:
        """The body, if reading it belongs to the attempt."""
        manner = manner_of(response)
        if manner == "endless":
            for allowance in self._allowances:
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


def manner_of(response: httpx.Response) -> Manner:
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
def manner_of_fields(status: int, kind: bytes, length: bytes) -> Manner:
    return manner_for(status, kind.decode("latin-1"), length.decode("latin-1"))


def plain(response: httpx.Response, body: bytes) -> bytes:
    """The body without its compression, as far as judging needs it: never more than 64 KiB."""
    if response.headers.get("Content-Encoding", "").lower() not in ("gzip", "deflate"):
        return body
    try:
        return zlib.decompressobj(47).decompress(body, 64 * 1024)
    except zlib.error:
        return b""
