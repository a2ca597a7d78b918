"""Events as metrics for Prometheus.  Needs `pip install 'oncemore[prometheus]'`.

guard = Guard(url, observers=[count_events()])
client = httpx.Client(transport=RetryTransport(observers=[count_retries()]))
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from weakref import WeakKeyDictionary

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram

from .._ledger.events import Event, Observer
from .metrics import (
    GUARD_METRICS,
    RETRY_METRICS,
    Measurement,
    Metric,
    RetryEventFields,
    guard_measurements,
    retry_measurements,
)

Registered = dict[Metric, Counter | Histogram]

# A registry refuses a second metric of the same name, so all guards of a process share these.
_registered: WeakKeyDictionary[CollectorRegistry, Registered] = WeakKeyDictionary()
_lock = threading.Lock()


def count_events(registry: CollectorRegistry = REGISTRY) -> Observer:
    """Return an observer for guards that counts events and outcomes."""
    metrics = register(GUARD_METRICS, registry)

    def observe(event: Event) -> None:
        record(metrics, guard_measurements(event))

    return observe


def count_retries(registry: CollectorRegistry = REGISTRY) -> Callable[[RetryEventFields], None]:
    """Return an observer for the retry client that counts retries and failures, and measures the pauses."""
    metrics = register(RETRY_METRICS, registry)

    def observe(event: RetryEventFields) -> None:
        record(metrics, retry_measurements(event))

    return observe


def record(registered: Registered, measurements: Iterable[Measurement]) -> None:
    for metric, values, amount in measurements:
        series = registered[metric].labels(*values)
        if isinstance(series, Histogram):
            series.observe(amount)
        else:
            series.inc(amount)


def register(metrics: Iterable[Metric], registry: CollectorRegistry) -> Registered:
    """Return the metrics of *registry*, after adding those that it does not have."""
    with _lock:
        registered = _registered.setdefault(registry, {})
        for metric in metrics:
            if metric not in registered:
                registered[metric] = create_metric(metric, registry)
        return registered


def create_metric(metric: Metric, registry: CollectorRegistry) -> Counter | Histogram:
    name = metric.name.replace(".", "_")
    if metric.bounds:
        return Histogram(f"{name}_seconds", metric.help, metric.labels, registry=registry, buckets=metric.bounds)
    return Counter(name, metric.help, metric.labels, registry=registry)
