"""A function and its keys belong together, whether its module is the program, is imported, or is spawned."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from oncemore._ledger.origin import imported_as, loaded, meant_for, module_of

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
TELLING = """
import functools


def told(function):
    @functools.wraps(function)
    def call(*args):
        return function(*args)

    return call
"""
TWICE = """
if __name__ == "__main__":
    import main

    assert main.charge("A-1") == main.charge("A-1") == main.Receipt("A-1")
    assert charge("A-2") == charge("A-2") == Receipt("A-2")
"""
WAYS = {
    "a script": ["tasks.py"],
    "a module": ["-m", "tasks"],
    "imported": ["-c", "import tasks; assert tasks.replayed()"],
}


@pytest.mark.longer
@pytest.mark.parametrize("first", WAYS)
def test_a_program_that_others_import_charges_once(tmp_path: Path, first: str) -> None:
    """A worker that is run, the web app that imports it, and what multiprocessing spawns: each had keys of its own."""
    (tmp_path / "tasks.py").write_text(TASKS)
    said = [python(tmp_path, *WAYS[way]) for way in (first, *WAYS)]
    assert said == ["charged A-1\n", "", "", ""]


@pytest.mark.longer
@pytest.mark.parametrize("first", WAYS)
def test_a_function_below_another_decorator_is_of_its_own_module(tmp_path: Path, first: str) -> None:
    """What `functools.wraps` makes says that it is from there, but its globals are those of the decorator's module."""
    (tmp_path / "telling.py").write_text(TELLING)
    wrapped = TASKS.replace("def charge", "@telling.told\ndef charge").replace("import multi", "import telling, multi")
    (tmp_path / "tasks.py").write_text(wrapped)
    said = [python(tmp_path, *WAYS[way]) for way in (first, *WAYS)]
    assert said == ["charged A-1\n", "", "", ""]


def test_a_program_that_imports_itself_keeps_the_results_of_both(tmp_path: Path) -> None:
    """As `uvicorn.run("main:app")` does in main.py: each of its classes is there twice."""
    (tmp_path / "main.py").write_text(TASKS.partition("if __name__")[0] + TWICE)
    assert python(tmp_path, "main.py") == "charged A-1\ncharged A-2\n"


def test_a_command_that_is_called_like_its_module_keeps_the_modules_results(tmp_path: Path) -> None:
    """As an installer makes it of `[project.scripts] shop = "shop:replayed"`."""
    (tmp_path / "shop.py").write_text(TASKS)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "shop").write_text("from shop import replayed\nassert replayed() and replayed()\n")
    assert python(tmp_path, "bin/shop") == "charged A-1\n"


def python(folder: Path, *words: str) -> str:
    """What Python prints, when it is called with these words in the *folder*, whose modules it can import."""
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    ran = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_what_is_typed_in_has_no_other_name() -> None:
    assert imported_as("__main__", {"__name__": "__main__"}) == "__main__"
    assert imported_as("__main__", {"__spec__": None, "__file__": "<stdin>"}) == "__main__"
    assert imported_as("__main__", {"__spec__": SimpleNamespace(name="shop.worker")}) == "shop.worker"
    assert imported_as("__mp_main__", {"__spec__": None, "__file__": "/srv/shop/worker.py"}) == "worker"


@pytest.mark.parametrize(("file", "name"), [("/srv/tasks.py", "tasks"), ("/srv/shop.pyz/__main__.py", "__main__")])
def test_a_spec_that_says_only_that_it_is_the_program_says_nothing(file: str, name: str) -> None:
    """cProfile and coverage have one for a script, and Python itself for a zipped application."""
    assert imported_as("__main__", {"__spec__": SimpleNamespace(name="__main__"), "__file__": file}) == name


def test_only_a_program_is_called_otherwise() -> None:
    assert module_of(Path) == Path.__module__
    assert list(loaded("pathlib")) == [sys.modules["pathlib"]]
    assert list(loaded("no.such.module")) == []


def test_a_class_of_the_programs_is_found_by_either_name(monkeypatch: pytest.MonkeyPatch) -> None:
    program = sys.modules["__main__"]
    monkeypatch.setattr(program, "__spec__", None)
    monkeypatch.setattr(program, "__file__", "/srv/shop/worker.py", raising=False)
    monkeypatch.setitem(sys.modules, "__mp_main__", program)  # as multiprocessing has it
    kind = type("Receipt", (), {"__module__": "__main__"})
    assert module_of(kind) == "worker"
    assert list(loaded("worker")) == [program]
    assert set(loaded("__main__")) == {program}


def test_of_a_program_and_a_module_of_one_name_the_one_is_meant_that_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    program, imported = sys.modules["__main__"], sys.modules["pathlib"]
    monkeypatch.setattr(program, "__spec__", None)
    monkeypatch.setattr(program, "__file__", "/srv/shop/pathlib.py", raising=False)
    assert list(loaded("pathlib")) == [imported, program]
    with meant_for(type("Receipt", (), {"__module__": "__main__"})):
        assert list(loaded("pathlib")) == [program, imported]
        with meant_for(Path):
            assert list(loaded("pathlib")) == [imported, program]


def test_what_a_program_that_is_gone_has_left_keeps_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """An embedded interpreter may have no program, and a class may come from another process."""
    kind = type("Receipt", (), {"__module__": "__mp_main__"})
    monkeypatch.delitem(sys.modules, "__mp_main__", raising=False)
    monkeypatch.delitem(sys.modules, "__main__")
    assert (module_of(kind), list(loaded("worker"))) == ("__mp_main__", [])
