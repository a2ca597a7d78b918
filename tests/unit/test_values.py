"""Values: built-in types replay equal and of the same type; other values leave a tombstone, and nothing is pickled."""

from __future__ import annotations

import datetime
import decimal
import math
import pickle
import sys
import uuid
from contextlib import suppress
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncemore._ledger.model import Outcome
from oncemore._ledger.values import (
    DEEPEST,
    NOTHING,
    encode,
    error_outcome,
    from_plain,
    replayed,
    to_plain,
    value_outcome,
)
from oncemore.errors import CorruptRecord, OutcomeNotKept

ZONES = [None, datetime.UTC, ZoneInfo("Europe/Berlin"), ZoneInfo("America/New_York"), ZoneInfo("UTC")]
offsets = st.builds(
    datetime.timezone,
    st.timedeltas(datetime.timedelta(hours=-23), datetime.timedelta(hours=23)),
)
zones = st.sampled_from(ZONES) | offsets
folds = st.sampled_from([0, 1])


def with_fold(moment: Any, fold: int) -> Any:
    return moment.replace(fold=fold)


datetimes = st.builds(with_fold, st.datetimes(timezones=zones), folds)
times = st.builds(with_fold, st.times(timezones=zones), folds)
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**400), 10**400)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.builds(bytearray, st.binary())
    | st.uuids()
    | st.decimals(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | datetimes
    | times
    | st.dates()
    | st.timedeltas()
)
hashable = st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.uuids() | st.dates()
keys = st.recursive(hashable, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=4)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.just("~") | st.just("v"), inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4)
        | st.sets(keys, max_size=4)
        | st.frozensets(keys, max_size=4)
    ),
    max_leaves=20,
)


def typed(value: Any) -> Any:
    """A value with its types, all the way down, so that 1 is neither True nor 1.0."""
    match value:
        case dict():
            return dict, tuple((typed(key), typed(item)) for key, item in value.items())
        case list() | tuple():
            return type(value), tuple(map(typed, value))
        case set() | frozenset():
            return type(value), frozenset(map(typed, value))
        case bytearray():
            return bytearray, bytes(value)
        case _:
            return type(value), value


def again(value: Any) -> Any:
    outcome = value_outcome(value)
    assert outcome.kind == "value", outcome.body
    return replayed(outcome)


@given(values)
def test_built_in_value_replays_equal_and_of_same_type(value: Any) -> None:
    assert typed(again(value)) == typed(value)


@pytest.mark.parametrize("value", [[], {}, 0, 0.0, False, "", None, (), set(), b"", decimal.Decimal(0)], ids=repr)
def test_falsy_value_replays_as_itself(value: Any) -> None:
    result = again(value)
    assert result == value
    assert type(result) is type(value)


def test_none_has_the_outcome_nothing() -> None:
    assert value_outcome(None) == NOTHING


@pytest.mark.parametrize("text", ["NaN", "-NaN", "sNaN123", "-0", "0E-10", "1E+5", "100.00", "Infinity", "-Infinity"])
def test_decimal_keeps_sign_exponent_and_payload(text: str) -> None:
    assert str(again(decimal.Decimal(text))) == text


@pytest.mark.parametrize("number", [math.inf, -math.inf, -0.0, 5e-324])
def test_float_is_kept_to_the_last_bit(number: float) -> None:
    assert again(number).hex() == number.hex()
    assert math.isnan(again(math.nan))


def test_integer_beyond_the_print_limit_replays() -> None:
    number = 7 ** (2 * sys.get_int_max_str_digits())
    assert again(-number) == -number


@given(datetimes)
def test_datetime_keeps_wall_clock_zone_and_fold(moment: datetime.datetime) -> None:
    result = again(moment)
    assert result == moment
    assert result.replace(tzinfo=None) == moment.replace(tzinfo=None)
    assert (result.fold, result.utcoffset()) == (moment.fold, moment.utcoffset())
    if isinstance(moment.tzinfo, ZoneInfo):
        assert result.tzinfo is moment.tzinfo


def test_ambiguous_hour_replays_equal() -> None:
    """Such a moment equals no moment in another zone, so that an offset alone would not do."""
    moment = datetime.datetime(2024, 10, 27, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=1)
    assert moment != moment.astimezone(datetime.UTC)
    assert again(moment) == moment


