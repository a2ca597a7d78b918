"""Claims on a partitioned table compared with a plain one, and the distribution of records over a cluster's nodes.

    python -m bench.spread

The script in docs/explain/capacity.md makes the partitions.  The two ledgers take turns; the figure is the median ratio.
"""

from __future__ import annotations

import asyncio
import re
import statistics
import time
import uuid
from pathlib import Path

import psycopg
import redis

from oncemore._ledger.guard import Guard
from oncemore._ledger.model import Operation, Outcome
from tests.support.servers import PostgresServer, ValkeyCluster

CALLERS, SECONDS, ROUNDS = 64, 1.0, 9
RECORDS = 6000
OUTCOME = Outcome("response", 201, (("content-type", "application/json"),), b'{"id": "rf_123", "amount": 1999}' * 8)
PAGE = Path(__file__).parents[1] / "docs" / "explain" / "capacity.md"


async def operations(guard: Guard, seconds: float) -> float:
    """Return new operations per second of CALLERS callers."""
    count, ends = 0, time.perf_counter() + seconds

    async def caller() -> None:
        nonlocal count
        while time.perf_counter() < ends:
            await guard.arun(Operation("s", str(uuid.uuid4())), lambda op: OUTCOME)
            count += 1

    await asyncio.gather(*(caller() for _ in range(CALLERS)))
    return count / seconds


def partitions() -> None:
    [script] = re.findall(r"```sql\n(.*?)```", PAGE.read_text(), re.DOTALL)
    with PostgresServer() as server:
        plain, divided = (Guard(f"{server.url}?schema={name}", cache=0) for name in ("plain", "divided"))
        plain.stats(), divided.stats()
        with psycopg.connect(server.url, autocommit=True, options="-c search_path=divided") as connection:
            connection.execute(script)

        async def turns() -> list[tuple[float, float]]:
            found = [(await operations(plain, SECONDS), await operations(divided, SECONDS)) for _ in range(ROUNDS)]
            await asyncio.gather(plain.aclose(), divided.aclose())
            return found

        found = asyncio.run(turns())
    one, eight = (statistics.median(each) for each in zip(*found, strict=True))
    ratio = statistics.median(after / before for before, after in found)
    print(f"PostgreSQL: {one:.0f} operations/s on one table, {eight:.0f} on eight partitions: ratio {ratio:.2f}")


def nodes() -> None:
    with ValkeyCluster() as cluster:
        guard = Guard(cluster.url, cache=0)

        async def fill() -> None:
            left = iter(range(RECORDS))

            async def caller() -> None:
                for number in left:
                    await guard.arun(Operation("refunds:principal:ann", f"key-{number}"), lambda op: OUTCOME)

            await asyncio.gather(*(caller() for _ in range(CALLERS)))
            await guard.aclose()

        asyncio.run(fill())
        counts = []
        for server in cluster.servers:
            with redis.Redis.from_url(server.url) as connection:
                counts.append(sum(1 for _ in connection.scan_iter(match="oncemore:{*", count=1000)))
    print(f"Valkey Cluster: {RECORDS} records with keys that count up, on its nodes: {counts}")


if __name__ == "__main__":
    partitions()
    nodes()
