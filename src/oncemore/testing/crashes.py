"""Named points at which a process can be made to die, between any two steps that matter to the ledger.

    guard.store = Crashing(guard.store, at="after claim")

Whoever performs calls `reached("after effect")` itself, for only it knows when its effect has happened.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from .._ledger.encrypted import StoreWrapper
from .._ledger.model import Lease, Operation, Outcome, Record
from .._ledger.store import Store
from .._ledger.transactions import Lender, Transaction
from .._runtime.plan import Plan

POINTS = ("before claim", "after claim", "after effect", "before commit", "after commit")


def die() -> None:
    """End this process as the kernel would: no clean-up, no goodbye to any server."""
    os.kill(os.getpid(), signal.SIGKILL)


class Crashing(StoreWrapper):
    """A *store* in whose process *crash* is called *at* one of the points, in transactions as well as under leases."""

    def __init__(self, store: Store, *, at: str, crash: Callable[[], None] = die) -> None:
        if at not in POINTS:
            raise ValueError(f"{at!r} is no point; choose one of {', '.join(POINTS)}")
        super().__init__(store)
        self.at = at
        self._crash = crash

    def reached(self, point: str) -> None:
        """Crash here, if this is the point."""
        if point == self.at:
            self._crash()

    @property
    def lender(self) -> Any:
        return None if self.inner.lender is None else CrashingLender(self, self.inner.lender)

    def claim(self, operation: Operation, **settings: Any) -> Plan[Lease | Record]:
        self.reached("before claim")
        found = yield from self.inner.claim(operation, **settings)
        self.reached("after claim")
        return found

    def settle(self, held: Lease, outcome: Outcome, **settings: Any) -> Plan[None]:
        self.reached("before commit")
        yield from self.inner.settle(held, outcome, **settings)
        self.reached("after commit")


class CrashingLender:
    def __init__(self, points: Crashing, inner: Lender) -> None:
        self.points = points
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def open(self) -> Plan[Any]:
        transaction = yield from self.inner.open()
        return CrashingTransaction(self.points, transaction)


class CrashingTransaction:
    def __init__(self, points: Crashing, inner: Transaction) -> None:
        self.points = points
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def begin(self, operation: Operation, **settings: Any) -> Plan[Lease | Record]:
        self.points.reached("before claim")
        found = yield from self.inner.begin(operation, **settings)
        self.points.reached("after claim")
        return found

    def commit(self) -> Plan[None]:
        self.points.reached("before commit")
        yield from self.inner.commit()
        self.points.reached("after commit")
