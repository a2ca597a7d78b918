"""`oncemore demo`: run the example service through crashes and retries."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import click

from ...errors import ConfigurationError, MissingDriver
from .options import json_option
from .output import Output

SCRIPTS = (
    Path(__file__).parents[4] / "examples" / "demo.py",  # in a checkout
    Path(__file__).parents[2] / "_demo" / "examples" / "demo.py",  # in a wheel
)
PACKAGES = (  # the packages of the extra `demo`
    "aiohttp",
    "aiosqlite",
    "cronsim",
    "cryptography",
    "fastapi",
    "httpx",
    "prometheus_client",
    "psycopg",
    "uvicorn",
)


@click.command()
@click.argument("stories", nargs=-1, type=int)
@json_option
@click.pass_obj
def demo(output: Output, stories: tuple[int, ...]) -> int:
    """Run the payments example through everyday accidents.  The exit code is 0 only if each ends with one effect.

    STORIES are the numbers of the accidents to show; the default is all.  The service then stays up until Ctrl-C, unless
    ONCE=1 is set or --json is given.
    """
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise MissingDriver(f"The demo needs {', '.join(missing)}: pip install 'oncemore[demo]'")
    script = next((path for path in SCRIPTS if path.exists()), None)
    if script is None:
        raise ConfigurationError("The demo is not part of this installation: in a checkout of oncemore, run: make demo")
    command = [sys.executable, str(script), *map(str, stories)]
    if not output.json:
        return subprocess.run(command).returncode
    ran = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "ONCE": "1"})
    output.show({"holds": ran.returncode == 0, "output": (ran.stdout + ran.stderr).splitlines()}, "")
    return ran.returncode
