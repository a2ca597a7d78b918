"""How long to wait before the next attempt: delays that grow up to a cap, with a jitter that spreads the callers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ..errors import ConfigurationError

Jitter = Literal["full", "equal", "zero", "decorrelated", "additive", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Delays in seconds.  The step before retry *n* is `base · factor ** (n - 1)`, at most *cap*; `delay` adds the jitter."""

    base: float = 0.1
    factor: float = 2.0
    cap: float = 2.0
    jitter: Jitter = "full"
    spread: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.base <= self.cap < float("inf"):
            raise ConfigurationError(f"backoff: base ({self.base}) and cap ({self.cap}) must be 0 ≤ base ≤ cap")
        if not 1 <= self.factor < float("inf"):
            raise ConfigurationError(f"backoff: factor ({self.factor}) must be at least 1, or the steps would shrink")
        if not 0 <= self.spread < float("inf"):
            raise ConfigurationError(f"backoff: spread ({self.spread}) must not be negative")
        if self.jitter not in get_args(Jitter):
            raise ConfigurationError(
                f"jitter = {self.jitter!r} is unknown: choose one of {', '.join(get_args(Jitter))}"
            )

    def step(self, retry: int) -> float:
        """Return the delay before retry number *retry* (from 1), without jitter."""
        try:
            return min(self.cap, self.base * self.factor ** (retry - 1))
        except OverflowError:
            return self.cap

    def delay(self, retry: int, chance: float, previous: float = 0.0) -> float:
        """Return the seconds to wait before retry number *retry*.  *chance* is a uniform random number in [0, 1)."""
        step = self.step(retry)
        match self.jitter:
            case "full":  # from the step to twice the step
                # At the cap, from half of it to the cap: otherwise all callers would come back together.
                top = min(self.cap, 2 * step)
                return top / 2 + chance * top / 2
            case "equal":  # from half of the step to the step
                return step / 2 + chance * step / 2
            case "zero":  # from zero to the step (AWS calls this full jitter)
                return chance * step
            case "decorrelated":  # from the base to three times the previous delay
                top = max(3 * previous, self.base)
                return min(self.cap, self.base + chance * (top - self.base))
            case "additive":  # the step plus up to *spread*
                return min(self.cap, step + chance * self.spread)
        return step
