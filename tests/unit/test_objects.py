"""Objects replay as themselves if their class is named: hidden attributes and all, and across upgrades."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import typing
from collections import namedtuple
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import attrs
import msgspec
import pydantic
import pydantic.dataclasses
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncemore._ledger.model import Outcome
from oncemore._ledger.values import encode, replayed, value_outcome
from oncemore.errors import CorruptRecord, OutcomeNotKept


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
    """Its __init__ would change or refuse the stored attributes."""

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


@attrs.frozen
class Sealed:
    number: int
    notes: list[str] = attrs.field(factory=list)


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
    Sealed(1, ["x"]),
    Point(1),
    Typed("a", Point(1, [Frozen(2)])),
    {"nested": [Plain(Decimal(1)), {Colour.RED: Struct(id=2)}, {Frozen(1)}]},
]


TYPES: tuple[type, ...] = (
    *(Colour, Level, Word, Right, Bit, Typed.Nested),
    *(Plain, Frozen, Careful, Child, Struct, Counting, Model, Listed, Checked, Sealed, Point, Typed),
)


def again(value: Any) -> Any:
    outcome = value_outcome(value, TYPES)
    assert outcome.kind == "value", outcome.body
    return replayed(outcome, types=TYPES)


@pytest.mark.parametrize("value", OBJECTS, ids=repr)
def test_object_of_named_class_replays_as_itself(value: Any) -> None:
    result = again(value)
    assert result == value
    assert type(result) is type(value)


def test_post_init_does_not_run_again_at_replay() -> None:
    value = Careful(100, 19)
    result = again(value)
    assert vars(result) == vars(value) == {"net": 119, "rounds": 1, "gross": 238}


def test_struct_is_not_changed_by_its_own_post_init() -> None:
    assert again(Counting(1)).count_all == 2


def test_model_keeps_private_extra_and_set_attributes() -> None:
    value = model()
    result = again(value)
    assert (result._secret, result.model_extra) == (7, {"more": [1]})
    assert result.model_fields_set == value.model_fields_set
    assert result.model_dump(exclude_unset=True) == value.model_dump(exclude_unset=True)


def test_model_made_without_validation_replays_as_it_was() -> None:
    value = Model.model_construct(amount="not a number")
    assert again(value).amount == "not a number"


def test_enum_member_replays_as_the_same_object() -> None:
    assert again([Colour.RED, Level.LOW]) == [Colour.RED, Level.LOW]
    assert again(Colour.CRIMSON) is Colour.RED


@given(st.recursive(st.integers(), lambda inner: st.builds(Frozen, inner, inner) | st.builds(Typed, st.text(), inner)))
def test_nested_objects_replay(value: Any) -> None:
    assert again(value) == value


# What cannot be made again, or not as the same, is not stored


def local_class() -> Any:
    @dataclasses.dataclass
    class Local:
        a: int = 1

    return Local()


def test_class_defined_inside_a_function_replays_if_named() -> None:
    value = local_class()
    kind = type(value)
    assert replayed(value_outcome(value, (kind,)), types=(kind,)) == value


def test_object_of_unnamed_class_leaves_tombstone_that_says_the_remedy() -> None:
    outcome = value_outcome([Frozen(1)], (Plain,))
    with pytest.raises(OutcomeNotKept, match=r"test_objects:Frozen is not among .* or write types=\(Frozen,\)"):
        replayed(outcome, types=(Plain,))


def test_subclass_of_a_named_class_is_not_stored() -> None:
    assert value_outcome(Child(1), (Frozen,)).kind == "tombstone"
    assert value_outcome(Child(1), (Frozen, Child)).kind == "value"


def test_namesake_of_a_named_class_is_not_stored() -> None:
    first, second = local_class(), local_class()
    assert value_outcome(first, (type(second),)).kind == "tombstone"


@dataclasses.dataclass
class Counter(dict):  # type: ignore[type-arg]
    """The items of a dict are not among its attributes."""

    a: int = 1


def half_made() -> Counting:
    value = Counting(1)
    del value.count_all
    return value


@pytest.mark.parametrize("make", [half_made, lambda: Counter(2), lambda: Plain], ids=["half made", "dict", "class"])
def test_object_that_cannot_be_made_again_leaves_a_tombstone(make: Any) -> None:
    assert value_outcome(make()).kind == "tombstone"


def test_object_with_unstorable_attribute_leaves_a_tombstone() -> None:
    outcome = value_outcome(Frozen(1, inner=object()))
    assert (outcome.kind, b"A object cannot be stored" in outcome.body) == ("tombstone", True)


# A record may be older than the class


def upgraded(old: Any, new: type) -> Any:
    """*old*, stored, and replayed after an upgrade that has made its class *new*."""
    outcome = value_outcome(old)
    assert outcome.kind == "value", outcome.body
    new.__module__, new.__qualname__ = type(old).__module__, type(old).__qualname__
    return replayed(outcome, types=(new,))


def test_field_gained_since_has_its_default() -> None:
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

    assert upgraded(Plain(Decimal(1)), NewPlain) == NewPlain(Decimal(1), [], "EUR", [])
    assert upgraded(Struct(id=1), NewStruct) == NewStruct(1, None, [])
    assert upgraded(model(), NewModel).notes == []
    assert upgraded(Point(1, 2), NewPoint) == NewPoint(1, 2, 5)


def test_field_lost_since_is_dropped() -> None:
    @dataclasses.dataclass(slots=True)
    class NewPlain:
        amount: Decimal

    class NewStruct(msgspec.Struct):
        id: int

    class NewPoint(typing.NamedTuple):
        y: int

    assert upgraded(Plain(Decimal(1)), NewPlain) == NewPlain(Decimal(1))
    assert upgraded(Struct(id=1), NewStruct) == NewStruct(1)
    assert upgraded(Point(1, 2), NewPoint) == NewPoint(2)


def test_required_field_gained_since_is_named_in_the_error() -> None:
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
            upgraded(old, new)


def test_class_no_longer_named_is_named_in_the_error() -> None:
    with pytest.raises(CorruptRecord, match=r"test_objects:Plain is not among the classes that the function names"):
        replayed(value_outcome([Plain(Decimal(1)), Colour.RED]), types=(Colour,))


@pytest.mark.parametrize(("name", "content"), [("Colour", {}), ("Plain", "RED"), ("Plain", 1), ("Right", "READ")])
def test_crafted_record_cannot_make_an_object_of_another_kind(name: str, content: Any) -> None:
    body = encode({"~": "object", "v": [f"{__name__}:{name}", content]})
    with pytest.raises(CorruptRecord):
        replayed(Outcome("value", body=body), types=(Colour, Plain, Right))


@dataclass
class Receipt:
    id: str
    amount: int


def test_object_without_classes_is_read_as_its_members() -> None:
    outcome = value_outcome(Receipt("r1", 5), None)
    assert replayed(outcome, types=None) == {"id": "r1", "amount": 5}
