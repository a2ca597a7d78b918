"""A ledger for the tests of the heartbeat: it notes each renewal, and how often the heartbeat looks."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from oncemore._ledger.model import Lease, Operation
from oncemore._runtime.clock import SYSTEM
from oncemore._runtime.heartbeat import Heartbeat, Renewal
from oncemore._runtime.plan import Call, Plan

PATIENCE = 20.0  # far beyond what any of this takes: a wait that long has failed
LONG = 600.0


class Ledger:
    """Notes each renewal."""

    def __init__(self) -> None:
        self.heartbeat = Heartbeat(self.renew, SYSTEM)
        self.renewals: list[tuple[str, float]] = []
        self.renewers: set[threading.Thread | None] = set()
        self.looks = 0
        self.look = self.heartbeat.take_due
        self.heartbeat.take_due = self.count  # type: ignore[method-assign]
        self.refuses: Callable[[Renewal], Any] = lambda renewal: None

    def count(self, renewals: set[Renewal]) -> list[Renewal]:
        self.looks += 1
        return self.look(renewals)

    def renew(self, renewal: Renewal) -> Plan[None]:
        yield Call(self.refuses, renewal)
        self.renewers.add(threading.current_thread())
        self.renewals.append((renewal.lease.operation.key, time.monotonic()))

    def times(self, key: str) -> list[float]:
        return [at for who, at in tuple(self.renewals) if who == key]

    def renewal(self, lease: float = LONG, key: str = "k") -> Renewal:
        return Renewal(self.heartbeat, Lease(Operation("s", key), 1, 0.0), lease)

    @contextmanager
    def kept(self, lease: float = LONG, key: str = "k") -> Generator[Renewal]:
        """A lease that is kept alive within the block, by the heartbeat's thread."""
        renewal = self.renewal(lease, key)
        renewal.run()
        try:
            yield renewal
        finally:
            renewal.stop()

    def until_renewed(self, key: str, times: int) -> None:
        """Block until the lease has been renewed so often."""
        ends = time.monotonic() + PATIENCE
        while len(self.times(key)) < times:
            assert time.monotonic() < ends, "it was not renewed"
            time.sleep(0.001)

    async def auntil_renewed(self, key: str, times: int) -> None:
        async with asyncio.timeout(PATIENCE):
            while len(self.times(key)) < times:
                await asyncio.sleep(0.001)
