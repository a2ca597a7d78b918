"""What the SQLite tests have in common."""

from __future__ import annotations

from typing import Any

from oncemore.core.model import Lease, Operation
from oncemore.core.plan import run
from oncemore.stores.sqlite import SqliteStore

from .children import DONE, HOUR


def claimed(store: SqliteStore, key: str = "key", lease: float = HOUR) -> Lease:
    found = run(store.claim(Operation("scope", key, "c1:aa", "refunds.create"), lease=lease))
    assert isinstance(found, Lease)
    return found


def settled(store: SqliteStore, key: str = "key", **options: Any) -> Lease:
    lease = claimed(store, key)
    run(store.settle(lease, DONE, retention=HOUR, **options))
    return lease
