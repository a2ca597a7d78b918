"""Fingerprints of Python values, such as the arguments of a function."""

from __future__ import annotations

import datetime
import enum
import os
import subprocess
import sys
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from hashlib import sha256
from types import MappingProxyType
from typing import Any, ClassVar
from uuid import UUID

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncemore._fingerprint.canonical import exact_value, read_json, write_json
from oncemore._fingerprint.fingerprint import fingerprint_of
from oncemore.errors import ConfigurationError, InvalidPayload

UID = UUID("8e03978e-40d5-43dd-bc93-6894a57f9324")


@dataclass
class Line:
    sku: str
    price: Any
    unit: ClassVar[str] = "EUR"


class Order(msgspec.Struct):
    sku: str
    price: Any


class Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    sku: str
    price: Any


class Color(enum.Enum):
    RED = "red"
    PAIR = (1, Decimal("2.0"))


class Level(enum.IntEnum):
    LOW = 1


class Amount(int):
    pass


class Name(str):
    def __str__(self) -> str:
        return "someone else"


class Rate(float):
    def __repr__(self) -> str:
        return "a rate"


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "form"),
    [
        (None, "null"),
        (True, "true"),
        (1, "1"),
        (-0.0, "0"),
        (100.0, "100"),
        (0.1, "0.1"),
        (1e16, "10000000000000000"),
        (1e22, "1e+22"),
        (1.5e-7, "1.5e-7"),
        (10**21, "1e+21"),
        (Decimal("100.00"), "100"),
        (Decimal("1E+2"), "100"),
        (Decimal("0.10000000000000000001"), "0.10000000000000000001"),
        (Decimal("-0.00"), "0"),
        (Amount(5), "5"),
        (Name("me"), '"me"'),
        (Rate(0.5), "0.5"),
        (Level.LOW, "1"),
        (Color.RED, '"red"'),
        (Color.PAIR, "[1,2]"),
        (UID, f'"{UID}"'),
        (b"abc", '"YWJj"'),
        (bytearray(b"abc"), '"YWJj"'),
        (memoryview(b"abc"), '"YWJj"'),
        (datetime.date(2025, 3, 1), '"2025-03-01"'),
        (datetime.datetime(2025, 3, 1, 12, 0, 0, 5, datetime.UTC), '"2025-03-01T12:00:00.000005Z"'),
        (datetime.datetime(2025, 3, 1), '"2025-03-01T00:00:00"'),
        (datetime.time(1, 2, 3), '"01:02:03"'),
        (datetime.timedelta(days=1), '"P1D"'),
        ((1, [2]), "[1,[2]]"),
        (Point(1, 2), "[1,2]"),
        (OrderedDict(b=1, a=2.0), '{"a":2,"b":1}'),
        (MappingProxyType({"a": 1}), '{"a":1}'),
        (
            {1.50: "a", UID: "b", None: "c", True: "d", (1,): "e"},
            f'{{"1.5":"a","{UID}":"b","[1]":"e","null":"c","true":"d"}}',
        ),
        (Line("a", Decimal("1.50")), '{"price":1.5,"sku":"a"}'),
        (Order("a", {2.0}), '{"price":[2],"sku":"a"}'),
        (Model(sku="a", price=1.50), '{"price":1.5,"sku":"a"}'),
        (Model(sku="a", price=1, more=[2]), '{"more":[2],"price":1,"sku":"a"}'),  # type: ignore[call-arg]
        ({"é": "\U0001f600", "\U0001f600": 1, "\ue000": 2}, '{"é":"\U0001f600","\U0001f600":1,"\ue000":2}'),
    ],
)
def test_value_counts_as_what_it_holds(value: Any, form: str) -> None:
    assert write_json(exact_value(value)).decode() == form


def test_integer_of_thousands_of_digits_is_exact() -> None:
    assert write_json(exact_value(-(10**5000) - 1)).decode() == "-1." + "0" * 4999 + "1e+5000"


def test_fingerprint_of_a_value_says_what_it_is() -> None:
    assert fingerprint_of({"b": 1.0, "a": "x"}) == "v1:" + sha256(b'v1\n\n{"a":"x","b":1}').hexdigest()


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_float_has_the_form_of_its_shortest_text(number: float) -> None:
    form = write_json(exact_value(number))
    assert form == read_json(repr(number).encode())[1]
    assert float(form) == number


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity"])
def test_what_is_no_number_is_itself_alone(text: str) -> None:
    assert fingerprint_of(float(text)) == fingerprint_of(Decimal(text))
    assert fingerprint_of(float(text)) not in {fingerprint_of(other) for other in (None, text, 0)}


def test_signals_and_infinities_are_told_apart() -> None:
    assert fingerprint_of(Decimal("sNaN")) == fingerprint_of(float("nan"))
    assert len({fingerprint_of(float(text)) for text in ("nan", "inf", "-inf")}) == 3


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        (0, False),
        (None, "null"),
        (1, "1"),
        ([], {}),
        ("", None),
        ([[]], []),
        ({"a": None}, {}),
        (2**53, 2**53 + 1),
    ],
)
def test_different_values_have_different_fingerprints(one: Any, other: Any) -> None:
    assert fingerprint_of(one) != fingerprint_of(other)


def test_set_has_one_fingerprint_in_every_process() -> None:
    """The order of a set of strings differs from process to process."""
    code = (
        "from oncemore._fingerprint.fingerprint import fingerprint_of as f; "
        "print(f({'a', 1, None, ('x', 2.50)} | {*'bcdefg'}))"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(runs) == 1


@pytest.mark.parametrize("value", [{1: "a", "1": "b"}, {"x": [{None: 1, "null": 2}]}])
def test_keys_that_json_would_merge_are_refused(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="same name"):
        fingerprint_of(value)


@pytest.mark.parametrize("value", [object(), 1j, Fraction(1, 3), range(3), Line, Model, Order, iter([]), len])
def test_value_without_a_form_is_refused_by_name(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="has no fingerprint"):
        fingerprint_of([value])


@pytest.mark.parametrize("value", ["\ud800", {"\udfff": 1}, ["a", {"b": ("\ud83d",)}], {"\ud800"}])
def test_half_a_character_is_refused(value: Any) -> None:
    with pytest.raises(InvalidPayload, match="half a character"):
        fingerprint_of(value)


def test_value_that_contains_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append({"again": endless})
    with pytest.raises(InvalidPayload, match="contains itself"):
        fingerprint_of(endless)
