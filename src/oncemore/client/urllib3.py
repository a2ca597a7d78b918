"""Retries for urllib3: `RetryPoolManager` in place of its PoolManager."""

from __future__ import annotations

import http.client
import io
import socket
from collections.abc import Callable, MutableMapping
from functools import partial
from typing import Any

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import (
    ConnectTimeoutError,
    HTTPError,
    LocationValueError,
    NewConnectionError,
    ProxyError,
    SSLError,
    UnrewindableBodyError,
)
from urllib3.exceptions import TimeoutError as Urllib3Timeout
from urllib3.util import Timeout

from .._runtime.plan import Call, Effect, Plan, run
from ._compat import ConnectHook
from .bodies import SentBody, position, read_mode
from .deadlines import Deadline, call_with_deadline
from .engine import Engine, LibraryErrors, PendingOperations, RetryableRequest
from .errors import OutcomeUnknown, RetriesExhausted
from .hosts import host_name
from .keyring import KeyringPlace
from .keyring.entry import Entry, Resumed
from .retry import Retry
from .verdict import Fault, HttpReply, find_fault


class PoolExhausted(RetriesExhausted, HTTPError):
    """All attempts failed, the last one without an answer."""


class PoolTimedOut(RetriesExhausted, Urllib3Timeout):
    """All attempts failed, the last one because it took too long."""


class PoolUnknown(OutcomeUnknown, HTTPError):
    """The request may have been performed, and sending it again is no longer safe."""


ERRORS = LibraryErrors(PoolExhausted, PoolTimedOut, PoolUnknown)

# The first class that matches decides.  Every error after the connection was made counts as sent.
FAULTS: list[tuple[type[BaseException], Fault]] = [
    (NewConnectionError, Fault("connection", sent=False)),  # before its base class, the timeout
    (ConnectTimeoutError, Fault("timeout", sent=False)),
    (ProxyError, Fault("connection", sent=False)),
    (Urllib3Timeout, Fault("timeout")),
    (TimeoutError, Fault("timeout")),
    (LocationValueError, Fault("error", sent=False, fatal=True)),
    (UnrewindableBodyError, Fault("error", sent=False, fatal=True)),
    (SSLError, Fault("connection")),
    (HTTPError, Fault("connection")),
    (OSError, Fault("connection")),
]


class RetryPoolManager(PendingOperations, urllib3.PoolManager):
    """A PoolManager that retries each request under one key.  `response.oncemore` is its story.

    Args:
        retry: the policy; `Retry()` by default.
        keyring: stores keys and requests; a URL such as `"sqlite:///keys.db"`.
        pool: arguments of urllib3's PoolManager.
        options: arguments of `Engine`.
    """

    def __init__(
        self,
        retry: Retry | None = None,
        keyring: KeyringPlace | None = None,
        *,
        pool: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**(pool or {}))
        self.engine = Engine(retry, keyring, **options)
        pools: dict[str, Any] = {
            "http": partial(RetryHTTPPool, engine=self.engine),
            "https": partial(RetryHTTPSPool, engine=self.engine),
        }
        self.pool_classes_by_scheme = pools

    def urlopen(self, method: str, url: str, redirect: bool = True, **options: Any) -> Any:  # type: ignore[override]
        # The key is added here, before the redirects, so that all of them carry the same one.
        given = options.pop("headers", None)
        headers = urllib3.HTTPHeaderDict(self.headers if given is None else given)  # empty headers stay empty
        self.engine.put_key(method, headers)
        if options.get("body_pos") is None:  # every redirect sends the body from this position
            options["body_pos"] = position(options.get("body"))
        return super().urlopen(method, url, redirect, headers=headers, **options)

    def resume(self, *, opened: bool = False, headers: dict[str, str] | None = None) -> list[Resumed]:
        """Send each unfinished operation of a dead process again, under its own key, and return the results.

        *headers* add the credentials, because the keyring stores none.  With *opened*, operations in state `open` are
        sent again too: their callers know that the outcome is unknown.
        """

        def send(entry: Entry) -> Any:
            fields = {**entry.kept_headers, **(headers or {})}
            return self.request(entry.method, entry.url, body=entry.body, headers=fields)

        return self._resume(send, opened)

    def close(self) -> None:
        """Close the connections and the keyring."""
        self.clear()
        self.engine.close()


class BlockingRequest(RetryableRequest):
    """The common part of requests and urllib3: one attempt is one call, and the body is rewound before it."""

    unrewindable: type[Exception] = UnrewindableBodyError
    _sent: SentBody

    def body(self) -> Plan[bytes | None]:
        content: bytes | None = yield Call(self._sent.data)
        return content

    def resendable(self) -> bool:
        return self._sent.resendable()

    def send(self, timeout: float) -> Effect[HttpReply]:
        return Call(self._attempt, timeout)

    def close(self, reply: HttpReply) -> Effect[None]:
        return Call(reply.response.close)

    def _rewind(self) -> None:
        """Go back to the beginning of the body, also if a redirect sends it to another address."""
        if not self._sent.resendable():
            raise self.unrewindable(
                "the body is a generator that has ended, so it cannot follow the redirect: send bytes or a file"
            )
        self._sent.rewind()

    def _attempt(self, timeout: float) -> HttpReply:
        raise NotImplementedError


def deadlines(timeout: Any, seconds: float) -> tuple[Deadline, Deadline]:
    """Return the caller's connect and read timeouts (in any form of requests or urllib3), both ending after *seconds*."""
    if isinstance(timeout, Timeout):
        timeout = (timeout.connect_timeout, timeout.read_timeout)
    steps = timeout if isinstance(timeout, tuple) else (timeout, timeout)
    connect, read = (Deadline(seconds, step if isinstance(step, int | float) else None) for step in steps)
    return connect, read


