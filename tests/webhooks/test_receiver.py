"""Receivers under real servers: each answer of each kind of app, ten deliveries at once, and a killed process."""

from __future__ import annotations

import random
import re
import signal
import socket
import sqlite3
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from ..support.processes import ForkedServer
from .senders import OTHER, SENDERS, Sender
from .shop import KINDS, LIMIT
from .test_receiver_answers import is_genuine, mutated, signed_headers

ROOT = Path(__file__).parents[2]


class ShopServer(ForkedServer):
    """The shop under one kind of server.  It dies at the point *crash*, if that is given."""

    def __init__(self, kind: str, crash: str = "") -> None:
        super().__init__()
        self.kind = kind
        self.crash_point = crash

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        crash = [self.crash_point] if self.crash_point else []
        return [sys.executable, "-m", "tests.webhooks.shop", self.kind, str(self.port), str(self.folder), *crash]

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/stripe", timeout=5).status_code == 405
        except httpx.HTTPError:
            return False

    def deliver(self, sender: Sender, name: str, body: bytes, id: str = "", **signed: Any) -> httpx.Response:
        headers = {"Content-Type": "application/json", **sender.headers(body, id, **signed)}
        return httpx.post(f"{self.url}/{name}", content=body, headers=headers, timeout=60)

    def bookings(self, event: str, source: str) -> int:
        with sqlite3.connect(self.folder / "shop.db", timeout=60) as shop:
            found = shop.execute("SELECT count(*) FROM bookings WHERE event = ? AND source = ?", (event, source))
            return int(found.fetchone()[0])


@pytest.fixture(scope="module", params=KINDS)
def shop(request: pytest.FixtureRequest) -> Iterator[ShopServer]:
    with ShopServer(request.param) as server:
        yield server


def results(*answers: httpx.Response) -> list[tuple[int, str]]:
    return [(each.status_code, each.json().get("result", each.json().get("error_code", ""))) for each in answers]


@pytest.mark.parametrize("name", SENDERS)
def test_repeated_webhook_is_acknowledged_and_booked_once(shop: ShopServer, name: str) -> None:
    sender, id = SENDERS[name], f"once_{name}"
    first = shop.deliver(sender, name, sender.body(id), id)
    again = shop.deliver(sender, name, sender.body(id), id)
    assert results(first, again) == [(200, "ok"), (200, "replayed")], shop.log
    assert shop.bookings(id, name) == 1
    row = first.json()
    assert list(row) == ["event_id", "source", "first_seen", "processed", "result"]
    assert (row["event_id"], row["source"]) == (id, name)


def test_webhook_that_is_not_genuine_is_refused(shop: ShopServer) -> None:
    for name, sender in SENDERS.items():
        body, id = sender.body("forged"), "forged"
        forged = [
            shop.deliver(sender, name, body, id, secret=OTHER),
            httpx.post(f"{shop.url}/{name}", content=body),
        ]
        if sender.timed:
            forged += [shop.deliver(sender, name, body, id, when=time.time() + off) for off in (-400, 400)]
        assert set(results(*forged)) == {(401, "AUTH.webhook_signature")}
        assert shop.bookings(id, name) == 0


def test_malformed_webhook_is_refused_although_it_is_signed(shop: ShopServer) -> None:
    sender = SENDERS["stripe"]
    bodies = [
        b"",
        b"{",
        b"not JSON",
        b"\xff",
        b'{"id": 1e999}',
        b'{"id": "a", "id": "b"}',
        b"[" * 50_000,
        b"null",
        b"[]",
    ]
    bodies += [b"{}", b'{"id": ""}', b'{"id": "a\\u0000b"}', b'{"id": "\\ud800"}', b'{"id": ' + b"9" * 6000 + b"}"]
    for body in bodies:
        assert shop.deliver(sender, "stripe", body).status_code == 400, body[:50]


def test_body_beyond_the_limit_is_refused(shop: ShopServer) -> None:
    sender = SENDERS["stripe"]
    large = shop.deliver(sender, "stripe", sender.body("large", padding="x" * LIMIT))
    assert results(large) == [(413, "VALIDATION.payload_too_large")]
    body = sender.body("nearly", padding="x" * (LIMIT - 1000))
    assert results(shop.deliver(sender, "stripe", body)) == [(200, "ok")]

    def pieces() -> Iterator[bytes]:
        yield from (body, body)

    try:  # in chunks, without a length
        status = httpx.post(f"{shop.url}/stripe", content=pieces(), headers=sender.headers(body)).status_code
    except httpx.HTTPError:  # the server may close the connection before it has read all
        status = 413
    assert status == 413


def test_other_methods_are_refused(shop: ShopServer) -> None:
    for method in ("GET", "PUT", "DELETE", "HEAD"):
        answer = httpx.request(method, f"{shop.url}/stripe")
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


