"""Processes from the forkserver behave like those of subprocess, and never outlive the test run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .processes import Program, run_to_end, separate_processes

pytestmark = pytest.mark.chaos

ABOUT = "import os, sys; print(sys.argv[1:], os.getcwd(), os.environ['WORD'], sys.stdin.read()); sys.exit(7)"

PARENT = """
import sys, time
from tests.support.processes import Program

if __name__ == "__main__":
    child = Program([sys.executable, sys.argv[1]])
    print(child.pid, flush=True)
    time.sleep(60)
"""


def script(folder: Path, text: str) -> str:
    path = folder / f"script{len(list(folder.iterdir()))}.py"
    path.write_text(text)
    return str(path)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_program_gets_arguments_folder_environment_and_streams(tmp_path: Path) -> None:
    ended = run_to_end(
        [sys.executable, script(tmp_path, ABOUT), "a", "b c"], said="heard", cwd=tmp_path, env={"WORD": "own"}
    )
    assert (ended.returncode, ended.stdout) == (7, f"['a', 'b c'] {tmp_path} own heard\n")


def test_program_that_raises_ends_with_traceback_and_one(tmp_path: Path) -> None:
    ended = run_to_end([sys.executable, script(tmp_path, "raise LookupError('lost')")])
    assert ended.returncode == 1
    assert "LookupError: lost" in ended.stderr


def test_killed_program_reports_its_signal(tmp_path: Path) -> None:
    sleeping = script(tmp_path, "import time; print('asleep', flush=True); time.sleep(60)")
    with Program([sys.executable, sleeping], stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "asleep\n"
        assert program.poll() is None
        program.kill()
        assert program.wait(20) == -signal.SIGKILL


def test_program_ends_when_the_test_run_is_killed(tmp_path: Path) -> None:
    sleeping = script(tmp_path, "import time; time.sleep(60)")
    command = [sys.executable, script(tmp_path, PARENT), sleeping]
    path = os.pathsep.join(sys.path)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert is_alive(child)
        parent.kill()
    deadline = time.monotonic() + 20
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(child)


def test_separate_process_is_not_a_fork_of_the_test() -> None:
    with separate_processes().Pool(1) as pool:
        assert pool.apply(os.getppid) != os.getpid()
