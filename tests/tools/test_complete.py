"""`oncemore complete`: interrupted operations are finished and reported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from oncemore.tools.cli import main
from oncemore.tools.commands.complete import run_completer

from .completers import completer_with_unfinished_operation

MODULE = Path(__file__).parent


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(MODULE)
    monkeypatch.setattr(sys, "path", [*sys.path])


def test_once_completes_the_unfinished_operation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["complete", "completers:lucky", "--once"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "completed  orders.pay order-1 (attempt 2)",
        "1 unfinished: 1 completed, 0 to be tried again, 0 held, 0 without a request",
    ]


def test_failed_completion_exits_with_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["complete", "completers:unlucky", "--once"]) == 1
    assert "1 to be tried again" in capsys.readouterr().out
    assert main(["complete", "completers:idle", "--once"]) == 0


@pytest.mark.parametrize("place", ["completers", "completers:missing", "nowhere:at_all", "completers:nothing"])
def test_unknown_completer_is_named_in_the_error(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["complete", place]) == 2
    assert place in capsys.readouterr().err


def test_error_of_the_module_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lacking.py").write_text("import os\nurl = os.environ['NO_SUCH_VARIABLE']\n")
    sys.path.insert(0, str(tmp_path))
    assert main(["complete", "lacking:completer"]) == 2
    assert "NO_SUCH_VARIABLE" in capsys.readouterr().err


def test_progress_callback_of_the_completer_is_called() -> None:
    completer = completer_with_unfinished_operation(fails=1)
    ends: list[str] = []
    completer.progress = lambda record, end: ends.append(end)
    assert run_completer(completer, once=True, report=lambda line: None).completed == 1
    assert ends == ["completed"]


def test_interrupted_once_exits_with_130() -> None:
    command = [sys.executable, "-u", "-m", "oncemore.tools.cli", "complete", "completers:slow", "--once"]
    with subprocess.Popen(command, cwd=MODULE, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130


def test_interrupt_without_once_exits_with_zero() -> None:
    command = [sys.executable, "-u", "-m", "oncemore.tools.cli", "complete", "completers:lucky"]
    with subprocess.Popen(command, cwd=MODULE, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("completed")
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
