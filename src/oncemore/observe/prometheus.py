"""Events as metrics for Prometheus; it needs `pip install 'oncemore[prometheus]'`.

guard = Guard(url, observers=[count_events()])
client = httpx.Client(transport=RetryTransport(observers=[count_retries()]))
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from weakref import WeakKeyDictionary

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram

from .._ledger.events import Event, Observer
from .metrics import GUARD_METRICS, RETRY_METRICS, Measurement, Metric, Retried, of_event, of_retry

Known = dict[Metric, Counter | Histogram]

# A registry refuses a second metric of the same name, and two guards of one process are counted together.
_known: WeakKeyDictionary[CollectorRegistry, Known] = WeakKeyDictionary()
_lock = threading.Lock()


def count_events(registry: CollectorRegistry = REGISTRY) -> Observer:
    """An observer for guards: counts what became of operations."""
    made = registered(GUARD_METRICS, registry)

    def observe(event: Event) -> None:
        record(made, of_event(event))

    return observe


def count_retries(registry: CollectorRegistry = REGISTRY) -> Callable[[Retried], None]:
    """An observer for the retry client: counts retries and what was given up, and measures the pauses."""
    made = registered(RETRY_METRICS, registry)

    def observe(event: Retried) -> None:
        record(made, of_retry(event))

    return observe


def record(made: Known, measurements: Iterable[Measurement]) -> None:
    for metric, values, amount in measurements:
        series = made[metric].labels(*values)
        if isinstance(series, Histogram):
            series.observe(amount)
        else:
            series.inc(amount)


def registered(metrics: Iterable[Metric], registry: CollectorRegistry) -> Known:
    """The metrics as *registry* has them, made where it does not."""
    with _lock:
        known = _known.setdefault(registry, {})
        for metric in metrics:
            if metric not in known:
                known[metric] = made(metric, registry)
        return known


def made(metric: Metric, registry: CollectorRegistry) -> Counter | Histogram:
    name = metric.name.replace(".", "_")
    if metric.bounds:
        return Histogram(f"{name}_seconds", metric.help, metric.labels, registry=registry, buckets=metric.bounds)
    return Counter(name, metric.help, metric.labels, registry=registry)
