"""The outbox: a transaction with a message compared with one without, and a relay compared with its broker's client.

    python -m bench.outbox          on its own PostgreSQL and NATS server

Each ratio is the median of several rounds, in which the two sides take turns.  Only ratios of one run count.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import psycopg

from oncemore import Guard, Op, Operation, Outbox, Policy
from oncemore.messages import Broker, Envelope, Relay
from oncemore.messages.broker import connect
from oncemore.messages.outbox_sql import NEW
from oncemore.messages.relay import RelayRun
from tests.support.brokers import NatsServer
from tests.support.servers import PostgresServer

ROUNDS, SECONDS, THREADS = 7, 0.7, 4
DRAINED, SENT, GONE = 100_000, 20_000, 1_000_000
PRODUCERS, PRODUCING, WARM = 4, 10.0, 2.0  # processes; seconds of adding; seconds that are not measured
DATA = {"id": "rf_1", "amount": 1000, "text": "x" * 150}
NUMBERS = itertools.count()


class NoBroker:
    """Confirms each message immediately, and stores nothing."""

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
    """Return operations per second of THREADS threads."""
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
    """Return the median seconds of a claim, while SENT rows are sent."""
    fill(url, outbox, SENT)
    times, claim = [], RelayRun._claim

    async def timed(self: RelayRun, transaction: Any, which: str) -> Any:
        began = time.perf_counter()
        try:
            return await claim(self, transaction, which)
        finally:
            if which == NEW:
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


class TimedBroker:
    """A broker that records the lag of each message, from `outbox.add` to the broker's confirmation.

    It ignores the first WARM seconds, because a relay that had nothing to do looks only once a second.
    """

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.began = 0.0
        self.count = 0
        self.lags: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.broker, name)

    async def publish(self, envelopes: Sequence[Envelope]) -> Sequence[Exception | None]:
        results = await self.broker.publish(envelopes)
        now = time.time()
        self.began = self.began or now
        self.count += len(envelopes)
        if now > self.began + WARM:
            self.lags += [now - envelope.time.timestamp() for envelope in envelopes if envelope.time is not None]
        return results


def produce(url: str, plain_url: str, rate: float | None, ready: Any) -> None:
    """Add ten messages in each transaction for PRODUCING seconds, with at most *rate* messages a second."""
    outbox = Outbox(Guard(url), source="steady")
    with psycopg.connect(plain_url) as connection:
        ready.wait()
        began, number = time.perf_counter(), 0
        while (passed := time.perf_counter() - began) < PRODUCING:
            if rate is not None and number > rate * passed:
                time.sleep(0.001)
                continue
            with connection.transaction(), connection.pipeline():
                for _ in range(10):
                    number += 1
                    outbox.add(connection, "refund.succeeded", DATA, subject=f"{os.getpid()}-{number}")


def send(url: str, nats: str, results: Any) -> None:
    """Run a relay until SIGTERM, and report the lags."""
    broker = TimedBroker(connect(nats))
    Relay(Outbox(Guard(url), source="steady"), to=broker).run()
    results.put((broker.count, broker.lags))


def make_and_send(url: str, plain_url: str, nats: str, rate: float | None = None) -> tuple[float, list[float]]:
    """Run a relay and PRODUCERS producers, each in a process.  Return messages a second, and the sorted lags."""
    processes = multiprocessing.get_context("spawn")
    results: Any = processes.Queue()
    relay = processes.Process(target=send, args=(url, nats, results))
    relay.start()
    outbox, ready = Outbox(Guard(url), source="steady"), processes.Barrier(PRODUCERS + 1)
    outbox.stats()
    producers = [processes.Process(target=produce, args=(url, plain_url, rate, ready)) for _ in range(PRODUCERS)]
    for producer in producers:
        producer.start()
    time.sleep(3)  # until the relay waits for messages
    ready.wait()
    began = time.perf_counter()
    for producer in producers:
        producer.join()
    while outbox.stats().pending:
        time.sleep(0.05)
    took = time.perf_counter() - began
    relay.terminate()
    count, lags = results.get()
    relay.join()
    outbox.guard.close()
    return count / took, sorted(lags)


def measure_steady(url: str, plain_url: str, nats: str) -> None:
    most, _ = make_and_send(url, plain_url, f"{nats}/steady")
    print(f"made and sent to NATS by {PRODUCERS} producers and a relay: {most:,.0f}/s")
    half, lags = make_and_send(url, plain_url, f"{nats}/half", most / 2 / PRODUCERS)
    middle, late = (1000 * lags[int(part * len(lags))] for part in (0.5, 0.99))
    print(f"lag at half load ({half:,.0f}/s): p50 {middle:.0f} ms, p99 {late:.0f} ms")


def main() -> None:
    with PostgresServer() as postgres, NatsServer() as nats:
        mark = "&" if "?" in postgres.url else "?"
        url = f"{postgres.url}{mark}schema=bench"
        with psycopg.connect(postgres.url, autocommit=True) as connection:
            connection.execute("CREATE TABLE refunds (id text PRIMARY KEY)")
        measure_add(url)
        measure_drain(url, postgres.url)
        measure_nats(url, postgres.url, nats.url)
        measure_steady(url, postgres.url, nats.url)


if __name__ == "__main__":
    main()
