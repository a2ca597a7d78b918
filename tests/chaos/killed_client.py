"""A client process that is killed at a given point: `python -m tests.chaos.killed_client <library> <point> <url> <keyring>`."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from oncemore._ledger.connect import connect
from oncemore._runtime.plan import Plan
from oncemore.client.keyring.entry import Keyring
from oncemore.client.keyring.ledger import LedgerKeyring
from oncemore.client.keyring.sqlite import SqliteKeyring
from oncemore.client.retry import Retry
from tests.client.clients import CLIENTS

CREDENTIALS = {"Authorization": "Bearer secret"}
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

    def _write(self, *arguments: Any) -> bool:
        if self.point == "before settling":
            die()
        written = super()._write(*arguments)
        if self.point == "after settling":
            die()
        return written


class DoomedStore:
    """A ledger in whose use the process dies: `before verb 1`, `after verb 1`, and so on."""

    def __init__(self, url: str, point: str) -> None:
        self.store: Any = connect(url)
        self.point = point
        self.count = 0

    def __getattr__(self, name: str) -> Any:
        plain = getattr(self.store, name)
        if name not in ("claim", "settle", "release", "hold", "delete"):
            return plain

        def verb(*arguments: Any, **options: Any) -> Plan[Any]:
            self.count += 1
            if self.point == f"before verb {self.count}":
                die()
            result = yield from plain(*arguments, **options)
            if self.point == f"after verb {self.count}":
                die()
            return result

        return verb


# Long enough for a busy machine to renew it, and short enough to wait for; a process that is killed at once renews nothing.
LEASE = 1.0
BRIEF = 0.4


def doomed(place: str, point: str) -> Keyring:
    if "://" in place:
        lease = LEASE if point == "never" else BRIEF
        return LedgerKeyring(DoomedStore(place, point), lease=lease)  # type: ignore[arg-type]
    return Doomed(place, point)


def main(library: str, point: str, url: str, place: str) -> None:
    client = CLIENTS[library](Retry(base=0.01, budget=None), doomed(place, point))
    headers = {"Content-Type": "application/json", "X-Pid": str(os.getpid()), **CREDENTIALS}
    client.request("POST", f"{url}/refunds", BODY, headers)


if __name__ == "__main__":
    main(*sys.argv[1:])
