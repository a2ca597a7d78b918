"""The examples run, and end well."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.chaos
def test_every_story_of_the_demo_charges_the_card_once() -> None:
    """CASES 14, 16, 17, 20, 25."""
    played = subprocess.run([sys.executable, EXAMPLES / "demo.py"], capture_output=True, text=True)
    assert played.returncode == 0, played.stdout + played.stderr
    assert played.stdout.count("✓") == 6
