"""A process that is killed while it gives an operation up leaves nothing that is refused for ever."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from tests.support.processes import run_to_end

COMMAND = [sys.executable, "-m", "tests.chaos.ending"]


def ended(what: str, url: str, *kill: str) -> list[str]:
    """Run the process; return what it printed.  With *kill* it must die by SIGKILL."""
    done = run_to_end([*COMMAND, what, url, *kill])
    assert done.returncode == (-signal.SIGKILL if kill else 0), done.stderr
    return done.stdout.split("\n")[:-1]


def on_command_line(url: str, *words: str) -> str:
    done = run_to_end([sys.executable, "-m", "oncemore", "inbox", *words, "--source", "payments", "--store", url])
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/once.db"


def test_inbox_killed_while_it_buries_leaves_a_dead_letter(url: str) -> None:
    ended("inbox", url, "kill")
    assert ended("inbox", url) == ["dead"]
    assert "ev_001" in on_command_line(url, "dead")
    on_command_line(url, "requeue", "ev_001")
    assert ended("inbox", url) == ["dead"], "requeued: it was handled again, and failed again"


def test_steps_killed_while_they_mark_their_failure_are_finished(url: str) -> None:
    assert ended("steps", url, "kill") == ["reserved"]
    assert ended("steps", url) == ["undone", "Declined('insufficient funds')"]
    assert ended("steps", url) == ["Declined('insufficient funds')"]
