"""The example script on retry storms, run as a reader would run it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "examples" / "retry_storm.py"


def test_retry_storm_script_shows_that_jitter_answers_more_clients() -> None:
    shown = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=True, timeout=60).stdout
    table = re.findall(r"^(no jitter|equal jitter|full jitter) +(\d+) +(\d+) +(\d+) +(\d+) ", shown, re.MULTILINE)
    answered = {name: int(count) for name, count, *_ in table}
    busiest = {name: int(count) for name, *_, count in table}
    assert answered["no jitter"] < answered["equal jitter"] < answered["full jitter"]
    assert busiest["full jitter"] < busiest["no jitter"]
    assert shown.count("#") > 100
    assert max(map(len, shown.splitlines())) <= 100
