"""Trace context of messages, if the program uses OpenTelemetry: it is found among the imported modules, never imported."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .envelope import Envelope

TRACEPARENT = re.compile("[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
SYSTEM = "oncemore"  # OpenTelemetry wants the broker's name, which a message does not know when it is added
MOST_LINKS = 128  # as many as a span has by default


def opentelemetry() -> Any:
    """The module `opentelemetry.trace`; None if the program has not imported it."""
    return sys.modules.get("opentelemetry.trace")


def describe(operation: str, destination: str) -> dict[str, str | int]:
    """The attributes that all spans have."""
    return {
        "messaging.system": SYSTEM,
        "messaging.operation.type": operation,
        "messaging.operation.name": operation,
        "messaging.destination.name": destination,
    }


def create_traceparent(source: str, type: str, id: str) -> str | None:
    """Make a span for the creation of a message, in the current one, and return its W3C trace context.

    None if there is no current span; the current one's context if the program exports no spans.
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
    """While a batch is sent: a span with a link to each span that added one of its messages."""
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
    """While a message is handled: a span whose parent is the span that created it.  Call the result with the outcome.

    It belongs to the trace of the request that the message tells of; a message without trace context begins a new one.  An
    error that leaves the block is the span's.
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
    """The context of the span that added the message."""
    parts = TRACEPARENT.fullmatch(envelope.traceparent or "")
    if parts is None:
        return None
    trace_id, span_id, flags = (int(part, 16) for part in parts.groups())
    if not trace_id or not span_id:
        return None
    return trace.SpanContext(trace_id, span_id, is_remote=True, trace_flags=trace.TraceFlags(flags))
