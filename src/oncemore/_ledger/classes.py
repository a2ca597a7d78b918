"""The classes of results: their names, whether they can be stored, and the classes that an annotation names.

A stored object is read back only as a class that the function's return annotation, `types` or `errors` name.  So a record
cannot choose the code that runs, nothing is imported to read it, and each function gets objects of its own classes.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import functools
import inspect
import os
import sys
import types
import typing
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import msgspec

# The names of the main module: in the program, and in the processes that multiprocessing spawns from it.
PROGRAM = ("__main__", "__mp_main__")

BUILT_IN: tuple[type, ...] = (
    *(type(None), bool, int, float, complex, str, bytes, bytearray),
    *(list, tuple, dict, set, frozenset, uuid.UUID, decimal.Decimal),
    *(datetime.datetime, datetime.date, datetime.time, datetime.timedelta),
)


def module_of(thing: Any) -> str:
    """Return the name of the module that a function or class is from, the same in every process.

    A script is named after its file, and `python -m shop.mails` after its module, as if another module imported it.
    """
    name: str = thing.__module__
    if name not in PROGRAM:
        return name
    module = getattr(thing, "__globals__", {})
    if module.get("__name__") != name:  # a class has no globals, and a wrapped function has those of its decorator
        module = getattr(sys.modules.get(name), "__dict__", {})
    spec, file = module.get("__spec__"), module.get("__file__")
    if spec is not None and spec.name not in PROGRAM:  # profilers run a script with a spec named `__main__`
        return str(spec.name)
    return os.path.splitext(os.path.basename(file))[0] if file and not file.startswith("<") else name  # "<stdin>"


def name_of(kind: type) -> str:
    """Return the name that stands for the class in a stored value."""
    return f"{module_of(kind)}:{kind.__qualname__}"


def field_names(kind: Any) -> set[str] | None:
    """Return the field names of a dataclass, struct, pydantic model, attrs class or named tuple; None for other classes."""
    if dataclasses.is_dataclass(kind):
        return {field.name for field in dataclasses.fields(kind) if field.init}
    if issubclass(kind, msgspec.Struct):
        return set(kind.__struct_fields__)
    if hasattr(kind, "__pydantic_fields__"):
        return set(kind.__pydantic_fields__)
    if hasattr(kind, "__attrs_attrs__"):
        return {attribute.name for attribute in kind.__attrs_attrs__ if attribute.init}
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return set(kind._fields)
    return None


def is_storable(kind: type) -> bool:
    """Whether objects of the class can be rebuilt from their attributes: it is an enum, or has known fields."""
    return issubclass(kind, enum.Enum) or field_names(kind) is not None


# ── From annotations ──────────────────────────────────────────────────────────────────────────────────────────────────


def annotated_classes(function: Any, *names: str) -> tuple[type, ...]:
    """Return the classes, except built-in types, in the annotations of these parameters; `return` is the result.

    An annotation that cannot be evaluated is skipped: it may name a class that is imported only for type checking.
    """
    function = annotated(function)
    found: list[type] = []
    for name in names:  # one at a time: if one cannot be evaluated, the others can
        with suppress(Exception):  # evaluating an annotation may raise anything, and built-in functions have none
            one = types.SimpleNamespace(__annotations__={name: function.__annotations__[name]})
            found += list(_classes_in(typing.get_type_hints(one, function.__globals__)[name]))
    return tuple(kind for kind in dict.fromkeys(found) if kind not in (*BUILT_IN, types.UnionType, Any))


def annotated(function: Any) -> Any:
    """Return the function that has the annotations, without decorators and partial; for a callable object its `__call__`."""
    function = inspect.unwrap(function.func if isinstance(function, functools.partial) else function)
    return function if hasattr(function, "__globals__") else type(function).__call__


def can_be_returned(kind: type, known: tuple[type, ...]) -> bool:
    """Whether a value annotated with the class may be storable: *kind* itself, or a subclass that is built in or *known*.

    True for an abstract class such as Mapping, because the value may be a dict.
    """
    try:
        return is_storable(kind) or any(issubclass(each, kind) for each in (*BUILT_IN, *filter(is_storable, known)))
    except TypeError:  # a protocol or a TypedDict does not tell the classes of its values
        return True


@functools.lru_cache(maxsize=256)
def classes_by_name(kinds: tuple[type, ...]) -> Mapping[str, type]:
    """Return the storable classes by name: those among *kinds*, and those in the annotations of their fields, recursively."""
    found: dict[str, type] = {}
    seen = list(dict.fromkeys(kinds))
    for kind in seen:  # grows during the loop
        if is_storable(kind):
            found.setdefault(name_of(kind), kind)
        if field_names(kind) is not None or typing.is_typeddict(kind):
            seen.extend(each for each in _field_classes(kind) if each not in seen)
    return found


def _field_classes(kind: Any) -> list[type]:
    with suppress(Exception):
        models: Mapping[str, Any] = getattr(kind, "__pydantic_fields__", {})  # evaluated by pydantic
        annotations = [field.annotation for field in models.values()] or typing.get_type_hints(kind).values()
        return [each for annotation in annotations for each in _classes_in(annotation)]
    return []


def _classes_in(annotation: Any) -> Iterator[type]:
    """Yield the classes in an annotation: a class, the members of a union, a container and its items.

    Follows an alias (`type Orders = list[Order]`); an alias that contains itself raises a RecursionError.
    """
    annotation = getattr(annotation, "__value__", annotation)
    outer = typing.get_origin(annotation) or annotation
    if isinstance(outer, type):
        yield outer
    for member in typing.get_args(annotation):
        yield from _classes_in(type(member) if isinstance(member, enum.Enum) else member)  # a Literal has enum members
