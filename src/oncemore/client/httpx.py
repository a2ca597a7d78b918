"""Retries for httpx: `httpx.Client(transport=RetryTransport(...))`, and the same for its async client."""

from __future__ import annotations

import asyncio
import ssl
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator
from functools import partial
from typing import Any

import httpcore
import httpx

from .._ledger.transactions import Do
from .._runtime.plan import Effect, Plan, arun, run
from ._compat import wrap_network_backend
from .bodies import MAX_BODY, READ_AHEAD, content_length, read_mode
from .deadlines import Deadline, call_with_deadline, with_deadline
from .engine import AsyncPendingOperations, Engine, LibraryErrors, PendingOperations, RetryableRequest
from .errors import OutcomeUnknown, RetriesExhausted
from .hosts import has_origin, host_name
from .keyring import KeyringPlace
from .keyring.entry import Entry, Resumed
from .retry import Retry
from .verdict import Fault, HttpReply, find_fault

__all__ = ["AsyncRetryTransport", "RequestExhausted", "RequestTimedOut", "RequestUnknown", "RetryTransport"]


class RequestExhausted(RetriesExhausted, httpx.TransportError):
    """All attempts failed, the last one without an answer."""


class RequestTimedOut(RetriesExhausted, httpx.TimeoutException):
    """All attempts failed, the last one because it took too long."""


class RequestUnknown(OutcomeUnknown, httpx.TransportError):
    """The request may have been performed, and sending it again is no longer safe."""


ERRORS = LibraryErrors(RequestExhausted, RequestTimedOut, RequestUnknown)

# The first class that matches decides.  Every error after the connection was made counts as sent.
FAULTS: list[tuple[type[BaseException], Fault]] = [
    (httpx.ConnectTimeout, Fault("timeout", sent=False)),
    (httpx.PoolTimeout, Fault("timeout", sent=False)),
    (httpx.TimeoutException, Fault("timeout")),
    (httpx.ConnectError, Fault("connection", sent=False)),
    (httpx.ProxyError, Fault("connection", sent=False)),
    (httpx.UnsupportedProtocol, Fault("error", sent=False, fatal=True)),
    (httpx.LocalProtocolError, Fault("error", fatal=True)),
    (httpx.TransportError, Fault("connection")),
]

PHASES = ("connect", "read", "write", "pool")  # each has a timeout of its own


class RetryTransport(PendingOperations, httpx.BaseTransport):
    """A transport that retries each request under one key.  The keyring stores the key before the first byte is sent.

    The last answer is returned whatever its status; `response.extensions["oncemore"]` is its story.  A request can bring its
    own policy in `extensions={"retry": Retry(...)}`, and its own key in the key's header.

    Args:
        retry: the policy; `Retry()` by default.
        keyring: stores keys and requests; a URL such as `"sqlite:///keys.db"`.
        transport: sends the requests; an `httpx.HTTPTransport` by default.
        options: arguments of `Engine`.
    """

    def __init__(
        self,
        retry: Retry | None = None,
        keyring: KeyringPlace | None = None,
        *,
        transport: httpx.BaseTransport | None = None,
        **options: Any,
    ) -> None:
        self.engine = Engine(retry, keyring, **options)
        self._transport = transport or httpx.HTTPTransport()
        wrap_network_backend(self._transport, BoundedBackend.around)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        sent = HttpxRequest(request, self._transport)
        self.engine.prepare(sent, request.extensions.get("retry"))
        return _with_story(run(self.engine.send(sent)), sent)

    def resume(self, client: httpx.Client | None = None, *, opened: bool = False) -> list[Resumed]:
        """Send each unfinished operation of a dead process again, under its own key, and return the results.

        *client* sends them, because the keyring stores no credentials.  With *opened*, operations in
        state `open` are sent again too: their callers know that the outcome is unknown.
        """

        sender = client or httpx.Client(transport=self, timeout=None)
        serves = partial(has_origin, sender.base_url)
        return self._resume(lambda entry: sender.send(_stored_request(sender, entry)), opened, serves)

    def close(self) -> None:
        self._transport.close()
        self.engine.close()


