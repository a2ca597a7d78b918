"""The classes of results: those in annotations, and their names, equal if a module is run, imported or spawned."""

from __future__ import annotations

import dataclasses
import enum
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import (
    Annotated,  # noqa: F401 - named in an annotation below
    Any,
    Generic,
    Literal,  # noqa: F401
    NamedTuple,
    NewType,
    Optional,  # noqa: F401
    Protocol,
    TypedDict,
    TypeVar,
)

import pydantic
import pytest

from oncemore._ledger.classes import annotated_classes, can_be_returned, classes_by_name, module_of


def as_program(monkeypatch: pytest.MonkeyPatch, name: str = "__main__", **module: Any) -> str:
    """The name of a class's module, if the program is such a module."""
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(**module))
    return module_of(type("Receipt", (), {"__module__": name}))


def test_module_name_of_a_program_is_its_import_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert as_program(monkeypatch, __spec__=SimpleNamespace(name="shop.worker")) == "shop.worker"
    assert as_program(monkeypatch, __spec__=None, __file__="/srv/shop/worker.py") == "worker"
    assert as_program(monkeypatch, "__mp_main__", __spec__=None, __file__="/srv/shop/worker.py") == "worker"


def test_module_name_of_typed_in_code_is_main(monkeypatch: pytest.MonkeyPatch) -> None:
    assert as_program(monkeypatch) == "__main__"
    assert as_program(monkeypatch, __spec__=None, __file__="<stdin>") == "__main__"


@pytest.mark.parametrize(("file", "name"), [("/srv/tasks.py", "tasks"), ("/srv/shop.pyz/__main__.py", "__main__")])
def test_spec_named_main_is_ignored(monkeypatch: pytest.MonkeyPatch, file: str, name: str) -> None:
    """cProfile and coverage make one for a script, and Python itself for a zipped application."""
    assert as_program(monkeypatch, __spec__=SimpleNamespace(name="__main__"), __file__=file) == name


def test_module_name_without_a_program_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """An embedded interpreter may have no program, and a class may come from another process."""
    monkeypatch.delitem(sys.modules, "__mp_main__", raising=False)
    assert module_of(type("Receipt", (), {"__module__": "__mp_main__"})) == "__mp_main__"
    assert module_of(Path) == Path.__module__


def test_module_name_of_a_function_is_from_its_globals() -> None:
    program = {"__name__": "__main__", "__spec__": None, "__file__": "/srv/tasks.py"}
    exec("def work(): ...", program)
    assert module_of(program["work"]) == "tasks"


# What annotations name


class Colour(enum.Enum):
    RED = "r"


@dataclasses.dataclass
class Line:
    colour: Colour
    parent: Line | None = None


@dataclasses.dataclass
class Order:
    lines: list[Line]


class Refund(NamedTuple):
    order: Order


class Shipped(TypedDict):
    order: Order


T = TypeVar("T")


@dataclasses.dataclass
class Page(Generic[T]):
    items: list[T]


class Listing(pydantic.BaseModel, Generic[T]):
    items: list[T]


class Alias:
    """The object that `type Orders = list[Order]` makes, from Python 3.12 on."""

    def __init__(self, value: Any) -> None:
        self.__value__ = value

    def __call__(self) -> None: ...  # typing takes only what can be called


Number = NewType("Number", Order)
Orders = Alias(list[Order])
Recursive = Alias(None)
Recursive.__value__ = tuple[Order, Recursive]  # type: ignore[valid-type]


class Unreadable:
    pass


@dataclasses.dataclass
class Hidden:
    order: Order
    session: NotImported  # type: ignore[name-defined] # noqa: F821


class Countable(Protocol):
    def count(self) -> int: ...


def returning(annotation: Any) -> tuple[type, ...]:
    def function() -> None: ...

    function.__annotations__ = {"return": annotation, "session": "NotImportedAtRunTime"}
    return annotated_classes(function, "return")


@pytest.mark.parametrize(
    ("annotation", "named"),
    [
        ("Order", [Order]),
        ("Order | None", [Order]),
        ("Optional[Order]", [Order]),
        ("list[Order]", [Order]),
        ("dict[str, tuple[Order, ...]]", [Order]),
        ("Order | Refund", [Order, Refund]),
        (list["Order"], [Order]),  # type: ignore[type-arg]
        ("Annotated[Order, 'metadata']", [Order]),
        ("Page[Order]", [Page, Order]),
        ("Number", []),
        ("Orders", [Order]),
        ("Recursive", []),
        ("Literal[Colour.RED, 'x']", [Colour]),
        ("int", []),
        ("Any", []),
        ("None", []),
        ("T", []),
        ("NotImportedAtRunTime", []),
        ("not even an annotation", []),
    ],
    ids=str,
)
def test_annotation_names_its_classes(annotation: Any, named: list[type]) -> None:
    assert list(returning(annotation)) == named


def take(order: Order, refund: Refund, session: NotImported) -> int:  # type: ignore[name-defined] # noqa: F821
    return 1


class Taking:
    def __call__(self) -> Order: ...  # type: ignore[empty-body]


def test_annotations_are_found_on_every_kind_of_callable() -> None:
    assert annotated_classes(take, "order", "session", "refund", "other") == (Order, Refund)
    assert annotated_classes(functools.partial(take, 1), "order") == (Order,)
    assert annotated_classes(functools.wraps(take)(lambda *args: None), "order") == (Order,)
    assert annotated_classes(Taking(), "return") == annotated_classes(Taking().__call__, "return") == (Order,)
    assert annotated_classes(lambda: None, "return") == annotated_classes(len, "return") == ()


class Failing:
    """A function whose annotations cannot be evaluated, as in Python 3.14."""

    __globals__: dict[str, Any] = {}  # noqa: RUF012

    @property
    def __annotations__(self) -> dict[str, Any]:  # type: ignore[override]
        raise NameError("NotImportedAtRunTime")

    def __call__(self) -> Order: ...  # type: ignore[empty-body]


def test_annotations_that_fail_to_evaluate_name_no_class() -> None:
    assert annotated_classes(Failing(), "return") == ()


@pytest.mark.parametrize(
    ("kinds", "named"),
    [
        ([Refund], {"Refund", "Order", "Line", "Colour"}),
        ([Shipped], {"Order", "Line", "Colour"}),
        ([Listing[Line]], {"Listing[Line]", "Line", "Colour"}),
        ([Page, Colour, Page], {"Page", "Colour"}),
        ([Unreadable, int], set()),
        ([Hidden], {"Hidden"}),
    ],
    ids=["named tuple", "typed dict", "generic model", "generic class", "no data", "unknown at run time"],
)
def test_fields_name_classes_all_the_way_down(kinds: list[type], named: set[str]) -> None:
    assert set(classes_by_name(tuple(kinds))) == {f"{__name__}:{name}" for name in named}


@pytest.mark.parametrize("kind", [Order, Colour, object, Mapping, Sequence, Countable, Shipped])
def test_class_of_storable_values_can_be_returned(kind: type) -> None:
    assert can_be_returned(kind, ())


@pytest.mark.parametrize("kind", [Unreadable, Iterator, type, Callable, ValueError, threading.Thread])
def test_class_of_unstorable_values_cannot_be_returned(kind: Any) -> None:
    assert not can_be_returned(kind, (Order, Unreadable))


def test_base_class_can_be_returned_if_storable_subclass_is_named() -> None:
    @dataclasses.dataclass
    class Readable(Unreadable):
        number: int

    assert can_be_returned(Unreadable, (Readable,))
