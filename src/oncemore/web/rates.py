"""The rate of new keys per principal, counted by the `limits` package: 429 with Retry-After when it is used up."""

from __future__ import annotations

import logging
import math
import time
from typing import Any, cast

import limits
from limits.errors import ConfigurationError as UnknownStorage
from limits.storage import Storage, storage_from_string
from limits.strategies import SlidingWindowCounterRateLimiter

from .._contract.rule import Rule
from .._ledger.connect import hide_password
from ..errors import ConfigurationError, RateLimited, Refusal, StoreUnavailable

log = logging.getLogger("oncemore.web")


class NotCounted(Refusal, StoreUnavailable):
    """New keys cannot be counted now, so none are accepted.  A refusal: the key is as new as before when it comes again."""


class NewKeys:
    """Counts new keys in a *storage* of `limits`: `memory://` is this process's own, `redis://...` is everyone's.

    The window slides, by a weighted count of this window and the last: it takes the same small room for every rate.
    """

    def __init__(self, storage: str = "memory://", **options: Any) -> None:
        shown = hide_password(storage)
        if storage.startswith("async+"):
            raise ConfigurationError(f"{shown!r} cannot count new keys: drop the async+, it is asked in a thread")
        try:
            found = cast("Storage", storage_from_string(storage, **options))
            self._limiter = SlidingWindowCounterRateLimiter(found)
        except (UnknownStorage, NotImplementedError) as error:
            told = str(error).replace(storage, shown)  # nor is the cause shown: it tells the password
            raise ConfigurationError(f"{shown!r} cannot count new keys: {told}") from None
        self.blocking = not storage.startswith("memory:")

    def admit(self, rule: Rule, owner: str) -> None:
        """Count one new key of *owner*; a RateLimited that says when to come back, where it is one too many."""
        if rule.rate is None:
            return
        item = limits.RateLimitItemPerSecond(rule.rate.count, math.ceil(rule.rate.window), namespace="oncemore")
        try:
            if self._limiter.hit(item, owner):
                return
            reset = self._limiter.get_window_stats(item, owner).reset_time
        except Exception as error:
            self._fail(rule, error)
            return
        raise RateLimited(
            f"At most {rule.rate.count} new operations are accepted in {rule.rate.window:g} seconds; retry with the same key",
            retry_after=max(1.0, reset - time.time()),
        )

    def _fail(self, rule: Rule, error: Exception) -> None:
        """Without the count, do as the rule does without the ledger."""
        if rule.store_down != "run":
            raise NotCounted("New keys cannot be counted now, so none are accepted", retry_after=1.0) from error
        log.error("New keys of %s cannot be counted, and are accepted: %s", rule.name, error)