class AsyncRetryTransport(AsyncPendingOperations, httpx.AsyncBaseTransport):
    """RetryTransport for `httpx.AsyncClient`; `pending`, `resume` and `forget` are awaited."""

    def __init__(
        self,
        retry: Retry | None = None,
        keyring: KeyringPlace | None = None,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        **options: Any,
    ) -> None:
        self.engine = Engine(retry, keyring, **options)
        self._transport = transport or httpx.AsyncHTTPTransport()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        sent = HttpxRequest(request, self._transport)
        self.engine.prepare(sent, request.extensions.get("retry"))
        return _with_story(await arun(self.engine.send(sent)), sent)

    async def resume(self, client: httpx.AsyncClient | None = None, *, opened: bool = False) -> list[Resumed]:
        """Send each unfinished operation again through *client*: see `RetryTransport.resume`."""

        sender = client or httpx.AsyncClient(transport=self, timeout=None)
        serves = partial(has_origin, sender.base_url)
        return await self._resume(lambda entry: sender.send(_stored_request(sender, entry)), opened, serves)

    async def aclose(self) -> None:
        await self._transport.aclose()
        await self.engine.aclose()


def _with_story(reply: HttpReply, request: RetryableRequest) -> httpx.Response:
    response: httpx.Response = reply.response
    response.extensions["oncemore"] = request.story
    return response


def _stored_request(client: httpx.Client | httpx.AsyncClient, entry: Entry) -> httpx.Request:
    request = client.build_request(entry.method, entry.url, headers=entry.kept_headers, content=entry.body)
    request.url = httpx.URL(entry.url)  # without the parameters that the client has added
    return request


class HttpxRequest(RetryableRequest):
    """One request of `httpx.Client` or `httpx.AsyncClient`, sent by *transport*.

    It is also the effect of one attempt: send the request, and read the part of the response that belongs to the attempt.
    """

    errors = ERRORS

    def __init__(self, request: httpx.Request, transport: Any) -> None:
        self.request = request
        self.transport = transport
        self.method = request.method
        self.url = str(request.url)
        self.name = host_name(request.url.scheme, request.url.host, request.url.port)
        self.headers = request.headers
        self.extensions = request.extensions
        self._deadlines: dict[str, Deadline] = {}

    def body(self) -> Plan[bytes | None]:
        if isinstance(self.request.stream, httpx.ByteStream):
            return self.request.read()  # it is in memory, also with async clients
        length = content_length(self.headers)
        if length is not None and length <= MAX_BODY:
            content: bytes = yield Do(self.request.read, self.request.aread)
            return content
        self.request.stream = SingleUseBody(self.request.stream)
        return None

    def resendable(self) -> bool:
        return not (isinstance(self.request.stream, SingleUseBody) and self.request.stream.begun)

    def close(self, reply: HttpReply) -> Effect[None]:
        return Do(reply.response.close, reply.response.aclose)

    def fault(self, error: Exception) -> Fault:
        return find_fault(error, FAULTS)

    def send(self, timeout: float) -> Effect[HttpReply]:
        self._timeout = timeout
        self._ends = time.monotonic() + timeout
        return self

    def run(self) -> HttpReply:
        # No task can be cancelled here, so each phase gets a timeout that knows when the attempt must end.
        timeouts: dict[str, float | None] = self.extensions.get("timeout") or {}
        self._deadlines = {phase: Deadline(self._timeout, timeouts.get(phase)) for phase in PHASES}
        self.request.extensions = {**self.extensions, "timeout": self._deadlines}
        try:
            response = self.transport.handle_request(self.request)
        finally:
            self.request.extensions = self.extensions  # the caller may send the same request again
        try:
            body = self._body(response)
            content = None if body is None else body.read_ahead()
        except BaseException:
            response.close()
            raise
        return _reply(response, content)

    def arun(self) -> Awaitable[HttpReply]:
        return with_deadline(self._send(), self._timeout, httpx.ReadTimeout)

    async def _send(self) -> HttpReply:
        response = await self.transport.handle_async_request(self.request)
        try:
            body = self._body(response)
            content = None if body is None else await body.aread_ahead()
        except BaseException:
            await response.aclose()
            raise
        return _reply(response, content)

    def _body(self, response: httpx.Response) -> ResponseBody | None:
        """Return the body if it is to be read within the attempt, otherwise None."""
        mode = read_mode(response.status_code, response.headers)
        if mode == "endless":
            for deadline in self._deadlines.values():
                deadline.lift()
            return None
        response.stream = body = ResponseBody(response.stream, self._ends)
        return body if self.key is not None or mode == "whole" else None