class Urllib3Request(BlockingRequest):
    """One request of a pool, sent by the pool's own *urlopen*."""

    errors = ERRORS

    def __init__(
        self, pool: Any, method: str, url: str, headers: MutableMapping[str, str], urlopen: Any, body: Any, options: Any
    ) -> None:
        self.method = method
        self.name = host_name(pool.scheme, pool.host, pool.port)
        self.url = url if "://" in url else f"{pool.scheme}://{self.name}{url}"
        self.headers = headers
        self._urlopen = urlopen
        self._sent = SentBody(body)
        self._options = options

    def _attempt(self, timeout: float) -> HttpReply:
        self._rewind()
        connect, read = deadlines(self._options.get("timeout"), timeout)
        options = {**self._options, "retries": False, "timeout": Timeout(connect=connect, read=read)}
        response = self._urlopen(body=self._sent.value, headers=self.headers, **options)
        if read_mode(response.status, response.headers) == "endless":
            read.lift()
        body = response.data if self._options.get("preload_content", True) else b""
        return HttpReply(response.status, response.headers, body, response)

    def fault(self, error: Exception) -> Fault:
        return find_fault(error, FAULTS)


class RetryingPool:
    """Mixin for urllib3's pools: sends their requests through *engine*."""

    def __init__(self, *arguments: Any, engine: Engine, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._engine = engine

    def urlopen(
        self,
        method: str,
        url: str,
        body: Any = None,
        headers: Any = None,
        *,
        body_pos: int | None = None,
        **options: Any,
    ) -> Any:
        if body_pos is not None:
            body.seek(body_pos)
        fields = urllib3.HTTPHeaderDict(self.headers if headers is None else headers)  # type: ignore[attr-defined]
        urlopen = partial(super().urlopen, method, url)  # type: ignore[misc]
        request = Urllib3Request(self, method, url, fields, urlopen, body, options)
        self._engine.prepare(request)
        reply = run(self._engine.send(request))
        reply.response.oncemore = request.story
        reply.response.retries = options.get("retries")  # the manager needs them for redirects
        return reply.response


# Blocking sockets that keep a deadline: no trickle of bytes and no name lookup outlasts it.


class BoundedConnection(ConnectHook):
    """A connection that ends each wait at its deadline, if its timeout is a Deadline."""

    timeout: Any
    sock: Any

    def open_socket(self, connect: Callable[[], socket.socket]) -> socket.socket:
        try:
            sock = call_with_deadline(self.timeout, connect, lambda late: late.close())
        except TimeoutError as error:
            message = f"no connection within {float(self.timeout):.3g} s"
            raise ConnectTimeoutError(self, message) from error
        self._set_timeout(sock)
        return sock

    def send(self, data: Any) -> None:
        self._set_timeout(self.sock)
        super().send(data)  # type: ignore[misc]

    def response_class(self, sock: Any, **options: Any) -> http.client.HTTPResponse:
        if not isinstance(self.timeout, Deadline):
            return http.client.HTTPResponse(sock, **options)
        return WholeResponse(BoundedFile(sock, self.timeout), **options)

    def _set_timeout(self, sock: Any) -> None:
        if sock is not None and isinstance(self.timeout, Deadline):
            sock.settimeout(self.timeout.next_timeout())


class BoundedFile(io.RawIOBase):
    """The file from which http.client reads a response.  Each wait ends at the deadline."""

    def __init__(self, sock: Any, deadline: Deadline) -> None:
        self._sock = sock
        self._file = sock.makefile("rb", buffering=0)
        self._deadline = deadline
        self.ended = False

    def makefile(self, mode: str) -> io.BufferedReader:
        """Return the buffered file.  http.client calls this method of its socket."""
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(self._deadline.next_timeout())
        count: int | None = self._file.readinto(buffer)
        self.ended = count == 0
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


class WholeResponse(http.client.HTTPResponse):
    """A response that refuses incomplete headers, because http.client itself accepts headers that break off."""

    def __init__(self, file: BoundedFile, **options: Any) -> None:
        super().__init__(file, **options)  # type: ignore[arg-type]
        self._bounded_file = file

    def begin(self) -> None:
        super().begin()
        if self._bounded_file.ended:
            raise http.client.BadStatusLine("the answer broke off in its headers")


class BoundedHTTPConnection(BoundedConnection, HTTPConnection):  # type: ignore[misc]
    """A plain connection that keeps deadlines."""


class BoundedHTTPSConnection(BoundedConnection, HTTPSConnection):  # type: ignore[misc]
    """A TLS connection that keeps deadlines, in its handshake too."""


class BoundedHTTPPool(HTTPConnectionPool):
    """A pool of plain connections that keep deadlines."""

    ConnectionCls = BoundedHTTPConnection


class BoundedHTTPSPool(HTTPSConnectionPool):
    """A pool of TLS connections that keep deadlines."""

    ConnectionCls = BoundedHTTPSConnection


class RetryHTTPPool(RetryingPool, BoundedHTTPPool):  # type: ignore[misc]
    """A pool of plain connections that sends again."""


class RetryHTTPSPool(RetryingPool, BoundedHTTPSPool):  # type: ignore[misc]
    """A pool of TLS connections that sends again."""


BOUNDED_POOLS = {"http": BoundedHTTPPool, "https": BoundedHTTPSPool}
