"""The classes of results: their names, which of them can be stored, and which ones an annotation names.

A stored object is read back only as a class that the function's return annotation, `types` or `errors` name.  So a record
cannot choose which code runs, nothing is imported to read it, and each function gets objects of its own classes.
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

# A module's name while it is the program, and in the processes that multiprocessing has spawned from it.
PROGRAM = ("__main__", "__mp_main__")

BUILT_IN: tuple[type, ...] = (
    *(type(None), bool, int, float, complex, str, bytes, bytearray),
    *(list, tuple, dict, set, frozenset, uuid.UUID, decimal.Decimal),
    *(datetime.datetime, datetime.date, datetime.time, datetime.timedelta),
)


def module_of(thing: Any) -> str:
    """Return the name of the module that a function or class is from, the same in every process.

    A script is called after its file, and `python -m shop.mails` after its module, just as if others import them.
    """
    name: str = thing.__module__
    if name not in PROGRAM:
        return name
    module = getattr(thing, "__globals__", {})
    if module.get("__name__") != name:  # a class has no globals, and a wrapped function has those of its decorator
        module = getattr(sys.modules.get(name), "__dict__", {})
    spec, file = module.get("__spec__"), module.get("__file__")
    if spec is not None and spec.name not in PROGRAM:  # profilers run a script under a spec that is named `__main__`
        return str(spec.name)
    return os.path.splitext(os.path.basename(file))[0] if file and not file.startswith("<") else name  # "<stdin>"


def name_of(kind: type) -> str:
    """Return the name that stands for the class in a stored value."""
    return f"{module_of(kind)}:{kind.__qualname__}"


def field_names(kind: Any) -> set[str] | None:
    """Return the names of the fields of a data class of any make; None if it is no data class."""
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
    """Whether objects of the class are no more than the values that they hold."""
    return issubclass(kind, enum.Enum) or field_names(kind) is not None


# ── From annotations ──────────────────────────────────────────────────────────────────────────────────────────────────


def annotated_classes(function: Any, *names: str) -> tuple[type, ...]:
    """Return the classes, beside built-in types, that the annotations of these parameters name; `return` is the result.

    An annotation that cannot be evaluated, such as a class imported only for type checking, names none.
    """
    function = annotated(function)
    found: list[type] = []
    for name in names:  # one at a time: if one cannot be evaluated, the others can
        with suppress(Exception):  # evaluating an annotation may raise anything, and a built-in function has none
            one = types.SimpleNamespace(__annotations__={name: function.__annotations__[name]})
            found += list(_classes_in(typing.get_type_hints(one, function.__globals__)[name]))
    return tuple(kind for kind in dict.fromkeys(found) if kind not in (*BUILT_IN, types.UnionType, Any))


def annotated(function: Any) -> Any:
    """Return the function that has the annotations: below decorators and a partial, and of an object its `__call__`."""
    function = inspect.unwrap(function.func if isinstance(function, functools.partial) else function)
    return function if hasattr(function, "__globals__") else type(function).__call__


def can_be_returned(kind: type, known: tuple[type, ...]) -> bool:
    """Whether a value annotated with the class may be one that can be stored; *known* are the classes named so far.

    An abstract class such as Mapping may: the value may be a dict.
    """
    try:
        return is_storable(kind) or any(issubclass(each, kind) for each in (*BUILT_IN, *filter(is_storable, known)))
    except TypeError:  # a protocol or a TypedDict: the class does not tell what its values are
        return True


@functools.lru_cache(maxsize=256)
def classes_by_name(kinds: tuple[type, ...]) -> Mapping[str, type]:
    """Return the storable classes among *kinds* and among the annotations of their fields, all the way down."""
    found: dict[str, type] = {}
    seen = list(dict.fromkeys(kinds))
    for kind in seen:  # grows while it is read
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
    """Yield the classes in an annotation: itself, the members of a union, a container and its items.

    It looks into an alias (`type Orders = list[Order]`); one that contains itself raises a RecursionError.
    """
    annotation = getattr(annotation, "__value__", annotation)
    outer = typing.get_origin(annotation) or annotation
    if isinstance(outer, type):
        yield outer
    for member in typing.get_args(annotation):
        yield from _classes_in(type(member) if isinstance(member, enum.Enum) else member)  # of a Literal