def test_unknown_time_zone_replays_as_its_offset() -> None:
    body = encode({"~": "datetime", "v": ["2024-07-01T12:00:00", 0, 5 * 3600 * 10**6, "Atlantis/Capital"]})
    result = replayed(Outcome("value", body=body))
    assert result == datetime.datetime(2024, 7, 1, 7, tzinfo=datetime.UTC)


class Sundial(datetime.tzinfo):
    """Neither fixed nor from zoneinfo."""

    def utcoffset(self, when: datetime.datetime | None) -> datetime.timedelta:
        return datetime.timedelta(hours=2, seconds=5)

    def dst(self, when: datetime.datetime | None) -> None:
        return None


def test_own_tzinfo_class_replays_as_its_offset() -> None:
    moment = datetime.datetime(2024, 7, 1, 12, tzinfo=Sundial())
    assert again(moment) == moment


def test_stored_value_is_plain_messagepack() -> None:
    body = value_outcome({"id": uuid.UUID(int=1), "amount": decimal.Decimal("9.50")}).body
    assert msgspec.msgpack.decode(body) == {
        "id": {"~": "uuid", "v": "00000000-0000-0000-0000-000000000001"},
        "amount": {"~": "decimal", "v": "9.50"},
    }


STORED = [  # the stored form of each built-in type is a promise: old records must be readable for ever
    (None, None),
    (True, True),
    (2**64, {"~": "int", "v": "0x10000000000000000"}),
    (-5, -5),
    (1.5, 1.5),
    ("text", "text"),
    (b"bytes", b"bytes"),
    (bytearray(b"x"), {"~": "bytearray", "v": b"x"}),
    (decimal.Decimal("1.50"), {"~": "decimal", "v": "1.50"}),
    (datetime.date(2024, 2, 29), {"~": "date", "v": "2024-02-29"}),
    (datetime.time(12, 30), {"~": "time", "v": ["12:30:00", 0, None, None]}),
    (datetime.datetime(2024, 7, 1, tzinfo=datetime.UTC), {"~": "datetime", "v": ["2024-07-01T00:00:00", 0, 0, None]}),
    (
        datetime.datetime(2024, 7, 1, tzinfo=ZoneInfo("Europe/Berlin"), fold=1),
        {"~": "datetime", "v": ["2024-07-01T00:00:00", 1, 7200 * 10**6, "Europe/Berlin"]},
    ),
    (datetime.timedelta(1, 2, 3), {"~": "timedelta", "v": [1, 2, 3]}),
    (1 + 2j, {"~": "complex", "v": [1.0, 2.0]}),
    ([1, (2,)], [1, {"~": "tuple", "v": [2]}]),
    ({1}, {"~": "set", "v": [1]}),
    (frozenset({1}), {"~": "frozenset", "v": [1]}),
    ({"a": 1}, {"a": 1}),
    ({1: 2}, {"~": "dict", "v": [[1, 2]]}),
    ({"~": 1}, {"~": "dict", "v": [["~", 1]]}),
]


@pytest.mark.parametrize(("value", "plain"), STORED, ids=lambda each: repr(each)[:30])
def test_stored_form_of_built_in_type_never_changes(value: Any, plain: Any) -> None:
    body = value_outcome(value).body
    assert msgspec.msgpack.decode(body) == plain
    assert typed(replayed(Outcome("value", body=msgspec.msgpack.encode(plain)))) == typed(value)


# What cannot be stored: the effect has happened, so there is a tombstone and never an exception


class Session:
    pass


class Text(str):
    pass


