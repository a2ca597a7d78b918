"""Turns the results and errors of functions into outcomes and back, equal and of the same type.  Nothing is pickled.

Built-in types can always be read back; other objects if the function names their class (`classes.py`).  Reading a value runs
no code of its class, except for msgspec structs and for classes that have gained a field since.  A zoneinfo time zone is
stored by name, any other time zone by its offset.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec

from ..errors import CorruptRecord, OncemoreError, OutcomeNotKept
from .classes import classes_by_name, field_names, is_storable, name_of
from .events import log
from .model import Outcome

Types = tuple[type, ...]
Errors = tuple[type[BaseException], ...]
Classes = Mapping[str, type] | None  # None: read objects as dictionaries of their members

# A value of a type that MessagePack does not have is written as {"~": tag, "v": ...}; so is a dictionary with a key "~".
MARK = "~"

# The deepest nesting: more than any sensible result has, and less than Python's recursion limit.
DEEPEST = 100

TICK = datetime.timedelta(microseconds=1)


class Unstorable(OncemoreError):
    """The value has a type that cannot be stored and read back."""

    code = "CONFIGURATION.unstorable_value"
    title = "The value cannot be stored"


# ── Values ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def to_plain(value: Any, classes: Classes | None = None, room: int = DEEPEST) -> Any:
    """Return *value* as values of MessagePack's own types, from which `from_plain` makes an equal value of the same type.

    Objects must be instances of one of *classes*; with None, of any class that can be stored.  *room* is the nesting left.
    """
    kind = type(value)
    if value is None or kind in PLAIN:
        return value
    if kind is int:
        return value if -(2**63) <= value < 2**64 else _tagged("int", hex(value))
    if room == 0:
        raise Unstorable(f"The result is nested more than {DEEPEST} deep, or contains itself")
    if kind is list:
        return [to_plain(item, classes, room - 1) for item in value]
    if kind is dict:
        return _write_dict(value, classes, room - 1)
    if kind in COLLECTIONS:
        return _tagged(kind.__name__, [to_plain(item, classes, room - 1) for item in value])
    write = WRITE.get(kind)
    return write(value) if write else _write_object(value, classes, room - 1)


def from_plain(value: Any, classes: Classes) -> Any:
    """Return the value that `to_plain` was given."""
    if type(value) is list:
        return [from_plain(item, classes) for item in value]
    if type(value) is dict:
        if MARK in value:
            return READ[value[MARK]](value["v"], classes)
        return {key: from_plain(item, classes) for key, item in value.items()}
    return value


def _tagged(tag: str, value: Any) -> dict[str, Any]:
    return {MARK: tag, "v": value}


def _write_dict(value: dict[Any, Any], classes: Classes | None, room: int) -> Any:
    if MARK not in value and {*map(type, value)} <= {str}:
        return {key: to_plain(item, classes, room) for key, item in value.items()}
    pairs = [[to_plain(key, classes, room), to_plain(item, classes, room)] for key, item in value.items()]
    return _tagged("dict", pairs)


def _write_object(value: Any, classes: Classes | None, room: int) -> Any:
    kind = type(value)
    name = name_of(kind)
    if not is_storable(kind):
        raise Unstorable(
            f"A {kind.__qualname__} cannot be stored as the result of a guarded function: return built-in types, "
            "dataclasses, attrs classes, msgspec structs, pydantic models, named tuples or enums"
        )
    if classes is not None and classes.get(name) is not kind:
        raise Unstorable(
            f"{name} is not among the classes that can be replayed: name it in the function's return annotation, or "
            f"write types=({kind.__name__},)"
        )
    if isinstance(value, enum.Enum):
        return _tagged("object", [name, value.value if isinstance(value, enum.Flag) else value.name])
    return _tagged("object", [name, _write_dict(_attributes(value), classes, room)])


def _read_object(name: str, content: Any, classes: Classes) -> Any:
    if classes is None:  # for JSON, which needs only the members
        return from_plain(content, None)
    kind: Any = classes.get(name)
    if kind is None:
        raise Unstorable(
            f"{name} is not among the classes that the function names: add it to its return annotation or to `types`"
        )
    if issubclass(kind, enum.Enum):
        return kind(content) if issubclass(kind, enum.Flag) else kind[content]
    return _rebuild(kind, from_plain(content, classes))


def _write_moment(value: datetime.datetime | datetime.time) -> Any:
    zone, offset = value.tzinfo, value.utcoffset()
    key = zone.key if isinstance(zone, ZoneInfo) else None
    ticks = None if offset is None else offset // TICK
    return _tagged(type(value).__name__, [value.replace(tzinfo=None).isoformat(), value.fold, ticks, key])


def _read_moment(kind: Any, text: str, fold: int, ticks: int | None, key: str | None) -> Any:
    zone: datetime.tzinfo | None = None if ticks is None else datetime.timezone(ticks * TICK)
    if key is not None:
        with suppress(ZoneInfoNotFoundError):  # this machine may not know the zone: then keep the offset
            zone = ZoneInfo(key)
    return kind.fromisoformat(text).replace(fold=fold, tzinfo=zone)


PLAIN = frozenset({bool, str, float, bytes})
COLLECTIONS = frozenset({tuple, set, frozenset})
WRITE: dict[type, Callable[[Any], Any]] = {
    bytearray: lambda v: _tagged("bytearray", bytes(v)),
    uuid.UUID: lambda v: _tagged("uuid", str(v)),
    decimal.Decimal: lambda v: _tagged("decimal", str(v)),
    datetime.datetime: _write_moment,
    datetime.time: _write_moment,
    datetime.date: lambda v: _tagged("date", v.isoformat()),
    datetime.timedelta: lambda v: _tagged("timedelta", [v.days, v.seconds, v.microseconds]),
    complex: lambda v: _tagged("complex", [v.real, v.imag]),
}
READ: dict[str, Callable[[Any, Classes], Any]] = {
    "int": lambda v, _: int(v, 16),
    "bytearray": lambda v, _: bytearray(v),
    "uuid": lambda v, _: uuid.UUID(v),
    "decimal": lambda v, _: decimal.Decimal(v),
    "datetime": lambda v, _: _read_moment(datetime.datetime, *v),
    "time": lambda v, _: _read_moment(datetime.time, *v),
    "date": lambda v, _: datetime.date.fromisoformat(v),
    "timedelta": lambda v, _: datetime.timedelta(*v),
    "complex": lambda v, _: complex(*v),
    "tuple": lambda v, classes: tuple(from_plain(item, classes) for item in v),
    "set": lambda v, classes: {from_plain(item, classes) for item in v},
    "frozenset": lambda v, classes: frozenset(from_plain(item, classes) for item in v),
    "dict": lambda v, classes: {from_plain(key, classes): from_plain(item, classes) for key, item in v},
    "object": lambda v, classes: _read_object(v[0], v[1], classes),
}


# ── Objects ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object by name, including attributes that are no fields."""
    kind = type(value)
    if issubclass(kind, tuple):
        return dict(zip(kind._fields, value, strict=True))  # type: ignore[attr-defined]
    if issubclass(kind, msgspec.Struct):
        return {name: getattr(value, name) for name in kind.__struct_fields__}
    object.__new__(kind)  # raises now rather than at the replay if the class cannot be made without arguments
    return _state(value)


