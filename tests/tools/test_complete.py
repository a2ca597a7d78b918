"""`oncemore complete` finishes what was left unfinished, and tells what came of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from oncemore.tools.cli import main
from oncemore.tools.complete import rounds

from .completers import left_unfinished

MODULE = Path(__file__).parent


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(MODULE)
    monkeypatch.setattr(sys, "path", [*sys.path])


def test_one_round_finishes_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["complete", "completers:lucky", "--once"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told == [
        "completed  orders.pay order-1 (attempt 2)",
        "1 unfinished: 1 completed, 0 to be tried again, 0 held, 0 without a request",
    ]


def test_what_is_not_finished_shows_in_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["complete", "completers:unlucky", "--once"]) == 1
    assert "1 to be tried again" in capsys.readouterr().out
    assert main(["complete", "completers:idle", "--once"]) == 0


@pytest.mark.parametrize("place", ["completers", "completers:missing", "nowhere:at_all", "completers:nothing"])
def test_a_completer_that_is_not_there_is_told(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["complete", place]) == 2
    assert place in capsys.readouterr().err


def test_a_module_that_fails_is_told_with_what_it_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lacking.py").write_text("import os\nurl = os.environ['NO_SUCH_VARIABLE']\n")
    sys.path.insert(0, str(tmp_path))
    assert main(["complete", "lacking:completer"]) == 2
    assert "NO_SUCH_VARIABLE" in capsys.readouterr().err


def test_the_completers_own_progress_is_told_as_well() -> None:
    completer = left_unfinished(fails=1)
    ends: list[str] = []
    completer.progress = lambda record, end: ends.append(end)
    assert rounds(completer, once=True, report=lambda line: None).completed == 1
    assert ends == ["completed"]


def test_a_round_that_is_interrupted_is_not_done() -> None:
    command = [sys.executable, "-u", "-m", "oncemore.tools.cli", "complete", "completers:slow", "--once"]
    with subprocess.Popen(command, cwd=MODULE, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "it begins\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130


def test_it_runs_until_it_is_interrupted() -> None:
    command = [sys.executable, "-u", "-m", "oncemore.tools.cli", "complete", "completers:lucky"]
    with subprocess.Popen(command, cwd=MODULE, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("completed")
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
