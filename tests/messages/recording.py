"""Brokers for tests of the relay: they record envelopes, and fail if a test says so."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from oncemore.errors import BrokerError
from oncemore.messages import Envelope


class RecordingBroker:
    """Stores envelopes in memory, except those for which *fails* is true.  While *down*, every call fails."""

    url, channel, group = "recording://", "recording", ""

    def __init__(
        self, fails: Callable[[Envelope], bool] = lambda _: False, *, window: float | None = None, delay: float = 0.0
    ) -> None:
        self.fails = fails
        self.window = window
        self.delay = delay
        self.down = False
        self.stored: list[Envelope] = []

    async def aopen(self) -> None:
        if self.down:
            raise BrokerError("recording:// cannot be reached")

    async def aclose(self) -> None:
        return

    async def publish(self, envelopes: Sequence[Envelope]) -> Sequence[Exception | None]:
        if self.down:
            return [BrokerError("connection lost")] * len(envelopes)
        if self.delay:
            await asyncio.sleep(self.delay)
        return [self._store(envelope) for envelope in envelopes]

    def _store(self, envelope: Envelope) -> Exception | None:
        if self.fails(envelope):
            return ValueError(f"{envelope.type} is refused")
        self.stored.append(envelope)
        return None

    def subscribe(self, group: str, *, prefetch: int = 1) -> Any:
        raise NotImplementedError

    def data(self, subject: str | None = None) -> list[Any]:
        """Return the data of the stored envelopes, of all or of one subject, in order of arrival."""
        return [envelope.data for envelope in self.stored if subject in (None, envelope.subject)]


class FileBroker(RecordingBroker):
    """Stores a line for each envelope in a file that many processes share; *reached* is called at each step."""

    def __init__(self, path: str | Path, reached: Callable[[str], None] = lambda _: None) -> None:
        super().__init__()
        self.path = path
        self.reached = reached

    async def publish(self, envelopes: Sequence[Envelope]) -> Sequence[Exception | None]:
        self.reached("before publish")
        lines = "".join(json.dumps([e.id, e.type, e.subject, e.data]) + "\n" for e in envelopes)
        with open(self.path, "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())
        self.reached("after publish")
        return [None] * len(envelopes)


def stored_in(path: str | Path) -> list[list[Any]]:
    """Return id, type, subject and data of each envelope that a FileBroker has stored."""
    if not os.path.exists(path):
        return []
    return [json.loads(line) for line in Path(path).read_text().splitlines()]
