"""Events as metrics and span events for OpenTelemetry; it needs `pip install 'oncemore[otel]'`.

guard = Guard(url, observers=[count_events(), trace_events()])
client = httpx.Client(transport=RetryTransport(observers=[count_retries(), trace_retries()]))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from opentelemetry.metrics import Counter, Histogram, Meter, MeterProvider, get_meter
from opentelemetry.trace import get_current_span

from .._ledger.events import Event, Observer
from .logging import Keys, fields_of, shown_by
from .metrics import GUARD_METRICS, RETRY_METRICS, Measurement, Metric, Retried, of_event, of_retry

Made = dict[Metric, Counter | Histogram]


def count_events(provider: MeterProvider | None = None) -> Observer:
    """An observer for guards: counts what became of operations."""
    made = instruments(GUARD_METRICS, provider)

    def observe(event: Event) -> None:
        record(made, of_event(event))

    return observe


def count_retries(provider: MeterProvider | None = None) -> Callable[[Retried], None]:
    """An observer for the retry client: counts retries and what was given up, and measures the pauses."""
    made = instruments(RETRY_METRICS, provider)

    def observe(event: Retried) -> None:
        record(made, of_retry(event))

    return observe


def trace_events(*, keys: Keys = "plain", secret: bytes = b"") -> Observer:
    """An observer for guards: the span of the request bears the key and the attempt, and an event for each transition.

    With `keys="digest"`, keys appear as in the log: see `log_events`.
    """
    shown = shown_by(keys, secret)

    def observe(event: Event) -> None:
        span = get_current_span()
        if span.is_recording():
            fields = {name: value for name, value in fields_of(event, shown).items() if value}
            span.set_attribute("idempotency_key", fields["idempotency_key"])
            if event.attempt:
                span.set_attribute("attempt", event.attempt)
            span.add_event(f"oncemore.{event.kind}", fields)

    return observe


def trace_retries(*, keys: Keys = "plain", secret: bytes = b"") -> Callable[[Retried], None]:
    """An observer for the retry client: the caller's span bears the key and the attempt, and an event for each step."""
    shown = shown_by(keys, secret)

    def observe(event: Retried) -> None:
        span = get_current_span()
        if span.is_recording():
            tags: dict[str, str | float] = {"attempt": event.attempt}
            if event.story.key is not None:
                tags["idempotency_key"] = shown(event.story.key)
            span.set_attributes(tags)
            facts: dict[str, str | float] = {
                "name": event.story.name,
                "delay": event.delay,
                "reason": event.story.reason,
            }
            span.add_event(f"oncemore.{event.kind}", tags | facts)

    return observe


def record(made: Made, measurements: Iterable[Measurement]) -> None:
    for metric, values, amount in measurements:
        labels = dict(zip(metric.labels, values, strict=True))
        instrument = made[metric]
        if isinstance(instrument, Histogram):
            instrument.record(amount, labels)
        else:
            instrument.add(amount, labels)


def instruments(metrics: Iterable[Metric], provider: MeterProvider | None) -> Made:
    meter = get_meter("oncemore", meter_provider=provider)
    return {metric: instrument(metric, meter) for metric in metrics}


def instrument(metric: Metric, meter: Meter) -> Counter | Histogram:
    if metric.bounds:
        return meter.create_histogram(
            metric.name, "s", metric.help, explicit_bucket_boundaries_advisory=list(metric.bounds)
        )
    return meter.create_counter(metric.name, "1", metric.help)
