"""Events as metrics for Prometheus.  Needs `pip install 'oncemore[prometheus]'`.

guard = Guard(url, observers=[count_events()])
client = httpx.Client(transport=RetryTransport(observers=[count_retries()]))
watch_outbox(outbox)
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as PrometheusMetric
from prometheus_client.registry import Collector

from .._ledger.events import Event, Observer
from .._ledger.guard import Guard
from .._ledger.store import TierCounts
from ..errors import ConfigurationError, OncemoreError
from .metrics import (
    GUARD_METRICS,
    RETRY_METRICS,
    Measurement,
    Metric,
    RetryEventFields,
    guard_measurements,
    retry_measurements,
)

log = logging.getLogger("oncemore")

Registered = dict[Metric, Counter | Histogram]

# The metrics of each registry.  It refuses a second one of the same name, so all guards of a process share them.
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


def count_tiers(guard: Guard, registry: CollectorRegistry = REGISTRY) -> None:
    """Export the counts of lookups in Redis for a guard with a tiered store (`redis+postgresql://`)."""
    registry.register(TierCollector(guard))


class TierCollector(Collector):
    """Reads the counts of a tiered store when Prometheus asks for them."""

    def __init__(self, guard: Guard) -> None:
        if not hasattr(guard.store, "tiers"):
            raise ConfigurationError(f"{guard.store.url} has no tiers: give the guard a redis+postgresql:// URL")
        self._store: Any = guard.store

    def describe(self) -> Iterable[PrometheusMetric]:
        return ()  # without this method, the registry would collect to learn the names

    def collect(self) -> Iterable[PrometheusMetric]:
        counts: TierCounts = self._store.tiers
        looks = CounterMetricFamily(
            "idempotency_redis_lookups", "Looks for a copy of an outcome in Redis.", labels=["result"]
        )
        for name in ("hits", "misses", "errors", "skipped"):
            looks.add_metric([name], getattr(counts, name))
        yield looks
        yield GaugeMetricFamily(
            "idempotency_redis_left_alone", "1 while Redis is left alone because it has failed.", float(counts.open)
        )


class OutboxStatsFields(Protocol):
    """The part of an outbox's stats that is exported."""

    @property
    def pending(self) -> int: ...
    @property
    def oldest_age(self) -> float: ...
    @property
    def dead(self) -> int: ...


class WatchedOutbox(Protocol):
    source: str

    def stats(self) -> OutboxStatsFields: ...


def watch_outbox(outbox: WatchedOutbox, registry: CollectorRegistry = REGISTRY) -> None:
    """Export the number of pending messages of *outbox*, the age of the oldest one, and the number of dead letters.

    The database is asked at each scrape, so one process of a service is enough.
    """
    with _lock:
        collector = _watching.get(registry)
        if collector is None:
            collector = _watching[registry] = OutboxCollector()
            registry.register(collector)
        collector.outboxes[outbox.source] = outbox


class OutboxCollector(Collector):
    """Reads the stats of all outboxes that a registry shows, because a metric may stand in its text only once."""

    def __init__(self) -> None:
        self.outboxes: dict[str, WatchedOutbox] = {}

    def collect(self) -> Iterable[PrometheusMetric]:
        gauges = [GaugeMetricFamily(name, help, labels=["source"]) for name, help in OUTBOX_GAUGES]
        for source, outbox in tuple(self.outboxes.items()):
            try:
                stats = outbox.stats()
            except OncemoreError as error:  # raised, it would fail the scrape, with all other metrics of the process
                text = "The outbox of %r cannot be read for its metrics, which are missing from this scrape: %s"
                log.warning(text, source, error)
                continue
            for gauge, value in zip(gauges, (stats.pending, stats.oldest_age, stats.dead), strict=True):
                gauge.add_metric([source], value)
        return gauges

    def describe(self) -> Iterable[PrometheusMetric]:
        """Return nothing.  Without this method, the database would be asked when the outbox is registered."""
        return []


OUTBOX_GAUGES = (
    ("outbox_pending", "Messages that wait to be sent."),
    ("outbox_oldest_age_seconds", "For how long the oldest pending message has been due."),
    ("outbox_dead", "Dead letters: messages that have failed too often."),
)
_watching: WeakKeyDictionary[CollectorRegistry, OutboxCollector] = WeakKeyDictionary()


def record(registered: Registered, measurements: Iterable[Measurement]) -> None:
    for metric, values, amount in measurements:
        series = registered[metric].labels(*values) if values else registered[metric]
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
