"""A consumer in a process of its own, which may be killed at a point: `consuming.py DATABASE URL POINT`."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

from oncemore import Guard, Inbox, Op
from oncemore.messages import Consumer, Envelope
from oncemore.messages.broker import Delivery
from oncemore.messages.consumer import ConsumerRun
from oncemore.testing.crashes import POINTS, Crashing, die


def main(database: str, url: str, point: str) -> None:
    logging.basicConfig()
    guard = Guard(f"sqlite:///{database}")
    crashing = Crashing(guard.store, at=point) if point in POINTS else None
    if crashing is not None:
        guard.store = crashing

    def book(op: Op, envelope: Envelope) -> None:
        op.connection.execute("INSERT INTO bookings VALUES (?, ?)", (envelope.id, envelope.data["number"]))
        if crashing is not None:
            crashing.reached("after effect")
        if point == "slow":
            print("begun", flush=True)
            time.sleep(1)

    if point == "after ack":
        answer = ConsumerRun._answer

        async def answer_and_die(self: ConsumerRun, delivery: Delivery, again: float | None) -> None:
            await answer(self, delivery, again)
            die()

        settings: Any = ConsumerRun
        settings._answer = answer_and_die
    consumer = Consumer(Inbox(guard, lease=2, sender_span="1d"), url, {"refund.*": book}, concurrency=1)
    consumer.run()
    print("stopped", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
