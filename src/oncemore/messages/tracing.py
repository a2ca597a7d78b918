"""Trace context of messages, if the program has imported OpenTelemetry; this module never imports it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .envelope import Envelope

TRACEPARENT = re.compile("[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
SYSTEM = "oncemore"  # in place of the broker's name, because the broker is not known when a message is added
MOST_LINKS = 128  # OpenTelemetry's default limit per span


def opentelemetry() -> Any:
    """Return the module `opentelemetry.trace`; None if the program has not imported it."""
    return sys.modules.get("opentelemetry.trace")


def describe(operation: str, destination: str) -> dict[str, str | int]:
    """Return the attributes that all our spans have."""
    return {
        "messaging.system": SYSTEM,
        "messaging.operation.type": operation,
        "messaging.operation.name": operation,
        "messaging.destination.name": destination,
    }


def create_traceparent(source: str, type: str, id: str) -> str | None:
    """Record a span for the creation of a message below the current span, and return its W3C trace context.

    Return None if there is no current span, and the current span's context if the program records no spans.
    """
    trace = opentelemetry()
    if trace is None or not trace.get_current_span().get_span_context().is_valid:
        return None
    attributes = {**describe("create", source), "messaging.message.id": id, "oncemore.message.type": type}
    span = trace.get_tracer("oncemore").start_span(
        f"create {source}", kind=trace.SpanKind.PRODUCER, attributes=attributes
    )
    span.end()
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


@contextmanager
def send_span(channel: str, envelopes: Sequence[Envelope]) -> Iterator[None]:
    """Open a span while a batch is sent, with links to the spans that added its messages."""
    trace = opentelemetry()
    if trace is None:
        yield
        return
    attributes = {**describe("send", channel), "messaging.batch.message_count": len(envelopes)}
    links = [trace.Link(context) for envelope in envelopes if (context := context_of(trace, envelope)) is not None]
    with trace.get_tracer("oncemore").start_as_current_span(
        f"send {channel}", kind=trace.SpanKind.PRODUCER, links=links[:MOST_LINKS], attributes=attributes
    ):
        yield


@contextmanager
def process_span(channel: str, group: str, envelope: Envelope | None, count: int) -> Iterator[Callable[[str], None]]:
    """Open a span while a message is handled.  Call the yielded function with the outcome.

    The parent is the span that created the message, so the span belongs to the trace of the producer's request; if the
    message has no trace context, it is the current span, if any.  An error that leaves the block is recorded.
    """
    trace = opentelemetry()
    if trace is None:
        yield lambda outcome: None
        return
    attributes = {**describe("process", channel), "messaging.consumer.group.name": group, "oncemore.delivery": count}
    parent = None
    if envelope is not None:
        attributes |= {"messaging.message.id": envelope.id, "oncemore.message.type": envelope.type}
        if envelope.correlationid is not None:
            attributes["messaging.message.conversation_id"] = envelope.correlationid
        if (creator := context_of(trace, envelope)) is not None:
            parent = trace.set_span_in_context(trace.NonRecordingSpan(creator))
    with trace.get_tracer("oncemore").start_as_current_span(
        f"process {channel}", context=parent, kind=trace.SpanKind.CONSUMER, attributes=attributes
    ) as span:
        yield lambda outcome: span.set_attribute("oncemore.outcome", outcome)


def context_of(trace: Any, envelope: Envelope) -> Any:
    """Return the context of the span that created the message; None if the message has no valid `traceparent`."""
    parts = TRACEPARENT.fullmatch(envelope.traceparent or "")
    if parts is None:
        return None
    trace_id, span_id, flags = (int(part, 16) for part in parts.groups())
    if not trace_id or not span_id:
        return None
    return trace.SpanContext(trace_id, span_id, is_remote=True, trace_flags=trace.TraceFlags(flags))
