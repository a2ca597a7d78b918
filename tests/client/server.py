"""A server on a real socket that does, request by request, what a test tells it to: answer, hang, trickle, reset."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import BinaryIO

Act = Callable[["Visit"], None]


@dataclass
class Visit:
    """One request, as it was received, and the connection it came on."""

    server: Server
    sock: socket.socket
    reader: BinaryIO
    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    at: float = field(default_factory=time.monotonic)

    @property
    def key(self) -> str | None:
        return self.headers.get("idempotency-key")

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def reset(self) -> None:
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def close(self) -> None:
        self.reader.close()  # it holds the socket open too
        self.sock.close()


class Server:
    """Acts on each request with the next act of its script, and when that is over with *default*.

    *effects* counts what was performed: once per key, as a server with a ledger does.
    """

    def __init__(self, *script: Act, default: Act | None = None) -> None:
        self.script = list(script)
        self.default = default or performed()
        self.visits: list[Visit] = []
        self.effects: dict[str, int] = {}
        self.connections = 0
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Server:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # or the thread that waits there would accept once more
        self._listener.close()
        for sock in self._open:
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.connections += 1
            self._open.append(sock)
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        reader = sock.makefile("rb")
        try:
            while visit := self._receive(sock, reader):
                with self._lock:
                    self.visits.append(visit)
                    act = self.script.pop(0) if self.script else self.default
                act(visit)
                if visit.sock.fileno() < 0:
                    return
        except (OSError, ValueError):
            return

    def _receive(self, sock: socket.socket, reader: BinaryIO) -> Visit | None:
        line = reader.readline()
        if not line:
            return None
        method, path, _ = line.decode().split(" ", 2)
        headers = {}
        while (line := reader.readline().decode().strip()) != "":
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        if headers.get("transfer-encoding") == "chunked":
            body = b""
            while size := int(reader.readline().strip() or b"0", 16):
                body += reader.read(size)
                reader.readline()
            reader.readline()
        else:
            body = reader.read(int(headers.get("content-length", 0)))
        return Visit(self, sock, reader, method, path, headers, body)


def response(status: int, headers: dict[str, str] | None = None, body: bytes = b"", length: int | None = None) -> bytes:
    fields = {"Content-Length": str(len(body) if length is None else length), **(headers or {})}
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"HTTP/1.1 {status} X\r\n{lines}\r\n".encode() + body


def answer(status: int, body: bytes = b"", **headers: str) -> Act:
    """Answer so; header names are written with underscores."""
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda visit: visit.send(response(status, fields, body))


def problem(status: int, **members: object) -> Act:
    return answer(status, json.dumps(members).encode(), content_type="application/problem+json")


def performed(status: int = 201) -> Act:
    """Perform the operation once per key, and answer with what the ledger then holds."""

    def act(visit: Visit) -> None:
        first = perform(visit)
        said = "stored" if first else "replayed"
        visit.send(response(status, {"Idempotency-Status": said}, b'{"id": "r1"}'))

    return act


def perform(visit: Visit) -> bool:
    key = visit.key or f"none-{len(visit.server.effects)}"
    with visit.server._lock:
        seen = visit.server.effects.setdefault(key, 0)
        if not seen:
            visit.server.effects[key] = 1
    return not seen


def then(*acts: Act) -> Act:
    def act(visit: Visit) -> None:
        for one in acts:
            one(visit)

    return act


def effect(visit: Visit) -> None:
    """Perform the operation, and say nothing yet."""
    perform(visit)


def reset(visit: Visit) -> None:
    """Tear the connection down without an answer."""
    visit.reset()


def close(visit: Visit) -> None:
    """End the connection in good order, without an answer."""
    visit.close()


def hang(visit: Visit) -> None:
    """Never answer."""
    time.sleep(30)


def trickle(data: bytes, pause: float = 0.1) -> Act:
    """Send *data* byte by byte, as slowly as that."""

    def act(visit: Visit) -> None:
        for at in range(len(data)):
            visit.send(data[at : at + 1])
            time.sleep(pause)

    return act


def raw(data: bytes, after: Act = close) -> Act:
    """Send exactly these bytes, and then do that."""
    return then(lambda visit: visit.send(data), after)
