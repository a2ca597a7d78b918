"""Formats of a webhook's body.  The built-in ones give the same bytes in every attempt."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from ..errors import ConfigurationError
from ..messages.envelope import Envelope, structured

JSON = "application/json"
BodyFormat = Literal["standard", "cloudevents", "eventId"]


class WebhookMessage(msgspec.Struct, frozen=True):
    """One event for a tenant.  *data* is the event's data; *created_at* is its time, in seconds since 1970.

    For the built-in formats, *data* may be a `msgspec.Raw` that contains JSON, so that it need not be decoded.
    """

    id: str
    type: str
    data: Any
    created_at: float
    tenant: str = ""
    subject: str | None = None

    @property
    def time(self) -> datetime:
        return datetime.fromtimestamp(self.created_at, UTC)


Render = Callable[[WebhookMessage], Any]  # returns bytes, or anything that can be written as JSON


def standard(message: WebhookMessage) -> tuple[bytes, str]:
    """Return `{"type", "timestamp", "data"}`, as Standard Webhooks recommends."""
    body = {"type": message.type, "timestamp": iso(message.time), "data": message.data}
    return msgspec.json.encode(body), JSON


def cloudevents(message: WebhookMessage) -> tuple[bytes, str]:
    """Return a CloudEvents 1.0 event in structured mode.  Its source is the tenant, or `/` if there is none."""
    envelope = Envelope(
        message.type,
        decode_data(message).data,
        id=message.id,
        source=message.tenant or "/",
        subject=message.subject,
        time=message.time,
    )
    body, media_type = structured(envelope), "application/cloudevents+json"
    return body, media_type


def event_id(message: WebhookMessage) -> tuple[bytes, str]:
    """Return `{"eventId", "eventType", "timestamp", "data"}`."""
    body = {
        "eventId": message.id,
        "eventType": message.type,
        "timestamp": iso(message.time),
        "data": message.data,
    }
    return msgspec.json.encode(body), JSON


FORMATS: dict[str, Callable[[WebhookMessage], tuple[bytes, str]]] = {
    "standard": standard,
    "cloudevents": cloudevents,
    "eventId": event_id,
}


def body_of(format: BodyFormat | Render) -> Callable[[WebhookMessage], tuple[bytes, str]]:
    """Return the function that makes the bytes of a body and their media type."""
    if isinstance(format, str):
        if format not in FORMATS:
            raise ConfigurationError(f"body = {format!r} is unknown: write one of {', '.join(FORMATS)}, or a function")
        return FORMATS[format]
    if not callable(format):
        raise ConfigurationError(f"body = {format!r} is neither the name of a format nor a function of the message")
    render = format

    def rendered(message: WebhookMessage) -> tuple[bytes, str]:
        body = render(decode_data(message))
        return body if isinstance(body, bytes) else msgspec.json.encode(body), JSON

    return rendered


def decode_data(message: WebhookMessage) -> WebhookMessage:
    """Return the message with its data decoded, if that is JSON in a `msgspec.Raw`."""
    if isinstance(message.data, msgspec.Raw):
        return msgspec.structs.replace(message, data=msgspec.json.decode(message.data))
    return message


def iso(time: datetime) -> str:
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")
