"""Limits the rate of new keys per principal with the package `limits`: above it, a request gets 429 with Retry-After."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from typing import Any, Protocol

from .._contract.contract import Contract
from .._contract.rule import Rule
from .._ledger.connect import hide_password
from .._runtime.plan import Call
from ..errors import ConfigurationError, MissingDriver, RateLimited, Refusal, StoreUnavailable

log = logging.getLogger("oncemore.web")


class Rates(Protocol):
    """Counts the new keys of each owner.

    On an event loop, `admit` is called in a thread, unless the counter has `blocking = False` because it never blocks.
    """

    def admit(self, rule: Rule, owner: str) -> None:
        """Count one new key of *owner* under the rule.  Raise RateLimited if it exceeds the rate."""


class NotCounted(Refusal, StoreUnavailable):
    """New keys cannot be counted now, so none are accepted.  The claim is withdrawn, so a retry's key is still new."""


class NewKeys:
    """Counts new keys in a *storage* of `limits`: `memory://` is this process's own, `redis://...` is shared.

    The window slides: it is a weighted count of the present and the last window, which takes little memory at any rate.
    """

    def __init__(self, storage: str = "memory://", **options: Any) -> None:
        try:
            from limits.errors import ConfigurationError as UnknownStorage
            from limits.storage import storage_from_string
            from limits.strategies import SlidingWindowCounterRateLimiter
        except ModuleNotFoundError as error:
            raise MissingDriver("Rates need a package; install it with: pip install 'oncemore[limits]'") from error
        shown = hide_password(storage)
        if storage.startswith("async+"):
            raise ConfigurationError(f"{shown!r} cannot count new keys: remove 'async+' (a thread calls it)")
        try:
            found: Any = storage_from_string(storage, **options)
            self._limiter = SlidingWindowCounterRateLimiter(found)
        except (UnknownStorage, NotImplementedError) as error:
            reason = str(error).replace(storage, shown)  # raised without its cause, which shows the password
            raise ConfigurationError(f"{shown!r} cannot count new keys: {reason}") from None
        self.blocking = not storage.startswith("memory:")

    def admit(self, rule: Rule, owner: str) -> None:
        """Count one new key of *owner*.  If it exceeds the rate, raise a RateLimited that says when to retry."""
        from limits import RateLimitItemPerSecond

        if rule.rate is None:
            return
        item = RateLimitItemPerSecond(rule.rate.count, math.ceil(rule.rate.window), namespace="oncemore")
        try:
            if self._limiter.hit(item, owner):
                return
            reset = self._limiter.get_window_stats(item, owner).reset_time
        except Exception as error:
            if rule.store_down != "run":
                raise NotCounted("New keys cannot be counted now, so none are accepted", retry_after=1.0) from error
            log.error("The counter of new keys fails, so %s accepts them uncounted: %s", rule.name, error)
            return
        raise RateLimited(
            f"At most {rule.rate.count} new operations are accepted in {rule.rate.window:g} seconds; retry with the same key",
            retry_after=max(1.0, reset - time.time()),
        )


class Admission(Call):
    """Effect: count one new key of *owner*."""

    def __init__(self, rates: Rates, rule: Rule, owner: str) -> None:
        super().__init__(rates.admit, rule, owner)
        self.blocking = getattr(rates, "blocking", True)

    async def arun(self) -> Any:
        return await (asyncio.to_thread(self.run) if self.blocking else super().arun())


def default_rates(contract: Contract) -> Rates | None:
    """Return a counter in this process's memory if a rule has a rate, else None."""
    return NewKeys() if any(rule.rate is not None for rule in (*contract.rules, contract.default)) else None
