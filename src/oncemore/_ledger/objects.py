"""Data objects and exceptions: taken apart into a class's name and attributes, and put together without their __init__."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import msgspec

from ..errors import OncemoreError
from .origin import loaded, module_of

Errors = tuple[type[BaseException], ...]


class Unstorable(OncemoreError):
    """The value is of a type that cannot be stored and read back as itself."""

    code = "CONFIGURATION.unstorable_value"
    title = "The value cannot be stored"


# ── Classes, by name ──────────────────────────────────────────────────────────────────────────────────────────────────


def name_of(kind: type) -> str:
    return f"{module_of(kind)}:{kind.__qualname__}"


def classes_named(name: str, fits: Callable[[type], bool]) -> Iterator[Any]:
    """The classes called *name*: only in modules that are already loaded, and only those that *fit*; at least one.

    There are two where a program is also imported.
    """
    found = False
    for each in _named(name):
        if isinstance(each, type) and fits(each):
            found = True
            yield each
    if not found:
        raise Unstorable(f"{name} cannot be found again: define it at the top of an imported module")


def _named(name: str) -> Iterator[Any]:
    module, _, path = name.partition(":")
    for place in loaded(module):
        found = place
        for part in path.split("."):
            found = getattr(found, "__dict__", {}).get(part)  # not getattr: a module's own __getattr__ may import
        yield found


def is_enum(kind: type) -> bool:
    return issubclass(kind, enum.Enum)


def is_data(kind: type) -> bool:
    """Whether objects of the class are no more than what they hold."""
    return not is_enum(kind) and (
        dataclasses.is_dataclass(kind)
        or issubclass(kind, msgspec.Struct)
        or hasattr(kind, "__pydantic_fields__")
        or (issubclass(kind, tuple) and hasattr(kind, "_fields"))
    )


# ── Data objects ──────────────────────────────────────────────────────────────────────────────────────────────────────


def state_of(value: Any) -> dict[str, Any]:
    """The attributes of a data object, by name."""
    kind = type(value)
    if issubclass(kind, tuple):
        return dict(zip(kind._fields, value, strict=True))  # type: ignore[attr-defined]
    if issubclass(kind, msgspec.Struct):
        return {name: getattr(value, name) for name in kind.__struct_fields__}
    object.__new__(kind)  # a class that cannot be made without arguments is refused now, not at the replay
    return _attributes(value)


def _attributes(value: object) -> dict[str, Any]:
    """All that is in the object's dictionary and slots, whatever the class says about its own state."""
    state: Any = object.__getstate__(value)
    members, slots = state if isinstance(state, tuple) else (state, None)
    return {**(members or {}), **(slots or {})}


def rebuilt(kind: Any, state: dict[str, Any]) -> Any:
    """The data object with these attributes; a field that its class has gained since takes its default."""
    if issubclass(kind, msgspec.Struct):
        return _rebuilt_struct(kind, state)
    state = {**dict(_gained(kind, state)), **state}
    if issubclass(kind, tuple):
        return tuple.__new__(kind, [state[name] for name in kind._fields])
    result = object.__new__(kind)
    for name, item in state.items():
        with suppress(AttributeError):  # a slot that the class has lost since
            object.__setattr__(result, name, item)
    return result


def _rebuilt_struct(kind: Any, state: dict[str, Any]) -> Any:
    known = {name: state[name] for name in kind.__struct_fields__ if name in state}
    result = kind(**known)
    for name, item in known.items():  # as they were, whatever __post_init__ makes of them
        msgspec.structs.force_setattr(result, name, item)
    return result


def _gained(kind: Any, state: dict[str, Any]) -> dict[str, Any]:
    """The defaults of the fields that the class has and *state* lacks."""
    if issubclass(kind, tuple):
        return dict(kind._field_defaults)
    if dataclasses.is_dataclass(kind):
        return {
            field.name: _default(field) for field in dataclasses.fields(kind) if field.init and field.name not in state
        }
    lacking = {name: field for name, field in kind.__pydantic_fields__.items() if name not in state}
    for name, field in lacking.items():
        if field.is_required():
            raise Unstorable(f"{name_of(kind)} has gained {name!r}, which the stored one lacks")
    return {name: field.get_default(call_default_factory=True) for name, field in lacking.items()}


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    raise Unstorable(f"The class has gained {field.name!r}, which the stored one lacks")


# ── Exceptions ────────────────────────────────────────────────────────────────────────────────────────────────────────


def error_parts(error: BaseException) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the error was made of, as far as Python itself is concerned, and all attributes that it has."""
    _, args, *state = _builtin(type(error)).__reduce__(error)
    return args, {**(state[0] if state else {}), **_attributes(error)}


def error_from(kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    """The error with these parts; its own __init__ is not asked, for nobody knows what it was given."""
    builtin = _builtin(kind)
    error: BaseException = builtin.__new__(kind, *args)
    builtin.__init__(error, *args)
    for name, item in state.items():
        object.__setattr__(error, name, item)
    return error


def _builtin(kind: type[BaseException]) -> Any:
    """The class of Python's own that *kind* is made from: some, like OSError, hold more than args and attributes."""
    return next(base for base in kind.__mro__ if base.__module__ == "builtins")


def error_class(name: str, errors: Errors) -> type[BaseException] | None:
    """The class called *name*, if it is one of *errors* or made from one."""
    for found in _named(name):
        if isinstance(found, type) and issubclass(found, errors):
            return found
    return next((kind for kind in _descendants(errors) if name_of(kind) == name), None)  # defined inside a function


def _descendants(kinds: Errors) -> list[type[BaseException]]:
    found = list(kinds)
    for kind in found:  # grows while it is walked
        found.extend(child for child in kind.__subclasses__() if child not in found)
    return found
