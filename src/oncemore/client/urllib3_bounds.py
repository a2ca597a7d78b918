"""Sockets for urllib3 and requests that keep to a deadline: no trickle of bytes and no name lookup outlasts it."""

from __future__ import annotations

import http.client
import io
import socket
from typing import Any

from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import ConnectTimeoutError

from .deadline import Allowance, within


class BoundedFile(io.RawIOBase):
    """What http.client reads answers from; each wait ends at the deadline."""

    def __init__(self, sock: Any, allowance: Allowance) -> None:
        self._sock = sock
        self._file = sock.makefile("rb", buffering=0)
        self._allowance = allowance
        self.ended = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(self._allowance.left())
        count: int | None = self._file.readinto(buffer)
        self.ended = count == 0
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


class _Reading:
    """A socket as http.client needs it: something to make a file of."""

    def __init__(self, sock: Any, allowance: Allowance) -> None:
        self.file = BoundedFile(sock, allowance)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(self.file)


class WholeResponse(http.client.HTTPResponse):
    """A response whose headers came whole; http.client takes a broken-off head for a good one."""

    def __init__(self, sock: Any, **options: Any) -> None:
        super().__init__(sock, **options)
        self._file: BoundedFile = sock.file

    def begin(self) -> None:
        super().begin()
        if self._file.ended:
            raise http.client.BadStatusLine("the answer broke off in its headers")


class Bounded:
    """A connection whose timeouts, where they are Allowances, bound everything it does."""

    timeout: Any
    sock: Any

    def _new_conn(self) -> socket.socket:
        connect = super()._new_conn  # type: ignore[misc]
        try:
            sock: socket.socket = within(self.timeout, connect, lambda late: late.close())
        except TimeoutError as error:
            raise ConnectTimeoutError(self, f"no connection within {float(self.timeout):.3g} s") from error
        self._limit(sock)
        return sock

    def send(self, data: Any) -> None:
        self._limit(self.sock)
        super().send(data)  # type: ignore[misc]

    def response_class(self, sock: Any, **options: Any) -> http.client.HTTPResponse:
        if not isinstance(self.timeout, Allowance):
            return http.client.HTTPResponse(sock, **options)
        return WholeResponse(_Reading(sock, self.timeout), **options)

    def _limit(self, sock: Any) -> None:
        if sock is not None and isinstance(self.timeout, Allowance):
            sock.settimeout(self.timeout.left())


class BoundedHTTPConnection(Bounded, HTTPConnection):  # type: ignore[misc]
    """Plain HTTP within a deadline."""


class BoundedHTTPSConnection(Bounded, HTTPSConnection):  # type: ignore[misc]
    """HTTPS within a deadline, its handshake included."""


class BoundedHTTPPool(HTTPConnectionPool):
    """A pool of such connections."""

    ConnectionCls = BoundedHTTPConnection


class BoundedHTTPSPool(HTTPSConnectionPool):
    """A pool of such connections, over TLS."""

    ConnectionCls = BoundedHTTPSConnection


BOUNDED_POOLS = {"http": BoundedHTTPPool, "https": BoundedHTTPSPool}
