"""The counts of shadow mode, from its records."""

from __future__ import annotations

import pytest

from oncemore._ledger import shadow
from oncemore._ledger.guard import Guard
from oncemore._ledger.model import Operation
from oncemore._runtime.plan import run


def test_verdicts_are_counted_by_operation_over_all_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadow, "PAGE", 2)
    guard = Guard("memory://")
    for verdict, name, count in (("replayed", "pay", 5), ("replayed", "refund", 1), ("held", "pay", 2)):
        for number in range(count):
            guard.run(Operation(f"shadow|{verdict}", f"{name}{number}", name=name), lambda op: None)
    guard.run(Operation("shadow|pay:alice", "k", name="pay"), lambda op: None)  # what was observed, not a verdict
    assert run(shadow.count_verdicts(guard.store)) == {"replayed": {"pay": 5, "refund": 1}, "held": {"pay": 2}}
