"""Stores that wrap another store: crash points and faults."""

from __future__ import annotations

from typing import Any

import pytest

from oncemore import Guard, Operation
from oncemore._ledger.model import Lease
from oncemore._runtime.plan import run
from oncemore.errors import StoreUnavailable
from oncemore.stores.memory import connect
from oncemore.testing.clock import Clock
from oncemore.testing.crashes import CLAIM_FAILS, POINTS, Crashing, FaultyStore


@pytest.mark.parametrize("around", [FaultyStore, lambda store: Crashing(store, at="after effect")])
def test_clock_of_a_wrapper_moves_the_inner_store(around: Any) -> None:
    inner = connect("memory://")
    outer = around(inner)
    run(outer.claim(Operation("s", "k"), lease=30))
    Clock(outer).advance(31)
    found = run(inner.claim(Operation("s", "k"), lease=30))
    assert isinstance(found, Lease)
    assert found.lapsed


@pytest.mark.parametrize("at", POINTS)
def test_crash_happens_once_at_its_point(at: str) -> None:
    passed: list[str] = []
    points = Crashing(connect("memory://"), at=at, crash=lambda: passed.append(at))
    Guard(points).run(Operation("s", "k"), lambda op: points.reached("after effect"))
    assert passed == [at]


def test_unknown_crash_point_is_refused() -> None:
    with pytest.raises(ValueError, match="after claim"):
        Crashing(connect("memory://"), at="sometimes")


def test_faulty_store_fails_for_matching_names_only() -> None:
    guard = Guard(FaultyStore.around(connect("memory://")))
    assert guard.run(Operation("s", "k"), lambda op: "done").value == "done"
    with pytest.raises(StoreUnavailable, match="is down"):
        guard.run(Operation("s", "k2", name=CLAIM_FAILS), lambda op: "done")
