"""When a delivery is tried again: at fixed times after its first attempt."""

from __future__ import annotations

import random
from collections.abc import Sequence

from .._contract.policy import duration
from ..errors import ConfigurationError

# Seconds after the first attempt.
STEPS = (0.0, 5.0, 30.0, 120.0, 600.0, 1800.0, 3600.0, 21600.0, 43200.0, 86400.0)
JITTER = 0.1  # the most by which a step is delayed, as a share of the time since the step before
LATE = 60.0  # seconds; if a delivery is claimed later than this, the wait does not count for its schedule


class DeliverySchedule:
    """Decides when a delivery is tried: at each of *steps*, in seconds or `"30s"`, after the first attempt."""

    def __init__(self, steps: Sequence[float | str] = STEPS) -> None:
        self.steps = tuple(duration(step) for step in steps)
        if not self.steps or self.steps[0] != 0 or list(self.steps) != sorted(set(self.steps)):
            raise ConfigurationError(
                f"schedule = {list(steps)!r}: write growing times after the first attempt, the first of them 0, as in "
                "[0, '5s', '30s', '10m']"
            )

    @property
    def span(self) -> float:
        """The seconds from the first attempt to the last."""
        return self.steps[-1]

    def next_attempt(self, elapsed: float, retry_after: float | None = None) -> float | None:
        """Return when to try again after an attempt at *elapsed*, in seconds after the first; None if it was the last.

        *retry_after* is the delay that the receiver has asked for.  It delays the next attempt at most by one
        step; later steps keep their times.
        """
        elapsed = max(elapsed, 0.0)  # the clock may have been set back
        later = [number for number, step in enumerate(self.steps) if step > elapsed]
        if not later:
            return None
        first = later[0]
        at = self.steps[first]
        if retry_after is not None and elapsed + retry_after > at:
            return min(elapsed + retry_after, self.steps[min(first + 1, len(self.steps) - 1)])
        return at + random.uniform(0, JITTER) * (at - self.steps[first - 1])
