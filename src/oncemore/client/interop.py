"""A policy as arguments for tenacity or stamina, for code that already uses them."""

from __future__ import annotations

import random
from typing import Any

from ..errors import ConfigurationError
from .retry import Retry


def tenacity_arguments(retry: Retry) -> dict[str, Any]:
    """Return keyword arguments for `tenacity.retry(**…)`: the same errors, delays, attempts and deadline."""

    def wait(state: Any) -> float:
        # tenacity also asks after the last attempt, for which a schedule has no time.
        if state.attempt_number >= retry.attempts:
            return 0.0
        previous = state.next_action.sleep if state.next_action else 0.0
        elapsed = state.seconds_since_start or 0.0
        return retry.delay(state.attempt_number, random.random(), previous=previous, elapsed=elapsed)

    def stop(state: Any) -> bool:
        if state.attempt_number >= retry.attempts:
            return True
        return bool((state.seconds_since_start or 0.0) + state.upcoming_sleep >= retry.deadline)

    def wanted(state: Any) -> bool:
        error = state.outcome.exception()
        return isinstance(error, Exception) and retry.wants(error)

    return {"wait": wait, "stop": stop, "retry": wanted, "reraise": True}


def stamina_arguments(retry: Retry) -> dict[str, Any]:
    """Return keyword arguments for `stamina.retry(**…)`; it has one kind of jitter, so only `additive` and `none` are exact."""
    if retry.schedule:
        raise ConfigurationError("stamina knows no schedule of its own: use oncemore's retry, or tenacity")
    jitter = {"additive": retry.spread, "none": 0.0}.get(retry.jitter, retry.base)
    return {
        "on": retry.wants,
        "attempts": retry.attempts,
        "timeout": retry.deadline,
        "wait_initial": retry.base,
        "wait_max": retry.cap,
        "wait_jitter": jitter,
        "wait_exp_base": retry.factor,
    }
