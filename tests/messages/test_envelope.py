"""Envelopes: CloudEvents 1.0 in both modes, readable by the `cloudevents` package, and hostile input refused."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from cloudevents.core.bindings import http, kafka, rabbitmq
from cloudevents.core.formats.json import JSONFormat
from cloudevents.core.v1.event import CloudEvent
from hypothesis import given
from hypothesis import strategies as st

from oncemore.errors import InvalidPayload, PayloadTooLarge
from oncemore.messages.envelope import Envelope, binary, parse_binary, parse_structured, structured

AT = datetime(2026, 2, 19, 6, 0, 0, 123456, tzinfo=UTC)
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

texts = st.text(st.characters(blacklist_categories=["Cc", "Cs", "Cn"]), min_size=1, max_size=50)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=10,
)
envelopes = st.builds(
    Envelope,
    type=texts,
    data=values | st.binary(),
    id=texts,
    source=texts,
    subject=st.none() | texts,
    time=st.none() | st.datetimes(timezones=st.just(UTC)),
    traceparent=st.none() | st.just(TRACE),
    correlationid=st.none() | texts,
    extensions=st.dictionaries(st.from_regex("[a-z]{1,9}x[0-9]", fullmatch=True), texts, max_size=3),
)


def make(data: Any = None, **more: Any) -> Envelope:
    settings = {"id": "e1", "source": "payments", "subject": "rf_1", "time": AT, "traceparent": TRACE, **more}
    return Envelope("refund.succeeded", {"id": "rf_1"} if data is None else data, **settings)


@given(envelopes)
def test_envelope_survives_both_modes(envelope: Envelope) -> None:
    assert parse_structured(structured(envelope)) == envelope
    for prefix in ("ce-", "ce_"):
        for quoted in (False, True):
            headers, body = binary(envelope, prefix, quoted=quoted)
            again = parse_binary(headers, body, prefix, quoted=quoted)
            assert again == envelope
            assert again.data == envelope.data


def test_data_are_parsed_by_their_media_type() -> None:
    assert make({"a": [1, None]}).data == {"a": [1, None]}
    assert make({"a": 1}).raw == b'{"a":1}'
    assert make(b"\x00\xff").data == b"\x00\xff"
    assert make(b"\x00\xff").datacontenttype == "application/octet-stream"
    assert make("hello", datacontenttype="text/plain").data == "hello"
    assert make("hello").raw == b'"hello"'
    assert make(b'{"a": 1}', datacontenttype="application/vnd.acme+json; charset=utf-8").data == {"a": 1}
    nothing = Envelope("t", id="1", source="s")
    assert (nothing.data, nothing.raw, nothing.datacontenttype) == (None, None, None)


def test_structured_form_follows_the_standard() -> None:
    assert json.loads(
        structured(make(correlationid="k1", extensions={"tenant": "acme", "retries": 3, "live": True}))
    ) == {
        "specversion": "1.0",
        "id": "e1",
        "source": "payments",
        "type": "refund.succeeded",
        "subject": "rf_1",
        "time": "2026-02-19T06:00:00.123456Z",
        "datacontenttype": "application/json",
        "traceparent": TRACE,
        "correlationid": "k1",
        "tenant": "acme",
        "retries": 3,
        "live": True,
        "data": {"id": "rf_1"},
    }
    assert json.loads(structured(make(b"\xff")))["data_base64"] == "/w=="
    assert json.loads(structured(make("hé", datacontenttype="text/plain")))["data"] == "hé"


SAMPLES = (
    make(),
    make(b"\x00\xffbytes"),
    make("plain text", datacontenttype="text/plain"),
    make([1, "zwei", None], subject="Köln 100%", extensions={"tenant": "Ä & Ö"}),
)


@pytest.mark.parametrize("envelope", SAMPLES, ids=range(len(SAMPLES)))
def test_cloudevents_package_reads_our_envelopes(envelope: Envelope) -> None:
    event = JSONFormat().read(CloudEvent, structured(envelope))
    agree(envelope, event)
    headers, body = binary(envelope, quoted=True)
    agree(envelope, http.from_binary(http.HTTPMessage(headers, body), JSONFormat(), CloudEvent))
    headers, body = binary(envelope)
    content_type = headers.pop("content-type")
    message = rabbitmq.RabbitMQMessage(headers=headers, content_type=content_type, body=body)
    agree(envelope, rabbitmq.from_binary(message, JSONFormat(), CloudEvent))
    headers, body = binary(envelope, "ce_")
    raw = {name: value.encode() for name, value in headers.items()}
    agree(envelope, kafka.from_binary(kafka.KafkaMessage(raw, None, body), JSONFormat(), CloudEvent))


def agree(envelope: Envelope, event: Any) -> None:
    assert (event.get_id(), event.get_source(), event.get_type()) == ("e1", "payments", "refund.succeeded")
    assert event.get_subject() == envelope.subject
    assert event.get_time() == envelope.time
    assert event.get_extension("traceparent") == TRACE
    data = event.get_data()
    assert (data.encode() if isinstance(data, str) and isinstance(envelope.data, bytes) else data) == envelope.data
    for name, value in envelope.extensions.items():
        assert event.get_extension(name) == value


@pytest.mark.parametrize(
    ("data", "content_type"),
    [({"id": "rf_1"}, "application/json"), (b"\x00\xff", "application/octet-stream"), ("text", "text/plain")],
)
def test_events_of_the_cloudevents_package_are_read(data: Any, content_type: str) -> None:
    event = CloudEvent(
        {
            "id": "e1",
            "source": "/their/service",
            "type": "a.b",
            "specversion": "1.0",
            "time": AT,
            "subject": "Köln",
            "datacontenttype": content_type,
            "tenant": "acme",
        },
        data,
    )
    message = http.to_binary(event, JSONFormat())
    sent = kafka.to_binary(event, JSONFormat())
    for envelope in (
        parse_structured(JSONFormat().write(event)),
        parse_binary(message.headers, message.body, quoted=True),
        parse_binary(sent.headers, sent.value, "ce_"),
    ):
        assert (envelope.id, envelope.source, envelope.type) == ("e1", "/their/service", "a.b")
        assert (envelope.subject, envelope.time, envelope.extensions) == ("Köln", AT, {"tenant": "acme"})
        assert envelope.data == data


def test_package_events_without_content_type_or_data_are_read() -> None:
    """By default the package omits the content type of JSON, and writes no body for an event without data."""
    for attributes, data in (({}, {"id": "rf_1"}), ({}, None), ({"datacontenttype": "application/json"}, None)):
        event = CloudEvent({"id": "e1", "source": "s", "type": "t", "specversion": "1.0", **attributes}, data)
        message, sent = http.to_binary(event, JSONFormat()), kafka.to_binary(event, JSONFormat())
        assert parse_binary(message.headers, message.body, quoted=True).data == data
        assert parse_binary(sent.headers, sent.value, "ce_").data == data
        assert parse_structured(JSONFormat().write(event)).data == data


def test_body_without_content_type_that_is_not_json_is_bytes() -> None:
    headers = {"ce-specversion": "1.0", "ce-id": "1", "ce-source": "s", "ce-type": "t"}
    for body in (b"\x00\xff", b"plain", b"[" * 100_000):
        assert parse_binary(headers, body).data == body


def test_envelope_with_media_type_and_no_data_survives() -> None:
    envelope = Envelope("t", id="1", source="s", datacontenttype="application/json")
    headers, body = binary(envelope)
    assert parse_binary(headers, body) == envelope == parse_structured(structured(envelope))


GOOD = {"specversion": "1.0", "id": "1", "source": "s", "type": "t"}
HOSTILE: list[bytes] = [
    b"",
    b"\xff\xfe",
    b"null",
    b"[]",
    b"{",
    b'{"specversion": "1.0"}',
    b"[" * 100_000,
    b'{"specversion":"1.0","id":"1","source":"s","type":"t","data":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"specversion":"1.0","id":"1","source":"s","type":"t","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"specversion":"1.0","id":"1","source":"s","type":"t","data":"\\ud800"}',
    *(
        json.dumps({**GOOD, **wrong}).encode()
        for wrong in (
            {"specversion": "0.3"},
            {"specversion": 1.0},
            {"id": ""},
            {"id": 7},
            {"id": None},
            {"id": "x" * 10_000},
            {"source": "a\r\nb: c"},
            {"type": ["t"]},
            {"time": "yesterday"},
            {"time": "2026-13-01T00:00:00Z"},
            {"time": 12},
            {"time": "0001-01-01T00:00:00+14:00"},
            {"datacontenttype": 5},
            {"data_base64": "*"},
            {"data_base64": 5},
            {"data_base64": "AA==", "data": 1},
            {"Tenant": "acme"},
            {"te-nant": "acme"},
            {"tenant": {"a": 1}},
            {"tenant": 2**40},
        )
    ),
]


@pytest.mark.parametrize("body", HOSTILE, ids=[repr(body[:60]) for body in HOSTILE])
def test_malformed_message_is_refused_with_one_error(body: bytes) -> None:
    with pytest.raises(InvalidPayload):
        parse_structured(body)
    with pytest.raises(InvalidPayload):
        parse_binary({"content-type": "application/cloudevents+json; charset=utf-8"}, body)


def test_malformed_headers_are_refused_with_one_error() -> None:
    good = {f"ce-{name}": value for name, value in GOOD.items()}
    for wrong in (
        {"ce-id": b"\xff"},
        {"ce-source": "a\nb"},
        {"content-type": "application/json"},  # and the body is none
        {"ce-time": "soon"},
        {"ce-": "x"},
        {"ce-specversion": "2.0"},
    ):
        with pytest.raises(InvalidPayload):
            parse_binary({**good, **wrong}, b"{")
    with pytest.raises(InvalidPayload, match="no 'id'"):
        parse_binary({"ce-specversion": "1.0"}, b"")


@given(st.binary() | st.dictionaries(texts, values).map(lambda members: json.dumps({**GOOD, **members}).encode()))
def test_any_bytes_are_an_envelope_or_refused(body: bytes) -> None:
    try:
        envelope = parse_structured(body)
    except InvalidPayload:
        return
    assert parse_structured(structured(envelope)) == envelope


def test_data_that_json_cannot_hold_are_refused() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    endless, no_number = float("inf"), float("nan")  # JSON has no form for them, and null would be another value
    for data in (object(), {1: object()}, {"a": "\ud800"}, deep, no_number, {"a": [None, endless]}):
        with pytest.raises(InvalidPayload, match="cannot be written as JSON"):
            make(data)
    with pytest.raises(InvalidPayload, match="cannot be read as JSON"):
        make(b"{", datacontenttype="application/json")
    assert make({"a": None, "b": [0.5]}).data == {"a": None, "b": [0.5]}


def test_wrong_attributes_are_refused_with_their_values() -> None:
    with pytest.raises(InvalidPayload, match="time zone"):
        make(time=datetime(2026, 1, 1))
    with pytest.raises(InvalidPayload, match="'X-Tenant' cannot be the name of a header"):
        make(extensions={"X-Tenant": "acme"})
    with pytest.raises(InvalidPayload, match="'id' cannot"):
        make(extensions={"id": "acme"})


def test_size_limit_names_the_sizes() -> None:
    make().check_size(1000)
    with pytest.raises(PayloadTooLarge, match=r"has 10,\d\d\d bytes, and at most 1,000 are allowed"):
        make("x" * 10_000).check_size(1000)
