"""Claims and replays in a ledger with a million records, compared with a small one, and claims during a purge.

    python -m bench.scale [URL] [--records 1000000] [--expired 100000]

The URL names a durable store (`sqlite:////tmp/big.db`, `postgresql://...`), which should be empty.  The records stay in
it.  Without a URL, SQLite in a temporary folder and own servers of PostgreSQL and Valkey are measured.  To fill them takes
most of the time.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from oncemore._ledger.model import Lease, Operation, Outcome
from oncemore._ledger.store import Store
from oncemore._runtime.plan import arun, run
from oncemore.stores import connect
from tests.support.servers import PostgresServer, ValkeyServer

FEW = 1000
SAMPLES = 1500
DAY = 86400.0
LEASE = 30.0
TOGETHER = 256
SCOPE = f"scale {uuid.uuid4()}"
FINGERPRINT = "c1:" + "a" * 64
OUTCOME = Outcome("response", 201, (("content-type", "application/json"),), b'{"id": "rf_123", "amount": 1999}')


def with_prefix(url: str, prefix: str) -> str:
    return f"{url}{'&' if '?' in url else '?'}prefix={prefix}"


def operation(key: str) -> Operation:
    return Operation(SCOPE, key, FINGERPRINT, "refunds.create")


async def fill(store: Store, first: int, last: int, *, retention: float = DAY, prefix: str = "key") -> None:
    """Settle records with the numbers from *first* to *last* - 1, many at a time."""
    numbers = iter(range(first, last))

    async def worker() -> None:
        for n in numbers:
            lease = await arun(store.claim(operation(f"{prefix}-{n}"), lease=LEASE))
            assert isinstance(lease, Lease)
            await arun(store.settle(lease, OUTCOME, retention=retention))

    await asyncio.gather(*(worker() for _ in range(TOGETHER)))


def latencies(stores: dict[Store, int]) -> list[tuple[float, float]]:
    """Return, for each store, the median microseconds of a new claim and of a replay.

    The stores take turns, so that other work on the machine disturbs all of them equally.
    """
    claims: dict[Store, list[float]] = {store: [] for store in stores}
    replays: dict[Store, list[float]] = {store: [] for store in stores}
    for n in range(SAMPLES):
        for store, records in stores.items():
            claims[store].append(timed(store, operation(str(uuid.uuid4()))))
            replays[store].append(timed(store, operation(f"key-{n * 7919 % records}")))
    return [(statistics.median(claims[store]), statistics.median(replays[store])) for store in stores]


def timed(store: Store, one: Operation) -> float:
    started = time.perf_counter()
    run(store.claim(one, lease=LEASE))
    return (time.perf_counter() - started) * 1e6


def p99(store: Store, seconds: float, purge: subprocess.Popen[bytes] | None = None) -> float:
    """Return the 99th percentile of new claims, measured for *seconds*, or until the purge has ended."""
    times = []
    ends = time.perf_counter() + seconds
    while purge.poll() is None if purge else time.perf_counter() < ends:
        times.append(timed(store, operation(str(uuid.uuid4()))))
    return statistics.quantiles(times, n=100)[98]


def purge(url: str) -> None:
    """Remove all expired records.  This runs in a process of its own, as a scheduled job would."""
    store = connect(url)
    run(store.stats())
    print("ready", flush=True)
    while run(store.purge()):
        pass
    store.close()


def measure(url: str, records: int, expired: int) -> None:
    print(url.partition(":")[0])
    small, large = connect(with_prefix(url, "few_")), connect(with_prefix(url, "many_"))
    asyncio.run(fill(small, 0, FEW))
    started = time.perf_counter()
    asyncio.run(fill(large, 0, records))
    print(f"filled with {records:,} in {time.perf_counter() - started:.0f} s", flush=True)
    few, many = latencies({small: FEW, large: records})
    print(f"{'median µs':<22}{FEW:>12,}{records:>12,}{'ratio':>8}")
    for name, before, after in zip(("claim of a new key", "replay"), few, many, strict=True):
        print(f"{name:<22}{before:>12.0f}{after:>12.0f}{after / before:>8.2f}", flush=True)
    asyncio.run(fill(large, 0, expired, retention=0.001, prefix="old"))
    quiet = p99(large, 5.0)
    command = [sys.executable, "-m", "bench.scale", with_prefix(url, "many_"), "--purge"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as job:
        assert job.stdout is not None
        job.stdout.readline()
        busy = p99(large, 5.0, job)
    print(f"{'p99 µs of a claim':<22}{'quiet':>12}{'purging':>12}{'ratio':>8}")
    print(f"{f'{expired:,} expired':<22}{quiet:>12.0f}{busy:>12.0f}{busy / quiet:>8.2f}", flush=True)
    small.close()
    large.close()


@contextmanager
def places(url: str | None) -> Iterator[list[str]]:
    if url is not None:
        yield [url]
        return
    with (
        tempfile.TemporaryDirectory() as folder,
        PostgresServer(shared_buffers="1GB") as postgres,
        ValkeyServer(fsync=False) as valkey,
    ):
        yield [f"sqlite:///{folder}/scale.db", postgres.url, valkey.url]


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("url", nargs="?")
    options.add_argument("--records", type=int, default=1_000_000)
    options.add_argument("--expired", type=int, default=100_000)
    options.add_argument("--purge", action="store_true", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.purge:
        purge(given.url)
    else:
        with places(given.url) as urls:
            for place in urls:
                measure(place, given.records, given.expired)
