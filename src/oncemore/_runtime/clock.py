"""The clock that a guard measures its own waiting with; tests replace it.  Leases and retention use the store's clock."""

from __future__ import annotations

import time
from typing import Protocol


class TimeSource(Protocol):
    """A clock with the two readings that a guard needs."""

    def monotonic(self) -> float: ...
    def time(self) -> float: ...


class SystemClock:
    """This machine's clock."""

    monotonic = staticmethod(time.monotonic)
    time = staticmethod(time.time)


SYSTEM: TimeSource = SystemClock()
