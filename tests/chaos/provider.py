"""A provider of payouts, in a process of its own: it honours keys, counts what it pays, and misbehaves to order.

Run as a script, it prints its address.  `POST /payouts?mode=...` with a key in `Idempotency-Key`; `GET /payouts` tells all,
`DELETE /payouts` makes it forget.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

PAYOUTS: dict[str, dict[str, Any]] = {}
LOCK = threading.Lock()


class Provider(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.respond(200, PAYOUTS)

    def do_DELETE(self) -> None:
        with LOCK:
            PAYOUTS.clear()
        self.respond(200, {})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", "0")))
        mode = parse_qs(urlsplit(self.path).query).get("mode", [""])[0]
        key = self.headers["Idempotency-Key"]
        with LOCK:
            known = key in PAYOUTS
            payout = PAYOUTS.setdefault(key, {"receipt": f"r-{len(PAYOUTS) + 1}", "paid": 0, "asked": 0})
            payout["asked"] += 1
            if not known:
                payout["paid"] += 1
        if mode == "late" and not known:
            time.sleep(1.0)
        if mode == "failing" and payout["asked"] < 3:  # paid, and then unable to say so
            self.respond(503, {"error": "try again"})
        elif mode == "duplicate" and known:
            self.respond(409, {"error": "duplicate", "receipt": payout["receipt"]})
        else:
            self.respond(201, {"receipt": payout["receipt"]})

    def respond(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        """Not a word."""


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Provider)
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    # It ends with the process that has started it.
    threading.Thread(target=lambda: (sys.stdin.read(), server.shutdown())).start()
    server.serve_forever()