def _reply(response: httpx.Response, content: bytes | None) -> HttpReply:
    """Return the reply, and let the caller read *content* again."""
    error_body = b""
    if content is not None:
        response.stream = httpx.ByteStream(content)
        if response.status_code >= 400:
            error_body = _decompress(response, content)
    return HttpReply(response.status_code, response.headers, error_body, response)


def _decompress(response: httpx.Response, body: bytes) -> bytes:
    """Return the uncompressed body, at most 64 KiB of it: no verdict needs more."""
    if response.headers.get("Content-Encoding", "").lower() not in ("gzip", "deflate"):
        return body
    try:
        return zlib.decompressobj(47).decompress(body, 64 * 1024)
    except zlib.error:
        return b""


class SingleUseBody(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A request body that can be sent only once.  *begun* is True as soon as sending has started."""

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


class ResponseBody(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A response body that can be read ahead.  As a stream, it yields those chunks, then the rest until *ends*."""

    def __init__(self, source: Any, ends: float) -> None:
        self._source = source
        self._ends = ends
        self._chunks: list[bytes] = []
        self._rest: Any = None

    def read_ahead(self) -> bytes | None:
        """Return the whole body if it is no longer than READ_AHEAD; otherwise None."""
        size = 0
        self._rest = iter(self._source)
        for chunk in self._rest:
            self._chunks.append(chunk)
            size += len(chunk)
            if size > READ_AHEAD:
                return None
        self._source.close()
        return b"".join(self._chunks)

    async def aread_ahead(self) -> bytes | None:
        """Do the same as `read_ahead`, for async clients."""
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


# Blocking sockets that keep a deadline: no phase, no trickle of bytes and no name lookup outlasts it.

# Small enough that the kernel takes each piece whole if it takes anything, so that one piece is about one wait.
PIECE = 16 * 1024


class BoundedStream(httpcore.NetworkStream):
    """A stream that ends each wait at the deadline of its timeout."""

    def __init__(self, stream: httpcore.NetworkStream, connect_timeout: float | None) -> None:
        self._stream = stream
        # A SOCKS greeting is read without a timeout, so the connect timeout applies until the first timeout is given.
        self._connect_timeout = connect_timeout

    def _next_timeout(self, timeout: float | None, error: type[Exception]) -> float | None:
        if timeout is None:
            timeout = self._connect_timeout
        else:
            self._connect_timeout = None
        if not isinstance(timeout, Deadline):
            return timeout
        try:
            return timeout.next_timeout()
        except TimeoutError as passed:
            raise error(str(passed)) from None

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, self._next_timeout(timeout, httpcore.ReadTimeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        for start in range(0, len(buffer), PIECE):
            piece = buffer[start : start + PIECE]
            self._stream.write(piece, self._next_timeout(timeout, httpcore.WriteTimeout))

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        left = self._next_timeout(timeout, httpcore.ConnectTimeout)
        return BoundedStream(self._stream.start_tls(ssl_context, server_hostname, left), timeout)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


class BoundedBackend(httpcore.NetworkBackend):
    """Opens bounded streams within the deadline, including the name lookup and all addresses."""

    def __init__(self, backend: httpcore.NetworkBackend) -> None:
        self._backend = backend

    @classmethod
    def around(cls, backend: httpcore.NetworkBackend) -> httpcore.NetworkBackend:
        """Return *backend* wrapped, or unchanged if it is wrapped already or is not for blocking sockets."""
        if isinstance(backend, cls) or not isinstance(backend, httpcore.NetworkBackend):
            return backend
        return cls(backend)

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        def connect() -> httpcore.NetworkStream:
            return self._backend.connect_tcp(host, port, timeout, local_address, socket_options)

        try:
            stream = call_with_deadline(timeout, connect, lambda late: late.close())
        except TimeoutError as error:
            raise httpcore.ConnectTimeout(str(error)) from error
        return BoundedStream(stream, timeout)

    def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore.NetworkStream:
        return BoundedStream(self._backend.connect_unix_socket(path, timeout, socket_options), timeout)

    def sleep(self, seconds: float) -> None:
        self._backend.sleep(seconds)
