"""A producer and a relay that kill themselves at a chosen point: `killed.py producer|relay URL FILE POINT [mode]`."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from oncemore import Guard, Op, Operation, Outbox, Policy
from oncemore.messages import Relay
from oncemore.messages.relay import RelayRun
from oncemore.testing.crashes import Crashing
from tests.messages.recording import FileBroker


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def produce(url: str, point: str) -> None:
    """Add messages 0 to 9 in one operation, and die at *point*."""
    guard = Guard(url, policy=Policy(effect="transaction"))
    outbox = Outbox(guard, source="shop")
    crashing: Any = (
        Crashing(guard.store, at=point) if point in ("after claim", "before commit", "after commit") else None
    )
    if crashing is not None:
        guard.store = crashing

    def perform(op: Op) -> None:
        for n in range(10):
            outbox.add(op, "a", n, subject="s" if n % 2 else None)
            if point == "after add" and n == 4:
                die()

    guard.run(Operation("test", "k1"), perform)


def relay(url: str, file: str, point: str, mode: Any) -> None:
    """Send the messages that are there, and die at *point*."""

    def reached(step: str) -> None:
        if step == point:
            die()

    outbox = Outbox(Guard(url), source="shop")
    send, tell = RelayRun._send, RelayRun._tell

    async def before_send(self: RelayRun, rows: Any, token: str | None) -> Any:
        reached("after claim")
        ends = await send(self, rows, token)
        reached("before end")
        return ends

    def after_end(self: RelayRun, ends: Any) -> Any:
        reached("after end")
        return tell(self, ends)

    RelayRun._send, RelayRun._tell = before_send, after_end  # type: ignore[method-assign]
    Relay(outbox, to=FileBroker(file, reached), mode=mode, batch=4, lease="1s").run_once()


if __name__ == "__main__":
    role, url, file, point, *rest = sys.argv[1:]
    if role == "producer":
        produce(url, point)
    else:
        relay(url, file, point, rest[0] if rest else None)
