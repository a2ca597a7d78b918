"""A payment provider in a process of its own, which answers late or never, and repeats its webhooks.

    python -m examples.payments.provider --port 8010 --database provider.db --webhooks http://127.0.0.1:8000/webhooks/provider

Its customers call `POST /charges` and `POST /payouts` with an Idempotency-Key; a known key gets 409 "duplicate" with the
first movement.  Without a key, each request moves money.  `POST /admin/quirks` or an `X-Quirk` header chooses the faults of
the next requests; `GET /admin/charges` counts the movements per key.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from oncemore.webhooks.signature import new_secret

from .provider_books import Books
from .provider_webhooks import ProviderWebhooks

KINDS = {"/charges": "charge", "/payouts": "payout"}
# Faults before the money moves, and after.  Each has a number of seconds, 0 if it needs none.
BEFORE = ("latency", "error_before", "decline")
AFTER = ("latency_after", "timeout_after", "error_after", "drop_after")


class Provider(ThreadingHTTPServer):
    """The server, with its books, its webhooks, and the faults of the next requests."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int, database: str, webhooks: str, secret: str) -> None:
        super().__init__(("127.0.0.1", port), RequestHandler)
        self.books = Books(database)
        self.webhooks = ProviderWebhooks(webhooks, secret, database)
        self.quirks: list[dict[str, Any]] = []


class RequestHandler(BaseHTTPRequestHandler):
    """Handles the requests to the provider."""

    server: Provider
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = urlsplit(self.path)
        asked = {name: values[0] for name, values in parse_qs(path.query).items()}
        if path.path == "/health":
            self.answer(200, {"pid": os.getpid()})
        elif path.path == "/admin/charges":
            self.answer(200, self.server.books.report(asked.get("kind")))
        elif path.path == "/admin/events":
            self.answer(200, {"events": self.server.webhooks.report()})
        elif path.path == "/movements":
            found = self.server.books.by_key(asked.get("key", ""))
            self.answer(200 if found else 404, found or {"error": "not_found"})
        else:
            self.answer(404, {"error": "not_found"})

    def do_POST(self) -> None:
        length = int(self.headers.get("content-length", 0))
        try:
            body = json.loads(self.rfile.read(length) or b"{}")
        except ValueError:
            return self.answer(400, {"error": "not_json"})
        if self.path in KINDS:
            return self.move(KINDS[self.path], body)
        if self.path == "/admin/quirks":
            self.server.quirks = list(body["next"])
            return self.answer(200, {"next": self.server.quirks})
        if self.path == "/admin/replay":
            return self.answer(
                200, {"deliveries": self.server.webhooks.replay(body["event"], int(body.get("times", 1)))}
            )
        return self.answer(404, {"error": "not_found"})

    def move(self, kind: str, body: dict[str, Any]) -> None:
        """Take money or pay it out, with the fault that was chosen for this request."""
        books, key = self.server.books, self.headers.get("idempotency-key", "")
        quirk = self.quirk()
        books.note_call(kind, key, self.headers.get("x-request-id", ""), self.headers.get("traceparent", ""))
        time.sleep(quirk.get("latency", 0))
        if "error_before" in quirk:
            return self.answer(503, {"error": "unavailable"})
        if "decline" in quirk:
            return self.answer(402, {"error": "declined"})
        wanted = (kind, key, int(body["amount"]), str(body["currency"]), str(body["reference"]))
        movement, new = books.move(*wanted, tell=self.server.webhooks.send)
        time.sleep(quirk.get("latency_after", 0))
        if "timeout_after" in quirk:  # the money has moved, and the caller gets no answer
            time.sleep(quirk["timeout_after"])
        if "timeout_after" in quirk or "drop_after" in quirk:
            self.close_connection = True
            return None
        if "error_after" in quirk:
            return self.answer(502, {"error": "bad_gateway"})
        if new:
            return self.answer(201, movement)
        same = (movement["kind"], movement["amount"]) == (kind, int(body["amount"]))
        return self.answer(409 if same else 422, {"error": "duplicate" if same else "key_reused", "existing": movement})

    def quirk(self) -> dict[str, Any]:
        """Return the fault of this request: the fault in its header (`X-Quirk: timeout_after=5`), or the next in the list."""
        header = self.headers.get("x-quirk")
        if header:
            name, _, seconds = header.partition("=")
            return {name: float(seconds or 0)} if name in BEFORE + AFTER else {}
        return self.server.quirks.pop(0) if self.server.quirks else {}

    def answer(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass

    def log_error(self, *_: Any) -> None:
        pass


def main() -> None:
    options = argparse.ArgumentParser(
        prog="python -m examples.payments.provider", description=(__doc__ or "").partition("\n")[0]
    )
    options.add_argument("--port", type=int, default=8010)
    options.add_argument("--database", default="provider.db")
    options.add_argument("--webhooks", default="", help="the URL that gets the events; empty: none are sent")
    given = options.parse_args()
    secret = os.environ.get("PAYMENTS_WEBHOOK_SECRET") or new_secret()
    provider = Provider(given.port, given.database, given.webhooks, secret)
    print(f"The provider answers at http://127.0.0.1:{provider.server_port}", file=sys.stderr, flush=True)
    try:
        provider.serve_forever(poll_interval=0.1)
    except KeyboardInterrupt:
        pass
    finally:
        provider.server_close()


if __name__ == "__main__":
    main()
