"""A store that is down if the name of an operation says so, for tests of what your service does then."""

from __future__ import annotations

from typing import Any, cast

from .._ledger.encrypted import StoreWrapper
from .._ledger.model import Lease, Operation, Outcome, Record
from .._ledger.store import Store
from .._runtime.plan import Plan
from ..errors import StoreTimeout, StoreUnavailable

SECRET = "db-7.internal"  # a detail such as errors of drivers have, and callers must not see
CLAIM_FAILS, CLAIM_HANGS, SETTLE_FAILS = "down.claim", "down.late", "down.settle"


class FaultyStore(StoreWrapper):
    """Passes every verb on to the *inner* store, except for operations whose names begin with one of the names above."""

    @classmethod
    def around(cls, store: Store) -> Store:
        return cast("Store", cls(store))

    def claim(self, operation: Operation, **options: Any) -> Plan[Lease | Record]:
        if operation.name.startswith(CLAIM_FAILS):
            raise StoreUnavailable(f"{SECRET} is down, as it was asked to be")
        if operation.name.startswith(CLAIM_HANGS):
            raise StoreTimeout(f"{SECRET} did not answer, as it was asked to")
        return (yield from self.inner.claim(operation, **options))

    def settle(self, held: Lease, outcome: Outcome, **options: Any) -> Plan[None]:
        if held.operation.name.startswith(SETTLE_FAILS):
            raise StoreUnavailable(f"{SECRET} is down, as it was asked to be")
        yield from self.inner.settle(held, outcome, **options)
