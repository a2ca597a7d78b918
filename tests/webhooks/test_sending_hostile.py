"""Receivers that reset, hang, trickle, answer garbage, redirect, close early or speak HTTP/1.0: the sender goes on."""

from __future__ import annotations

import asyncio
import gzip
import socket
import struct
from contextlib import ExitStack
from typing import Any

import pytest

from oncemore import Webhooks
from oncemore.testing.clock import Clock
from oncemore.webhooks import Sender
from tests.webhooks.conftest import send
from tests.webhooks.hooks import OK, Answer, Arrived, Hooks, response

Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter


async def reset(reader: Reader, writer: Writer) -> None:
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def hang(reader: Reader, writer: Writer) -> None:
    await reader.read()


async def trickle(reader: Reader, writer: Writer) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n")
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.05)


async def trickle_headers(reader: Reader, writer: Writer) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        writer.write(b"x: y\r\n")
        await writer.drain()
        await asyncio.sleep(0.05)


async def close(reader: Reader, writer: Writer) -> None:
    return


async def close_within_response(reader: Reader, writer: Writer) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf")
    await writer.drain()


async def endless(reader: Reader, writer: Writer) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    while True:
        writer.write(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")
        await writer.drain()


async def http_1_0(reader: Reader, writer: Writer) -> None:
    writer.write(b"HTTP/1.0 200 OK\r\n\r\naccepted until the end")
    await writer.drain()


BOMB = gzip.compress(b"\0" * 50_000_000)
# The answer: a part of the error in the log, or None if the delivery succeeds.
ANSWERS: dict[str, tuple[Answer, str | None]] = {
    "reset": (reset, ""),
    "hang": (hang, "no complete response within 1 s"),
    "trickle": (trickle, "no complete response within 1 s"),
    "trickle headers": (trickle_headers, ""),
    "close": (close, "Disconnected"),
    "close within response": (close_within_response, "Payload"),
    "garbage": (b"\x00\xff\x16\x03 garbage \r\n\r\n", ""),
    "garbage header": (b"HTTP/1.1 200 OK\r\nbad header\x00\xff\r\n\r\n", ""),
    "status 999": (b"HTTP/1.1 999 X\r\ncontent-length: 0\r\n\r\n", "status 999"),
    "huge header": (b"HTTP/1.1 200 OK\r\nx: " + b"y" * 100_000 + b"\r\n\r\n", ""),
    "bytes that are no text": (response(500, b"\x00\xff\xfe\xed\xa0\x80 end"), "status 500"),
    "redirect to bytes": (b"HTTP/1.1 302 X\r\nlocation: /\xff\xfe\r\ncontent-length: 0\r\n\r\n", "not followed"),
    "redirect to metadata": (response(307, location="http://169.254.169.254/"), "not followed"),
    "absurd retry-after": (response(503, retry_after="9" * 400), "status 503"),
    "negative retry-after": (response(503, retry_after="-5"), "status 503"),
    "204": (b"HTTP/1.1 204 No Content\r\n\r\n", None),
    "endless": (endless, None),
    "HTTP/1.0": (http_1_0, None),
    "gzip bomb": (response(200, BOMB, content_encoding="gzip"), None),
    "cookie": (response(200, set_cookie="a=b"), None),
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_hostile_answer_is_one_attempt_and_spares_others(webhooks: Webhooks, hooks: Hooks, kind: str) -> None:
    answer, error = ANSWERS[kind]
    hooks.answer = lambda arrived: answer if arrived.path == "/bad" else OK
    bad = webhooks.endpoints.create(hooks.url("/bad"))
    good = webhooks.endpoints.create(hooks.url("/good"))
    (id,) = send(webhooks, 1)
    sender = Sender(webhooks, timeout="1s")
    assert sender.run_once() == (1 if error is not None else 2)
    (delivery,) = webhooks.deliveries.list(endpoint=bad.id)
    (attempt,) = webhooks.deliveries.attempts(delivery.id)
    assert (delivery.state == "delivered") == (error is None)
    assert (error or "") in attempt.error
    assert bool(attempt.error) == (error is not None)
    assert len(attempt.response) <= 4096
    assert webhooks.deliveries.list(endpoint=good.id)[0].state == "delivered"
    if error is not None:
        hooks.answer = lambda _: OK
        Clock(webhooks.guard.store).advance(60)
        assert sender.run_once() == 1
    assert set(hooks.ids) == {id}
    assert not any("cookie" in each.headers for each in hooks.arrived)


def test_unknown_host_and_closed_port_are_ordinary_failures(webhooks: Webhooks) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        webhooks.endpoints.create(f"http://127.0.0.1:{taken.getsockname()[1]}/")
        webhooks.endpoints.create("http://no-such-host.invalid/")
        send(webhooks, 1)
        assert Sender(webhooks, timeout="5s").run_once() == 0
    found = webhooks.deliveries.list(state="pending")
    assert len(found) == 2
    assert all(delivery.error for delivery in found)


def test_connection_timeout_is_named_in_the_error(webhooks: Webhooks) -> None:
    with socket.socket() as full, ExitStack() as waiting:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):  # fill its backlog
            client = waiting.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(full.getsockname())
        webhooks.endpoints.create(f"http://127.0.0.1:{full.getsockname()[1]}/")
        send(webhooks, 1)
        assert Sender(webhooks, connect_timeout="0.5s", timeout="5s").run_once() == 0
    (delivery,) = webhooks.deliveries.list()
    assert delivery.error == "no connection within 0.5 s"


def test_name_that_resolves_to_loopback_is_refused_for_good(guard: Any, hooks: Hooks) -> None:
    webhooks = Webhooks(guard, allow_http=True)
    webhooks.endpoints.create(f"http://localhost:{hooks.port}/")
    send(webhooks, 1)
    Sender(webhooks).run_once()
    (dead,) = webhooks.deliveries.list(state="dead")
    assert dead.error.startswith("refused: localhost cannot be called")
    assert hooks.arrived == []


def test_hanging_endpoints_do_not_delay_proven_ones(webhooks: Webhooks, hooks: Hooks) -> None:
    hung: set[str] = set()

    def answer(arrived: Arrived) -> Answer:
        if arrived.path.startswith("/hang"):
            hung.add(arrived.path)
            return hang
        return OK

    hooks.answer = answer
    for n in range(40):
        webhooks.endpoints.create(hooks.url(f"/hang{n}" if n % 2 else f"/good{n}"))

    async def main() -> None:
        sender = Sender(webhooks, concurrency=20, timeout="2s", grace="0s")
        task = asyncio.create_task(sender.arun())
        for _ in range(10):
            await asyncio.to_thread(send, webhooks, *range(10))
        # New endpoints wait for those that hang until their first timeout, and from then on for none.
        async with asyncio.timeout(120):
            while (await webhooks.astats())["delivered"] < 20 * 100:
                await asyncio.sleep(0.05)
        sender.stop()
        await task

    asyncio.run(main())
    good = [each for each in hooks.arrived if each.path.startswith("/good")]
    assert len(good) == len({(each.path, each.id) for each in good}) == 2000
    assert hung
    assert webhooks.stats()["pending"] == 2000  # the others are not lost
