"""`make demo-matchmaking`, run in a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples.show.matchmaking import STORIES

from .test_demo import environment

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "examples" / "demo_matchmaking.py"

pytestmark = pytest.mark.chaos


def play(*numbers: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(DEMO), *numbers]
    return subprocess.run(command, capture_output=True, text=True, env=environment(ONCE="1", **more), timeout=110)


def test_demo_effects_happen_once() -> None:
    played = play()
    assert played.returncode == 0, played.stdout + played.stderr
    rows = re.findall(r"^(\d)\. .*?  +(\d+)  +(\d+)  +(\d+)  ✓ once$", played.stdout, re.MULTILINE)
    assert [int(row[0]) for row in rows] == list(range(1, len(STORIES) + 1))
    assert all(wanted == found != "0" for _, _, wanted, found in rows)
    assert "\x1b" not in played.stdout
    assert max(map(len, played.stdout.splitlines())) <= 100


def test_one_story_can_be_chosen() -> None:
    played = play("2")
    assert played.returncode == 0, played.stdout + played.stderr
    assert "2. ten accept at once" in played.stdout
    assert "1. a double swipe" not in played.stdout


def test_unknown_story_is_refused() -> None:
    played = play("6")
    assert played.returncode == 1
    assert "There is no story 6" in played.stderr
