"""The metrics, and the measurements that each event adds to them.  Prometheus and OpenTelemetry share both.

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
CACHE_HIT = Metric(
    "idempotency.cache_hit", "Stored outcomes that were returned, by their place.", ("operation", "tier")
)
KEY_REUSE = Metric("idempotency.key_reuse_conflict", "Keys that were used for another payload.", ("operation",))
SHADOWED = Metric(
    "idempotency.shadowed", "In shadow mode: what would have been done with requests.", ("operation", "verdict")
)
RETRIES = Metric("retry.attempts", "Attempts after the first.", ("name",))
EXHAUSTED = Metric("retry.exhausted", "Operations that were given up; the reason says why.", ("name", "reason"))
RECOVERED = Metric("retry.recovered", "Operations that succeeded after the first attempt.", ("name",))
# From the shortest pause of the retry client to the longest between two deliveries of a webhook.
DELAY_BOUNDS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 10.0, 30.0, 60.0, 300.0, 1800.0, 7200.0, 43200.0)
DELAY = Metric("retry.delay", "Pauses before retries, in seconds.", ("name",), DELAY_BOUNDS)
JOB_CONFLICT = Metric("scheduler.job_conflict", "Slots that were done before, or ran elsewhere.", ("job",))
SLOTS = Metric("scheduler.slots", "Attempts at slots, by how they ended.", ("job", "outcome"))
MISSED = Metric("scheduler.missed", "Scheduled times that passed without their slot.", ("job",))
SLOT_DELAY = Metric("scheduler.slot_delay", "How late completed slots began, in seconds.", ("job",), DELAY_BOUNDS)

PUBLISHED = Metric(
    "outbox.published", "Attempts to send messages of an outbox, by how they ended.", ("topic", "outcome")
)

RECEIVED = Metric(
    "inbox.received", "Deliveries of messages and events to an inbox, by how they ended.", ("source", "outcome")
)

DELIVERED = Metric("webhook.delivery_success", "Webhooks that their endpoints have accepted.", ())
DELIVERIES = Metric("webhook.deliveries", "Deliveries of webhooks that have ended: delivered or dead.", ("outcome",))
WEBHOOK_ATTEMPTS = Metric(
    "webhook.attempts", "Requests to endpoints, by their status: 2xx to 5xx, or none.", ("code_class",)
)
DELIVERY_AGE = Metric(
    "webhook.delivery_age", "From the sending of a webhook to its acceptance, in seconds.", (), DELAY_BOUNDS
)

GUARD_METRICS = (
    EVENTS,
    CREATED,
    REPLAYED,
    CONFLICT,
    CACHE_HIT,
    KEY_REUSE,
    SHADOWED,
    PUBLISHED,
    RECEIVED,
    JOB_CONFLICT,
    SLOTS,
    MISSED,
    SLOT_DELAY,
    DELIVERED,
    DELIVERIES,
    WEBHOOK_ATTEMPTS,
    DELIVERY_AGE,
)
RETRY_METRICS = (RETRIES, EXHAUSTED, RECOVERED, DELAY)

# The value of the label *outcome* for events of the outbox.
PUBLISH_OUTCOMES = {"published": "published", "unpublished": "failed", "dead": "dead"}

# Metrics that an event adds one to, besides EVENTS.
OUTCOMES = {"settled": (CREATED,), "unstored": (CREATED,), "replayed": (REPLAYED,)}


class Measurement(NamedTuple):
    """One step of a counter, or one sample of a histogram, with the *values* of the metric's labels."""

    metric: Metric
    values: tuple[str, ...]
    amount: float = 1.0


class RetryRunFields(Protocol):
    """The part of a retry event's `story` that is measured: this package does not import the client's classes."""

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
    if event.kind == "replayed":
        yield Measurement(CACHE_HIT, (operation, event.tier))
    if event.kind in PUBLISH_OUTCOMES:
        yield Measurement(PUBLISHED, (operation.removeprefix("outbox."), PUBLISH_OUTCOMES[event.kind]))
    if event.kind == "received":
        yield Measurement(RECEIVED, (operation.removeprefix("inbox."), event.detail))
    if event.kind == "shadowed":
        yield Measurement(SHADOWED, (operation, event.detail))
    if event.kind == "refused":
        yield Measurement(CONFLICT, (operation, event.code))
        if event.code == PayloadMismatch.code:
            yield Measurement(KEY_REUSE, (operation,))
    elif event.kind == "slot":
        yield Measurement(SLOTS, (operation, event.detail))
        if event.detail == "conflict":
            yield Measurement(JOB_CONFLICT, (operation,))
        elif event.detail == "completed":
            yield Measurement(SLOT_DELAY, (operation,), event.duration)
    elif event.kind == "missed":
        yield Measurement(MISSED, (operation,))
    elif event.kind == "delivery":
        yield Measurement(WEBHOOK_ATTEMPTS, (f"{event.status // 100}xx" if event.status else "none",))
        if event.to_state in ("delivered", "dead"):
            yield Measurement(DELIVERIES, (event.to_state,))
        if event.to_state == "delivered":
            yield Measurement(DELIVERED, ())
            yield Measurement(DELIVERY_AGE, (), event.duration)


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
