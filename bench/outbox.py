"""The outbox: an added message beside the transaction without it, and a relay beside its broker's client.

    python -m bench.outbox          on its own PostgreSQL and NATS server

Each ratio is the median of ROUNDS rounds whose two sides follow each other, and only ratios of one run count.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import psycopg

from oncemore import Guard, Op, Operation, Outbox, Policy
from oncemore.messages import Envelope, Relay
from oncemore.messages.broker import connect
from oncemore.messages.outbox_sql import CLAIM_NEW
from oncemore.messages.relay import RelayRun
from tests.support.brokers import NatsServer
from tests.support.servers import PostgresServer

ROUNDS, SECONDS, THREADS = 7, 0.7, 4
DRAINED, SENT, GONE = 100_000, 20_000, 1_000_000
DATA = {"id": "rf_1", "amount": 1000, "text": "x" * 150}
NUMBERS = itertools.count()


class NoBroker:
    """Stores nothing, at once."""

    url, channel, group, window = "none://", "none", "", None

    async def aopen(self) -> None:
        return

    async def aclose(self) -> None:
        return

    async def publish(self, envelopes: Sequence[Envelope]) -> Sequence[Exception | None]:
        return [None] * len(envelopes)

    def subscribe(self, group: str, *, prefetch: int = 1) -> Any:
        raise NotImplementedError


def rate(guard: Guard, perform: Callable[[Op], None]) -> float:
    """Operations per second, by some threads."""
    counts: list[int] = []
    ends = time.perf_counter() + SECONDS

    def work() -> None:
        done = 0
        while time.perf_counter() < ends:
            guard.run(Operation("bench", f"k{next(NUMBERS)}"), perform)
            done += 1
        counts.append(done)

    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / SECONDS


def measure_add(url: str) -> None:
    guard = Guard(url, policy=Policy(effect="transaction"))
    outbox = Outbox(guard, source="bench")

    def plain(op: Op) -> None:
        op.connection.execute("INSERT INTO refunds (id) VALUES (%s)", (op.key,))

    def adding(op: Op) -> None:
        plain(op)
        outbox.add(op, "refund.succeeded", DATA, subject=op.key)

    rate(guard, adding)
    ratios, rates = [], []
    for number in range(ROUNDS):
        order = (plain, adding) if number % 2 else (adding, plain)
        found = {perform: rate(guard, perform) for perform in order}
        ratios.append(found[adding] / found[plain])
        rates.append(found[adding])
    print(
        f"transaction with outbox.add beside without: {statistics.median(ratios):.2f} ({statistics.median(rates):,.0f}/s)"
    )
    guard.close()


def fill(url: str, outbox: Outbox, count: int) -> None:
    with psycopg.connect(url) as connection, connection.pipeline():
        for number in range(count):
            outbox.add(connection, "refund.succeeded", DATA, subject=f"rf_{number}", correlationid="bench")


def drain(relay: Relay) -> float:
    began = time.perf_counter()
    return relay.run_once() / (time.perf_counter() - began)


def time_claims(url: str, outbox: Outbox, relay: Relay) -> float:
    """The median seconds of a claim, while some rows are sent."""
    fill(url, outbox, SENT)
    times, claim = [], RelayRun._claim

    async def timed(self: RelayRun, transaction: Any, statement: Any) -> Any:
        began = time.perf_counter()
        try:
            return await claim(self, transaction, statement)
        finally:
            if statement is CLAIM_NEW:
                times.append(time.perf_counter() - began)

    RelayRun._claim = timed  # type: ignore[method-assign]
    try:
        relay.run_once()
    finally:
        RelayRun._claim = claim  # type: ignore[method-assign]
    return statistics.median(times)


def measure_drain(url: str, plain_url: str) -> None:
    guard = Guard(url)
    outbox = Outbox(guard, source="bench")
    relay = Relay(outbox, to=NoBroker())
    relay.run_once()
    fill(plain_url, outbox, DRAINED)
    print(f"drained with a broker that does nothing: {drain(relay):,.0f}/s of {DRAINED:,}")
    with psycopg.connect(plain_url, autocommit=True) as connection:
        connection.execute("VACUUM ANALYZE bench.oncemore_outbox")
    before = time_claims(plain_url, outbox, relay)
    with psycopg.connect(plain_url, autocommit=True) as connection:
        connection.execute("ALTER TABLE bench.oncemore_outbox SET (autovacuum_enabled = false)")
        connection.execute(
            "INSERT INTO bench.oncemore_outbox (id, source, type, subject, attributes, created_at, due_at)"
            " SELECT n::text, 'bench', 'a', n::text, '{}', now(), now() FROM generate_series(1, %s) n",
            (GONE,),
        )
        connection.execute("DELETE FROM bench.oncemore_outbox")
    after = time_claims(plain_url, outbox, relay)
    print(
        f"a claim after {GONE:,} deleted rows, without a vacuum, beside before: {before / after:.2f} ({1000 * after:.1f} ms)"
    )
    guard.close()


async def publish_from_memory(url: str, envelopes: Sequence[Envelope]) -> float:
    broker = connect(url)
    await broker.aopen()
    began = time.perf_counter()
    for first in range(0, len(envelopes), 500):
        results = await broker.publish(envelopes[first : first + 500])
        assert not any(results)
    took = time.perf_counter() - began
    await broker.aclose()
    return len(envelopes) / took


def measure_nats(url: str, plain_url: str, nats: str) -> None:
    guard = Guard(url)
    outbox = Outbox(guard, source="bench")
    ratios, rates = [], []
    for number in range(3):
        envelopes = [Envelope("refund.succeeded", DATA, id=f"{number}-{n}", source="bench") for n in range(SENT)]
        memory = asyncio.run(publish_from_memory(f"{nats}/memory{number}", envelopes))
        fill(plain_url, outbox, SENT)
        sent = drain(Relay(outbox, to=f"{nats}/relayed{number}"))
        ratios.append(sent / memory)
        rates.append(sent)
    print(
        f"relay to NATS beside publishing from memory: {statistics.median(ratios):.2f} ({statistics.median(rates):,.0f}/s)"
    )
    guard.close()


def main() -> None:
    with PostgresServer() as postgres, NatsServer() as nats:
        mark = "&" if "?" in postgres.url else "?"
        url = f"{postgres.url}{mark}schema=bench"
        with psycopg.connect(postgres.url, autocommit=True) as connection:
            connection.execute("CREATE TABLE refunds (id text PRIMARY KEY)")
        measure_add(url)
        measure_drain(url, postgres.url)
        measure_nats(url, postgres.url, nats.url)


if __name__ == "__main__":
    main()
