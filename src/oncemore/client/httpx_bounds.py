"""Sockets for httpx that keep to a deadline: no phase, no trickle of bytes and no name lookup outlasts it."""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from typing import Any

import httpcore
import httpx

from .deadline import Allowance, within

# Small enough that the kernel takes each piece whole when it takes anything, so that one piece is about one wait.
PIECE = 16 * 1024


class BoundedStream(httpcore.NetworkStream):
    """A stream whose every wait ends at the deadline that its timeout carries."""

    def __init__(self, stream: httpcore.NetworkStream, opened: float | None) -> None:
        self._stream = stream
        # A SOCKS greeting is read without any timeout: it gets that of the connecting.
        self._opening = opened
        self.get_extra_info = stream.get_extra_info  # type: ignore[method-assign]  # asked before each request

    def _next(self, timeout: float | None, error: type[Exception]) -> float | None:
        if not isinstance(timeout, Allowance):
            timeout = timeout or self._opening
            if not isinstance(timeout, Allowance):
                return timeout
        elif self._opening is not None:
            self._opening = None
        try:
            return timeout.left()
        except TimeoutError as passed:
            raise error(str(passed)) from None

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        if self._opening is not None or not isinstance(timeout, Allowance):
            return self._stream.read(max_bytes, self._next(timeout, httpcore.ReadTimeout))
        try:
            left = timeout.left()
        except TimeoutError as passed:
            raise httpcore.ReadTimeout(str(passed)) from None
        return self._stream.read(max_bytes, left)

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        if not buffer:
            return  # which is how most requests end
        if len(buffer) <= PIECE:
            self._stream.write(buffer, self._next(timeout, httpcore.WriteTimeout))
            return
        for start in range(0, len(buffer), PIECE):
            self._stream.write(buffer[start : start + PIECE], self._next(timeout, httpcore.WriteTimeout))

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        left = self._next(timeout, httpcore.ConnectTimeout)
        return BoundedStream(self._stream.start_tls(ssl_context, server_hostname, left), timeout)


class BoundedBackend(httpcore.NetworkBackend):
    """Opens streams within the deadline, names and all addresses included."""

    def __init__(self, backend: httpcore.NetworkBackend) -> None:
        self._backend = backend

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
            stream = within(timeout, connect, lambda late: late.close())
        except TimeoutError as error:
            raise httpcore.ConnectTimeout(str(error)) from error
        return BoundedStream(stream, timeout)

    def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore.NetworkStream:
        return BoundedStream(self._backend.connect_unix_socket(path, timeout, socket_options), timeout)

    def sleep(self, seconds: float) -> None:
        self._backend.sleep(seconds)


def bound(transport: httpx.BaseTransport) -> httpx.BaseTransport:
    """*transport*, with its future sockets bounded; one that has no pool of sockets is left as it is."""
    pool = getattr(transport, "_pool", None)
    backend = getattr(pool, "_network_backend", None)
    if isinstance(backend, httpcore.NetworkBackend) and not isinstance(backend, BoundedBackend):
        pool._network_backend = BoundedBackend(backend)  # type: ignore[union-attr]
    return transport
