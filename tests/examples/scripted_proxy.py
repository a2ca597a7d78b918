"""A proxy in front of the service, which loses answers or answers by itself, as a script says."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from examples.payments.processes import http


class ScriptedProxy(ThreadingHTTPServer):
    """Forwards to *target*.  For each of the first requests, *script* has "lose" (the answer) or a status to send."""

    daemon_threads = True

    def __init__(self, target: str, script: list[str | int]) -> None:
        super().__init__(("127.0.0.1", 0), ProxyHandler)
        self.target = target
        self.script = script
        self.closing = threading.Event()


class ProxyHandler(BaseHTTPRequestHandler):
    server: ScriptedProxy

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        now = self.server.script.pop(0) if self.server.script else "pass"
        if isinstance(now, int):
            return self.answer(now, b"")
        headers = {name: self.headers[name] for name in ("authorization", "idempotency-key", "content-type")}
        answer = http.post(self.server.target + self.path, content=body, headers=headers)
        if now == "lose":
            self.server.closing.wait(20)
            return None
        return self.answer(answer.status_code, answer.content)

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def scripted_proxy(target: str, *script: str | int) -> Iterator[str]:
    """Run a proxy in scripted_proxy of *target*, and return its URL."""
    with ScriptedProxy(target, list(script)) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.closing.set()
            server.shutdown()
            thread.join()
