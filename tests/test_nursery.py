"""The nursery's children are processes like any others, and none outlives the tests."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from .nurse import MEASURED, ROOT
from .nursery import CAN_FORK, Child, Raised, nursery, run
from .strangers import MODULES, strangers

pytestmark = pytest.mark.skipif(not CAN_FORK, reason="children are ordinary processes here")


def nursed(task: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "tests.nursed", task, *arguments]


def talking(task: str) -> Child:
    return Child(nursed(task), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def about(*arguments: str, **options: Any) -> dict[str, Any]:
    ended = run(nursed("about", *arguments), **options)
    assert (ended.returncode, ended.stderr) == (0, "")
    told: dict[str, Any] = json.loads(ended.stdout)
    return told


def until(true: Callable[[], bool]) -> None:
    ends = time.monotonic() + 20
    while not true():
        assert time.monotonic() < ends, "it did not come true"
        time.sleep(0.01)


def lives(pid: int) -> bool:
    """Whether there is such a process, and it is not merely waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_child_has_its_own_arguments_environment_and_folder(tmp_path: Path) -> None:
    told = about("a", "b c", cwd=tmp_path, env={"ONLY": "this", "PATH": ""})
    assert (told["argv"], told["cwd"]) == (["about", "a", "b c"], str(tmp_path))
    assert told["environment"] == {"ONLY": "this", "PATH": ""}


def test_a_child_lives_in_the_time_zone_of_its_environment() -> None:
    """A new interpreter would; a fork does if it is told."""
    assert about(env={"TZ": "XYZ-3"})["zone"] == -3 * 3600


def test_a_child_inherits_the_environment_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    nursery()
    monkeypatch.setenv("SET_SINCE", "the nursery began")
    assert about()["environment"]["SET_SINCE"] == "the nursery began"


def test_a_child_is_the_main_program_in_a_process_of_its_own() -> None:
    told = about()
    assert (told["name"], told["main"], told["threads"]) == ("__main__", True, 1)
    assert told["pid"] not in (os.getpid(), nursery().process.pid)


def test_a_child_has_its_three_streams_and_nothing_of_others() -> None:
    """A pipe that a neighbour held open would never end."""
    with talking("echo") as neighbour:
        assert about()["streams"] == [0, 1, 2]
        neighbour.kill()


def test_a_child_takes_signals_as_a_new_interpreter_does() -> None:
    told = about()
    assert told["interrupt"]
    assert told["children"]


def test_no_two_children_draw_the_same_random_numbers() -> None:
    assert about()["random"] != about()["random"]


def test_a_child_is_not_measured(tmp_path: Path) -> None:
    """Coverage that was half begun would write down nonsense."""
    settings = tmp_path / "settings"
    settings.write_text(f"[run]\ndata_file = {tmp_path / 'data'}\nparallel = true\n")
    told = about(env={**os.environ, "COVERAGE_PROCESS_START": str(settings)})
    assert not told["measured"]
    assert not set(MEASURED) & set(told["environment"])
    assert not list(tmp_path.glob("data*"))


def test_a_script_is_run_as_well_as_a_module(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("WORD = 'found'")
    script = tmp_path / "script.py"
    script.write_text("import sys, beside\nif __name__ == '__main__': print(beside.WORD, *sys.argv[1:])")
    assert run([sys.executable, str(script), "x"]).stdout == "found x\n"


def test_one_talks_with_a_child_by_its_streams() -> None:
    with talking("echo") as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write("stressed\n")
        child.stdin.flush()
        assert child.stdout.readline() == "desserts\n"
        assert child.poll() is None
        assert child.communicate("live\n") == ("evil\n", "over\n")
    assert child.returncode == 0


def test_an_error_is_told_as_the_interpreter_tells_it() -> None:
    ended = run(nursed("fail"))
    assert ended.returncode == 1
    assert ended.stderr.endswith("LookupError: lost\n")


def test_a_child_ends_as_an_interpreter_does() -> None:
    """With its code, its threads awaited, its last words said and its streams flushed."""
    ended = run(nursed("leave"))
    assert (ended.returncode, ended.stdout) == (7, "a thread\nlast words\n")


@pytest.mark.chaos
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_child_is_known_by_its_signal_and_leaves_nothing(how: signal.Signals) -> None:
    with talking("sleep") as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "asleep\n"
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.05)
        os.kill(child.pid, how)
        assert child.wait(20) == child.poll() == -how
    assert not Path(f"/proc/{child.pid}").exists()


@pytest.mark.chaos
def test_an_interrupt_reaches_a_child() -> None:
    with talking("sleep") as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "asleep\n"
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=20)
    assert errors.endswith("KeyboardInterrupt\n")
    assert child.returncode == -signal.SIGINT


@pytest.mark.chaos
def test_a_frozen_child_stands_still_until_it_may_go_on() -> None:
    with talking("count") as child:
        child.send_signal(signal.SIGSTOP)
        stat = Path(f"/proc/{child.pid}/stat")
        until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")
        assert child.poll() is None
        child.send_signal(signal.SIGCONT)
        until(lambda: stat.read_text().rpartition(")")[2].split()[0] != "T")
        child.kill()
    assert child.returncode == -signal.SIGKILL


@pytest.mark.chaos
@pytest.mark.parametrize("victim", ["worker", "nursery"])
def test_no_child_outlives_its_worker_or_its_nursery(victim: str) -> None:
    """Not even where a fork of the worker's lives on."""
    command = nursed("work")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True) as worker:
        try:
            assert worker.stdout is not None
            theirs, child = map(int, worker.stdout.readline().split())
            assert lives(theirs)
            assert lives(child)
            os.kill(worker.pid if victim == "worker" else theirs, signal.SIGKILL)
            until(lambda: not lives(child) and not lives(theirs))
        finally:
            os.killpg(worker.pid, signal.SIGKILL)  # the fork


# What is built on it


class Files(Raised):
    """A server of its folder's files."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        return [
            "env",
            "-u",
            "NONE",
            "WORD=x",
            sys.executable,
            "-m",
            "http.server",
            str(self.port),
            "--bind",
            "127.0.0.1",
        ]

    def is_ready(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False


@pytest.mark.chaos
def test_a_raised_server_can_be_crashed_and_started_again_and_leaves_nothing() -> None:
    with Files() as server:
        first, url, folder = server.pid, server.url, server.folder
        server.crash()
        assert not lives(first)
        server.start()
        assert (server.url, server.pid == first) == (url, False)
        with urllib.request.urlopen(f"{url}/log", timeout=10) as response:
            assert response.status == 200
        last = server.pid
    assert not lives(last)
    assert not folder.exists()


def test_strangers_have_their_modules_and_nothing_else_of_ours() -> None:
    loaded = f"{MODULES!r} == [name for name in {MODULES!r} if name in __import__('sys').modules]"
    with strangers().Pool(1) as pool:
        assert pool.apply(os.getppid) != os.getpid()
        assert pool.apply(sys.gettrace) is None
        assert pool.apply(eval, (loaded,))
        assert not pool.apply(eval, (f"{__name__!r} in __import__('sys').modules",))
