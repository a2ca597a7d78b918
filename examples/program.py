"""A program of an example in a process of its own, which the demos and the tests can kill."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from examples.process import Server, free_port

ROOT = Path(__file__).parents[1]

# One client for all, without TLS, because creating an SSL context takes longer than most requests here.
http = httpx.Client(verify=False, timeout=30, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))


class Program(Server):
    """A module of an example, run in a process of its own with its settings in the environment."""

    module = ""

    def __init__(self, port: int = 0, **settings: str) -> None:
        super().__init__()
        self.port = port or free_port()
        self.settings = settings

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def arguments(self) -> list[str]:
        return []

    def command(self) -> list[str]:
        return in_environment(self.settings, ["-m", self.module, "--port", str(self.port), *self.arguments()])

    def is_ready(self) -> bool:
        try:
            return bool(http.get(f"{self.url}/health").json()["pid"] == self.pid)
        except (httpx.HTTPError, ValueError, KeyError):  # nothing answers, or another process does
            return False

    def get(self, path: str) -> Any:
        return http.get(self.url + path).raise_for_status().json()


def in_environment(settings: Mapping[str, str], arguments: list[str]) -> list[str]:
    """Return the command that runs Python with *settings* as environment variables."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    variables = [f"{name}={value}" for name, value in {"PYTHONPATH": path, **settings}.items()]
    return ["env", *variables, sys.executable, *arguments]
