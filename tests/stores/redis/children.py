"""Functions that the Redis tests run many at a time, and in other processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe
from typing import Any

from oncemore._ledger.model import Lease, Operation
from oncemore._runtime.plan import arun, run
from oncemore.errors import Fenced, StoreError
from oncemore.stores.redis import RedisStore, connect

from ..parts import DONE, HOUR, operation


async def load(
    store: RedisStore, keys: int, settled: set[str], *, until: Callable[[], bool] = lambda: True, prefix: str = ""
) -> int:
    """Have 16 callers claim and settle, add the acknowledged keys to *settled*, and return the number of failures."""
    failures, numbers = 0, iter(range(10**9))

    async def caller() -> None:
        nonlocal failures
        for number in numbers:
            if number >= keys and until():
                return
            key = f"{prefix}{number}"
            try:
                lease = await arun(store.claim(operation(key), lease=1.0))
                assert isinstance(lease, Lease)
                await arun(store.settle(lease, DONE, retention=HOUR))
            except StoreError:
                failures += 1
                await asyncio.sleep(0.01)
            else:
                settled.add(key)

    await asyncio.gather(*(caller() for _ in range(16)))
    return failures


# Each of these functions is the whole run of a process.


def claim(start: Any, url: str) -> tuple[bool, int]:
    """Claim the key of the race.  Return whether this process won, and the token that it saw."""
    store = connect(url)
    run(store.find("race", "none"))  # connects, so that the claims are sent at the same time
    start.wait()
    found = run(store.claim(Operation("race", "key"), lease=HOUR))
    store.close()
    return isinstance(found, Lease), found.token


def hold_then_write(url: str, verb: str, pipe: Pipe) -> None:
    """Claim, send the token to the test, wait for its message, and then use the lease."""
    store = connect(url)
    lease = run(store.claim(Operation("frozen", verb), lease=0.3))
    assert isinstance(lease, Lease)
    pipe.send(lease.token)
    pipe.recv()
    verbs: dict[str, Callable[[], Any]] = {
        "renew": lambda: store.renew(lease, lease=HOUR),
        "settle": lambda: store.settle(lease, DONE, retention=HOUR),
        "release": lambda: store.release(lease, retention=HOUR),
        "hold": lambda: store.hold(lease),
    }
    try:
        run(verbs[verb]())
    except Fenced:
        pipe.send("fenced")
    else:
        pipe.send("done")


def settle_when_told(url: str, pipe: Pipe) -> None:
    """Claim, send a message to the test, and settle when it answers."""
    store = connect(url)
    lease = run(store.claim(Operation("scope", "key", "c1:aa"), lease=HOUR))
    assert isinstance(lease, Lease)
    pipe.send("claimed")
    pipe.recv()
    run(store.settle(lease, DONE, retention=HOUR))
    store.close()
