"""A store that fails for operations with certain names, to test how a service behaves if its store is down."""

from __future__ import annotations

from typing import Any, cast

from .._ledger.encrypted import StoreWrapper
from .._ledger.model import Lease, Operation, Outcome, Record
from .._ledger.store import Store
from .._runtime.plan import Plan
from ..errors import StoreTimeout, StoreUnavailable

SECRET = "db-7.internal"  # drivers put such details into errors; callers must not see them
CLAIM_FAILS, CLAIM_HANGS, SETTLE_FAILS = "down.claim", "down.late", "down.settle"


class FaultyStore(StoreWrapper):
    """Wraps a store, and fails for operations with a name that begins with CLAIM_FAILS, CLAIM_HANGS or SETTLE_FAILS."""

    @classmethod
    def around(cls, store: Store) -> Store:
        """Wrap *store*, typed as a Store."""
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
