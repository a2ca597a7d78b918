"""A gateway before the service: it answers 502 when nobody is there, and what it is told to where the service never would."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

from examples.payments.processes import PaymentSystem, http
from tests.support.proxy import FaultProxy

# Of one connection, not of the message.
HOP_BY_HOP = ("host", "connection", "transfer-encoding", "content-length", "date", "server")


@dataclass
class Said:
    """An answer of the gateway's own."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    problem: dict[str, Any] | None = None


@dataclass
class Seen:
    """A request, as it came."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class Gateway(ThreadingHTTPServer):
    """Forwards to *target*, after the answers of its own that *script* holds."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, target: str, script: list[Said]) -> None:
        super().__init__(("127.0.0.1", 0), Forwarded)
        self.target = target
        self.script = script
        self.seen: list[Seen] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Connections end here as they do in bad networks; that is no error."""


class Forwarded(BaseHTTPRequestHandler):
    server: Gateway
    protocol_version = "HTTP/1.1"  # it stays on the line: an answer that is lost is one that is waited for

    def forward(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        body = self.rfile.read(int(headers.get("content-length", 0)))
        self.server.seen.append(Seen(self.command, self.path, headers, body))
        if self.server.script:
            said = self.server.script.pop(0)
            fields = {**({"Content-Type": "application/problem+json"} if said.problem else {}), **said.headers}
            return self.answer(said.status, fields, json.dumps(said.problem).encode() if said.problem else b"")
        kept = {name: value for name, value in headers.items() if name not in HOP_BY_HOP}
        try:
            answer = http.request(self.command, self.server.target + self.path, content=body, headers=kept)
        except httpx.TransportError:  # nobody is there, or no longer
            return self.answer(502, {}, b"")
        fields = {name: value for name, value in answer.headers.items() if name not in HOP_BY_HOP}
        return self.answer(answer.status_code, fields, answer.content)

    do_GET = do_POST = do_PUT = forward

    def answer(self, status: int, fields: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in {**fields, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def gateway(target: str, *script: Said) -> Iterator[Gateway]:
    """A gateway before *target*."""
    with Gateway(target, list(script)) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class Road:
    """The way to a service: past a network that can fail, and a gateway with answers of its own."""

    def __init__(self, proxy: FaultProxy, before: Gateway) -> None:
        self.proxy, self.gateway = proxy, before
        self.url = proxy.url(before.url)


@contextmanager
def road_to(world: PaymentSystem) -> Iterator[Road]:
    """A road to the service of *world*; whatever was broken at either end is whole again when it closes."""
    with ExitStack() as stack:
        before = stack.enter_context(gateway(world.service.url))
        yield Road(stack.enter_context(FaultProxy.before(before.url)), before)
    world.provider.order()
    if not world.service.is_ready():
        world.service.start()
