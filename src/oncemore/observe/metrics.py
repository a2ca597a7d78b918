"""The metrics, and the measurements that each event adds to them; Prometheus and OpenTelemetry share both.

Names have dots, as in OpenTelemetry.  In Prometheus, `idempotent.created` is `idempotent_created_total`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from .._ledger.events import Event
from ..errors import PayloadMismatch


class Metric(NamedTuple):
    """A counter, or a histogram if it has *bounds* (upper limits of its buckets, in seconds)."""

    name: str
    help: str
    labels: tuple[str, ...]
    bounds: tuple[float, ...] = ()


# No label is a key, a scope or a path: their number is unlimited, and each value is a time series.
EVENTS = Metric("idempotency.events", "Transitions of operations, of every kind.", ("operation", "event"))
CREATED = Metric("idempotent.created", "Operations that were performed.", ("operation",))
REPLAYED = Metric("idempotent.replayed", "Repeats that got the stored outcome.", ("operation",))
CONFLICT = Metric("idempotent.conflict", "Repeats that were turned away; the code says why.", ("operation", "code"))
CACHE_HIT = Metric("idempotency.cache_hit", "Stored outcomes that were returned.", ("operation",))
KEY_REUSE = Metric("idempotency.key_reuse_conflict", "Keys that were used for another payload.", ("operation",))
RETRIES = Metric("retry.attempts", "Attempts after the first.", ("name",))
EXHAUSTED = Metric("retry.exhausted", "Operations that were given up; the reason says why.", ("name", "reason"))
RECOVERED = Metric("retry.recovered", "Operations that succeeded after the first attempt.", ("name",))
# From the shortest pause of the retry client to the longest between two deliveries of a webhook.
DELAY_BOUNDS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 10.0, 30.0, 60.0, 300.0, 1800.0, 7200.0, 43200.0)
DELAY = Metric("retry.delay", "Pauses before retries, in seconds.", ("name",), DELAY_BOUNDS)

GUARD_METRICS = (EVENTS, CREATED, REPLAYED, CONFLICT, CACHE_HIT, KEY_REUSE)
RETRY_METRICS = (RETRIES, EXHAUSTED, RECOVERED, DELAY)

# Metrics that an event adds one to, besides EVENTS.
OUTCOMES = {"settled": (CREATED,), "unstored": (CREATED,), "replayed": (REPLAYED, CACHE_HIT)}


class Measurement(NamedTuple):
    """One step of a counter, or one sample of a histogram, with the *values* of the metric's labels."""

    metric: Metric
    values: tuple[str, ...]
    amount: float = 1.0


class RetryRunFields(Protocol):
    """The part of a retry event's `story` that is measured.  Packages beside each other do not import each other."""

    @property
    def name(self) -> str: ...
    @property
    def key(self) -> str | None: ...
    @property
    def reason(self) -> str: ...


class RetryEventFields(Protocol):
    """The part of a retry client's event that is measured."""

    @property
    def kind(self) -> str: ...
    @property
    def story(self) -> RetryRunFields: ...
    @property
    def delay(self) -> float: ...
    @property
    def attempt(self) -> int: ...


def guard_measurements(event: Event) -> Iterator[Measurement]:
    """Yield the measurements that a guard's event adds."""
    operation = event.operation.name
    yield Measurement(EVENTS, (operation, event.kind))
    for metric in OUTCOMES.get(event.kind, ()):
        yield Measurement(metric, (operation,))
    if event.kind == "refused":
        yield Measurement(CONFLICT, (operation, event.code))
        if event.code == PayloadMismatch.code:
            yield Measurement(KEY_REUSE, (operation,))


def retry_measurements(event: RetryEventFields) -> Iterator[Measurement]:
    """Yield the measurements that a retry client's event adds."""
    name = event.story.name
    if event.kind == "retrying":
        yield Measurement(RETRIES, (name,))
        yield Measurement(DELAY, (name,), event.delay)
    elif event.kind == "recovered":
        yield Measurement(RECOVERED, (name,))
    else:
        yield Measurement(EXHAUSTED, (name, event.story.reason))
