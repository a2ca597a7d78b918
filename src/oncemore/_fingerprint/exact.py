"""Python values in terms of canonical JSON: numbers by their exact value, everything else by what it holds."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import uuid
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

import msgspec

from ..errors import ConfigurationError, InvalidPayload
from .canonical import LONGEST_INTEGER, exact_number, write_json


def exact_value(value: Any) -> Any:
    """*value* as write_json takes it; raises ConfigurationError for a type that has no such form."""
    try:
        return _exact(value)
    except UnicodeEncodeError as error:
        raise InvalidPayload(f"The value has text with half a character: {error.reason}") from error
    except RecursionError:
        raise InvalidPayload("The value is nested too deeply, or contains itself") from None


def _exact(value: Any) -> Any:
    for kinds, form in FORMS:
        if isinstance(value, kinds):
            return form(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _members({part.name: getattr(value, part.name) for part in dataclasses.fields(value)})
    if hasattr(type(value), "__pydantic_fields__"):
        return _members(dict(value))
    raise ConfigurationError(
        f"A {type(value).__qualname__} has no fingerprint: pass built-in types, dates, UUIDs, enums, dataclasses, "
        "msgspec structs or pydantic models"
    )


def _text(value: str) -> str:
    value.encode()  # half a surrogate pair is refused here, where the cause can still be told
    return str.__str__(value)


def _integer(value: int) -> Any:
    # By way of Decimal, since str() refuses integers of more than some thousand digits.
    return int(value) if abs(value) < 10**LONGEST_INTEGER else exact_number(str(Decimal(value)))


def _number(text: str) -> msgspec.Raw:
    """The number that *text* is; NaN and the infinities stand unquoted, so that they pass for no other value."""
    lower = text.lower()
    if "nan" in lower:
        return msgspec.Raw("NaN")
    if "inf" in lower:
        return msgspec.Raw("-Infinity" if lower.startswith("-") else "Infinity")
    return exact_number(text)


def _members(value: Mapping[Any, Any]) -> dict[str, Any]:
    members = {_name(key): _exact(item) for key, item in value.items()}
    if len(members) != len(value):
        raise ConfigurationError("A dictionary has two keys that JSON would write as the same name, such as 1 and '1'")
    return members


def _name(key: Any) -> str:
    form = _exact(key)
    return form if isinstance(form, str) else write_json(form).decode()


FORMS: tuple[
    tuple[type | tuple[type, ...], Callable[[Any], Any]], ...
] = (  # the first that fits: a bool is an int, too
    (enum.Enum, lambda value: _exact(value.value)),
    ((bool, type(None)), lambda value: value),
    (str, _text),
    (int, _integer),
    (float, lambda value: _number(float.__repr__(value))),
    (Decimal, lambda value: _number(str(value))),
    ((list, tuple), lambda value: [_exact(item) for item in value]),
    ((set, frozenset), lambda value: sorted(map(_exact, value), key=write_json)),
    (Mapping, _members),
    (msgspec.Struct, lambda value: _members(msgspec.structs.asdict(value))),
    ((bytes, bytearray, memoryview, uuid.UUID), msgspec.to_builtins),
    ((datetime.date, datetime.time, datetime.timedelta), msgspec.to_builtins),
)
