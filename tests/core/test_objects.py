"""Data objects replay as themselves: classes, hidden attributes and all, and across upgrades."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import sys
import typing
from collections import namedtuple
from decimal import Decimal
from typing import Any

import msgspec
import pydantic
import pydantic.dataclasses
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncemore._ledger import objects
from oncemore._ledger.values import replayed, value_outcome
from oncemore.errors import CorruptRecord, OncemoreError

HERE = sys.modules[__name__]


class Colour(enum.Enum):
    RED = "r"
    CRIMSON = "r"  # noqa: PIE796 - another name for it
    MIXED = ("a", 1)


class Level(enum.IntEnum):
    LOW = 1


class Word(enum.StrEnum):
    YES = "yes"


class Right(enum.Flag):
    READ = 1
    WRITE = 2


class Bit(enum.IntFlag):
    ONE = 1
    TWO = 2


@dataclasses.dataclass
class Plain:
    amount: Decimal
    lines: list[Any] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    id: int
    inner: Any = None


@dataclasses.dataclass
class Careful:
    """Its __init__ would change or refuse what is stored."""

    net: int
    tax: dataclasses.InitVar[int] = 0
    rounds: int = dataclasses.field(init=False, default=0)

    def __post_init__(self, tax: int) -> None:
        self.net += tax
        self.rounds += 1
        self.gross = self.net * 2  # not a field, and still part of it


@dataclasses.dataclass(frozen=True)
class Child(Frozen):
    extra: str = ""


class Struct(msgspec.Struct, frozen=True, kw_only=True):
    id: int
    when: datetime.date | None = None


class Counting(msgspec.Struct, rename="camel"):
    count_all: int

    def __post_init__(self) -> None:
        self.count_all += 1


class Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")

    amount: Decimal
    currency: str = pydantic.Field("EUR", alias="cur")
    _secret: int = pydantic.PrivateAttr(0)


class Listed(pydantic.RootModel[list[int]]):
    pass


@pydantic.dataclasses.dataclass
class Checked:
    number: int


Point = namedtuple("Point", "x y", defaults=[0])


class Typed(typing.NamedTuple):
    name: str
    inner: Any = None

    class Nested(enum.Enum):
        ONE = 1


def model() -> Model:
    made = Model(amount=Decimal("1.50"), cur="USD", more=[1])  # type: ignore[call-arg]
    made._secret = 7
    return made


OBJECTS: list[Any] = [
    Colour.RED,
    Colour.CRIMSON,
    Colour.MIXED,
    Level.LOW,
    Word.YES,
    Right.READ,
    Right.READ | Right.WRITE,
    Right(0),
    Bit.ONE | Bit.TWO,
    Typed.Nested.ONE,
    Plain(Decimal("9.50"), [1, (2,)]),
    Frozen(1, Frozen(2)),
    Careful(100, 19),
    Child(1, inner={1: 2}, extra="x"),
    Struct(id=1, when=datetime.date(2024, 2, 29)),
    Counting(1),
    model(),
    Listed([1, 2]),
    Checked(3),
    Point(1),
    Typed("a", Point(1, [Frozen(2)])),
    {"nested": [Plain(Decimal(1)), {Colour.RED: Struct(id=2)}, {Frozen(1)}]},
]


def again(value: Any) -> Any:
    outcome = value_outcome(value)
    assert outcome.kind == "value", outcome.body
    return replayed(outcome)


@pytest.mark.parametrize("value", OBJECTS, ids=repr)
def test_a_data_object_replays_as_itself(value: Any) -> None:
    """CASES 30."""
    result = again(value)
    assert result == value
    assert type(result) is type(value)


def test_an_object_keeps_what_its_init_has_added_and_its_init_does_not_run_again() -> None:
    value = Careful(100, 19)
    result = again(value)
    assert vars(result) == vars(value) == {"net": 119, "rounds": 1, "gross": 238}


def test_a_struct_is_not_changed_by_its_own_post_init() -> None:
    assert again(Counting(1)).count_all == 2


def test_a_model_keeps_its_private_and_extra_attributes_and_knows_what_was_set() -> None:
    value = model()
    result = again(value)
    assert (result._secret, result.model_extra) == (7, {"more": [1]})
    assert result.model_fields_set == value.model_fields_set
    assert result.model_dump(exclude_unset=True) == value.model_dump(exclude_unset=True)


def test_a_model_that_was_never_valid_replays_as_it_was() -> None:
    value = Model.model_construct(amount="not a number")
    assert again(value).amount == "not a number"


def test_an_enum_member_is_the_very_same() -> None:
    assert again([Colour.RED, Level.LOW]) == [Colour.RED, Level.LOW]
    assert again(Colour.CRIMSON) is Colour.RED


@given(st.recursive(st.integers(), lambda inner: st.builds(Frozen, inner, inner) | st.builds(Typed, st.text(), inner)))
def test_objects_may_be_nested(value: Any) -> None:
    assert again(value) == value


# What would not be found again, or not be the same, is not stored


def local_class() -> Any:
    @dataclasses.dataclass
    class Local:
        a: int = 1

    return Local()


@dataclasses.dataclass
class Renamed:
    a: int = 1


Original = Renamed


@dataclasses.dataclass
class Counter(dict):  # type: ignore[type-arg]
    """What a dict holds is not among its attributes."""

    a: int = 1


def renamed() -> Any:
    """Of a class whose name means another one now."""
    value = Original()
    Original.__qualname__ = "Plain"
    return value


def half_made() -> Counting:
    value = Counting(1)
    del value.count_all
    return value


@pytest.mark.parametrize(
    "make", [local_class, renamed, half_made, lambda: Counter(2), lambda: Plain], ids=lambda make: make.__name__
)
def test_an_object_that_could_not_be_made_again_leaves_a_tombstone(make: Any) -> None:
    assert value_outcome(make()).kind == "tombstone"


def test_an_object_with_an_attribute_that_cannot_be_stored_leaves_a_tombstone() -> None:
    outcome = value_outcome(Frozen(1, inner=object()))
    assert (outcome.kind, b"A object cannot be stored" in outcome.body) == ("tombstone", True)


# A record may be older than the class


def upgraded(monkeypatch: pytest.MonkeyPatch, old: Any, new: type) -> Any:
    """*old*, stored, and replayed after an upgrade that has made its class *new*."""
    outcome = value_outcome(old)
    assert outcome.kind == "value", outcome.body
    monkeypatch.setattr(HERE, type(old).__name__, new)
    return replayed(outcome)


def test_a_field_gained_since_has_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass(slots=True)
    class NewPlain:
        amount: Decimal
        lines: list[Any]
        currency: str = "EUR"
        notes: list[str] = dataclasses.field(default_factory=list)

    class NewStruct(msgspec.Struct):
        id: int
        when: Any
        notes: list[str] = []

    class NewModel(pydantic.BaseModel):
        amount: Decimal
        currency: str
        notes: list[str] = pydantic.Field(default_factory=list)

    class NewPoint(typing.NamedTuple):
        x: int
        y: int
        z: int = 5

    assert upgraded(monkeypatch, Plain(Decimal(1)), NewPlain) == NewPlain(Decimal(1), [], "EUR", [])
    assert upgraded(monkeypatch, Struct(id=1), NewStruct) == NewStruct(1, None, [])
    assert upgraded(monkeypatch, model(), NewModel).notes == []
    assert upgraded(monkeypatch, Point(1, 2), NewPoint) == NewPoint(1, 2, 5)


def test_a_field_lost_since_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass(slots=True)
    class NewPlain:
        amount: Decimal

    class NewStruct(msgspec.Struct):
        id: int

    class NewPoint(typing.NamedTuple):
        y: int

    assert upgraded(monkeypatch, Plain(Decimal(1)), NewPlain) == NewPlain(Decimal(1))
    assert upgraded(monkeypatch, Struct(id=1), NewStruct) == NewStruct(1)
    assert upgraded(monkeypatch, Point(1, 2), NewPoint) == NewPoint(2)


def test_a_field_gained_since_without_a_default_is_told_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass
    class NewPlain:
        currency: str

    class NewStruct(msgspec.Struct):
        currency: str

    class NewModel(pydantic.BaseModel):
        code: str

    class NewPoint(typing.NamedTuple):
        z: int

    for old, new, name in [
        (Plain(Decimal(1)), NewPlain, "currency"),
        (Struct(id=1), NewStruct, "currency"),
        (model(), NewModel, "code"),
        (Point(1), NewPoint, "z"),
    ]:
        with pytest.raises(CorruptRecord, match=name):
            upgraded(monkeypatch, old, new)


def test_a_class_that_is_gone_is_told_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = value_outcome([Plain(Decimal(1)), Colour.RED])
    monkeypatch.delattr(HERE, "Plain")
    with pytest.raises(CorruptRecord, match=r"test_objects:Plain cannot be found again"):
        replayed(outcome)


def test_a_name_is_looked_up_without_running_a_modules_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HERE, "__getattr__", lambda name: pytest.fail("ran"), raising=False)
    with pytest.raises(OncemoreError, match="cannot be found again"):
        next(objects.classes_named(f"{__name__}:Missing", objects.is_data))
