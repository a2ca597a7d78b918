"""The other processes of the PostgreSQL tests: a script, `children.py URL TASK`, that prints and reads lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from oncemore._ledger.model import Lease, Operation, Outcome
from oncemore._runtime.plan import run
from oncemore.errors import OncemoreError
from oncemore.stores.postgres import PostgresStore

DONE = Outcome("response", 201, (("content-type", "application/json"),), b'{"id": "rf_123"}')
LEASE, RETENTION = 30.0, 3600.0


def tell(*words: object) -> None:
    print(*words, flush=True)


def told() -> str:
    return sys.stdin.readline().strip()


def claim(store: PostgresStore) -> None:
    """Wait for a line, claim one key, and print whether this process won."""
    tell("ready")
    told()
    found = run(store.claim(Operation("race", "key"), lease=LEASE))
    tell(type(found).__name__, found.token)


def contend(store: PostgresStore) -> None:
    """Claim the same keys as other processes, and print the number of granted leases."""
    tell("ready")
    told()
    won = 0
    for n in range(60):
        found = run(store.claim(Operation("race", str(n)), lease=LEASE))
        if isinstance(found, Lease):
            run(store.settle(found, DONE, retention=RETENTION))
            won += 1
    tell(won)


def hold(store: PostgresStore) -> None:
    """Claim for half a second, wait for a line, and try every verb of an owner."""
    lease = run(store.claim(Operation("s", "k"), lease=0.5))
    tell(lease.token)
    told()
    verbs: dict[str, Callable[[], Any]] = {
        "renew": lambda: store.renew(lease, lease=LEASE),
        "settle": lambda: store.settle(lease, DONE, retention=RETENTION),
        "release": lambda: store.release(lease, retention=RETENTION),
        "hold": lambda: store.hold(lease),
    }
    for name, verb in verbs.items():
        try:
            run(verb())
        except OncemoreError as error:
            tell(name, type(error).__name__)
        else:
            tell(name, "done")


def settle(store: PostgresStore) -> None:
    """Claim, wait for a line, settle, and print the time."""
    lease = run(store.claim(Operation("s", "k"), lease=LEASE))
    tell(lease.token)
    told()
    before = time.time()
    run(store.settle(lease, DONE, retention=RETENTION))
    tell(before)


if __name__ == "__main__":
    own = PostgresStore(sys.argv[1])
    {"claim": claim, "contend": contend, "hold": hold, "settle": settle}[sys.argv[2]](own)
    own.close()
