"""Templates: keys made from requests, calls and the time."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from oncemore._contract.templates import Template
from oncemore._fingerprint.canonical import read_json
from oncemore._fingerprint.pointer import parse_pointer, value_at
from oncemore.errors import ConfigurationError, InvalidKey

NOON = datetime(2026, 2, 19, 12, 0, tzinfo=UTC)
TEXTS = st.text(st.characters() | st.sampled_from(":%~{}"), min_size=1, max_size=20)


def body_name(value: object) -> str:
    return Template("{body.x}").render(body={"x": value})


# ── Where values come from ────────────────────────────────────────────────────────────────────────────────────────────


def test_safety_report_is_named_by_reporter_subject_category_and_hour():
    template = Template("{principal}:{body.subjectId}:{body.category}:{window:1h}")
    report = {"subjectId": "user-9", "category": "spam"}
    name = template.render(principal="user-1", body=report, now=NOON.timestamp() + 1800)
    assert name == "user-1:user-9:spam:20260219T120000Z"
    assert name == template.render(principal="user-1", body=report, now=NOON.timestamp())
    assert name != template.render(principal="user-1", body=report, now=NOON.timestamp() + 3600)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("{tenant}:{principal}", "acme:alice"),
        ("order:{path.id}", "order:7"),
        ("{query.page}", "2"),
        ("{query.tag}", "x"),
        ("{header.X-Device}", "phone"),
        ("{body.order.id}", "o1"),
        ("{body:/order/id}", "o1"),
        ("{body:/items/1/sku}", "s2"),
        ("{body:/a~1b}", "slash"),
        ("{body:/m~0n}", "tilde"),
        ("{{{path.id}}}", "{7}"),
        ("fixed", "fixed"),
        ("50%~{path.id}", "50%25%7E7"),
    ],
)
def test_fields_find_their_values(text, name):
    values = {
        "principal": "alice",
        "tenant": "acme",
        "path": {"id": "7"},
        "query": {"page": "2", "tag": ["x"]},
        "headers": {"x-device": "phone"},
        "body": {"order": {"id": "o1"}, "items": [{"sku": "s1"}, {"sku": "s2"}], "a/b": "slash", "m~n": "tilde"},
    }
    assert Template(text).render(**values) == name


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("{principal}", {}),
        ("{tenant}", {"tenant": ""}),
        ("{path.id}", {"path": {}}),
        ("{query.page}", {"query": {"page": []}}),
        ("{header.x}", {}),
        ("{body.x}", {"body": None}),
        ("{body.x}", {"body": {"x": None}}),
        ("{body.x}", {"body": {"x": ""}}),
        ("{body.x.y}", {"body": {"x": "text"}}),
        ("{body:/x/2}", {"body": {"x": [1, 2]}}),
        ("{body:/x/01}", {"body": {"x": [1, 2]}}),
        ("{body:/x/-}", {"body": {"x": [1, 2]}}),
        ("{body:/x/٣}", {"body": {"x": [1, 2, 3, 4]}}),
    ],
)
def test_missing_or_empty_value_is_refused_and_named(text, values):
    with pytest.raises(InvalidKey) as refusal:
        Template(text).render(**values)
    assert text in refusal.value.detail


@pytest.mark.parametrize("value", [[1], {"a": 1}, b"bytes", object()])
def test_what_is_not_a_single_value_is_refused(value):
    with pytest.raises(InvalidKey, match="single value"):
        body_name(value)


def test_parameter_given_twice_is_refused():
    with pytest.raises(InvalidKey, match="2 times"):
        Template("{query.x}").render(query={"x": ["1", "2"]})


# ── Time ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("window", "name"),
    [("1h", "20260219T120000Z"), ("24h", "20260219T000000Z"), ("90s", "20260219T125830Z"), ("1d", "20260219T000000Z")],
)
def test_windows_are_aligned_to_the_epoch(window, name):
    now = datetime(2026, 2, 19, 12, 59, 59, 999999, tzinfo=UTC)
    assert Template(f"{{window:{window}}}").render(now=now.timestamp()) == name


@given(st.integers(1, 10**7), st.floats(0, 4e9))
@example(1, 1.9999996)  # which a datetime has no place for, and rounds up
def test_window_holds_every_moment_in_it(seconds, now):
    template = Template(f"{{window:{seconds}s}}")
    start = datetime.strptime(template.render(now=now), "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp()
    assert start <= now < start + seconds
    assert start % seconds == 0
    assert template.window == seconds


def test_day_begins_at_midnight_of_its_time_zone():
    evening = datetime(2026, 2, 19, 23, 30, tzinfo=timezone(timedelta(hours=-5)))
    assert Template("{date}").render(now=evening.timestamp()) == "2026-02-20"
    slot = Template("{date:America/New_York}:{principal}:daily_offers")
    assert (
        slot.render(now=evening.timestamp(), principal="user-123")
        == "2026-02-19:America/New_York:user-123:daily_offers"
    )


def test_template_knows_how_long_a_name_lasts():
    assert Template("{principal}").window == 0
    assert Template("{window:1h}:{window:2h}").window == 7200
    assert Template("{window:1h}:{date}").window == Template("{date:UTC}").window == 86400


def test_day_on_which_clocks_go_back_has_25_hours():
    """With 24 hours, an operation just after midnight would happen again before the next midnight."""
    template = Template("{date:Europe/Berlin}")
    first = datetime(2026, 10, 24, 22, 5, tzinfo=UTC)  # 00:05 in Berlin
    last = datetime(2026, 10, 25, 22, 55, tzinfo=UTC)  # 23:55
    assert template.render(now=first.timestamp()) == template.render(now=last.timestamp())
    assert template.render(now=first.timestamp()) == "2026-10-25:Europe/Berlin"
    assert template.window >= (last - first).total_seconds() > 86400


@dataclass
class Wall:
    date: date
    zone: str
    name: str


def test_scheduled_call_is_named_by_its_wall_time():
    late = datetime(2026, 2, 19, 20, 0, tzinfo=timezone(timedelta(hours=-5)))
    wall = Wall(date(2026, 2, 19), "America/New_York", "2026-02-19T2000")
    shown = {
        text: Template(text, names=("user",)).render(arguments={}, now=late.timestamp(), scheduled=wall)
        for text in ("{date}", "{date:America/New_York}", "{date:Asia/Tokyo}", "{window:1h}", "{tick}")
    }
    assert shown == {
        "{date}": "2026-02-19",
        "{date:America/New_York}": "2026-02-19:America/New_York",
        "{date:Asia/Tokyo}": "2026-02-20:Asia/Tokyo",
        "{window:1h}": "20260220T010000Z",
        "{tick}": "2026-02-19T2000",
    }
    assert Template("{tick}", names=()).render(now=late.timestamp()) == "20260220T010000Z"
    assert Template("{window:1h}", names=()).render(now=late.timestamp()) == "20260220T010000Z"


@pytest.mark.parametrize(
    ("text", "argument", "expected"),
    [
        ("{date:Europe/Berlin}", date(2026, 2, 19), "2026-02-19:Europe/Berlin"),
        ("{date:Europe/Berlin}", datetime(2026, 2, 19, 23, 30, tzinfo=UTC), "2026-02-20:Europe/Berlin"),
        ("{date:Europe/Berlin}", datetime(2026, 2, 19, 23, 30), "2026-02-19:Europe/Berlin"),
        ("{date:Europe/Berlin}", None, "1970-01-01:Europe/Berlin"),
        ("{date}", date(2026, 2, 19), "2026-02-19"),
        ("{date}", None, "1970-01-01"),
        ("{window:1h}", datetime(2026, 2, 19, 23, 30, tzinfo=UTC), "20260219T230000Z"),
        ("{window:1h}", "morning", "morning"),
        ("{window:1h}", None, "19700101T000000Z"),
    ],
)
def test_parameter_comes_before_the_time(text, argument, expected):
    template = Template(text, names=("date", "window"))
    assert template.render(arguments={"date": argument, "window": argument}, now=0.0) == expected


# ── Functions ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_arguments_and_what_is_inside_them_can_be_named():
    template = Template("invoice:{invoice_id}:{order.customer.id}", names=("invoice_id", "order"))
    inside = SimpleNamespace(customer={"id": 7})
    assert template.render(arguments={"invoice_id": "i1", "order": inside}) == "invoice:i1:7"
    assert (
        template.render(arguments={"invoice_id": "i1", "order": {"customer": SimpleNamespace(id=7)}}) == "invoice:i1:7"
    )


@pytest.mark.parametrize("items", [[{"id": 7}], ({"id": 7},), [SimpleNamespace(id=7), None], {"0": {"id": 7}}])
def test_items_of_a_list_can_be_named(items):
    assert Template("{items.0.id}", names=("items",)).render(arguments={"items": items}) == "7"
    assert Template("{body.items.0.id}").render(body={"items": [{"id": 7}]}) == "7"


@pytest.mark.parametrize("items", [[], [{"id": 7}], SimpleNamespace(), "text", None])
def test_item_that_is_not_there_is_refused(items):
    with pytest.raises(InvalidKey, match=r"\{items\.1\.id\} is missing"):
        Template("{items.1.id}", names=("items",)).render(arguments={"items": items})


def test_argument_named_like_a_request_field_is_the_argument():
    assert Template("{body}:{date}", names=("body", "date")).render(arguments={"body": "b", "date": "d"}) == "b:d"


def test_time_fields_are_there_for_functions_too():
    assert (
        Template("{user}:{date}", names=("user",)).render(arguments={"user": "u"}, now=NOON.timestamp())
        == "u:2026-02-19"
    )


@pytest.mark.parametrize("missing", [{}, {"order": None}, {"order": SimpleNamespace()}, {"order": {}}])
def test_argument_that_is_not_there_is_refused(missing):
    with pytest.raises(InvalidKey, match=r"order\.id"):
        Template("{order.id}", names=("order",)).render(arguments=missing)


@pytest.mark.parametrize(
    "text",
    ["{order.__class__}", "{order._secret}", "{order.a b}", "{order.}", "{order.x[0]}", "{order.01}", "{order.-1}"],
)
def test_nothing_private_can_be_reached_through_an_argument(text):
    with pytest.raises(ConfigurationError):
        Template(text, names=("order",))


@pytest.mark.parametrize("text", ["{principal}", "{oder}", "{order:x}", "{path.id}"])
def test_function_has_only_its_own_arguments(text):
    with pytest.raises(ConfigurationError, match=r"choose from \{order\}"):
        Template(text, names=("order",))


# ── The text of a value ───────────────────────────────────────────────────────────────────────────────────────────────


class Colour(Enum):
    RED = "red"


class Level(IntEnum):
    HIGH = 3


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("42", "42"),
        (42, "42"),
        (-7, "-7"),
        (100.0, "100"),
        (Decimal("100.00"), "100"),
        (Decimal("1E+2"), "100"),
        (-0.0, "0"),
        (0.1, "0.1"),
        (1e-7, "0.0000001"),
        (Decimal("1E-7"), "0.0000001"),
        (9007199254740993, "9007199254740993"),
        (True, "true"),
        (False, "false"),
        (Colour.RED, "red"),
        (Level.HIGH, "3"),
        (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (date(2026, 2, 19), "2026-02-19"),
        (datetime(2026, 2, 19, 12), "2026-02-19T12%3A00%3A00"),
        (NOON, "2026-02-19T12%3A00%3A00+00%3A00"),
        (NOON.astimezone(timezone(timedelta(hours=2))), "2026-02-19T12%3A00%3A00+00%3A00"),
        (msgspec.Raw(b"100.50"), "100.5"),
        (msgspec.Raw(b"1e+3"), "1000"),
    ],
)
def test_equal_values_have_one_text(value, text):
    assert body_name(value) == text


@pytest.mark.parametrize("document", [b'{"x": 100}', b'{"x": 100.00}', b'{"x": 1e2}', b'{"x": "100"}'])
def test_body_that_was_read_without_loss_can_be_named(document):
    assert Template("{body.x}").render(body=read_json(document)[0]) == "100"


@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        float("inf"),
        Decimal("NaN"),
        Decimal("1E+1000000"),
        Decimal("1E-1000000"),
        pytest.param(10**5000, id="huge"),
        pytest.param(-(10**5000), id="-huge"),
    ],
)
def test_absurd_numbers_are_refused(value):
    with pytest.raises(InvalidKey, match="number"):
        body_name(value)


@pytest.mark.parametrize("number", [b"15e999999999999999999", b"-15e999999999999999999", b"0.1e-999999999999999999"])
def test_absurd_numbers_in_a_body_are_refused_too(number):
    """Never a 500."""
    with pytest.raises(InvalidKey, match="number"):
        Template("{body.x}").render(body=read_json(b'{"x": %b}' % number)[0])


@given(st.one_of(st.integers(-(10**30), 10**30), st.floats(allow_nan=False, allow_infinity=False)))
def test_numbers_are_named_exactly(number):
    name = Template("{body.x}", max_length=400).render(body={"x": number})
    assert Decimal(name) == Decimal(repr(number))


# ── Ambiguity ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(st.lists(TEXTS, min_size=3, max_size=3), st.lists(TEXTS, min_size=3, max_size=3))
def test_templates_are_injective_in_their_values(one, other):
    template = Template("pre{principal}:{path.id}-x:y~{body.x}post")

    def name(values: list[str]) -> str:
        return template.render(principal=values[0], path={"id": values[1]}, body={"x": values[2]})

    assume(one != other)
    assert name(one) != name(other)


def test_value_cannot_forge_a_delimiter():
    template = Template("{principal}:{body.x}")
    assert template.render(principal="a:", body={"x": "b"}) != template.render(principal="a", body={"x": ":b"})


def test_long_name_ends_in_digest_that_cannot_be_forged():
    template = Template("{principal}:{body.x}")
    long = template.render(principal="p", body={"x": "x" * 100_000})
    assert len(long) == 255
    assert long != template.render(principal="p", body={"x": "x" * 100_001})
    assert long != template.render(principal="p", body={"x": long[2:]})


# ── Mistakes are found at load time ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("", "must not be empty"),
        ("{", "unbalanced '{'"),
        ("a}b", "unbalanced '}'"),
        ("{principal}}", "unbalanced '}'"),
        ("{}", "unknown field"),
        ("{ principal }", "did you mean 'principal'"),
        ("{principle}", "did you mean 'principal'"),
        ("{bdy.x}", "did you mean 'body.'"),
        ("{body}", "did you mean 'body"),
        ("{principal.name}", "unknown field"),
        ("{path.}", "unknown field"),
        ("{window}", "did you mean 'window:'"),
        ("{window:soon}", "not a duration"),
        ("{window:0s}", "whole seconds"),
        ("{window:1500ms}", "whole seconds"),
        ("{date:Amerika/New_York}", "did you mean 'America/New_York'"),
        ("{date:America}", "time zone 'America' is unknown"),
        ("{date:../UTC}", "is unknown"),
        ("{body:x}", "begin it with '/'"),
        ("{body:/a~2}", "write '~' as '~0'"),
        ("{path.idd}", r"did you mean 'id'.*\{path\.id\}"),
        ("{principal}{path.id}", "needs a ':' before {path.id}"),
        ("{principal}-{path.id}", "needs a ':' before {path.id}"),
    ],
)
def test_error_message_names_the_fix(text, hint):
    with pytest.raises(ConfigurationError, match=hint):
        Template(text, path_params=("id",))


def test_path_without_parameters_says_so():
    with pytest.raises(ConfigurationError, match="parameters are none"):
        Template("{path.id}", path_params=())


def test_template_needs_room_for_the_digest():
    with pytest.raises(ConfigurationError, match="65 or more"):
        Template("{principal}", max_length=64)
    assert len(Template("{principal}", max_length=65).render(principal="x" * 100)) == 65


def test_templates_are_equal_when_their_text_is():
    assert Template("{principal}") == Template("{principal}")
    assert hash(Template("{principal}")) == hash(Template("{principal}"))
    assert Template("{principal}") != Template("{tenant}")


@given(st.lists(st.text(max_size=5), min_size=1, max_size=4), st.integers())
def test_pointer_finds_what_stands_at_its_steps(steps, value):
    document: object = value
    for step in reversed(steps):
        document = {step: document}
    text = "".join("/" + step.replace("~", "~0").replace("/", "~1") for step in steps)
    assert parse_pointer(text) == tuple(steps)
    assert value_at(document, steps) == value
