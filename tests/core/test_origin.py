"""A function and its keys belong together, whether its module is the program, is imported, or is spawned."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from oncemore.core.origin import imported_as, loaded, module_of

TASKS = """
import multiprocessing
from dataclasses import dataclass

from oncemore import Guard, once

guard = Guard("sqlite:///once.db")


@dataclass
class Receipt:
    order: str


@once(guard, key="charge:{order}")
def charge(order: str) -> Receipt:
    print("charged", order, flush=True)
    return Receipt(order)


def replayed() -> bool:
    return charge("A-1") == Receipt("A-1")


if __name__ == "__main__":
    assert replayed()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(replayed)
"""
WAYS = {
    "a script": ["tasks.py"],
    "a module": ["-m", "tasks"],
    "imported": ["-c", "import tasks; assert tasks.replayed()"],
}


@pytest.mark.parametrize("first", WAYS)
def test_a_program_that_others_import_charges_once(tmp_path: Path, first: str) -> None:
    """A worker that is run, the web app that imports it, and what multiprocessing spawns: each had keys of its own."""
    (tmp_path / "tasks.py").write_text(TASKS)
    said = []
    for way in (first, *WAYS):
        ran = subprocess.run([sys.executable, *WAYS[way]], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert ran.returncode == 0, ran.stderr
        said.append(ran.stdout)
    assert said == ["charged A-1\n", "", "", ""]


def test_what_is_typed_in_has_no_other_name() -> None:
    assert imported_as("__main__", {"__name__": "__main__"}) == "__main__"
    assert imported_as("__main__", {"__spec__": SimpleNamespace(name="shop.worker")}) == "shop.worker"
    assert imported_as("__mp_main__", {"__spec__": None, "__file__": "/srv/shop/worker.py"}) == "worker"


def test_only_a_program_is_called_otherwise() -> None:
    assert module_of(Path) == Path.__module__
    assert loaded("pathlib") is sys.modules["pathlib"]
    assert loaded("no.such.module") is None


def test_a_class_of_the_programs_is_found_by_either_name(monkeypatch: pytest.MonkeyPatch) -> None:
    program = sys.modules["__main__"]
    monkeypatch.setattr(program, "__spec__", None)
    monkeypatch.setattr(program, "__file__", "/srv/shop/worker.py", raising=False)
    kind = type("Receipt", (), {"__module__": "__main__"})
    assert module_of(kind) == "worker"
    assert loaded("worker") is loaded("__main__") is program
