"""The clock: this machine's, read in one place."""

import ast
import time
from pathlib import Path

import pytest

import oncemore._ledger
from oncemore._runtime.clock import SYSTEM

LEDGER = Path(oncemore._ledger.__path__[0])


def test_the_systems_clock_is_this_machines() -> None:
    before = (time.time(), time.monotonic())
    now = (SYSTEM.time(), SYSTEM.monotonic())
    assert before <= now
    assert SYSTEM.time() <= time.time()
    assert SYSTEM.monotonic() <= time.monotonic()


@pytest.mark.parametrize("path", sorted(LEDGER.glob("*.py")), ids=lambda path: path.stem)
def test_nothing_else_in_the_core_reads_a_clock(path: Path) -> None:
    """CASES 53: leases and retention live by the store's clock, and a stray reading would break that unseen."""
    readings = {
        f"{node.value.id}.{node.attr}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    } & {"time.time", "time.monotonic", "time.perf_counter", "datetime.now", "datetime.utcnow", "date.today"}
    assert not readings or path.stem == "clock"
