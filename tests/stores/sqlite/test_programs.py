"""A program has the same keys if its module is run, imported or spawned."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
SERVED_ON_A_THREAD = """
import asyncio
import threading
import time
from contextlib import suppress

from oncemore import Guard, once

guard = Guard("sqlite:///once.db?thread=always")


@once(guard, key="charge:{order}")
async def charge(order: str) -> str:
    with suppress(RuntimeError):  # once the main thread has ended
        while True:
            await asyncio.to_thread(time.sleep, 0.01)
    print("charged", order, flush=True)
    return order


async def serve() -> None:
    print(await charge("A-1"), await charge("A-1"))


threading.Thread(target=lambda: asyncio.run(serve())).start()
"""
DROPPED_ON_A_THREAD = """
import asyncio
import threading
import time
from contextlib import suppress

from oncemore import Guard, current_operation, once

guard = Guard("sqlite:///once.db?timeout=1s")


@once(guard, key="charge:{order}", effect="transaction")
async def charge(order: str, dropped: bool = False) -> str:
    if dropped:  # as if nobody could wait for the rollback
        current_operation().transaction.drop()
    return order


async def serve() -> None:
    with suppress(RuntimeError):  # once the main thread has ended
        while True:
            await asyncio.to_thread(time.sleep, 0.01)
    with suppress(Exception):
        await charge("A-1", dropped=True)
    print(await charge("A-2"))


threading.Thread(target=lambda: asyncio.run(serve())).start()
"""
WAYS = {
    "a script": ["tasks.py"],
    "a module": ["-m", "tasks"],
    "imported": ["-c", "import tasks; assert tasks.replayed()"],
}


@pytest.mark.parametrize("first", WAYS)
def test_program_that_is_also_imported_charges_once(tmp_path: Path, first: str) -> None:
    """A worker, the web app that imports it, and the processes that multiprocessing spawns have the same keys."""
    (tmp_path / "tasks.py").write_text(TASKS)
    said = [python(tmp_path, *WAYS[way]) for way in (first, *WAYS)]
    assert said == ["charged A-1\n", "", "", ""]


@pytest.mark.parametrize("first", WAYS)
def test_wrapped_function_is_of_its_own_module(tmp_path: Path, first: str) -> None:
    """A function made by `functools.wraps` has the globals of the decorator's module."""
    (tmp_path / "telling.py").write_text(TELLING)
    wrapped = TASKS.replace("def charge", "@telling.told\ndef charge").replace("import multi", "import telling, multi")
    (tmp_path / "tasks.py").write_text(wrapped)
    said = [python(tmp_path, *WAYS[way]) for way in (first, *WAYS)]
    assert said == ["charged A-1\n", "", "", ""]


def test_program_that_imports_itself_returns_its_own_classes(tmp_path: Path) -> None:
    """`uvicorn.run("main:app")` in main.py imports main again, so each of its classes exists twice."""
    (tmp_path / "main.py").write_text(TASKS.partition("if __name__")[0] + TWICE)
    assert python(tmp_path, "main.py") == "charged A-1\ncharged A-2\n"


def test_command_named_like_its_module_replays(tmp_path: Path) -> None:
    """An installer makes such a command from `[project.scripts] shop = "shop:replayed"`."""
    (tmp_path / "shop.py").write_text(TASKS)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "shop").write_text("from shop import replayed\nassert replayed() and replayed()\n")
    assert python(tmp_path, "bin/shop") == "charged A-1\n"


def test_loop_that_outlives_the_main_thread_keeps_outcomes(tmp_path: Path) -> None:
    """Python's executors then refuse work, but a server on another thread continues."""
    (tmp_path / "served.py").write_text(SERVED_ON_A_THREAD)
    assert python(tmp_path, "served.py") == "charged A-1\nA-1 A-1\n"


def test_dropped_transaction_frees_the_file_after_main_thread(tmp_path: Path) -> None:
    (tmp_path / "served.py").write_text(DROPPED_ON_A_THREAD)
    assert python(tmp_path, "served.py") == "A-2\n"


def python(folder: Path, *words: str) -> str:
    """Run Python with these arguments in *folder*, whose modules it can import, and return its output."""
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
