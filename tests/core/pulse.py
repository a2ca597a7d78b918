"""A ledger for the tests of the heartbeat: it notes each renewal, and when the heartbeat looks."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

from oncemore._ledger.context import Op
from oncemore._ledger.heartbeat import Beat, Heartbeat, Perform
from oncemore._ledger.model import Lease, Operation
from oncemore._runtime.clock import SYSTEM
from oncemore._runtime.plan import Call, Plan

PATIENCE = 20.0  # far beyond what any of this takes: a wait that long has failed
LONG = 600.0


class Ledger:
    """Notes each renewal."""

    def __init__(self) -> None:
        self.heart = Heartbeat(self.renew, SYSTEM)
        self.renewals: list[tuple[str, float]] = []
        self.renewers: set[threading.Thread | None] = set()
        self.looks = 0
        self.look = self.heart.due
        self.heart.due = self.count  # type: ignore[method-assign]
        self.refuses: Callable[[Beat], Any] = lambda beat: None

    def count(self, beats: set[Beat]) -> list[Beat]:
        self.looks += 1
        return self.look(beats)

    def renew(self, beat: Beat) -> Plan[None]:
        yield Call(self.refuses, beat)
        self.renewers.add(threading.current_thread())
        self.renewals.append((beat.lease.operation.key, time.monotonic()))

    def times(self, key: str) -> list[float]:
        return [at for who, at in tuple(self.renewals) if who == key]

    def perform(self, function: Callable[[Op], Any], *, lease: float = LONG, key: str = "k") -> Perform:
        held = Lease(Operation("s", key), 1, 0.0)
        return Perform(self.heart, (self.heart.beat(held, lease),), function, Op(held))

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


def two_leases(ledger: Ledger, function: Callable[[Op], Any]) -> Perform:
    outer, inner = (Lease(Operation("s", key), 1, 0.0) for key in ("outer", "inner"))
    return Perform(ledger.heart, (ledger.heart.beat(inner, LONG), ledger.heart.beat(outer, 0.06)), function, Op(inner))
