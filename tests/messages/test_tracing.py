"""Traces: from the request that adds a message, through the relay, to the consumer that handles it."""

from __future__ import annotations

import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from oncemore import Guard, Inbox, Op, Operation, Outbox, Policy
from oncemore.messages import Consumer, Envelope, Relay
from oncemore.messages.tracing import context_of
from tests.messages.recording import RecordingBroker


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """The spans that have ended."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    return exporter


@pytest.fixture
def guard(tmp_path: Path) -> Iterator[Guard]:
    guard = Guard(f"sqlite:///{tmp_path / 'shop.db'}", policy=Policy(effect="transaction"))
    yield guard
    guard.close()


def named(spans: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in spans.get_finished_spans() if span.name == name]


def attributes(span: ReadableSpan) -> Mapping[str, Any]:
    return span.attributes or {}


def test_send_span_links_to_the_spans_that_added(guard: Guard, spans: InMemorySpanExporter) -> None:
    outbox = Outbox(guard, source="shop")
    with trace.get_tracer("test").start_as_current_span("request") as request:
        guard.run(Operation("s", "k1"), lambda op: outbox.add(op, "a"))
    guard.run(Operation("s", "k2"), lambda op: outbox.add(op, "a"))  # outside a span
    Relay(outbox, to=RecordingBroker()).run_once()
    (created,) = named(spans, "create shop")
    assert created.parent is not None
    assert created.parent.span_id == request.get_span_context().span_id
    (span,) = named(spans, "send recording")
    assert [link.context.span_id for link in span.links] == [created.context.span_id]
    assert span.kind is created.kind is trace.SpanKind.PRODUCER
    assert attributes(span)["messaging.batch.message_count"] == 2


@pytest.mark.server
@pytest.mark.parametrize("awaited", [False, True])
def test_one_trace_from_the_request_to_the_consumers_handler(
    guard: Guard, spans: InMemorySpanExporter, nats_url: str, awaited: bool
) -> None:
    url, current = f"{nats_url}/t{secrets.token_hex(8)}?visibility=30", []
    outbox = Outbox(guard, source="shop")

    def handle(op: Op, envelope: Envelope) -> None:
        current.append(trace.get_current_span().get_span_context())
        if len(current) == 1:
            raise RuntimeError("not now")

    async def ahandle(op: Op, envelope: Envelope) -> None:
        handle(op, envelope)

    with trace.get_tracer("test").start_as_current_span("request") as request:
        key = guard.run(Operation("s", "k1"), lambda op: outbox.add(op, "refund.succeeded")).value
    assert Relay(outbox, to=url).run_once() == 1
    consumer = Consumer(Inbox(guard, name="books"), url, {"*": ahandle if awaited else handle})
    ends = time.monotonic() + 60
    while not consumer.run_once():
        assert time.monotonic() < ends
    (created,) = named(spans, "create shop")
    failed, done = named(spans, f"process {consumer.broker.channel}")
    for span in (failed, done):
        assert span.context.trace_id == request.get_span_context().trace_id
        assert span.parent is not None
        assert span.parent.span_id == created.context.span_id
        assert span.kind is trace.SpanKind.CONSUMER
        expected = {"messaging.operation.type": "process", "messaging.message.id": key}
        expected |= {"messaging.message.conversation_id": "k1", "messaging.consumer.group.name": "books"}
        assert expected.items() <= attributes(span).items()
    assert [context.span_id for context in current] == [failed.context.span_id, done.context.span_id]
    assert failed.status.status_code is trace.StatusCode.ERROR
    assert done.status.status_code is trace.StatusCode.UNSET
    assert (attributes(done)["oncemore.outcome"], attributes(done)["oncemore.delivery"]) == ("processed", 2)
    (sent,) = named(spans, f"send {consumer.broker.channel}")
    assert [link.context.span_id for link in sent.links] == [created.context.span_id]


def test_malformed_traceparent_has_no_link() -> None:
    for text in (None, "x", "00-zz", f"00-{'0' * 32}-{'0' * 16}-00"):
        assert context_of(trace, Envelope("a", id="1", source="s", traceparent=text)) is None


def test_opentelemetry_is_never_imported_for_it() -> None:
    code = "import sys, oncemore.messages.relay; assert 'opentelemetry' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
