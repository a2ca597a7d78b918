"""The envelope of a message: a CloudEvents 1.0 event, in structured (JSON) and binary (headers) mode."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, unquote

import msgspec

from ..errors import InvalidPayload, PayloadTooLarge

JSON, BYTES = "application/json", "application/octet-stream"
STRUCTURED = "application/cloudevents+json"
LIMIT = 1024 * 1024  # bytes; the default limit of several brokers is about the same

# CloudEvents' rules: attribute names are lower-case letters and digits, and texts have no control characters.
NAME = re.compile(r"[a-z0-9]{1,64}", re.ASCII)
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")
IS_JSON = re.compile(r"[\w.-]+/([\w.-]+\+)?json\s*(;.*)?", re.ASCII | re.IGNORECASE)
TIME = re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)", re.ASCII)
LONGEST = 2048  # characters of an attribute

# The attributes that have a parameter of `Envelope`; all others are extensions.
OWN = ("id", "source", "type", "subject", "time", "datacontenttype", "traceparent", "correlationid")
RESERVED = {*OWN, "specversion", "data", "data_base64"}
UNSET: Any = object()

# CloudEvents' rule for HTTP headers: printable ASCII except space, quote and percent is not percent-encoded.
SAFE = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) not in '"%')

Extension = str | int | bool

encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder().decode


class Envelope:
    """One message: a CloudEvents 1.0 event.

    Attributes:
        id: The message's id: unique within its source, and the same in every repetition.
        source: The service that the message comes from.
        type: The kind of event, such as `refund.succeeded`.
        subject: The thing that the event is about.  Messages with the same subject keep their order.
        time: When the event happened, with a time zone.
        datacontenttype: The media type of the data; `application/json` unless the data are bytes.
        traceparent: The W3C trace context of the code that made the message.
        correlationid: The key of the operation or request that the message came from.
        extensions: Other CloudEvents attributes: names in lower-case letters and digits, values str, int or bool.
        raw: The data as bytes; None if there are none.
        replays: How often the outbox has replayed the message.  Not sent; it makes a replay differ from a repetition.
    """

    __slots__ = (
        "_data",
        "correlationid",
        "datacontenttype",
        "extensions",
        "id",
        "raw",
        "replays",
        "source",
        "subject",
        "time",
        "traceparent",
        "type",
    )

    def __init__(
        self,
        type: str,
        data: Any = UNSET,
        *,
        id: str,
        source: str,
        subject: str | None = None,
        time: datetime | None = None,
        datacontenttype: str | None = None,
        traceparent: str | None = None,
        correlationid: str | None = None,
        extensions: Mapping[str, Extension] | None = None,
        raw: bytes | None = None,
    ) -> None:
        """Make an envelope around *data*, or around its bytes, *raw*.

        Raises:
            InvalidPayload: CloudEvents forbids an attribute, or the data cannot be written as JSON.
        """
        self.replays = 0
        self.id = check_text("id", id)
        self.source = check_text("source", source)
        self.type = check_text("type", type)
        self.subject = None if subject is None else check_text("subject", subject)
        self.time = None if time is None else check_time(time)
        self.traceparent = None if traceparent is None else check_text("traceparent", traceparent)
        self.correlationid = None if correlationid is None else check_text("correlationid", correlationid)
        self.extensions = {} if not extensions else check_extensions(extensions)
        if isinstance(data, bytes | bytearray | memoryview):
            data, raw = UNSET, bytes(data)
        if datacontenttype is not None:
            check_text("datacontenttype", datacontenttype)
        elif raw is not None:
            datacontenttype = BYTES
        elif data is not UNSET:
            datacontenttype = JSON
        self.datacontenttype = datacontenttype
        self._data = UNSET
        if raw is not None:
            self.raw: bytes | None = raw
            if is_json(datacontenttype):
                self._data = parse_json(raw, "The data")
        else:
            self.raw = None if data is UNSET else write_data(data, datacontenttype)

    @property
    def data(self) -> Any:
        """The data: parsed if JSON, text if the media type is text, otherwise bytes; None if there are none."""
        if self._data is UNSET:
            self._data = read_data(self.raw, self.datacontenttype)
        return self._data

    @property
    def attributes(self) -> dict[str, Extension]:
        """All attributes that are set, under their CloudEvents names."""
        found: dict[str, Extension] = {"specversion": "1.0", "id": self.id, "source": self.source, "type": self.type}
        if self.subject is not None:
            found["subject"] = self.subject
        if self.time is not None:
            found["time"] = format_time(self.time)
        if self.datacontenttype is not None:
            found["datacontenttype"] = self.datacontenttype
        if self.traceparent is not None:
            found["traceparent"] = self.traceparent
        if self.correlationid is not None:
            found["correlationid"] = self.correlationid
        if self.extensions:
            found |= self.extensions
        return found

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Envelope):
            return NotImplemented
        return (self.attributes, self.raw) == (other.attributes, other.raw)

    def __hash__(self) -> int:
        return hash((self.source, self.id))

    def __repr__(self) -> str:
        return f"Envelope({self.type!r}, id={self.id!r}, source={self.source!r}, subject={self.subject!r})"

    def check_size(self, limit: int) -> None:
        """Raise PayloadTooLarge if the structured form has more than *limit* bytes."""
        size = len(structured(self))
        if size > limit:
            raise PayloadTooLarge(
                f"The message {self.id!r} of type {self.type!r} has {size:,} bytes, and at most {limit:,} are allowed: store "
                "the data elsewhere and send a reference, or raise the outbox's limit= if your broker accepts more"
            )


# Structured mode


def structured(envelope: Envelope) -> bytes:
    """Write the envelope as one JSON object.  Data that are neither JSON nor text go into `data_base64`."""
    members: dict[str, Any] = dict(envelope.attributes)
    raw = envelope.raw
    if raw is not None:
        if is_json(envelope.datacontenttype):
            members["data"] = msgspec.Raw(raw)
        elif (text := as_text(raw, envelope.datacontenttype)) is not None:
            members["data"] = text
        else:
            members["data_base64"] = base64.b64encode(raw).decode()
    return encode(members)


def parse_structured(body: bytes) -> Envelope:
    """Read an envelope from a JSON object.  Raises InvalidPayload if it is not a CloudEvents 1.0 event."""
    try:
        members = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidPayload(f"The message is not a JSON object: {error}") from None
    raw_data = members.pop("data", None)
    attributes = {name: parse_json(bytes(value), f"The attribute {name!r}") for name, value in members.items()}
    attributes = {name: value for name, value in attributes.items() if value is not None}
    encoded = attributes.pop("data_base64", None)
    content_type = attributes.get("datacontenttype")
    if raw_data is None:
        return from_attributes(attributes, None if encoded is None else decode_base64(encoded))
    if encoded is not None:
        raise InvalidPayload("The message has both data and data_base64: CloudEvents allows one of them")
    data = bytes(raw_data)
    if content_type is None or is_json(content_type):
        if data == b"null" and content_type is None:
            return from_attributes(attributes, None)
        attributes["datacontenttype"] = content_type or JSON
        return from_attributes(attributes, data)
    value = parse_json(data, "The data")
    return from_attributes(attributes, value.encode() if isinstance(value, str) else data)


# Binary mode


def binary(envelope: Envelope, prefix: str = "ce-", *, quoted: bool = False) -> tuple[dict[str, str], bytes]:
    """Write the attributes as headers with names that begin with *prefix*, and the data as the body.

    With *quoted*, values are percent-encoded, as HTTP and NATS require; RabbitMQ and Kafka accept any text.
    """
    headers = {}
    for name, value in envelope.attributes.items():
        text = value if isinstance(value, str) else str(value).lower()
        header = "content-type" if name == "datacontenttype" else prefix + name
        headers[header] = quote(text, safe=SAFE) if quoted and header != "content-type" else text
    return headers, envelope.raw or b""


def parse_binary(
    headers: Mapping[str, str | bytes], body: bytes, prefix: str = "ce-", *, quoted: bool = False
) -> Envelope:
    """Read an envelope from headers and a body, or from the body alone if the content type says structured mode.

    Raises InvalidPayload if it is not a CloudEvents 1.0 event.
    """
    attributes: dict[str, Any] = {}
    for header, value in headers.items():
        name = header.lower()
        if name != "content-type" and not name.startswith(prefix):
            continue
        try:
            text = value.decode() if isinstance(value, bytes) else str(value)
        except UnicodeDecodeError:
            raise InvalidPayload(f"The header {header!r} is not UTF-8") from None
        if name == "content-type":
            attributes["datacontenttype"] = text
        else:
            attributes[name[len(prefix) :]] = unquote(text) if quoted else text
    content_type = attributes.get("datacontenttype", "")
    if content_type.lower().startswith(STRUCTURED):
        return parse_structured(body)
    if not body and (not content_type or is_json(content_type)):
        return from_attributes(attributes, None)
    if not content_type and reads_as_json(body):  # the `cloudevents` package omits the content type of JSON
        attributes["datacontenttype"] = JSON
    return from_attributes(attributes, body)


def from_attributes(attributes: dict[str, Any], raw: bytes | None) -> Envelope:
    """Make an envelope from the attributes of a received message."""
    version = attributes.pop("specversion", None)
    if version != "1.0":
        raise InvalidPayload(f"The message is not a CloudEvents 1.0 event: its specversion is {version!r}")
    for name in ("id", "source", "type"):
        if name not in attributes:
            raise InvalidPayload(f"The message has no {name!r}, which CloudEvents requires")
    time = attributes.pop("time", None)
    own = {name: attributes.pop(name) for name in OWN if name in attributes}
    if raw is None:
        own.setdefault("datacontenttype", None)
    return Envelope(**own, time=None if time is None else parse_time(time), extensions=attributes, raw=raw)


# Values


def check_text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidPayload(f"The message's {name} is a {type(value).__name__}: it must be a text")
    if not value or len(value) > LONGEST:
        raise InvalidPayload(f"The message's {name} has {len(value):,} characters: 1 to {LONGEST:,} are allowed")
    if CONTROL.search(value):
        raise InvalidPayload(f"The message's {name} is {value[:80]!r}: control characters are not allowed in it")
    return value


def check_time(value: Any) -> datetime:
    if not isinstance(value, datetime) or value.tzinfo is None:
        raise InvalidPayload(f"The message's time is {value!r}: it must be a datetime with a time zone")
    try:
        value.astimezone(UTC)
    except OverflowError:  # within hours of datetime.min or datetime.max
        raise InvalidPayload(f"The message's time is {value.isoformat()}: it cannot be converted to UTC") from None
    return value


def check_extensions(extensions: Mapping[str, Any]) -> dict[str, Extension]:
    for name, value in extensions.items():
        if not isinstance(name, str) or not NAME.fullmatch(name) or name in RESERVED:
            raise InvalidPayload(
                f"{name!r} cannot be the name of a header: use up to 64 lower-case letters and digits, and no "
                "name that CloudEvents uses itself"
            )
        if isinstance(value, str):
            if value:  # an empty text is allowed here
                check_text(f"header {name!r}", value)
        elif not isinstance(value, bool | int) or not -(2**31) <= value < 2**31:
            raise InvalidPayload(f"The header {name!r} is {value!r}: it must be a text, a 32-bit integer or a bool")
    return dict(extensions)


def format_time(time: datetime) -> str:
    return time.astimezone(UTC).isoformat().replace("+00:00", "Z")


def parse_time(text: Any) -> datetime:
    try:
        if not isinstance(text, str) or not TIME.fullmatch(text):
            raise ValueError
        return datetime.fromisoformat(text.upper())
    except ValueError:
        raise InvalidPayload(f"The message's time is {text!r}: write it like 2026-02-19T06:00:00Z") from None


def is_json(content_type: str | None) -> bool:
    return content_type is not None and (content_type == JSON or IS_JSON.fullmatch(content_type) is not None)


def as_text(raw: bytes, content_type: str | None) -> str | None:
    """Return the data as text; None if the media type is not text, or the bytes are not UTF-8."""
    if content_type is None or not content_type.lower().startswith("text/"):
        return None
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None


def parse_json(raw: bytes, what: str) -> Any:
    try:
        return decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidPayload(f"{what} cannot be read as JSON: {error}") from None


def reads_as_json(raw: bytes) -> bool:
    try:
        parse_json(raw, "The data")
    except InvalidPayload:
        return False
    return True


def decode_base64(text: Any) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (ValueError, TypeError):
        raise InvalidPayload("The message's data_base64 is not base64") from None


def write_data(data: Any, content_type: str | None) -> bytes:
    """Return text as UTF-8 if the media type is not JSON, and all other data as JSON."""
    try:
        if isinstance(data, str) and not is_json(content_type):
            return data.encode()
        raw = encode(data)
        if b"null" in raw and not is_finite(msgspec.to_builtins(data)):  # the encoder writes NaN as null
            raise ValueError("JSON has no NaN and no infinite numbers")
        return raw
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError, OverflowError) as error:
        raise InvalidPayload(f"The data of the message cannot be written as JSON: {error}") from None


def is_finite(data: Any) -> bool:
    """Whether no number in the data is NaN or infinite."""
    if isinstance(data, float):
        return math.isfinite(data)
    if isinstance(data, dict):
        return all(map(is_finite, data.values()))
    return not isinstance(data, list | tuple) or all(map(is_finite, data))


def read_data(raw: bytes | None, content_type: str | None) -> Any:
    if raw is None:
        return None
    if is_json(content_type):
        return parse_json(raw, "The data")
    text = as_text(raw, content_type)
    return raw if text is None else text
