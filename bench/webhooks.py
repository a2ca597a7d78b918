"""Webhooks: deliveries per second, endpoints that hang, and a million pending deliveries.  It takes about two minutes.

    python -m bench.webhooks [postgresql://...] [--count N] [--pending N]

Without a URL it starts its own server, with fsync on.  The receiver is a process of its own that answers 200 to everything, or
nothing at all under /hang.  Bare is aiohttp without a database: the same bodies, signed, over as many connections.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, ClassVar

import aiohttp

from oncemore import Guard, Webhooks
from oncemore._runtime.plan import arun, run
from oncemore.webhooks import Sender, Signing
from oncemore.webhooks.claims import Claims
from oncemore.webhooks.signature import new_id, new_secret
from tests.support.servers import PostgresServer

ENDPOINTS, HANGING = 1000, 200
PARALLEL = 64
CLAIMS = 30  # claims to measure, of 200 deliveries each
CLAIMED_AT_MOST = 20_000  # the pending deliveries that suffice: 100 endpoints, each with up to 20 at a time
RATE = 300  # webhooks per second to all endpoints together, while some hang
DATA = {"id": "rf_123", "amount": 1999, "currency": "EUR", "status": "succeeded", "reason": "requested by the customer"}


class Receiver(asyncio.Protocol):
    """A minimal HTTP server, so that the sender is measured.  It records the age of each webhook at its arrival."""

    ages: ClassVar[list[float]] = []

    def __init__(self) -> None:
        self.data = b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.data += data
        while (end := self.data.find(b"\r\n\r\n")) >= 0:
            head = self.data[:end].lower()
            start = head.index(b"content-length: ") + 16
            length = int(head[start:].split(b"\r\n", 1)[0])
            if len(self.data) < end + 4 + length:
                return
            body, self.data = self.data[end + 4 : end + 4 + length], self.data[end + 4 + length :]
            if head.startswith(b"post /ages"):
                shown = json.dumps(self.ages).encode()
                self.ages.clear()
                self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(shown) + shown)
            elif not head.startswith(b"post /hang"):
                sent = json.loads(body)["data"].get("sent")
                if sent:
                    self.ages.append(time.time() - sent)
                self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")


def receive(pipe: Connection) -> None:
    async def main() -> None:
        server = await asyncio.get_running_loop().create_server(Receiver, "127.0.0.1", 0, backlog=2000)
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


@contextmanager
def receiver() -> Iterator[str]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=receive, args=(theirs,), daemon=True)
    process.start()
    yield f"http://127.0.0.1:{ours.recv()}"
    process.kill()


@contextmanager
def new_webhooks(url: str) -> Iterator[Webhooks]:
    joint = "&" if "?" in url else "?"
    guard = Guard(f"{url}{joint}schema=bench_{uuid.uuid4().hex[:8]}")
    yield Webhooks(guard, allow=["127.0.0.0/8"], allow_http=True)
    guard.close()


async def add_messages(webhooks: Webhooks, count: int, tenant: str = "") -> None:
    """Add *count* messages with one statement."""
    tables = webhooks.tables
    await arun(tables.access.ready(tables.feature))
    transaction = await arun(tables.open())
    prefix = tables.access.statement("{p}").text
    statement = tables.access.statement(
        f"INSERT INTO {prefix}webhook_messages (id, tenant, type, data, created_at) SELECT 'm' || gen_random_uuid(), $1, "
        "'refund.succeeded', convert_to($2, 'UTF8'), clock_timestamp() FROM generate_series(1, $3)"
    )
    await arun(transaction.begin((statement, [tenant, json.dumps(DATA), count])))
    await arun(transaction.commit())


async def bare(url: str, count: int) -> float:
    """Return requests per second of aiohttp alone, with a new signature each."""
    signing, left = Signing(new_secret()), iter(range(count))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one() -> None:
            for _ in left:
                body = json.dumps(
                    {"type": "refund.succeeded", "timestamp": "2026-01-01T00:00:00Z", "data": DATA}
                ).encode()
                headers = {"content-type": "application/json", **signing.sign(body, id=new_id())}
                async with session.post(url, data=body, headers=headers) as response:
                    await response.read()

        began = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(PARALLEL)))
        return count / (time.perf_counter() - began)


async def throughput(webhooks: Webhooks, target: str, count: int) -> float:
    """Return deliveries per second of one sender, to ten endpoints of one receiver."""
    for n in range(10):
        await webhooks.endpoints.acreate(f"{target}/{n}", tenant=str(n))
    sender = Sender(webhooks)
    for n in range(10):
        await add_messages(webhooks, 20, str(n))
    await sender.arun_once()
    for n in range(10):
        await add_messages(webhooks, count // 10, str(n))
    began = time.perf_counter()
    done = await sender.arun_once()
    assert done == count, done
    return count / (time.perf_counter() - began)


async def ages(webhooks: Webhooks, target: str, seconds: float, hanging: int) -> list[float]:
    """Return the seconds from each webhook's creation to its arrival, while *hanging* endpoints never answer."""
    for n in range(ENDPOINTS):
        path = "hang" if n < hanging else "fine"
        await webhooks.endpoints.acreate(f"{target}/{path}/{n}", tenant=f"{hanging}-{n}")
    sender = Sender(webhooks, grace="0s")
    task = asyncio.create_task(sender.arun())
    async with aiohttp.ClientSession() as session:

        async def send_for(duration: float) -> list[float]:
            began, n = time.perf_counter(), 0
            while (passed := time.perf_counter() - began) < duration:
                while n < passed * RATE:
                    tables, tenant = webhooks.tables, f"{hanging}-{n * 7 % ENDPOINTS}"
                    data = json.dumps({**DATA, "sent": time.time()})
                    await add_one(tables, tenant, data)
                    webhooks.announcer.announce()
                    n += 1
                await asyncio.sleep(0.01)
            await asyncio.sleep(1.0)
            async with session.post(f"{target}/ages", data=b"{}") as response:
                found: list[float] = await response.json(content_type=None)
                return found

        await send_for(16.0 if hanging else 4.0)  # until the hanging requests have timed out once
        found = await send_for(seconds)
    sender.stop()
    await task
    return found


