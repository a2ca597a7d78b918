"""The service's counters for Prometheus, each exported from zero on.

The guards' events and the webhooks' rows are counted without labels, because the alerts of the service need only sums.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, generate_latest

from examples.sql import rows
from oncemore.observe import Event
from oncemore.observe.metrics import CACHE_HIT, JOB_CONFLICT, KEY_REUSE, guard_measurements

from .daily import NAME
from .work import Service

COUNTED = {metric: metric.name.replace(".", "_") for metric in (CACHE_HIT, KEY_REUSE, JOB_CONFLICT)}
# The deliveries of webhooks are counted in the database, because any process may send them.
DELIVERIES = (
    "SELECT coalesce(sum(CASE WHEN state = 'delivered' THEN 1 ELSE 0 END), 0) AS delivered,"
    " coalesce(sum(CASE WHEN state = 'dead' THEN 1 ELSE 0 END), 0) AS dead,"
    " coalesce(sum(CASE WHEN attempts > 1 THEN attempts - 1 ELSE 0 END), 0) AS retries"
    " FROM oncemore_webhook_deliveries"
)


class Metrics:
    """Observes the guards, and makes the page for Prometheus."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.counters = {
            name: Counter(name, help, registry=self.registry)
            for name, help in (
                ("idempotency_cache_hit", "Stored answers that were returned."),
                ("idempotency_key_reuse_conflict", "Keys that were used for another payload."),
                ("scheduler_job_conflict", "Slots that were done before, or ran elsewhere."),
            )
        }
        self.retries = 0
        self.exhausted = 0

    def __call__(self, event: Event) -> None:
        for metric, _, amount in guard_measurements(event):
            if metric in COUNTED and not (metric is CACHE_HIT and event.operation.name == NAME):  # counted as slots
                self.counters[COUNTED[metric]].inc(amount)
        self.retries += event.kind == "claimed" and event.attempt > 1
        self.exhausted += event.kind == "slot" and event.detail == "failed"

    def count_slots(self, event: Event) -> None:
        if event.kind == "slot":
            self(event)

    async def page(self, service: Service) -> bytes:
        async with service.read() as connection:
            found = (await rows(connection, DELIVERIES))[0]
        lines = [
            (
                "retry_attempts",
                "Attempts after the first, of requests, slots and webhooks.",
                self.retries + found["retries"],
            ),
            ("retry_exhausted", "Slots and webhooks that were given up.", self.exhausted + found["dead"]),
            ("webhook_delivery_success", "Webhooks that were delivered.", found["delivered"]),
        ]
        text = "".join(
            f"# HELP {name}_total {help}\n# TYPE {name}_total counter\n{name}_total {float(value)}\n"
            for name, help, value in lines
        )
        return generate_latest(self.registry) + text.encode()
