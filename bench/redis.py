"""Claims and settles on Redis through the Guard, compared with plain commands to the same server.

    python -m bench.redis [url]          without a URL, on its own Valkey

The plain pair is SET NX GET and SET.  It has no token, no fingerprint, and an expiry in place of a lease, so a late owner
can write.  The fenced pair is the minimum that is safe: two short scripts, which compare a token.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import urlsplit

import hiredis
import redis.asyncio

from oncemore._ledger.guard import Guard
from oncemore._ledger.model import Operation, Outcome
from tests.support.servers import ValkeyServer

CALLERS = 64
SECONDS = 0.1  # per measurement; the best of ROUNDS counts, because other work has disturbed it least
ROUNDS = 24

BODY = b'{"id": "pay_0123456789", "amount": 4200, "currency": "EUR", "status": "succeeded"}' * 3
OUTCOME = Outcome("response", 201, (("content-type", "application/json"),), BODY)

CLAIM = (
    "if redis.call('HSETNX', KEYS[1], 'token', ARGV[1]) == 1 then return 1 end return redis.call('HGETALL', KEYS[1])"
)
SETTLE = """if redis.call('HGET', KEYS[1], 'token') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'outcome', ARGV[2]) return redis.call('PEXPIRE', KEYS[1], 3600000)"""

RUN = uuid.uuid4()
KEYS = (f"{RUN}-{n}" for n in itertools.count())
Words = tuple[Any, ...]


def plain(key: str) -> tuple[Words, Words]:
    return ("SET", key, "running:1", "NX", "GET", "PX", 30_000), ("SET", key, BODY, "PX", 3_600_000)


def fencing(key: str, claim: str, settle: str) -> tuple[Words, Words]:
    return ("EVALSHA", claim, 1, key, "1"), ("EVALSHA", settle, 1, key, "1", BODY)


class Raw(asyncio.Protocol):
    """One connection for all callers.  It writes the commands of one turn of the event loop together."""

    def __init__(self) -> None:
        self.reader = hiredis.Reader()
        self.asked: deque[asyncio.Future[Any]] = deque()
        self.packets: list[bytes] = []

    @classmethod
    async def open(cls, url: str) -> Raw:
        parts = urlsplit(url)
        _, raw = await asyncio.get_running_loop().create_connection(cls, parts.hostname, parts.port)
        return raw

    def connection_made(self, transport: Any) -> None:
        self.loop, self.transport = asyncio.get_running_loop(), transport

    def ask(self, words: Words) -> asyncio.Future[Any]:
        if not self.packets:
            self.loop.call_soon(self.flush)
        self.packets.append(hiredis.pack_command(words))
        self.asked.append(future := self.loop.create_future())
        return future

    def flush(self) -> None:
        self.transport.write(b"".join(self.packets))
        self.packets = []

    def data_received(self, data: bytes) -> None:
        self.reader.feed(data)
        while (answer := self.reader.gets()) is not False:
            self.asked.popleft().set_result(answer)


async def grouped(url: str, *, fenced: bool) -> float:
    """Return pairs per second of CALLERS callers on one raw connection."""
    raw = await Raw.open(url)
    claim, settle = await raw.ask(("SCRIPT", "LOAD", CLAIM)), await raw.ask(("SCRIPT", "LOAD", SETTLE))

    async def pair() -> None:
        key = next(KEYS)
        first, second = fencing(key, claim, settle) if fenced else plain(key)
        await raw.ask(first)
        await raw.ask(second)

    try:
        return await rate([pair] * CALLERS)
    finally:
        raw.transport.close()


async def alone(url: str, *, fenced: bool) -> float:
    """Return pairs per second of one caller through redis-py, one command after the other."""
    async with redis.asyncio.Redis.from_url(url) as client:
        claim, settle = await client.script_load(CLAIM), await client.script_load(SETTLE)

        async def pair() -> None:
            key = next(KEYS)
            first, second = fencing(key, claim, settle) if fenced else plain(key)
            await client.execute_command(*first)
            await client.execute_command(*second)

        return await rate([pair])


async def guarded(url: str, callers: int) -> float:
    """Return pairs per second of *callers* callers through Guard.arun."""
    guard = Guard(f"{url}?prefix={uuid.uuid4()}")

    async def perform(_: object) -> Outcome:
        return OUTCOME

    async def pair() -> None:
        await guard.arun(Operation("tenant", next(KEYS), "c1:" + "f" * 64, "payments.create"), perform)

    await pair()
    try:
        return await rate([pair] * callers)
    finally:
        await guard.aclose()


async def rate(callers: list[Callable[[], Coroutine[Any, Any, None]]]) -> float:
    ends = time.perf_counter() + SECONDS
    done = 0

    async def call(pair: Callable[[], Coroutine[Any, Any, None]]) -> None:
        nonlocal done
        while time.perf_counter() < ends:
            await pair()
            done += 1

    await asyncio.gather(*map(call, callers))
    return done / SECONDS


def measure(url: str) -> None:
    kinds: dict[str, Callable[[], Coroutine[Any, Any, float]]] = {
        "plain, one by one, redis-py": lambda: alone(url, fenced=False),
        "fenced, one by one, redis-py": lambda: alone(url, fenced=True),
        "oncemore, one caller": lambda: guarded(url, 1),
        f"plain, {CALLERS} callers, grouped": lambda: grouped(url, fenced=False),
        f"fenced, {CALLERS} callers, grouped": lambda: grouped(url, fenced=True),
        f"oncemore, {CALLERS} callers": lambda: guarded(url, CALLERS),
    }
    best = dict.fromkeys(kinds, 0.0)
    for _ in range(ROUNDS):
        for name, kind in kinds.items():
            best[name] = max(best[name], asyncio.run(kind()))
    rates = list(best.values())
    print(f"{'pairs of claim and settle':<30}{'per second':>12}{'µs each':>10}{'of plain':>10}{'of fenced':>10}")
    for number, (name, value) in enumerate(best.items()):
        row = f"{name:<30}{value:>12,.0f}{1e6 / value:>10.0f}"
        print(
            row + (f"{value / rates[number - 2]:>10.0%}{value / rates[number - 1]:>10.0%}" if number % 3 == 2 else "")
        )


def main() -> None:
    if len(sys.argv) > 1:
        measure(sys.argv[1])
        return
    with ValkeyServer(fsync=False) as server:
        measure(server.url)


if __name__ == "__main__":
    main()
