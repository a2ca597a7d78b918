"""The relay of the payments service: sends the messages of its outbox to a broker, in a process of its own.

python -m examples.payments.relay --broker nats://127.0.0.1:4222/payments
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from typing import Any

from oncemore import Guard, Outbox
from oncemore.messages import Broker, Envelope, Relay
from oncemore.messages.broker import connect

from .observability import log_to_stderr
from .settings import Settings

SOURCE = "payments"
LEASE = "1s"  # short, because the demo waits for it: only then is a killed relay's message sent again


class PausingBroker:
    """A broker whose confirmations arrive late, so that the demo can kill the relay before it marks a message as sent."""

    def __init__(self, broker: Broker, pause: float) -> None:
        self._broker = broker
        self._pause = pause

    def __getattr__(self, name: str) -> Any:
        return getattr(self._broker, name)

    async def publish(self, envelopes: Sequence[Envelope]) -> Sequence[Exception | None]:
        results = await self._broker.publish(envelopes)
        await asyncio.sleep(self._pause)
        return results


if __name__ == "__main__":
    options = argparse.ArgumentParser(prog="python -m examples.payments.relay", description="The relay.")
    options.add_argument("--broker", default="nats://127.0.0.1:4222/payments")
    options.add_argument("--pause", type=float, default=0.0, help="seconds before each confirmation, for the demo")
    given = options.parse_args()
    log_to_stderr()
    outbox = Outbox(Guard(Settings.read().database), source=SOURCE)
    broker: Any = connect(given.broker)
    Relay(outbox, to=PausingBroker(broker, given.pause) if given.pause else broker, lease=LEASE).run()
