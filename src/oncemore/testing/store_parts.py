"""What the parts of the store contract share."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from .._ledger.model import Claim, Lease, Operation, Outcome
from .._ledger.store import Store
from .._runtime.plan import Plan, arun, run
from .clock import Clock

Drive = Callable[[Plan[Any]], Any]

DONE = Outcome(
    "response", 201, (("content-type", "application/json"), ("link", "a"), ("link", "b")), b'{"id": "rf_123"}'
)
LEASE, RETENTION = 30.0, 3600.0


class Part:
    """Each test runs twice, for callers that block and for callers that await."""

    @pytest.fixture(params=["run", "arun"])
    def drive(self, request: pytest.FixtureRequest, store: Store) -> Iterator[Drive]:
        if request.param == "run":
            yield run
            store.close()
            return
        with asyncio.Runner() as runner:
            yield lambda plan: runner.run(arun(plan))
            runner.run(store.aclose())

    @pytest.fixture
    def clock(self, store: Store) -> Clock:
        return Clock(store)

    @pytest.fixture
    def operation(self) -> Operation:
        return Operation(f"test {uuid.uuid4()}", "key-1", "c1:aa", "refunds.create")


def claim_of(drive: Drive, store: Store, operation: Operation) -> Claim:
    """The claim that the operation's record stands for."""
    return Claim(operation, drive(store.find(*operation.id)).holder, LEASE)


def write(store: Store, verb: str, lease: Lease) -> Plan[Any]:
    """One of the owner's verbs, with ordinary arguments."""
    verbs: dict[str, Callable[[], Plan[Any]]] = {
        "renew": lambda: store.renew(lease, lease=LEASE),
        "settle": lambda: store.settle(lease, DONE, retention=RETENTION),
        "release": lambda: store.release(lease, retention=RETENTION),
        "hold": lambda: store.hold(lease),
    }
    return verbs[verb]()
