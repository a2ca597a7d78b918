"""Turns the results and errors of functions into outcomes and back, as themselves: typed, readable, never pickled.

No code runs when a value is read back, but for the __post_init__ of msgspec structs and the defaults of fields that a
class has gained since.  A zoneinfo zone is kept; of any other time zone, the offset.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec

from ..errors import CorruptRecord, OutcomeNotKept
from .events import log
from .model import Outcome
from .objects import (
    Errors,
    Unstorable,
    classes_named,
    error_class,
    error_from,
    error_parts,
    is_data,
    is_enum,
    name_of,
    rebuilt,
    state_of,
)

# Every value that MessagePack cannot carry is written as {"~": tag, "v": ...}; a dictionary with a "~" of its own is, too.
MARK = "~"

# So deep that nobody's result gets there, and so shallow that reading it back never meets Python's own limit.
DEEPEST = 100

TICK = datetime.timedelta(microseconds=1)


# ── Plain values ──────────────────────────────────────────────────────────────────────────────────────────────────────


def to_plain(value: Any, room: int = DEEPEST) -> Any:
    """*value* in terms of what MessagePack carries, from which from_plain makes an equal value of the same type."""
    kind = type(value)
    if value is None or kind in PLAIN:
        return value
    if kind is int:
        return value if -(2**63) <= value < 2**64 else _tagged("int", hex(value))
    if room == 0:
        raise Unstorable(f"The result is nested more than {DEEPEST} deep, or contains itself")
    if kind is list:
        return [to_plain(item, room - 1) for item in value]
    if kind is dict:
        return _write_dict(value, room - 1)
    if kind in COLLECTIONS:
        return _tagged(kind.__name__, [to_plain(item, room - 1) for item in value])
    write = WRITE.get(kind)
    return write(value) if write else _write_object(value, kind, room - 1)


def from_plain(value: Any) -> Any:
    """The value that to_plain was given."""
    if type(value) is list:
        return [from_plain(item) for item in value]
    if type(value) is dict:
        if MARK in value:
            return READ[value[MARK]](value["v"])
        return {key: from_plain(item) for key, item in value.items()}
    return value


def _tagged(tag: str, value: Any) -> dict[str, Any]:
    return {MARK: tag, "v": value}


def _write_dict(value: dict[Any, Any], room: int) -> Any:
    if MARK not in value and {*map(type, value)} <= {str}:
        return {key: to_plain(item, room) for key, item in value.items()}
    return _tagged("dict", [[to_plain(key, room), to_plain(item, room)] for key, item in value.items()])


def _write_object(value: Any, kind: type, room: int) -> Any:
    name, fits = name_of(kind), is_enum if is_enum(kind) else is_data
    if not fits(kind):
        raise Unstorable(
            f"A {kind.__qualname__} cannot be stored as the result of a guarded function: return built-in types, "
            "dataclasses, msgspec structs, pydantic models, named tuples or enums"
        )
    if not any(known is kind for known in classes_named(name, fits)):
        raise Unstorable(f"{name} now names another class than the one of the result")
    if isinstance(value, enum.Flag):
        return _tagged("flag", [name, value.value])
    if isinstance(value, enum.Enum):
        return _tagged("enum", [name, value.name])
    return _tagged("object", [name, _write_dict(state_of(value), room)])


def _write_moment(value: datetime.datetime | datetime.time) -> Any:
    zone, offset = value.tzinfo, value.utcoffset()
    key = zone.key if isinstance(zone, ZoneInfo) else None
    ticks = None if offset is None else offset // TICK
    return _tagged(type(value).__name__, [value.replace(tzinfo=None).isoformat(), value.fold, ticks, key])


def _read_moment(kind: Any) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        text, fold, ticks, key = value
        return kind.fromisoformat(text).replace(fold=fold, tzinfo=_zone(ticks, key))

    return read


def _zone(ticks: int | None, key: str | None) -> datetime.tzinfo | None:
    if key is not None:
        with suppress(ZoneInfoNotFoundError):  # another machine may not know the zone; the offset is known anyway
            return ZoneInfo(key)
    return None if ticks is None else datetime.timezone(ticks * TICK)


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
READ: dict[str, Callable[[Any], Any]] = {
    "int": lambda v: int(v, 16),
    "bytearray": bytearray,
    "uuid": uuid.UUID,
    "decimal": decimal.Decimal,
    "datetime": _read_moment(datetime.datetime),
    "time": _read_moment(datetime.time),
    "date": datetime.date.fromisoformat,
    "timedelta": lambda v: datetime.timedelta(*v),
    "complex": lambda v: complex(*v),
    "tuple": lambda v: tuple(from_plain(item) for item in v),
    "set": lambda v: {from_plain(item) for item in v},
    "frozenset": lambda v: frozenset(from_plain(item) for item in v),
    "dict": lambda v: {from_plain(key): from_plain(item) for key, item in v},
    "enum": lambda v: next(classes_named(v[0], is_enum))[v[1]],
    "flag": lambda v: next(classes_named(v[0], is_enum))(v[1]),
    "object": lambda v: rebuilt(next(classes_named(v[0], is_data)), from_plain(v[1])),
}


# ── Outcomes ──────────────────────────────────────────────────────────────────────────────────────────────────────────

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder().decode

NOTHING = Outcome("value", body=encode(None))


def value_outcome(value: Any) -> Outcome:
    """The outcome that replays *value*; a tombstone where it cannot be stored, for the effect has happened."""
    try:
        return Outcome("value", body=encode(to_plain(value)))
    except Exception as reason:  # whatever it is: if it got out, the operation would be performed again
        return _tombstone(type(value), reason)


def error_outcome(error: BaseException) -> Outcome:
    """The outcome that raises *error* again; a tombstone where it cannot be stored."""
    try:
        args, state = error_parts(error)
        error_from(type(error), args, state)  # one that cannot be made again is known now, not at the replay
        return Outcome("error", body=encode([name_of(type(error)), to_plain(args), to_plain(state)]))
    except Exception as reason:
        return _tombstone(type(error), reason)


def _tombstone(kind: type, reason: Exception) -> Outcome:
    why = f"{name_of(kind)}: {reason.detail if isinstance(reason, Unstorable) else type(reason).__name__}"
    log.warning("What came of an operation cannot be stored, only that it happened: %s", why)
    return Outcome("tombstone", body=why.encode("utf-8", "backslashreplace"))


def replayed(outcome: Outcome, errors: Errors = ()) -> Any:
    """The value that *outcome* holds; raises the error where it holds one of *errors*."""
    if outcome.kind not in ("value", "error"):
        raise OutcomeNotKept(
            f"The function ran, but its result was not kept: {outcome.body.decode('utf-8', 'replace')}"
        )
    try:
        result = _read(outcome, errors)
    except Exception as error:
        raise CorruptRecord(f"The stored result cannot be read: {type(error).__name__}: {error}") from error
    if outcome.kind == "error":
        raise result
    return result


def _read(outcome: Outcome, errors: Errors) -> Any:
    plain = decode(outcome.body)
    if outcome.kind == "value":
        return from_plain(plain)
    name, args, state = plain
    kind = error_class(name, errors)
    if kind is None:
        return OutcomeNotKept(f"The function raised {name} the first time; add it to `errors` to have it raised again")
    return error_from(kind, from_plain(args), from_plain(state))
