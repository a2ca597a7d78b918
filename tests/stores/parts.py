"""What the tests of all stores have in common: an operation and its outcome, and how a test comes by a record of it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

from oncemore._ledger.model import Lease, Operation, Outcome, Record
from oncemore._runtime.plan import arun, run

DONE = Outcome("response", 201, (("content-type", "application/json"),), b'{"id": "rf_123"}')
HOUR = 3600.0


def operation(key: str) -> Operation:
    return Operation("scope", key, "c1:aa", "refunds.create")


OPERATION = operation("key")


def claimed(store: Any, key: str = "key", lease: float = HOUR) -> Lease:
    found = run(store.claim(operation(key), lease=lease))
    assert isinstance(found, Lease)
    return found


def settled(store: Any, key: str = "key", **options: Any) -> Lease:
    lease = claimed(store, key)
    run(store.settle(lease, DONE, retention=HOUR, **options))
    return lease


def blocked(store: Any, key: str = "key") -> Record:
    found = run(store.claim(Operation("scope", key, "c1:aa"), lease=HOUR))
    assert isinstance(found, Record)
    return found


def in_a_fork(work: Callable[[], None]) -> int:
    """The exit status of a forked child that did *work*: 0 where it went well."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


async def left_in_doubt(store: Any, delays: tuple[float, ...]) -> list[bool]:
    """Claim what a vanished performer has left, and go away so soon after; whether those who claim next are told of it."""
    told: list[bool] = []
    for delay in delays:
        await arun(store.claim(OPERATION, lease=0.0))
        task = asyncio.create_task(arun(store.claim(OPERATION, lease=HOUR)))
        await asyncio.sleep(delay)
        task.cancel()
        await asyncio.wait([task])
        if task.cancelled():
            async with asyncio.timeout(5):
                while not isinstance(found := await arun(store.claim(OPERATION, lease=0.0)), Lease):
                    await asyncio.sleep(0.01)
            told.append(found.lapsed)
        store.shift += 2 * HOUR
    return told
