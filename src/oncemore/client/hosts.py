"""The retry budget and the circuit breaker of each host, shared by all clients of a process."""

from __future__ import annotations

import os
import threading
from urllib.parse import SplitResult, urlsplit

import msgspec

from ..errors import ConfigurationError

DEFAULT_PORTS = {"http": 80, "https": 443}

# A crawler may meet any number of hosts, so the oldest are forgotten.
MAX_HOSTS = 10_000


def host_name(scheme: str, host: str, port: int | None) -> str:
    """Return the name of a host with its port, such as `example.com:443`: the same for all spellings."""
    return f"{host.lower()}:{port or DEFAULT_PORTS.get(scheme, 0)}"


def has_origin(base: object, url: str) -> bool:
    """Whether *url* has the scheme, host and port of *base*, or *base* is None or empty."""
    if not base or not str(base):
        return True
    ours, theirs = urlsplit(str(base)), urlsplit(url)
    return ours.scheme == theirs.scheme and name_in(ours) == name_in(theirs)


def name_in(parts: SplitResult) -> str:
    return host_name(parts.scheme, parts.hostname or "", parts.port)


class Budget(msgspec.Struct, frozen=True):
    """A limit on retries: failures of a host use it up (gRPC's retry throttling).

    A failed attempt takes one token, and a successful one returns *ratio*.  If only half are left, nothing is retried.
    """

    tokens: float = 100.0
    ratio: float = 0.1

    def __post_init__(self) -> None:
        if not (0 < self.tokens < float("inf") and 0 <= self.ratio <= 1):
            raise ConfigurationError(
                f"budget: tokens ({self.tokens}) must be above 0, and ratio ({self.ratio}) from 0 to 1"
            )


DEFAULT_BUDGET = Budget()


class Breaker(msgspec.Struct, frozen=True):
    """After *failures* in a row, nothing is sent for *cooldown* seconds.  Then one attempt, the probe, decides."""

    failures: int = 5
    cooldown: float = 30.0

    def __post_init__(self) -> None:
        if self.failures < 1 or not 0 < self.cooldown < float("inf"):
            raise ConfigurationError(
                f"breaker: failures ({self.failures}) must be at least 1, and cooldown ({self.cooldown} s) longer than 0 s"
            )


class Host:
    """The circuit of one host, and the *tokens* left of its budget.  The caller passes the time."""

    __slots__ = ("_failures", "_lock", "_open_until", "breaker", "budget", "tokens")

    def __init__(self, budget: Budget | None, breaker: Breaker | None) -> None:
        self.budget = budget
        self.breaker = breaker
        self.tokens = budget.tokens if budget else 0.0
        self._failures = 0
        self._open_until = 0.0
        self._lock = threading.Lock()

    def may_retry(self) -> bool:
        """Whether the budget allows another retry."""
        return self.budget is None or self.tokens > self.budget.tokens / 2

    def admit(self, now: float) -> float:
        """Return 0 if an attempt may begin now, perhaps as the probe, or the seconds to wait."""
        breaker = self.breaker
        if breaker is None or self._failures < breaker.failures:
            return 0.0
        with self._lock:
            if now < self._open_until:
                return self._open_until - now
            # This caller is the probe.  If it never reports its result, another one follows after the cooldown.
            self._open_until = now + breaker.cooldown
            return 0.0

    def is_open(self, now: float) -> bool:
        """Whether the circuit would refuse an attempt at *now*."""
        return self.breaker is not None and self._failures >= self.breaker.failures and now < self._open_until

    def succeeded(self) -> None:
        """Count an attempt that did not fail because of the host."""
        if not self._failures and (self.budget is None or self.tokens >= self.budget.tokens):
            return  # most calls end here, without the lock
        with self._lock:
            if self.budget:
                self.tokens = min(self.budget.tokens, self.tokens + self.budget.ratio)
            self._failures = 0

    def failed(self, now: float) -> None:
        """Count an attempt that failed because of the host."""
        with self._lock:
            self.tokens = max(0.0, self.tokens - 1)
            self._failures += 1
            if self.breaker and self._failures >= self.breaker.failures:
                self._open_until = now + self.breaker.cooldown


class Hosts:
    """The known hosts, each with one state per budget and breaker."""

    _known: dict[tuple[str, Budget | None, Breaker | None], Host]

    def __init__(self) -> None:
        self.forget()

    def get(self, name: str, budget: Budget | None, breaker: Breaker | None) -> Host | None:
        """Return the state of the host *name*, or None if there is no budget and no breaker."""
        if budget is None and breaker is None:
            return None
        known = self._known.get((name, budget, breaker))
        if known is None:
            with self._lock:
                if len(self._known) >= MAX_HOSTS:
                    del self._known[next(iter(self._known))]
                known = self._known.setdefault((name, budget, breaker), Host(budget, breaker))
        return known

    def succeeded(self, name: str, budget: Budget | None, breaker: Breaker | None) -> None:
        """Count a success.  A host that never failed is not remembered, because it has no tokens to regain."""
        if self._known and (known := self._known.get((name, budget, breaker))):
            known.succeeded()

    def forget(self) -> None:
        """Forget all hosts, and replace the lock: a forked child may have inherited it locked."""
        self._known = {}
        self._lock = threading.Lock()


HOSTS = Hosts()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=HOSTS.forget)
