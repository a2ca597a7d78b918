"""The tiered store beside its two halves: replays beside plain Redis, new keys beside plain PostgreSQL.

    python -m bench.tiered          on its own PostgreSQL and Valkey

All callers are tasks of one event loop, and the process's own cache is off.  Each figure is the median of ROUNDS rounds in
rotated order, and only ratios of one run count.  `processor` is the ratio of operations per second
of this process's processor time, which says more than the rate if other programs use the machine.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import NamedTuple
from urllib.parse import quote

from oncemore._ledger.guard import Guard
from oncemore._ledger.model import Operation, Outcome
from tests.support.servers import PostgresServer, ValkeyServer

ROUNDS, SECONDS, CALLERS = 9, 0.5, 32
REPLAYED_KEYS = 200
OUTCOME = Outcome("response", 201, (("content-type", "application/json"),), b'{"id": "pay_0123456789"}' * 10)
NUMBERS = itertools.count()


async def perform(_: object) -> Outcome:
    return OUTCOME


def operation(key: str) -> Operation:
    return Operation("tenant", key, "c1:" + "f" * 64, "payments.create")


class Figure(NamedTuple):
    """Operations per second, and operations per second of this process's processor time."""

    rate: float
    by_processor: float


async def measure_calls(ask: Callable[[], Awaitable[object]], callers: int) -> Figure:
    done, ends, processor = 0, time.perf_counter() + SECONDS, time.process_time()

    async def call() -> None:
        nonlocal done
        while time.perf_counter() < ends:
            await ask()
            done += 1

    await asyncio.gather(*(call() for _ in range(callers)))
    return Figure(done / SECONDS, done / (time.process_time() - processor))


async def measure(url: str, callers: int, *, replays: bool) -> Figure:
    """Measure operations on the ledger at *url*: replays of a few keys, or new keys."""
    guard = Guard(url, cache=0)
    keys = [str(uuid.uuid4()) for _ in range(REPLAYED_KEYS)]
    for key in keys if replays else keys[:1]:
        await guard.arun(operation(key), perform)
    await asyncio.sleep(0.3)  # until the copies are written in the background
    for key in keys if replays else ():
        await guard.arun(operation(key), perform)
    turns = itertools.cycle(keys)

    async def ask() -> None:
        await guard.arun(operation(next(turns) if replays else f"new {next(NUMBERS)} {keys[0]}"), perform)

    await measure_calls(ask, callers)  # makes connections, statements and copies
    try:
        return await measure_calls(ask, callers)
    finally:
        await guard.aclose()


def main() -> None:
    with PostgresServer() as postgres, ValkeyServer(fsync=False) as valkey:
        tiered = f"redis+{postgres.url}?redis={quote(valkey.url, safe='')}"
        alone = f"redis+{postgres.url}?redis={quote('redis://127.0.0.1:1/0', safe='')}"  # nobody listens there
        pairs: dict[str, tuple[str, str, int, bool]] = {
            "replays, 1 caller, of Redis": (tiered, valkey.url, 1, True),
            f"replays, {CALLERS} callers, of Redis": (tiered, valkey.url, CALLERS, True),
            "new keys, 1 caller, of PostgreSQL": (tiered, postgres.url, 1, False),
            f"new keys, {CALLERS} callers, of PostgreSQL": (tiered, postgres.url, CALLERS, False),
            "new keys, 1 caller, Redis is down": (alone, postgres.url, 1, False),
            f"new keys, {CALLERS} callers, Redis is down": (alone, postgres.url, CALLERS, False),
        }
        figures: dict[str, list[tuple[Figure, Figure]]] = {name: [] for name in pairs}
        for number in range(ROUNDS):
            for name, (ours, theirs, callers, replays) in pairs.items():
                order = [ours, theirs] if number % 2 else [theirs, ours]
                found = {url: asyncio.run(measure(url, callers, replays=replays)) for url in order}
                figures[name].append((found[ours], found[theirs]))
    print(f"{'':<40}{'tiered/s':>10}{'plain/s':>10}{'ratio':>8}{'lowest':>8}{'highest':>9}{'processor':>11}")
    for name, rounds in figures.items():
        ratios = sorted(ours.rate / theirs.rate for ours, theirs in rounds)
        ours, theirs = (statistics.median(each.rate for each in side) for side in zip(*rounds, strict=True))
        processor = statistics.median(ours.by_processor / theirs.by_processor for ours, theirs in rounds)
        print(
            f"{name:<40}{ours:>10,.0f}{theirs:>10,.0f}{statistics.median(ratios):>8.2f}{ratios[0]:>8.2f}{ratios[-1]:>9.2f}"
            f"{processor:>11.2f}"
        )


if __name__ == "__main__":
    main()
