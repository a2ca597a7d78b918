"""ASGI servers as the tests start them: each in a process of its own, on a free port, ended with the tests."""

from __future__ import annotations

import contextlib
import socket
import sys
from pathlib import Path

from tests.support.processes import ForkedServer

SERVE = Path(__file__).with_name("serve.py")


class AsgiServer(ForkedServer):
    """The contract's app in *framework*, on *server*; without a store's URL, on a SQLite file of its own."""

    def __init__(self, server: str, framework: str = "starlette", store: str = "") -> None:
        super().__init__()
        self.server = server
        self.framework = framework
        self._store = store

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def store(self) -> str:
        return self._store or f"sqlite:///{self.folder}/once.db"

    def command(self) -> list[str]:
        return [sys.executable, str(SERVE), self.server, self.framework, self.store, str(self.port)]

    def is_ready(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False
