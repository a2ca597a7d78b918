"""Stores that fail on purpose: `Crashing` kills the process between two steps, `FaultyStore` answers with errors.

    guard.store = Crashing(guard.store, at="after claim")

The performer calls `guard.store.reached("after effect")` itself, because only it knows when its effect has happened.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any, cast

from .._ledger.encrypted import StoreWrapper, Wrapper
from .._ledger.model import Lease, Operation, Outcome, Record
from .._ledger.store import Store
from .._ledger.transactions import Transaction, TransactionSource
from .._runtime.plan import Plan
from ..errors import StoreTimeout, StoreUnavailable

POINTS = ("before claim", "after claim", "after effect", "before commit", "after commit")

# FaultyStore fails for operations with these names.
CLAIM_FAILS, CLAIM_HANGS, SETTLE_FAILS = "down.claim", "down.late", "down.settle"
SECRET = "db-7.internal"  # drivers put such details into errors; callers must not see them


def die() -> None:
    """Kill this process with SIGKILL: it cleans up nothing, and closes no connection."""
    os.kill(os.getpid(), signal.SIGKILL)


class Crashing(StoreWrapper):
    """Wraps *store*, and calls *crash* at the point *at*, under a lease or in a transaction."""

    def __init__(self, store: Store, *, at: str, crash: Callable[[], None] = die) -> None:
        if at not in POINTS:
            raise ValueError(f"{at!r} is not a crash point: choose one of {', '.join(POINTS)}")
        super().__init__(store)
        self.at = at
        self._crash = crash

    def reached(self, point: str) -> None:
        """Crash if *point* is the chosen one."""
        if point == self.at:
            self._crash()

    @property
    def lender(self) -> Any:
        return None if self.inner.lender is None else CrashingSource(self, self.inner.lender)

    def claim(self, operation: Operation, **settings: Any) -> Plan[Lease | Record]:
        self.reached("before claim")
        found = yield from self.inner.claim(operation, **settings)
        self.reached("after claim")
        return found

    def settle(self, held: Lease, outcome: Outcome, **settings: Any) -> Plan[None]:
        self.reached("before commit")
        yield from self.inner.settle(held, outcome, **settings)
        self.reached("after commit")


class CrashingSource(Wrapper):
    """Wraps a transaction source, and crashes at the point of *points*."""

    inner: TransactionSource

    def __init__(self, points: Crashing, inner: TransactionSource) -> None:
        super().__init__(inner)
        self.points = points

    def open(self) -> Plan[Any]:
        transaction = yield from self.inner.open()
        return CrashingTransaction(self.points, transaction)


class CrashingTransaction(Wrapper):
    """Wraps a transaction, and crashes at the point of *points*."""

    inner: Transaction

    def __init__(self, points: Crashing, inner: Transaction) -> None:
        super().__init__(inner)
        self.points = points

    def begin(self, operation: Operation, **settings: Any) -> Plan[Lease | Record]:
        self.points.reached("before claim")
        found = yield from self.inner.begin(operation, **settings)
        self.points.reached("after claim")
        return found

    def commit(self) -> Plan[None]:
        self.points.reached("before commit")
        yield from self.inner.commit()
        self.points.reached("after commit")


class FaultyStore(StoreWrapper):
    """Wraps a store, and fails for operations with a name that begins with CLAIM_FAILS, CLAIM_HANGS or SETTLE_FAILS."""

    @classmethod
    def around(cls, store: Store) -> Store:
        """Return *store* wrapped, with the type of a Store."""
        return cast("Store", cls(store))

    def claim(self, operation: Operation, **options: Any) -> Plan[Lease | Record]:
        if operation.name.startswith(CLAIM_FAILS):
            raise StoreUnavailable(f"{SECRET} is down, as the test asked")
        if operation.name.startswith(CLAIM_HANGS):
            raise StoreTimeout(f"{SECRET} did not answer, as the test asked")
        return (yield from self.inner.claim(operation, **options))

    def settle(self, held: Lease, outcome: Outcome, **options: Any) -> Plan[None]:
        if held.operation.name.startswith(SETTLE_FAILS):
            raise StoreUnavailable(f"{SECRET} is down, as the test asked")
        yield from self.inner.settle(held, outcome, **options)
