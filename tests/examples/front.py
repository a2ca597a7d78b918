"""A bad road to the service: a proxy that lets a request through and loses the answer, or fails by itself, to order."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from examples.payments.processes import http


class Front(ThreadingHTTPServer):
    """Forwards to *target*; *script* says what happens to the first requests: "lose", or a status of its own."""

    daemon_threads = True

    def __init__(self, target: str, script: list[str | int]) -> None:
        super().__init__(("127.0.0.1", 0), Forwarded)
        self.target = target
        self.script = script
        self.over = threading.Event()


class Forwarded(BaseHTTPRequestHandler):
    server: Front

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        now = self.server.script.pop(0) if self.server.script else "pass"
        if isinstance(now, int):
            return self.answer(now, b"")
        headers = {name: self.headers[name] for name in ("authorization", "idempotency-key", "content-type")}
        answer = http.post(self.server.target + self.path, content=body, headers=headers)
        if now == "lose":
            self.server.over.wait(20)
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
def front(target: str, *script: str | int) -> Iterator[str]:
    """The address of a proxy before *target*."""
    with Front(target, list(script)) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.over.set()
            server.shutdown()
            thread.join()
