"""What there is to count, whoever counts it: each event, as the measurements that it stands for.

Names are written with dots, as OpenTelemetry has them; Prometheus writes `idempotent.created` as `idempotent_created_total`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from .._ledger.events import Event
from ..errors import PayloadMismatch


class Metric(NamedTuple):
    """A counter or, where it has *bounds* (in seconds), a histogram; *labels* name what it is split by."""

    name: str
    help: str
    labels: tuple[str, ...]
    bounds: tuple[float, ...] = ()


# No label is a key, a scope or a path: there is no end to those.
EVENTS = Metric("idempotency.events", "Transitions of operations, of every kind.", ("operation", "event"))
CREATED = Metric("idempotent.created", "Operations that were performed.", ("operation",))
REPLAYED = Metric("idempotent.replayed", "Repeats that got the stored outcome.", ("operation",))
CONFLICT = Metric("idempotent.conflict", "Repeats that were turned away; the code says why.", ("operation", "code"))
CACHE_HIT = Metric("idempotency.cache_hit", "Stored outcomes that were returned.", ("operation",))
KEY_REUSE = Metric("idempotency.key_reuse_conflict", "Keys that were used for another payload.", ("operation",))
RETRIES = Metric("retry.attempts", "Attempts after the first.", ("name",))
EXHAUSTED = Metric("retry.exhausted", "Operations that were given up; the reason says why.", ("name", "reason"))
RECOVERED = Metric("retry.recovered", "Operations that succeeded after the first attempt.", ("name",))
# From the playbook's first pause to the longest between two deliveries of a webhook.
DELAY_BOUNDS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 10.0, 30.0, 60.0, 300.0, 1800.0, 7200.0, 43200.0)
DELAY = Metric("retry.delay", "Pauses before retries, in seconds.", ("name",), DELAY_BOUNDS)

GUARD_METRICS = (EVENTS, CREATED, REPLAYED, CONFLICT, CACHE_HIT, KEY_REUSE)
RETRY_METRICS = (RETRIES, EXHAUSTED, RECOVERED, DELAY)

# What came of an operation, besides that something happened to it.
OUTCOMES = {"settled": (CREATED,), "unstored": (CREATED,), "replayed": (REPLAYED, CACHE_HIT)}


class Measurement(NamedTuple):
    """One more of *metric*, or one sample of it, under the values of its labels."""

    metric: Metric
    values: tuple[str, ...]
    amount: float = 1.0


class Story(Protocol):
    """What a retry event tells of the whole run."""

    @property
    def name(self) -> str: ...
    @property
    def key(self) -> str | None: ...
    @property
    def reason(self) -> str: ...


class Retried(Protocol):
    """The retry client's event, as far as it is counted."""

    @property
    def kind(self) -> str: ...
    @property
    def story(self) -> Story: ...
    @property
    def delay(self) -> float: ...
    @property
    def attempt(self) -> int: ...


def of_event(event: Event) -> Iterator[Measurement]:
    """What a transition of the ledger stands for."""
    operation = event.operation.name
    yield Measurement(EVENTS, (operation, event.kind))
    for metric in OUTCOMES.get(event.kind, ()):
        yield Measurement(metric, (operation,))
    if event.kind == "refused":
        yield Measurement(CONFLICT, (operation, event.code))
        if event.code == PayloadMismatch.code:
            yield Measurement(KEY_REUSE, (operation,))


def of_retry(event: Retried) -> Iterator[Measurement]:
    """What a step of the retry client stands for."""
    name = event.story.name
    if event.kind == "retrying":
        yield Measurement(RETRIES, (name,))
        yield Measurement(DELAY, (name,), event.delay)
    elif event.kind == "recovered":
        yield Measurement(RECOVERED, (name,))
    else:
        yield Measurement(EXHAUSTED, (name, event.story.reason))
