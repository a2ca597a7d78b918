"""One httpx request on its way: its body read or refused, its answer read within the limit, its errors understood."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

import httpx

from ..core.plan import Effect, Plan
from .bodies import MAX_BODY, READ_AHEAD, Manner, manner_for
from .deadline import Allowance, is_distrust
from .effects import Either, Within
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


class HttpxWire:
    """One request of httpx.Client or httpx.AsyncClient, sent by *transport*."""

    errors = ERRORS
    parallel = True

    def __init__(self, request: httpx.Request, transport: Any) -> None:
        self.request = request
        self.transport = transport
        self.method = request.method
        url = request.url
        self.host = host_of(url.scheme, url.raw_host.decode("ascii"), url.port)
        self.headers = request.headers
        self._extensions = request.extensions

    @property
    def url(self) -> str:
        return str(self.request.url)

    def body(self) -> Plan[bytes | None]:
        if isinstance(self.request.stream, httpx.ByteStream):
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
        return Within(self._sending(limit, keyed), limit, httpx.ReadTimeout)

    def drop(self, reply: Reply) -> Effect[None]:
        return Either(reply.response, "close", "aclose")

    def _sending(self, limit: float, keyed: bool) -> Plan[Reply]:
        ends = time.monotonic() + limit
        allowances = self._allow(limit)
        try:
            response: httpx.Response = yield Either(
                self.transport, "handle_request", "handle_async_request", self.request
            )
        finally:
            self.request.extensions = self._extensions  # the caller may send the same request again
        status, content = response.status_code, None
        try:
            manner = manner_of(response)
            if manner != "endless":
                response.stream = body = Body(response.stream, ends)
                content = (yield body) if keyed or manner == "document" else None
        except GeneratorExit:
            raise
        except BaseException:
            yield Either(response, "close", "aclose")
            raise
        if manner == "endless":
            for allowance in allowances:
                allowance.lift()
        if content is None:
            return Reply(status, response.headers, b"", response)
        response.stream = httpx.ByteStream(content)
        return Reply(status, response.headers, plain(response, content) if status >= 400 else b"", response)

    def _allow(self, limit: float) -> Iterable[Allowance]:
        """Let the request's timeouts, which are mostly four times the same number, know when the attempt must end."""
        steps: dict[str, float | None] = self._extensions.get("timeout") or NO_TIMEOUTS
        made: dict[float | None, Allowance] = {}
        limits = {}
        for name in NO_TIMEOUTS:
            step = steps.get(name)
            limits[name] = made.get(step) or made.setdefault(step, Allowance.within(limit, step))
        self.request.extensions = {**self._extensions, "timeout": limits}
        return made.values()

    def fault(self, error: Exception) -> Fault:
        return fault_of(error)


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
    length = kind = ""
    for name, value in response.headers.raw:
        if len(name) == 14 and name.lower() == b"content-length":
            length = value.decode("latin-1")
        elif len(name) == 12 and name.lower() == b"content-type":
            kind = value.decode("latin-1")
    return manner_for(response.status_code, kind, length)


def plain(response: httpx.Response, body: bytes) -> bytes:
    """The body without its compression, as far as judging needs it: never more than 64 KiB."""
    if response.headers.get("Content-Encoding", "").lower() not in ("gzip", "deflate"):
        return body
    try:
        return zlib.decompressobj(47).decompress(body, 64 * 1024)
    except zlib.error:
        return b""
