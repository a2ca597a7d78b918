"""The time that is left to a Lambda function: nobody performs, or waits, after it is over."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..._contract.policy import Policy

# A function may be ended a little later than it was told; its lease must not lapse while it could still be working.
GRACE = 1.0


def time_left(context: Any) -> float | None:
    """The seconds until the function is ended; None where nobody tells."""
    tell = getattr(context, "get_remaining_time_in_millis", None)
    return max(0.0, tell() / 1000) if tell is not None else None


def within(policy: Policy, left: float | None) -> Policy:
    """The policy with a lease no longer than the function has left: then a retry need not wait for much longer."""
    if left is None or left + GRACE >= policy.lease:
        return policy
    return dataclasses.replace(policy, lease=left + GRACE)


def patience(asked: float | None, left: float | None) -> float | None:
    """How long to wait for one who is running: half the time at most, for if it fails, we need the other half."""
    known = [each for each in (asked, None if left is None else left / 2) if each is not None]
    return min(known) if known else None
