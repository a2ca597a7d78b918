"""A store that is down when the name of an operation says so, for tests of what a door does then."""

from __future__ import annotations

from typing import Any, cast

from ..core.model import Lease, Operation, Outcome, Record
from ..core.plan import Plan
from ..core.store import Store
from ..errors import StoreTimeout, StoreUnavailable

SECRET = "db-7.internal"  # a detail such as errors of drivers have, and callers must not see
CLAIM_FAILS, CLAIM_HANGS, SETTLE_FAILS = "down.claim", "down.late", "down.settle"


class FailingStore:
    """Passes everything on to *store*, except what operations ask for whose names begin with one of these."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @classmethod
    def around(cls, store: Store) -> Store:
        return cast("Store", cls(store))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def claim(self, operation: Operation, *, lease: float) -> Plan[Lease | Record]:
        if operation.name.startswith(CLAIM_FAILS):
            raise StoreUnavailable(f"{SECRET} is down, as it was asked to be")
        if operation.name.startswith(CLAIM_HANGS):
            raise StoreTimeout(f"{SECRET} did not answer, as it was asked to")
        return (yield from self._store.claim(operation, lease=lease))

    def settle(self, held: Lease, outcome: Outcome, **options: Any) -> Plan[None]:
        if held.operation.name.startswith(SETTLE_FAILS):
            raise StoreUnavailable(f"{SECRET} is down, as it was asked to be")
        yield from self._store.settle(held, outcome, **options)
