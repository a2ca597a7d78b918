"""Events as metrics and span events for OpenTelemetry.  Needs `pip install 'oncemore[otel]'`.

guard = Guard(url, observers=[count_events(), trace_events()])
client = httpx.Client(transport=RetryTransport(observers=[count_retries(), trace_retries()]))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from opentelemetry.metrics import Counter, Histogram, Meter, MeterProvider, get_meter
from opentelemetry.trace import get_current_span

from .._ledger.events import Event, Observer
from .logging import Keys, event_fields, key_display
from .metrics import (
    GUARD_METRICS,
    RETRY_METRICS,
    Measurement,
    Metric,
    RetryEventFields,
    guard_measurements,
    retry_measurements,
)

Instruments = dict[Metric, Counter | Histogram]


def count_events(provider: MeterProvider | None = None) -> Observer:
    """Return an observer for guards that counts events and outcomes."""
    instruments = create_instruments(GUARD_METRICS, provider)

    def observe(event: Event) -> None:
        record(instruments, guard_measurements(event))

    return observe


def count_retries(provider: MeterProvider | None = None) -> Callable[[RetryEventFields], None]:
    """Return an observer for the retry client that counts retries and failures, and measures the pauses."""
    instruments = create_instruments(RETRY_METRICS, provider)

    def observe(event: RetryEventFields) -> None:
        record(instruments, retry_measurements(event))

    return observe


def trace_events(*, keys: Keys = "plain", secret: bytes = b"") -> Observer:
    """Return an observer for guards that adds key, attempt and an event for each transition to the current span.

    *keys* and *secret* choose how keys are shown: see `log_events`.
    """
    display = key_display(keys, secret)

    def observe(event: Event) -> None:
        span = get_current_span()
        if span.is_recording():
            fields = {name: value for name, value in event_fields(event, display).items() if value}
            span.set_attribute("idempotency_key", fields["idempotency_key"])
            if event.attempt:
                span.set_attribute("attempt", event.attempt)
            span.add_event(f"oncemore.{event.kind}", fields)

    return observe


def trace_retries(*, keys: Keys = "plain", secret: bytes = b"") -> Callable[[RetryEventFields], None]:
    """Return an observer for the retry client that adds key, attempt and an event for each retry to the current span."""
    display = key_display(keys, secret)

    def observe(event: RetryEventFields) -> None:
        span = get_current_span()
        if span.is_recording():
            tags: dict[str, str | float] = {"attempt": event.attempt}
            if event.story.key is not None:
                tags["idempotency_key"] = display(event.story.key)
            span.set_attributes(tags)
            facts: dict[str, str | float] = {
                "name": event.story.name,
                "delay": event.delay,
                "reason": event.story.reason,
            }
            span.add_event(f"oncemore.{event.kind}", tags | facts)

    return observe


def record(instruments: Instruments, measurements: Iterable[Measurement]) -> None:
    for metric, values, amount in measurements:
        labels = dict(zip(metric.labels, values, strict=True))
        instrument = instruments[metric]
        if isinstance(instrument, Histogram):
            instrument.record(amount, labels)
        else:
            instrument.add(amount, labels)


def create_instruments(metrics: Iterable[Metric], provider: MeterProvider | None) -> Instruments:
    meter = get_meter("oncemore", meter_provider=provider)
    return {metric: create_instrument(metric, meter) for metric in metrics}


def create_instrument(metric: Metric, meter: Meter) -> Counter | Histogram:
    if metric.bounds:
        return meter.create_histogram(
            metric.name, "s", metric.help, explicit_bucket_boundaries_advisory=list(metric.bounds)
        )
    return meter.create_counter(metric.name, "1", metric.help)
