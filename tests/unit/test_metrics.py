"""Metrics and traces of operations and retries, read from Prometheus and OpenTelemetry."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import httpx
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from oncemore import Guard, Operation, Outcome
from oncemore._ledger.events import EventKind
from oncemore.client import Retry, RetryError, no_sleeping
from oncemore.client.httpx import RetryTransport
from oncemore.client.story import REASONS
from oncemore.errors import ConfigurationError, OncemoreError
from oncemore.observe import otel, prometheus
from oncemore.observe.metrics import GUARD_METRICS, RETRY_METRICS
from tests.client.server import Server, answer, performed, reset

REFUND = Operation("refunds.create:principal:alice", "key-1", "c1:aa", "refunds.create")
OTHER = Operation(REFUND.scope, REFUND.key, "c1:bb", "refunds.create")
HOWTO = (Path(__file__).parents[2] / "docs" / "howto" / "observe.md").read_text()
Observers = list[Callable[[Any], None]]


def refund_twice_and_reuse_the_key(observers: Observers) -> None:
    with closing(Guard("memory://", observers=observers)) as guard:
        for operation in (REFUND, REFUND, OTHER):
            with suppress(OncemoreError):
                guard.run(operation, lambda op: Outcome("response", 201))


def send_one_success_and_one_failure(observers: Observers) -> str:
    """Send a request that succeeds at its third attempt, and one that fails three times; return the host."""
    retry = Retry(attempts=3, base=0.1, jitter="none", budget=None)
    with Server(answer(503), answer(503), performed(), default=reset) as server, no_sleeping():
        with httpx.Client(transport=RetryTransport(retry, observers=observers), base_url=server.url) as client:
            client.post("/refunds", headers={"Idempotency-Key": "k1"})
            with pytest.raises(RetryError):
                client.post("/refunds", headers={"Idempotency-Key": "k2"})
        return server.url.removeprefix("http://")


def samples(registry: CollectorRegistry) -> dict[str, float]:
    """Return the samples of a scrape, without the `_created` ones."""
    lines = [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]
    pairs = [line.rsplit(" ", 1) for line in lines]
    return {name: float(value) for name, value in pairs if not re.match(r"\w+_created(\{|$)", name)}


class TestPrometheus:
    def test_scrape_counts_created_replayed_and_conflicts(self) -> None:
        registry = CollectorRegistry()
        refund_twice_and_reuse_the_key([prometheus.count_events(registry)])
        mismatch = "CONFLICT.idempotency.payload_mismatch"
        found = samples(registry)
        without_labels = {name: found.pop(name) for name in list(found) if name.startswith("webhook_")}
        assert set(without_labels.values()) == {0}  # there from the start, so that ratios of them have a value
        assert found == {
            'idempotency_events_total{event="claimed",operation="refunds.create"}': 1,
            'idempotency_events_total{event="settled",operation="refunds.create"}': 1,
            'idempotency_events_total{event="replayed",operation="refunds.create"}': 1,
            'idempotency_events_total{event="refused",operation="refunds.create"}': 1,
            'idempotent_created_total{operation="refunds.create"}': 1,
            'idempotent_replayed_total{operation="refunds.create"}': 1,
            f'idempotent_conflict_total{{code="{mismatch}",operation="refunds.create"}}': 1,
            'idempotency_cache_hit_total{operation="refunds.create",tier="process"}': 1,
            'idempotency_key_reuse_conflict_total{operation="refunds.create"}': 1,
        }

    def test_scrape_counts_retries_and_measures_delays(self) -> None:
        registry = CollectorRegistry()
        host = send_one_success_and_one_failure([prometheus.count_retries(registry)])
        found = samples(registry)
        assert found[f'retry_attempts_total{{name="{host}"}}'] == 4
        assert found[f'retry_recovered_total{{name="{host}"}}'] == 1
        assert found[f'retry_exhausted_total{{name="{host}",reason="attempts"}}'] == 1
        assert found[f'retry_delay_seconds_count{{name="{host}"}}'] == 4
        assert found[f'retry_delay_seconds_sum{{name="{host}"}}'] == pytest.approx(0.6)
        assert found[f'retry_delay_seconds_bucket{{le="0.1",name="{host}"}}'] == 2
        assert found[f'retry_delay_seconds_bucket{{le="0.2",name="{host}"}}'] == 4

    def test_guards_of_one_process_share_counters(self) -> None:
        registry = CollectorRegistry()
        for _ in range(2):
            refund_twice_and_reuse_the_key([prometheus.count_events(registry)])
        assert samples(registry)['idempotent_created_total{operation="refunds.create"}'] == 2


@pytest.fixture
def metered() -> Iterator[tuple[MeterProvider, Callable[[], dict[str, Any]]]]:
    """A meter provider, and a function that returns its data points by name and labels."""
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])

    def read() -> dict[str, Any]:
        data: Any = reader.get_metrics_data()
        metrics = data.resource_metrics[0].scope_metrics[0].metrics
        return {
            f"{metric.name} {' '.join(str(value) for _, value in sorted(point.attributes.items()))}": point
            for metric in metrics
            for point in metric.data.data_points
        }

    yield provider, read
    provider.shutdown()


class TestOpenTelemetry:
    def test_otel_counts_created_replayed_and_conflicts(self, metered: Any) -> None:
        provider, read = metered
        refund_twice_and_reuse_the_key([otel.count_events(provider)])
        found = {name: point.value for name, point in read().items()}
        assert found["idempotent.created refunds.create"] == 1
        assert found["idempotent.replayed refunds.create"] == 1
        assert found["idempotent.conflict CONFLICT.idempotency.payload_mismatch refunds.create"] == 1
        assert found["idempotency.events settled refunds.create"] == 1

    def test_otel_counts_retries_and_measures_delays(self, metered: Any) -> None:
        provider, read = metered
        host = send_one_success_and_one_failure([otel.count_retries(provider)])
        found = read()
        assert found[f"retry.attempts {host}"].value == 4
        assert found[f"retry.exhausted {host} attempts"].value == 1
        delay = found[f"retry.delay {host}"]
        assert (delay.count, delay.sum) == (4, pytest.approx(0.6))
        assert delay.explicit_bounds[:3] == (0.05, 0.1, 0.2)

    @pytest.mark.parametrize("keys", ["plain", "digest"])
    def test_spans_have_key_attempt_and_events(self, keys: Any) -> None:
        exporter, provider = InMemorySpanExporter(), TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        tracer = provider.get_tracer("tests")
        with tracer.start_as_current_span("refund"):
            refund_twice_and_reuse_the_key([otel.trace_events(keys=keys)])
        with tracer.start_as_current_span("post"):
            send_one_success_and_one_failure([otel.trace_retries(keys=keys)])
        served, sent = exporter.get_finished_spans()
        assert [event.name for event in served.events] == [
            f"oncemore.{kind}" for kind in ("claimed", "settled", "replayed", "refused")
        ]
        steps = [(event.name, (event.attributes or {})["attempt"]) for event in sent.events]
        assert steps == [
            ("oncemore.retrying", 1),
            ("oncemore.retrying", 2),
            ("oncemore.recovered", 3),
            ("oncemore.retrying", 1),
            ("oncemore.retrying", 2),
            ("oncemore.exhausted", 3),
        ]
        for span, key in ((served, REFUND.key), (sent, "k2")):
            attributes = dict(span.attributes or {})
            assert attributes["attempt"] == (1 if span is served else 3)
            assert (attributes["idempotency_key"] == key) is (keys == "plain")

    def test_tracing_without_a_span_does_nothing(self, caplog: pytest.LogCaptureFixture) -> None:
        refund_twice_and_reuse_the_key([otel.trace_events()])
        send_one_success_and_one_failure([otel.trace_retries()])
        assert "An observer failed" not in caplog.text

    def test_secret_without_digest_is_refused(self) -> None:
        for make in (otel.trace_events, otel.trace_retries):
            with pytest.raises(ConfigurationError):
                make(secret=b"s")


def test_every_metric_is_documented() -> None:
    for metric in (*GUARD_METRICS, *RETRY_METRICS):
        name = metric.name.replace(".", "_") + ("_seconds" if metric.bounds else "_total")
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        assert f"| `{name}` | `{metric.name}` | {labels} |" in HOWTO, metric.name


def test_every_event_and_reason_is_documented() -> None:
    assert all(f"`{word}`" in HOWTO for word in (*get_args(EventKind), *filter(None, REASONS)))


def test_outboxes_of_one_registry_share_their_metrics() -> None:
    """A scrape is refused if a metric stands in it twice."""
    registry = CollectorRegistry()
    for source, pending in (("shop", 1), ("mail", 2), ("shop", 3)):
        stats = SimpleNamespace(pending=pending, oldest_age=0.5, dead=0)
        prometheus.watch_outbox(SimpleNamespace(source=source, stats=lambda stats=stats: stats), registry)
    text = openmetrics.generate_latest(registry).decode()
    (pending_metric,) = (each for each in text_string_to_metric_families(text) if each.name == "outbox_pending")
    assert {each.labels["source"]: each.value for each in pending_metric.samples} == {"shop": 3, "mail": 2}
