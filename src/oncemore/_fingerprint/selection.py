"""Which fields of a JSON body count: those to compare by, and those to leave out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import ConfigurationError
from .pointer import INDEX, parse_pointer

Pointer = tuple[str, ...]

ABSENT = object()


def parse_fields(setting: str, fields: Sequence[str]) -> tuple[Pointer, ...]:
    """Where the *fields* that the setting of that name lists are: JSON pointers, or bare names of top-level members."""
    if isinstance(fields, str) or not isinstance(fields, Sequence):
        raise ConfigurationError(f"{setting} = {fields!r} is not a list of fields: write [{fields!r}]")
    return tuple(_parse_field(setting, field) for field in fields)


def _parse_field(setting: str, field: str) -> Pointer:
    if not isinstance(field, str) or not field:
        raise ConfigurationError(
            f"{setting} has {field!r}: write a member's name, or a JSON pointer such as '/order/id'"
        )
    if field.startswith("/"):
        return parse_pointer(field)
    if any(mark in field for mark in "./~#"):  # taken literally, `order.id` would silently select nothing
        raise ConfigurationError(f"{setting} has {field!r}: write a JSON pointer, such as '/order/id' or '/order.id'")
    return (field,)


def check_selection(include: Sequence[Pointer], exclude: Sequence[Pointer]) -> None:
    """Raise a ConfigurationError where an included field is excluded, since then every body would be the same."""
    for pointer in include:
        if any(pointer[: len(other)] == other for other in exclude):
            raise ConfigurationError(
                f"include has '/{'/'.join(pointer)}', which exclude leaves out: drop it from one of them"
            )


def select(value: Any, include: Sequence[Pointer], exclude: Sequence[Pointer]) -> Any:
    """What counts of *value*, which is used up: all but *exclude*, and of that only *include*, where there is any."""
    for pointer in exclude:
        _leave_out(value, pointer)
    if not include:
        return value
    found = ((pointer, _find(value, pointer)) for pointer in sorted(set(include)))
    return [[list(pointer), part] for pointer, part in found if part is not ABSENT]


def _find(value: Any, pointer: Pointer) -> Any:
    """What *pointer* points at, or ABSENT: unlike null, which a client has to say."""
    for step in pointer:
        if isinstance(value, dict) and step in value:
            value = value[step]
        elif isinstance(value, list) and INDEX.fullmatch(step) and int(step) < len(value):
            value = value[int(step)]
        else:
            return ABSENT
    return value


def _leave_out(value: Any, pointer: Pointer) -> None:
    """Take a member out of its object; an element of an array becomes null, so that the others keep their places."""
    parent, last = _find(value, pointer[:-1]), pointer[-1]
    if isinstance(parent, dict):
        parent.pop(last, None)
    elif isinstance(parent, list) and _find(parent, (last,)) is not ABSENT:
        parent[int(last)] = None