def endless() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def deep(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [
        Session(),
        Session,
        Text("a str, but not only"),
        len,
        endless(),
        deep(DEEPEST + 1),
        "\ud800",
        {"\ud800": 1},
        [object()],
        {Session(): 1},
        (item for item in "generator"),
        ValueError("returned, not raised"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_unstorable_value_leaves_tombstone_with_reason(value: Any) -> None:
    outcome = value_outcome(value)
    assert outcome.kind == "tombstone"
    with pytest.raises(OutcomeNotKept, match=r"The function ran, but its result was not kept: .+"):
        replayed(outcome)


def test_deepest_value_is_read_from_a_deep_stack() -> None:
    value = deep(DEEPEST - 1)
    outcome = value_outcome(value)

    def from_below(frames: int) -> Any:
        return from_below(frames - 1) if frames else replayed(outcome)

    assert from_below(200) == value


def test_response_is_not_replayed_as_a_value() -> None:
    with pytest.raises(OutcomeNotKept):
        replayed(Outcome("response", 200, body=b"hello"))


# A stored value may be damaged, or written by an attacker


class Chosen(Exception):
    pass


TAGGED = ["int", "uuid", "decimal", "datetime", "time", "date", "timedelta", "complex", "tuple", "set", "frozenset"]
TAGGED += ["dict", "object", "bytearray", "no such tag"]
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["~", "v", "x"]) | st.text(), inner, max_size=3)
        | st.builds(lambda tag, value: {"~": tag, "v": value}, st.sampled_from(TAGGED), inner)
    ),
    max_leaves=12,
)


@given(st.sampled_from(["value", "error"]), plain.map(encode) | st.binary())
def test_damaged_bytes_are_a_corrupt_record(kind: Any, body: bytes) -> None:
    with suppress(CorruptRecord, OutcomeNotKept, Chosen):
        replayed(Outcome(kind, body=body), (Chosen,))


@given(values, st.data())
def test_truncated_value_is_a_corrupt_record(value: Any, data: st.DataObject) -> None:
    body = value_outcome(value).body
    cut = data.draw(st.integers(0, len(body) - 1))
    with pytest.raises(CorruptRecord):
        replayed(Outcome("value", body=body[:cut]))


@pytest.mark.parametrize(
    "plain",
    [
        {"~": "object", "v": ["os:system", {"command": "true"}]},
        {"~": "object", "v": ["builtins:eval", {}]},
        {"~": "object", "v": ["subprocess:Popen", {"args": ["true"]}]},
        {"~": "object", "v": ["tests.unit.test_values:Session", {}]},
        {"~": "object", "v": ["no.such.module:Thing", {}]},
        {"~": "object", "v": ["http:HTTPStatus", {}]},
        {"~": "object", "v": ["os:environ", "PATH"]},
        {"~": "object", "v": ["os:environ.data", "PATH"]},
        {"~": "object", "v": ["http:HTTPStatus", "NO_SUCH_STATUS"]},
        {"~": "object", "v": ["builtins:exec", "raise SystemExit"]},
        {"~": "object", "v": ["re:RegexFlag", "X"]},
    ],
    ids=lambda plain: str(plain["v"][0]),
)
def test_crafted_record_cannot_name_code(plain: dict[str, Any]) -> None:
    with pytest.raises(CorruptRecord, match="The stored result cannot be read"):
        replayed(Outcome("value", body=encode(plain)))


def test_crafted_record_imports_no_module() -> None:
    sys.modules.pop("antigravity", None)
    with pytest.raises(CorruptRecord):
        replayed(Outcome("value", body=encode({"~": "object", "v": ["antigravity:fly", {}]})))
    assert "antigravity" not in sys.modules


def test_pickle_is_not_read() -> None:
    with pytest.raises(CorruptRecord):
        replayed(Outcome("value", body=pickle.dumps({"a": 1})))


@pytest.mark.parametrize(
    "name", ["builtins:SystemExit", "os:system", "no.such.module:Error", "tests.unit.test_values:Session"]
)
def test_crafted_error_outside_errors_is_not_raised(name: str) -> None:
    with pytest.raises(OutcomeNotKept, match=f"raised {name} the first time"):
        replayed(Outcome("error", body=encode([name, {"~": "tuple", "v": ["x"]}, {}])), (ValueError, KeyError))


def test_from_plain_reverses_to_plain() -> None:
    value = {"~": "a mark of one's own", "v": [1, (2, 3)]}
    assert from_plain(to_plain(value), {}) == value


def test_error_outside_errors_is_reported_by_name() -> None:
    with pytest.raises(
        OutcomeNotKept, match="The function raised builtins:KeyError the first time; add it to `errors`"
    ):
        replayed(error_outcome(KeyError("x")), (ValueError,))