def _state(value: object) -> dict[str, Any]:
    """Return the object's dictionary and slots, without calling a `__getstate__` of its class."""
    state: Any = object.__getstate__(value)
    members, slots = state if isinstance(state, tuple) else (state, None)
    return {**(members or {}), **(slots or {})}


def _rebuild(kind: Any, attributes: dict[str, Any]) -> Any:
    """Make the object with these attributes.

    Its `__init__` runs only if the class has gained a field since, for the field's default, or is a msgspec struct: it might
    validate, change or count again.
    """
    names = field_names(kind) or set()
    fields = {name: attributes[name] for name in names if name in attributes}
    if issubclass(kind, tuple):
        return kind(**fields)
    is_struct = issubclass(kind, msgspec.Struct)
    make = getattr(kind, "model_construct", kind)  # pydantic's `__init__` wants aliases in place of the names
    result = make(**fields) if is_struct or fields.keys() != names else object.__new__(kind)
    assign = msgspec.structs.force_setattr if is_struct else object.__setattr__
    for name, item in attributes.items():
        with suppress(AttributeError):  # the class has lost this slot since
            assign(result, name, item)
    for name in names - fields.keys():
        if not hasattr(result, name):
            raise Unstorable(f"{name_of(kind)} has gained {name!r}, which the stored object lacks: give it a default")
    return result


