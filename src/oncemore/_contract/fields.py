"""The fields of a template: where each `{...}` finds its value, and the one text that stands for a value."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Context as Arithmetic
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo, available_timezones

import msgspec

from .._fingerprint.pointer import parse_pointer, value_at
from ..errors import ConfigurationError, InvalidKey
from .keys import escaped
from .policy import duration
from .problems import did_you_mean

PUBLIC_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*", re.ASCII)
DAY = 86400.0
LONGEST_DAY = 25 * 3600.0  # where the clocks go back
# A number with more digits than this is an attack, not a name.
MOST_DIGITS = 1000
# What is too large even for Decimal is no number then, rather than an error.
LENIENT = Arithmetic(traps=[])

Context = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Field:
    """One `{...}`: *read* finds its value, *window* is how many seconds a value of it stays the same (0: for ever)."""

    text: str
    read: Callable[[Context], object]
    window: float = 0.0

    def render(self, context: Context) -> str:
        """The field's value as an unambiguous part of a name."""
        return escaped(text_of(self.text, self.read(context)))


# ── Of a request ──────────────────────────────────────────────────────────────────────────────────────────────────────


def owner_field(text: str, rest: str, path_params: Collection[str] | None) -> Field:
    return Field(text, lambda context: context[text])


def path_field(text: str, rest: str, path_params: Collection[str] | None) -> Field:
    if path_params is not None and rest not in path_params:
        known = ", ".join(f"{{path.{name}}}" for name in path_params) or "none"
        hint = did_you_mean(rest, path_params)
        raise ConfigurationError(f"{{{text}}} is not in the rule's path{hint}: its parameters are {known}")
    return Field(text, lambda context: context["path"].get(rest))


def query_field(text: str, rest: str, path_params: Collection[str] | None) -> Field:
    return Field(text, lambda context: only(text, context["query"].get(rest)))


def header_field(text: str, rest: str, path_params: Collection[str] | None) -> Field:
    name = rest.lower()
    return Field(text, lambda context: only(text, context["headers"].get(name)))


def member_field(text: str, rest: str, path_params: Collection[str] | None) -> Field:
    steps = rest.split(".")
    return Field(text, lambda context: value_at(context["body"], steps))


def pointer_field(text: str, rest: str, path_params: Collection[str] | None) -> Field:
    steps = parse_pointer(rest)
    return Field(text, lambda context: value_at(context["body"], steps))


def only(text: str, value: object) -> object:
    """A query parameter or header as the framework gives it: a text, or a list that must hold just one."""
    if not isinstance(value, list | tuple):
        return value
    if len(value) > 1:
        raise unusable(text, f"was given {len(value)} times; give it once")
    return value[0] if value else None


# ── Of the time ───────────────────────────────────────────────────────────────────────────────────────────────────────


def window_field(text: str, rest: str, path_params: Collection[str] | None) -> Field:
    """The start of the epoch-aligned bucket that holds *now*: `20260219T120000Z`."""
    seconds = duration(rest)
    if seconds < 1 or seconds != int(seconds):
        raise ConfigurationError(f"{{{text}}} is not a window: write one or more whole seconds, as in {{window:1h}}")

    def read(context: Context) -> str:
        start = instant(context).timestamp() // seconds * seconds
        return datetime.fromtimestamp(start, UTC).strftime("%Y%m%dT%H%M%SZ")

    return Field(text, read, seconds)


def date_field(text: str, rest: str, path_params: Collection[str] | None) -> Field:
    """The calendar day of *now* in a time zone: `2026-02-19`."""
    zone = time_zone(rest) if rest else UTC
    day = DAY if rest in ("", "UTC") else LONGEST_DAY
    return Field(text, lambda context: instant(context).astimezone(zone).date(), day)


def time_zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):  # unknown, not a plain name, and a directory such as 'America'
        hint = did_you_mean(name, available_timezones())
        raise ConfigurationError(
            f"time zone {name!r} is unknown{hint}: write an IANA name such as 'Europe/Berlin' "
            "(a system without a zone database needs the tzdata package)"
        ) from None


def instant(context: Context) -> datetime:
    now = context["now"]
    if isinstance(now, int | float):
        return datetime.fromtimestamp(now // 1, UTC)  # it rounds: the last moment of a day would be of the next
    if now is None or now.tzinfo is None:
        raise ConfigurationError("a template with a time field needs now: epoch seconds or an aware datetime")
    return now  # type: ignore[no-any-return]


# ── Of a function ─────────────────────────────────────────────────────────────────────────────────────────────────────


def argument_field(text: str, name: str, steps: Sequence[str]) -> Field:
    """An argument, or a public attribute or member of it."""
    for step in steps:
        if not PUBLIC_NAME.fullmatch(step):
            raise ConfigurationError(f"{{{text}}} cannot be read: {step!r} is not a public attribute or member")

    def read(context: Context) -> object:
        value = context["arguments"].get(name)
        for step in steps:
            value = value.get(step) if isinstance(value, Mapping) else getattr(value, step, None)
        return value

    return Field(text, read)


COMPILE: dict[str, Callable[[str, str, Collection[str] | None], Field]] = {
    "principal": owner_field,
    "tenant": owner_field,
    "path.": path_field,
    "query.": query_field,
    "header.": header_field,
    "body.": member_field,
    "body:": pointer_field,
    "window:": window_field,
    "date": date_field,
    "date:": date_field,
}
TIME_FIELDS = ("window:", "date", "date:")


# ── The text of a value ───────────────────────────────────────────────────────────────────────────────────────────────


def text_of(field: str, value: object) -> str:
    """The one text for *value*; without one it is an InvalidKey, lest nameless operations be taken for one another."""
    match value:
        case None:
            raise unusable(field, "is missing; send it")
        case "":
            raise unusable(field, "is empty; send a value")
        case Enum():
            return text_of(field, value.value)
        case bool():
            return "true" if value else "false"
        case str():
            return value
        case int() | float() | Decimal():
            return number_text(field, value)
        case msgspec.Raw():  # a number that was decoded without loss
            return number_text(field, Decimal(bytes(value).decode(), LENIENT))
        case datetime() if value.tzinfo is not None:
            return value.astimezone(UTC).isoformat()
        case date() | UUID():
            return str(value) if isinstance(value, UUID) else value.isoformat()
    raise unusable(field, "is not a single value; send a text or a number")


def unusable(field: str, what: str) -> InvalidKey:
    return InvalidKey(f"{{{field}}} {what}: the idempotency key of this operation is made from it.")


def number_text(field: str, value: float | Decimal) -> str:
    """Plain digits without an exponent or idle zeros, so that equal numbers have equal names."""
    small = not isinstance(value, int) or value.bit_length() < 3 * MOST_DIGITS
    exact = Decimal(repr(value) if isinstance(value, float) else value) if small else Decimal("Infinity")
    if not exact.is_finite() or abs(exact.adjusted()) > MOST_DIGITS:
        raise unusable(field, "is not a finite number of a sensible size; send another")
    text = format(exact, "f")
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text
