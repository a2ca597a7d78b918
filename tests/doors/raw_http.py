"""A raw HTTP client: it sends exactly the given bytes, and can close the connection in the middle of a request."""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from typing import Self
from urllib.parse import urlsplit

import msgspec

RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER of zero seconds: close() sends a reset instead of a goodbye
Fields = Sequence[tuple[str | bytes, str | bytes]]


class RawResponse(msgspec.Struct, frozen=True):
    """A response as it came; names of headers in lower case."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes = b""

    def header(self, name: str) -> str | None:
        """The first value of a header, if it is there."""
        return next((value for found, value in self.headers if found == name.lower()), None)

    def lines(self, name: str) -> list[str]:
        """Every value of a header."""
        return [value for found, value in self.headers if found == name.lower()]


class RawConnection:
    """One connection to the server at *url*."""

    def __init__(self, url: str, *, timeout: float = 15.0) -> None:
        parts = urlsplit(url)
        self.host = parts.netloc
        self._socket = socket.create_connection((parts.hostname, parts.port or 80), timeout)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._input = self._socket.makefile("rb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection in order."""
        self._input.close()
        self._socket.close()

    def reset(self) -> None:
        """Reset the connection, so that the server's next write fails."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        self.close()

    def send(self, data: bytes) -> None:
        """Send these bytes unchanged."""
        self._socket.sendall(data)

    def request(self, method: str, target: str, headers: Fields = (), body: bytes = b"") -> RawResponse:
        """The response to a request with a Content-Length."""
        self.send(head(method, target, [("Host", self.host), *headers, ("Content-Length", str(len(body)))]) + body)
        return self.response(method)

    def response(self, method: str = "POST") -> RawResponse:
        """The next response, whole."""
        response = self.start()
        return RawResponse(response.status, response.headers, self._body(method, response))

    def start(self) -> RawResponse:
        """Return the next response's status and headers as soon as they have arrived."""
        line = self._input.readline()
        if not line:
            raise ConnectionResetError("The server closed the connection without a response")
        headers: list[tuple[str, str]] = []
        while (field := self._input.readline().strip(b"\r\n")) != b"":
            name, _, value = field.decode("latin-1").partition(":")
            headers.append((name.lower(), value.strip(" ")))
        return RawResponse(int(line.split()[1]), headers)

    def chunk(self) -> bytes:
        """Return the next chunk of a chunked body as soon as it has arrived; at the end, an empty one."""
        size = int(self._input.readline().split(b";")[0], 16)
        data = self._input.read(size)
        self._input.readline()
        return data

    def _body(self, method: str, response: RawResponse) -> bytes:
        if method == "HEAD" or response.status in (204, 304):
            return b""
        if response.header("transfer-encoding") == "chunked":
            return b"".join(iter(self.chunk, b""))
        length = response.header("content-length")
        return self._input.read() if length is None else self._input.read(int(length))


def head(method: str, target: str, headers: Fields) -> bytes:
    """Return the first lines of a request; nothing checks that the parts are well-formed."""
    lines = [f"{method} {target} HTTP/1.1".encode("latin-1")]
    lines += [encoded(name) + b": " + encoded(value) for name, value in headers]
    return b"\r\n".join(lines) + b"\r\n\r\n"


def encoded(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode("latin-1")


def chunked(*chunks: bytes) -> bytes:
    """A body in chunked encoding."""
    return b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in (*chunks, b""))
