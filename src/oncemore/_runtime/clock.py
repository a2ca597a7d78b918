"""The only place that reads this machine's clock.  Leases and retention never do: they live by the store's."""

from __future__ import annotations

import time
from typing import Protocol


class TimeSource(Protocol):
    """The clock that the guard measures its own waiting with."""

    def monotonic(self) -> float: ...
    def time(self) -> float: ...


class SystemClock:
    """This machine's clock."""

    monotonic = staticmethod(time.monotonic)
    time = staticmethod(time.time)


SYSTEM: TimeSource = SystemClock()