async def add_one(tables: Any, tenant: str, data: str) -> None:
    from oncemore.webhooks import statements as sql

    await arun(tables.execute(tables.query(sql.ADD_MESSAGE, new_id(), tenant, "refund.succeeded", None, data.encode())))


def claim_latency(webhooks: Webhooks, target: str, pending: int) -> list[float]:
    """Return the milliseconds of each claim, with *pending* deliveries for 100 endpoints."""
    for n in range(100):
        webhooks.endpoints.create(f"{target}/{n}", tenant="t", id=f"ep{n:03}")
    tables = webhooks.tables
    messages = tables.access.statement(
        "INSERT INTO {p}webhook_messages (id, tenant, type, data, created_at, is_new) "
        "SELECT 'm' || n, 't', 'a', '1', clock_timestamp(), false FROM generate_series(1, $1) AS n"
    )
    deliveries = tables.access.statement(
        "INSERT INTO {p}webhook_deliveries (message, endpoint, tenant, type, state, created_at, next_at) "
        "SELECT m.seq, e.id, 't', 'a', 'pending', clock_timestamp(), clock_timestamp() "
        "FROM {p}webhook_messages m CROSS JOIN {p}webhook_endpoints e"
    )
    transaction = run(tables.open())
    run(transaction.begin((messages, [pending // 100])))
    run(transaction.commit((deliveries, [])))
    run(tables.execute((tables.access.statement("ANALYZE {p}webhook_deliveries"), [])))
    claims = Claims(webhooks, concurrency=1000, lease=60.0)
    times = []
    for _ in range(CLAIMS):
        began = time.perf_counter()
        claimed = run(claims.claim(200))
        times.append(1000 * (time.perf_counter() - began))
        assert claimed
        for each in claimed:
            claims.end(each.registered.endpoint.id, success=True)
    return times


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.webhooks", description=__doc__)
    parser.add_argument("url", nargs="?")
    parser.add_argument("--count", type=int, default=20_000, help="deliveries of a round")
    parser.add_argument("--pending", type=int, default=1_000_000, help="pending deliveries")
    parser.add_argument("--seconds", type=float, default=15.0, help="of sending while endpoints hang")
    options = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    if options.url:
        measure(options.url, options)
    else:
        with PostgresServer(fsync=True) as server:
            measure(server.url, options)


def measure(url: str, options: argparse.Namespace) -> None:
    with receiver() as target:
        rates, bares = [], []
        for _ in range(3):
            bares.append(asyncio.run(bare(f"{target}/bare", options.count)))
            with new_webhooks(url) as webhooks:
                rates.append(asyncio.run(throughput(webhooks, target, options.count)))
        print(f"bare aiohttp           {max(bares):8,.0f} /s")
        print(f"one sender             {max(rates):8,.0f} /s   {max(rates) / max(bares):.2f} of bare")
        for hanging in (0, HANGING):
            with new_webhooks(url) as webhooks:
                found = asyncio.run(ages(webhooks, target, options.seconds, hanging))
            p50, p99 = (1000 * quantile(found, share) for share in (0.5, 0.99))
            print(
                f"{hanging:4} of {ENDPOINTS:,} hang    p50 {p50:6.1f} ms, p99 {p99:6.1f} ms of the others ({len(found):,})"
            )
        for pending in sorted({CLAIMED_AT_MOST, max(options.pending, CLAIMED_AT_MOST)}):
            with new_webhooks(url) as webhooks:
                times = claim_latency(webhooks, target, pending)
            print(
                f"{pending:9,} pending      {statistics.median(times):6.1f} ms per claim of 200, p95 {quantile(times, 0.95):.1f}"
            )


if __name__ == "__main__":
    main()