def test_other_payload_under_the_same_id_is_flagged(shop: ShopServer) -> None:
    for name, sender in SENDERS.items():
        id = f"flagged_{name}"
        shop.deliver(sender, name, sender.body(id, amount=1), id)
        other = shop.deliver(sender, name, sender.body(id, amount=2), id)
        assert results(other) == [(200, "flagged")]
        assert shop.bookings(id, name) == 1


def test_stripe_event_with_other_pending_webhooks_is_a_duplicate(shop: ShopServer) -> None:
    sender = SENDERS["stripe"]
    bodies = [sender.body("pending", pending_webhooks=count) for count in (2, 1, 0)]
    answers = [shop.deliver(sender, "stripe", body) for body in bodies]
    assert results(*answers) == [(200, "ok"), (200, "replayed"), (200, "replayed")]


def test_event_of_unknown_type_is_acknowledged_and_not_remembered(shop: ShopServer) -> None:
    sender = SENDERS["stripe"]
    unknown = shop.deliver(sender, "stripe", sender.body("unknown", type="charge.failed"))
    known = shop.deliver(sender, "stripe", sender.body("unknown"))
    assert results(unknown, known) == [(200, "ignored"), (200, "ok")]


def test_failing_handler_is_500_until_the_event_is_dead(shop: ShopServer) -> None:
    sender = SENDERS["standard"]
    body = sender.body("failing", fail=True)
    answers = [shop.deliver(sender, "standard", body, "failing") for _ in range(4)]
    assert [each.status_code for each in answers] == [500, 500, 200, 200], shop.log
    assert [each.json().get("result") for each in answers[2:]] == ["dead letter"] * 2
    assert "cannot be booked" not in answers[0].text
    assert shop.bookings("failing", "standard") == 0


def test_slack_url_verification_is_answered_with_the_challenge(shop: ShopServer) -> None:
    body = b'{"type": "url_verification", "challenge": "3eZbrw1a"}'
    answer = shop.deliver(SENDERS["slack"], "slack", body)
    assert (answer.status_code, answer.text) == (200, "3eZbrw1a")
    assert shop.deliver(SENDERS["slack"], "slack", body, secret=OTHER).status_code == 401


def test_hostile_headers_on_the_socket_are_refused(shop: ShopServer) -> None:
    """Sends bytes that no HTTP client would send.  The server may refuse them itself, or end the connection."""
    chance = random.Random(7)
    for number in range(210):
        name = list(SENDERS)[number % len(SENDERS)]
        sender, id = SENDERS[name], f"hostile_{number}"
        body = sender.body(id)
        genuine = sender.headers(body, id)
        victim = chance.choice(signed_headers(sender, genuine))
        hostile = mutated(genuine[victim].encode(), chance)
        if is_genuine(victim, hostile.strip(), genuine[victim]):
            continue
        status = post_raw(
            shop.port, name, {**{key: text.encode() for key, text in genuine.items()}, victim: hostile}, body
        )
        assert status is None or 400 <= status < 500, (name, victim, hostile, status)
        assert shop.bookings(id, name) == 0


def post_raw(port: int, name: str, headers: dict[str, bytes], body: bytes) -> int | None:
    """Send the request byte for byte, and return the status of the answer, or None if there is none."""
    lines = [f"POST /{name} HTTP/1.1".encode(), b"Host: localhost", b"Connection: close"]
    lines += [key.encode() + b": " + value for key, value in headers.items()]
    lines.append(b"Content-Length: %d" % len(body))
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        try:
            connection.sendall(b"\r\n".join([*lines, b"", body]))
            answer = connection.recv(4096)
        except ConnectionError:
            return None
    found = re.match(rb"HTTP/1\.[01] (\d{3})", answer)
    return int(found[1]) if found else None


def test_ten_deliveries_at_once_have_one_effect(shop: ShopServer) -> None:
    sender = SENDERS["standard"]
    body = sender.body("ten", seconds=0.2)
    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda _: shop.deliver(sender, "standard", body, "ten"), range(10)))
    assert sorted(results(*answers)) == [(200, "ok")] + [(200, "replayed")] * 9, shop.log
    assert shop.bookings("ten", "standard") == 1


@pytest.mark.chaos
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("point", "result"), [("after commit", "replayed"), ("before commit", "ok")])
def test_kill_around_commit_then_redelivery_has_one_effect(kind: str, point: str, result: str) -> None:
    sender = SENDERS["stripe"]
    with ShopServer(kind, point) as shop:
        body = sender.body("killed")
        with pytest.raises(httpx.TransportError):
            shop.deliver(sender, "stripe", body)
        program: Any = shop._supervisor
        assert program.wait(60) == -signal.SIGKILL
        shop.crash_point = ""
        shop.restart()
        answers = [shop.deliver(sender, "stripe", body) for _ in range(2)]
        assert results(*answers) == [(200, result), (200, "replayed")]
        assert shop.bookings("killed", "stripe") == 1
