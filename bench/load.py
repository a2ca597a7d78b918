"""An HTTP load generator.  Each of its connections sends the next request when the last one was answered."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable

import uvloop

CONNECTIONS = 32


class Connection(asyncio.Protocol):
    """A keep-alive connection that measures the latency of each answer."""

    def __init__(self, request: Callable[[], bytes], until: float, latencies: list[float], done: asyncio.Future[None]):
        self.request = request
        self.until = until
        self.latencies = latencies
        self.done = done
        self.buffer = b""
        self.failures = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._next()

    def _next(self) -> None:
        self.began = time.perf_counter()
        self.transport.write(self.request())

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head, found, body = self.buffer.partition(b"\r\n\r\n")
        if not found or len(body) < length_of(head):
            return
        now = time.perf_counter()
        self.latencies.append(now - self.began)
        self.failures += not head.startswith(b"HTTP/1.1 2")
        self.buffer = b""
        if now < self.until:
            self._next()
        else:
            self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


def length_of(head: bytes) -> int:
    lower = head.lower()
    at = lower.find(b"content-length:")
    return int(lower[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0


class Round:
    """The results of one round of load."""

    def __init__(self, latencies: list[float], failures: int, seconds: float) -> None:
        self.requests = len(latencies)
        self.failures = failures
        self.rate = len(latencies) / seconds
        ordered = sorted(latencies)
        self.p50, self.p99 = (ordered[int(len(ordered) * q)] * 1000 for q in (0.5, 0.99))


def load(port: int, request: Callable[[], bytes], seconds: float, connections: int = CONNECTIONS) -> Round:
    """Run one round against a server on this machine, and return its results."""

    async def run() -> Round:
        loop = asyncio.get_running_loop()
        began = time.perf_counter()
        latencies: list[float] = []
        ends = [loop.create_future() for _ in range(connections)]
        made = []
        for done in ends:
            connection = Connection(request, began + seconds, latencies, done)
            await loop.create_connection(lambda connection=connection: connection, "127.0.0.1", port)  # type: ignore[misc]
            made.append(connection)
        await asyncio.gather(*ends)
        return Round(latencies, sum(each.failures for each in made), time.perf_counter() - began)

    return uvloop.run(run())


def look() -> bytes:
    """Return a GET that no rule guards."""
    return b"GET /look HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer token\r\n\r\n"


def repeated() -> bytes:
    """Return a POST that is the same each time."""
    return post(b"the-same-key", 1000)


def fresh(prefix: str) -> Callable[[], bytes]:
    """Return a function that makes a POST with a new key and amount each time."""
    counter = itertools.count()

    def request() -> bytes:
        number = next(counter)
        return post(b"%s-%d" % (prefix.encode(), number), number)

    return request


def post(key: bytes, amount: int) -> bytes:
    body = (
        b'{"charge_id":"ch_9ab12cd34ef56","amount":%d,"currency":"EUR","reason":"requested_by_customer",'
        b'"metadata":{"order":"o_12345","note":"%s"}}' % (amount, b"y" * 64)
    )
    return (
        b"POST /refunds HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer token\r\ncontent-type: application/json\r\n"
        b"idempotency-key: %s\r\ncontent-length: %d\r\n\r\n%s" % (key, len(body), body)
    )
