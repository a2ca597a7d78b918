"""The system clock."""

import ast
import time
from pathlib import Path

import oncemore._ledger
from oncemore import Guard, Operation, Policy
from oncemore._runtime.clock import SYSTEM
from oncemore.testing.clock import Clock as StoreClock

LEDGER = Path(oncemore._ledger.__path__[0])


def test_the_systems_clock_is_this_machines() -> None:
    before = (time.time(), time.monotonic())
    now = (SYSTEM.time(), SYSTEM.monotonic())
    assert before <= now
    assert SYSTEM.time() <= time.time()
    assert SYSTEM.monotonic() <= time.monotonic()


def test_ledger_reads_no_clock_but_its_own() -> None:
    """Leases and retention live by the store's clock, and a stray reading would break that unseen."""
    clocks = {"time.time", "time.monotonic", "time.perf_counter", "datetime.now", "datetime.utcnow", "date.today"}
    for path in LEDGER.glob("*.py"):
        read = {
            f"{node.value.id}.{node.attr}"
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        }
        assert not read & clocks or path.stem == "clock", path


def test_advanced_clock_expires_outcomes_that_a_guard_remembers() -> None:
    guard = Guard("memory://", policy=Policy(ttl="1h"))
    operation = Operation("scope", "key")
    runs: list[str] = []
    for hours in (0, 0, 2):
        StoreClock(guard.store).advance(hours * 3600)
        guard.run(operation, lambda op: runs.append("run"))
    assert len(runs) == 2
