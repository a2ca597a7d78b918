"""A producer or a relay in a process of its own, which may kill itself: `pipeline.py producer|relay SHOP URL POINT`.

The consumer is `consuming.py`.
"""

from __future__ import annotations

import sqlite3
import sys
import time
from typing import Any

from oncemore import Guard, Op, Operation, Outbox, Policy
from oncemore.messages import Relay
from oncemore.messages.relay import RelayRun
from oncemore.testing.crashes import POINTS, Crashing, die

COUNT = 12  # refunds of one producer, for two subjects in turn
FATAL = 5  # the number of the refund at which a producer dies


def new_shop(path: str) -> Outbox:
    """Make the outbox of a shop, which has its refunds in the same database."""
    with sqlite3.connect(path, timeout=30) as database:
        database.execute("CREATE TABLE IF NOT EXISTS refunds (number INTEGER)")
    return Outbox(Guard(f"sqlite:///{path}", policy=Policy(effect="transaction")), source="payments")


def refund(outbox: Outbox, number: int) -> None:
    """Refund once and add a message, however often this is called."""

    def perform(op: Op) -> None:
        op.connection.execute("INSERT INTO refunds VALUES (?)", (number,))
        outbox.add(op, "refund.succeeded", {"number": number}, subject=f"rf_{number % 2}")

    outbox.guard.run(Operation("customer", f"refund-{number}"), perform)


def produce(outbox: Outbox, point: str) -> None:
    guard = outbox.guard
    store = guard.store
    for number in range(COUNT):
        if number == FATAL and point in POINTS:
            guard.store = Crashing(store, at=point)
        refund(outbox, number)


def relay(outbox: Outbox, url: str, point: str) -> None:
    send, tell = RelayRun._send, RelayRun._tell

    async def send_and_die(self: RelayRun, rows: Any, token: str | None) -> Any:
        if point == "after claim":
            die()
        ends = await send(self, rows, token)
        if point == "after publish":
            die()
        return ends

    def tell_and_die(self: RelayRun, ends: Any) -> Any:
        if point == "after mark":
            die()
        return tell(self, ends)

    RelayRun._send, RelayRun._tell = send_and_die, tell_and_die  # type: ignore[method-assign]
    Relay(outbox, to=url, lease="1s", batch=5).run()


def main(role: str, shop: str, url: str, point: str) -> None:
    outbox = new_shop(shop)
    if role == "relay":
        relay(outbox, url, point)
    elif point == "slowly":
        for number in range(10**9):
            refund(outbox, number)
            time.sleep(0.01)
    else:
        produce(outbox, point)


if __name__ == "__main__":
    main(*sys.argv[1:])