# ── Exceptions ────────────────────────────────────────────────────────────────────────────────────────────────────────


def error_parts(error: BaseException) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of the error's built-in base class, and all attributes of the error."""
    _, args, *state = _builtin(type(error)).__reduce__(error)
    return args, {**(state[0] if state else {}), **_state(error)}


def error_from(kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    """Make the error from these parts.  Its own `__init__` does not run, because the arguments for it are not known."""
    builtin = _builtin(kind)
    error: BaseException = builtin.__new__(kind, *args)
    builtin.__init__(error, *args)
    for name, item in state.items():
        object.__setattr__(error, name, item)
    return error


def _builtin(kind: type[BaseException]) -> Any:
    """Return the built-in base class of *kind*: some, such as OSError, hold more than args and attributes."""
    return next(base for base in kind.__mro__ if base.__module__ == "builtins")


def error_class(name: str, errors: Errors) -> type[BaseException] | None:
    """Return the class called *name* if it is one of *errors* or a subclass of one."""
    kinds = list(errors)
    for kind in kinds:  # grows during the loop
        if name_of(kind) == name:
            return kind
        kinds.extend(child for child in kind.__subclasses__() if child not in kinds)
    return None


# ── Outcomes ──────────────────────────────────────────────────────────────────────────────────────────────────────────

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder().decode

NOTHING = Outcome("value", body=encode(None))


def value_outcome(value: Any, types: Types | None = None) -> Outcome:
    """Return the outcome that replays *value*; a tombstone if it cannot be stored, because the effect has happened.

    *types* are the classes that the reader will know; None allows any class that can be stored.
    """
    try:
        return Outcome("value", body=encode(to_plain(value, None if types is None else classes_by_name(types))))
    except Exception as reason:  # any error: if it were raised, the operation would be performed again
        return _tombstone(type(value), reason)


def error_outcome(error: BaseException, types: Types | None = None) -> Outcome:
    """Return the outcome that raises *error* again; a tombstone if it cannot be stored."""
    try:
        args, state = error_parts(error)
        error_from(type(error), args, state)  # raises now rather than at the replay if it cannot be made again
        classes = None if types is None else classes_by_name(types)
        return Outcome("error", body=encode([name_of(type(error)), to_plain(args, classes), to_plain(state, classes)]))
    except Exception as reason:
        return _tombstone(type(error), reason)


def _tombstone(kind: type, reason: Exception) -> Outcome:
    why = f"{name_of(kind)}: {reason.detail if isinstance(reason, Unstorable) else type(reason).__name__}"
    log.warning("The result of an operation cannot be stored, only that it happened: %s", why)
    return Outcome("tombstone", body=why.encode("utf-8", "backslashreplace"))


def replayed(outcome: Outcome, errors: Errors = (), types: Types | None = ()) -> Any:
    """Return the value in *outcome*, or raise its error if that is one of *errors*.  Objects are read as *types*."""
    found = value_or_error(outcome, errors, types)
    if outcome.kind == "error":
        raise found
    return found


def value_or_error(outcome: Outcome, errors: Errors = (), types: Types | None = ()) -> Any:
    """Return the value or the error in *outcome*.  Raises OutcomeNotKept or CorruptRecord if there is none."""
    if outcome.kind not in ("value", "error"):
        raise OutcomeNotKept(
            f"The function ran, but its result was not kept: {outcome.body.decode('utf-8', 'replace')}"
        )
    try:
        plain = decode(outcome.body)
        if outcome.kind == "value" and MARK.encode() not in outcome.body:  # nothing is tagged
            return plain
        classes = None if types is None else classes_by_name(types)
        if outcome.kind == "value":
            return from_plain(plain, classes)
        name, args, state = plain
        kind = error_class(name, errors)
        if kind is not None:
            return error_from(kind, from_plain(args, classes), from_plain(state, classes))
    except Exception as reason:
        raise CorruptRecord(f"The stored result cannot be read: {type(reason).__name__}: {reason}") from reason
    raise OutcomeNotKept(f"The function raised {name} the first time; add it to `errors` to have it raised again")
