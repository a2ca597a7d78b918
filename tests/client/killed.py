"""A client process that is killed at a given point: `python -m tests.client.killed <library> <point> <url> <keyring>`."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from oncemore.client.keyring_sqlite import SqliteKeyring
from oncemore.client.retry import Retry

from .clients import CLIENTS

BODY = b'{"amount": 100, "order": "17"}'


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Doomed(SqliteKeyring):
    """A keyring in whose use the process dies."""

    def __init__(self, path: str, point: str) -> None:
        super().__init__(path)
        self.point = point

    def _claim(self, *arguments: Any) -> Any:
        if self.point == "before the claim":
            die()
        held = super()._claim(*arguments)
        if self.point == "after the claim":
            die()
        return held

    def _write(self, *arguments: Any) -> None:
        if self.point == "before settling":
            die()
        super()._write(*arguments)
        if self.point == "after settling":
            die()


def main(library: str, point: str, url: str, path: str) -> None:
    client = CLIENTS[library](Retry(base=0.01, budget=None), Doomed(path, point))
    headers = {"Content-Type": "application/json", "X-Pid": str(os.getpid()), "Authorization": "Bearer secret"}
    client.request("POST", f"{url}/refunds", BODY, headers)


if __name__ == "__main__":
    main(*sys.argv[1:])
