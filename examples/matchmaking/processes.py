"""The service and a receiver of its webhooks, for the demo and the tests."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

import httpx

from examples.process import free_port
from examples.program import Program, http


def new_key() -> str:
    return str(uuid.uuid4())


class Matchmaking(Program):
    """The service with its test hooks, and the requests of its users."""

    module = "examples.matchmaking"

    def __init__(self, port: int = 0, **settings: str) -> None:
        given = {"MATCHMAKING_TEST_HOOKS": "on", "MATCHMAKING_SCHEDULER": "off", **settings}
        super().__init__(port, **given)
        self.tokens: dict[str, str] = {}

    # Requests

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        user: str | None = None,
        key: str | None = None,
        fault: str = "",
        **headers: str,
    ) -> httpx.Response:
        """Send a request of *user* with *key*, and return the answer."""
        sent = dict(headers)
        if user is not None:
            sent["Authorization"] = f"Bearer {self.tokens[user]}"
        if key is not None:
            sent["Idempotency-Key"] = key
        if fault:
            sent["X-Test-Fault"] = fault
        return http.request(method, self.url + path, json=body, headers=sent)

    def post(
        self, path: str, body: Any = None, user: str | None = None, key: str | None = None, **more: Any
    ) -> httpx.Response:
        """Send a POST under *key*, or under a new key."""
        return self.ask("POST", path, {} if body is None else body, user=user, key=key or new_key(), **more)

    def at_once(self, times: int, ask: Callable[[int], httpx.Response]) -> list[httpx.Response]:
        """Call *ask* at the same moment from as many threads as *times* says."""
        together = threading.Barrier(times)

        def call(number: int) -> httpx.Response:
            together.wait()
            return ask(number)

        with ThreadPoolExecutor(times) as pool:
            return list(pool.map(call, range(times)))

    def dies(self, ask: Callable[[], httpx.Response]) -> bool:
        """Call *ask*, which kills the service; start it again, and return whether it died without an answer."""
        try:
            ask()
        except httpx.TransportError:
            self.crash()  # it is dead already: this waits for its end
            self.start()
            return True
        return False

    # Test hooks

    def sign_in(self, id: str, timezone: str = "UTC") -> str:
        """Make a user, who can send requests from now on."""
        made = self.hook("users", {"id": id, "timezone": timezone})
        self.tokens[id] = made["accessToken"]
        return id

    def offers(self, one: str, other: str) -> dict[str, str]:
        """Make a pair of offers, and return the id of each user's own."""
        found: dict[str, str] = self.hook("offers", {"users": [one, other]})["offers"]
        return found

    def match(self, one: str, other: str) -> str:
        """Make a match by two accepted offers, and return its id."""
        offers = self.offers(one, other)
        for user in (one, other):
            answer = self.post(f"/matches/offers/{offers[user]}/action", {"action": "accept"}, user)
        id: str = answer.raise_for_status().json()["matchId"]
        return id

    def daily_offers(self, date: str, delay: float = 0.0) -> list[dict[str, Any]]:
        slots: list[dict[str, Any]] = self.hook("jobs/daily-offers", {"date": date, "delayMs": delay * 1000})["slots"]
        return slots

    def advance(self, seconds: float) -> None:
        self.hook("clock", {"advance": seconds})

    def hook(self, path: str, body: Any) -> Any:
        return http.post(f"{self.url}/_test/{path}", json=body).raise_for_status().json()

    def effects(self, kind: str, *users: str | None) -> list[str]:
        """Return the refs of the committed effects of a kind; if *users* are given, only of their effects."""
        found = self.get("/_test/effects")["effects"]
        return [each["ref"] for each in found if each["kind"] == kind and (not users or each["user"] in users)]


class WebhookReceiver:
    """Receives webhooks on a port of its own, and remembers each; it can be taken down and brought up again.

    It answers after *delay* seconds.
    """

    def __init__(self, delay: float = 0.0) -> None:
        self.port = free_port()
        self.delay = delay
        self.received: list[tuple[dict[str, str], bytes]] = []
        self._server: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hooks"

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(body) for _, body in self.received]

    def up(self) -> None:
        received, delay = self.received, self.delay

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                received.append(({name.lower(): value for name, value in self.headers.items()}, body))
                time.sleep(delay)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def down(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.down()
