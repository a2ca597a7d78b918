"""`oncemore demo`: the everyday accidents, played for whoever wants to see them."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import click

from ...errors import ConfigurationError, MissingDriver
from .options import json_option
from .screen import Screen

HERE = Path(__file__)
PLACES = (
    HERE.parents[4] / "examples" / "demo.py",
    HERE.parents[2] / "_demo" / "examples" / "demo.py",
)  # a checkout, a wheel
NEEDED = ("aiosqlite", "fastapi", "httpx", "uvicorn")


@click.command()
@click.argument("stories", nargs=-1, type=int)
@json_option
@click.pass_obj
def demo(screen: Screen, stories: tuple[int, ...]) -> int:
    """Play the everyday accidents against the payments example; the exit code is 0 only if every story ends well.

    STORIES are their numbers; without, all are played.  Then the service stays up until Ctrl-C, unless ONCE=1 is set, or
    the answer is asked for as JSON.
    """
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise MissingDriver(f"The demo needs {', '.join(missing)}: pip install 'oncemore[demo]'")
    command = [sys.executable, str(found(PLACES)), *map(str, stories)]
    if not screen.json:
        return subprocess.run(command).returncode
    played = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "ONCE": "1"})
    holds = played.returncode == 0
    screen.answer({"holds": holds, "output": (played.stdout + played.stderr).splitlines()}, lambda out: None)
    return played.returncode


def found(places: tuple[Path, ...]) -> Path:
    """The first of *places* that is there."""
    for place in places:
        if place.exists():
            return place
    raise ConfigurationError("The demo is not part of this installation: in a checkout of oncemore, run: make demo")
