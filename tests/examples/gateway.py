"""A gateway in front of the service: it answers 502 if the service is down, and can send scripted answers."""

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

# Headers of one connection, which are not forwarded.
HOP_BY_HOP = ("host", "connection", "transfer-encoding", "content-length", "date", "server")


@dataclass
class ScriptedAnswer:
    """An answer that the gateway sends by itself."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    problem: dict[str, Any] | None = None


@dataclass
class ReceivedRequest:
    """A request as the gateway received it."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class Gateway(ThreadingHTTPServer):
    """Sends the answers in *script* first, then forwards to *target*."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, target: str, script: list[ScriptedAnswer]) -> None:
        super().__init__(("127.0.0.1", 0), GatewayHandler)
        self.target = target
        self.script = script
        self.seen: list[ReceivedRequest] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: tests break connections on purpose."""


class GatewayHandler(BaseHTTPRequestHandler):
    server: Gateway
    protocol_version = "HTTP/1.1"  # keep-alive, so that a client waits for a lost answer

    def forward(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        body = self.rfile.read(int(headers.get("content-length", 0)))
        self.server.seen.append(ReceivedRequest(self.command, self.path, headers, body))
        if self.server.script:
            scripted = self.server.script.pop(0)
            fields = {**({"Content-Type": "application/problem+json"} if scripted.problem else {}), **scripted.headers}
            return self.answer(
                scripted.status, fields, json.dumps(scripted.problem).encode() if scripted.problem else b""
            )
        kept = {name: value for name, value in headers.items() if name not in HOP_BY_HOP}
        try:
            answer = http.request(self.command, self.server.target + self.path, content=body, headers=kept)
        except httpx.TransportError:  # the service is down, or died during the request
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
def gateway(target: str, *script: ScriptedAnswer) -> Iterator[Gateway]:
    """Run a gateway in front of *target*."""
    with Gateway(target, list(script)) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class NetworkRoute:
    """A connection to the service through a TCP proxy that can fail and a gateway that can answer by itself."""

    def __init__(self, proxy: FaultProxy, before: Gateway) -> None:
        self.proxy, self.gateway = proxy, before
        self.url = proxy.url(before.url)


@contextmanager
def open_route(system: PaymentSystem) -> Iterator[NetworkRoute]:
    """Open a route to the service of *system*; at the end, remove all faults and start the service if it is down."""
    with ExitStack() as stack:
        before = stack.enter_context(gateway(system.service.url))
        yield NetworkRoute(stack.enter_context(FaultProxy.before(before.url)), before)
    system.provider.order()
    if not system.service.is_ready():
        system.service.start()
