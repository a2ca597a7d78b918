"""`oncemore demo`: the everyday accidents, played for whoever wants to see them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click

from ...errors import ConfigurationError
from .options import json_option
from .screen import Screen

STORIES = Path(__file__).parents[4] / "examples" / "demo.py"


@click.command()
@json_option
@click.pass_obj
def demo(screen: Screen) -> int:
    """Play the everyday accidents against the payments example; the exit code is 0 only if every story ends well.

    Then the service stays up until Ctrl-C, unless ONCE=1 is set, or the answer is asked for as JSON.
    """
    if not STORIES.exists():
        raise ConfigurationError("The demo comes with the source of oncemore: in a checkout of it, run: make demo")
    command = [sys.executable, str(STORIES)]
    if not screen.json:
        return subprocess.run(command).returncode
    played = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "ONCE": "1"})
    holds = played.returncode == 0
    screen.answer({"holds": holds, "output": (played.stdout + played.stderr).splitlines()}, lambda out: None)
    return played.returncode
