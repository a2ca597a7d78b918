"""`memory://payments`: a broker in this process, for your tests.  All brokers of one channel share its messages."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..broker import PREFETCH, VISIBILITY, Address, Delivery, Subscription, UrlBroker, deduplication_id
from ..envelope import Envelope, parse_structured, structured

OPTIONS = {"visibility": VISIBILITY, "window": 86400.0}
POLL = 0.005  # seconds; a consumer polls because the producer may be on another thread and event loop


@dataclass
class KeptMessage:
    """A message for one group, with the time of its next delivery and the count of its deliveries."""

    body: bytes
    due: float
    count: int = 0


@dataclass
class Channel:
    """All messages of a channel, and each group's messages that are not acknowledged yet."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    messages: list[bytes] = field(default_factory=list)
    seen: dict[str, float] = field(default_factory=dict)
    groups: dict[str, dict[int, KeptMessage]] = field(default_factory=dict)

    def group(self, name: str) -> dict[int, KeptMessage]:
        """Return the group's messages by number.  A new group gets all messages ever published."""
        if name not in self.groups:
            self.groups[name] = {n: KeptMessage(body, 0.0) for n, body in enumerate(self.messages)}
        return self.groups[name]

    def add(self, body: bytes) -> None:
        for group in self.groups.values():
            group[len(self.messages)] = KeptMessage(body, 0.0)
        self.messages.append(body)


CHANNELS: dict[tuple[str, str], Channel] = {}


def clear() -> None:
    """Forget all channels."""
    CHANNELS.clear()


class MemoryBroker(UrlBroker):
    """A channel in this process's memory.  An unacknowledged delivery is repeated after *visibility* seconds."""

    def __init__(self, address: Address, settings: Mapping[str, Any]) -> None:
        super().__init__(address, settings)
        self.visibility: float = address.options["visibility"]
        self.shared = CHANNELS.setdefault((address.space, address.channel), Channel())

    async def aopen(self) -> None:
        return

    async def aclose(self) -> None:
        return

    async def send(self, envelopes: Sequence[Envelope]) -> Sequence[Exception | None]:
        now = time.monotonic()
        with self.shared.lock:
            for envelope in envelopes:
                id = deduplication_id(envelope, self.channel)
                if self.shared.seen.get(id, 0.0) <= now:
                    self.shared.seen[id] = now + (self.window or 0.0)
                    self.shared.add(structured(envelope))
        return [None] * len(envelopes)

    async def put(self, body: bytes) -> None:
        """Add a message unchecked, to test how your consumer handles a malformed message."""
        with self.shared.lock:
            self.shared.add(body)

    def subscribe(self, group: str, *, prefetch: int = PREFETCH) -> Subscription:
        return MemorySubscription(self, group)


class MemorySubscription(Subscription):
    def __init__(self, broker: MemoryBroker, group: str) -> None:
        self.broker = broker
        self.group = group
        self.visibility = broker.visibility

    async def aopen(self) -> None:
        with self.broker.shared.lock:
            self.broker.shared.group(self.group)

    async def receive(self, limit: int, wait: float) -> Sequence[Delivery]:
        ends = time.monotonic() + wait
        while not (found := self._take(limit)) and time.monotonic() < ends:
            await asyncio.sleep(POLL)
        return found

    def _take(self, limit: int) -> list[Delivery]:
        now = time.monotonic()
        found: list[Delivery] = []
        with self.broker.shared.lock:
            for number, message in self.broker.shared.group(self.group).items():
                if message.due <= now:
                    message.due = now + self.broker.visibility
                    message.count += 1
                    found.append(MemoryDelivery(self, number, message))
                    if len(found) == limit:
                        break
        return found

    async def aclose(self) -> None:
        return


class MemoryDelivery(Delivery):
    __slots__ = ("number", "subscription")

    def __init__(self, subscription: MemorySubscription, number: int, message: KeptMessage) -> None:
        super().__init__(lambda: parse_structured(message.body), message.body, message.count)
        self.subscription = subscription
        self.number = number

    async def ack(self) -> None:
        with self.subscription.broker.shared.lock:
            self._group().pop(self.number, None)

    async def nack(self, delay: float = 0.0) -> None:
        self._move(delay)

    async def extend(self) -> None:
        self._move(self.subscription.broker.visibility)

    def _move(self, seconds: float) -> None:
        with self.subscription.broker.shared.lock:
            message = self._group().get(self.number)
            if message is not None and message.count == self.count:  # it was not delivered again meanwhile
                message.due = time.monotonic() + seconds

    def _group(self) -> dict[int, KeptMessage]:
        return self.subscription.broker.shared.group(self.subscription.group)
