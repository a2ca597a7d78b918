"""A ledger on each store, and records in every state."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from oncemore._contract.policy import Policy
from oncemore._ledger.guard import Guard
from oncemore._ledger.model import Lease, Operation, Outcome
from oncemore._runtime.plan import run

STORES = [
    "sqlite",
    pytest.param("postgres", marks=pytest.mark.server),
    pytest.param("valkey", marks=pytest.mark.server),
    pytest.param("cluster", marks=pytest.mark.server),
]


@pytest.fixture(params=STORES)
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a ledger of this test alone, which does not exist yet."""
    match request.param:
        case "postgres":
            schema = request.getfixturevalue("postgres_schema")
            return f"{request.getfixturevalue('postgres_url')}?schema={schema}"
        case "valkey" | "cluster" as kind:
            prefix = request.getfixturevalue("redis_prefix")
            return f"{request.getfixturevalue(f'{kind}_url')}?prefix={prefix}"
    return f"sqlite:///{tmp_path}/once.db"


@pytest.fixture
def guard(store_url: str) -> Iterator[Guard]:
    """A guard on that ledger, after its tables were created."""
    guard = Guard(store_url, cache=0)
    guard.stats()
    yield guard
    guard.close()


@pytest.fixture
def filled(guard: Guard) -> Guard:
    """The ledger with one operation in each state: settled, released, held, running, lapsed, expired."""
    response = Outcome("response", 201, (("content-type", "application/json"),), b'{"id": "rf_1"}')
    guard.run(Operation("refunds:principal:ann", "settled-1", "c1:a", "refunds.create"), lambda op: response)
    with pytest.raises(ZeroDivisionError):
        guard.run(Operation("refunds:principal:ann", "released-1", "c1:b", "refunds.create"), lambda op: 1 // 0)
    run(guard.store.hold(claim(guard, "held-1"), note="worker lost"))
    claim(guard, "running-1")
    claim(guard, "lapsed-1", lease=0.001)
    guard.run(Operation("old", "expired-1"), lambda op: "gone", policy=Policy(ttl=0.001))
    time.sleep(0.01)  # until the last one has expired
    return guard


def claim(guard: Guard, key: str, *, scope: str = "payments:principal:bob", lease: float = 300.0) -> Lease:
    held = run(guard.store.claim(Operation(scope, key, "c1:c", "payments.create"), lease=lease))
    assert isinstance(held, Lease)
    return held
