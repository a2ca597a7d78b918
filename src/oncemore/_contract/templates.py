"""Templates: name an operation from its request, its function's arguments and the time.

A name is text: `42` and `"42"` are the same, and so are `100`, `100.0` and `1e2`.  Values are escaped, and two fields
must have a `:` between them, so different texts never make the same name.  A name that is too long is cut, and ends in a
digest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Context as Arithmetic
from decimal import Decimal
from enum import Enum
from typing import Any, Protocol
from uuid import UUID
from zoneinfo import ZoneInfo, available_timezones

import msgspec

from .._fingerprint.pointer import INDEX, parse_pointer, value_at
from ..errors import ConfigurationError, InvalidKey
from .keys import MAX_LENGTH, SHORTEST_LIMIT, bounded, escaped
from .policy import duration
from .problems import did_you_mean

TOKEN = re.compile(r"(?P<brace>\{\{|\}\})|\{(?P<field>[^{}]*)\}|(?P<text>[^{}]+)|(?P<stray>[{}])")
FIELD = re.compile(r"(?P<head>[A-Za-z_][A-Za-z0-9_]*)(?:(?P<mark>[.:])(?P<rest>.+))?", re.ASCII)
PUBLIC_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*", re.ASCII)
DAY = 86400.0
LONGEST_DAY = 25 * 3600.0  # on the day on which the clocks go back
# A number with more digits than this is an attack, not a name.
MOST_DIGITS = 1000
# A number too large even for Decimal becomes infinite, rather than an error.
LENIENT = Arithmetic(traps=[])

REQUEST_FIELDS = ("principal", "tenant", "path.", "query.", "header.", "body.", "body:")
TIME_FIELDS = ("window:", "date", "date:")
CALL_FIELDS = (*TIME_FIELDS, "tick")

Context = Mapping[str, Any]
NOTHING: Context = {}


class Scheduled(Protocol):
    """The scheduled time that a job's slot is named after: a wall time in a zone, and the schedule's own name for it."""

    @property
    def date(self) -> date: ...
    @property
    def zone(self) -> str: ...
    @property
    def name(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Field:
    """One `{...}` of a template: *read* finds its value, which stays the same for *window* seconds (0: for ever).

    *suffix* is written after the value.  A *safe* value is a name already, and is not escaped.
    """

    text: str
    read: Callable[[Context], object]
    window: float = 0.0
    suffix: str = ""
    safe: bool = False

    def render(self, context: Context) -> str:
        """Return the field's value as an unambiguous part of a name."""
        text = text_of(self.text, self.read(context))
        return text if self.safe else escaped(text) + self.suffix


@dataclass(frozen=True, slots=True)
class Template:
    """A compiled template.  Every mistake in its text is found here, not at the first request.

    *path_params* are the parameters of the rule's path (None: not known).  With *names*, the template names the call of
    a function with those parameters instead of a request.
    """

    text: str
    path_params: tuple[str, ...] | None = None
    names: tuple[str, ...] | None = None
    max_length: int = MAX_LENGTH
    parts: tuple[str | Field, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.max_length < SHORTEST_LIMIT:
            raise ConfigurationError(f"max_length must be {SHORTEST_LIMIT} or more: a long template ends in its digest")
        parts = compiled(self.text, self.path_params, self.names)
        check_separated(self.text, parts)
        object.__setattr__(self, "parts", tuple(parts))

    @property
    def window(self) -> float:
        """The seconds for which one name stays in use: the longest time window in the template, or 0 for ever."""
        return max((part.window for part in self.parts if isinstance(part, Field)), default=0.0)

    def retention_problem(self, ttl: float) -> str:
        """Return the problem if outcomes are kept for a shorter time than a name stays in use, else an empty text."""
        if self.window <= ttl:
            return ""
        return (
            f"its time window is {self.window:g} s, but ttl only {ttl:g} s, so a repeat within the window would run again; "
            "make ttl as long as the window"
        )

    @property
    def constant(self) -> bool:
        """Whether the template has no field, so that its name is always the same."""
        return not any(isinstance(part, Field) for part in self.parts)

    def reads(self, name: str) -> bool:
        """Whether a field of the template is the argument *name*, or a part of that argument."""
        fields = (part.text for part in self.parts if isinstance(part, Field))
        return any(text == name or text.startswith(f"{name}.") for text in fields)

    def render(
        self,
        *,
        principal: str = "",
        tenant: str = "",
        path: Context = NOTHING,
        query: Context = NOTHING,
        headers: Context = NOTHING,
        body: object = None,
        arguments: Context = NOTHING,
        now: float | None = None,
        scheduled: Scheduled | None = None,
    ) -> str:
        """Return the name, or raise an InvalidKey that says which field is missing, empty or not a single value.

        Names of headers are in lower case.  *body* is the decoded document.  *now* is in epoch seconds, and only needed
        for time fields.  If the call is *scheduled*, *now* is the scheduled time.
        """
        context: dict[str, object] = {"principal": principal, "tenant": tenant, "path": path, "query": query}
        context |= {"headers": headers, "body": body, "arguments": arguments, "now": now, "scheduled": scheduled}
        texts = (part if isinstance(part, str) else part.render(context) for part in self.parts)
        return bounded("".join(texts), self.max_length)


def remembered(template: Template, ttl: float) -> Template:
    """Return the template, or raise ConfigurationError if a name stays in use for longer than outcomes are kept."""
    problem = template.retention_problem(ttl)
    if problem:
        raise ConfigurationError(f"key {template.text!r}: {problem}")
    return template


def compiled(text: str, path_params: Collection[str] | None, names: Collection[str] | None) -> list[str | Field]:
    """Return the literals and fields of *text*, in their order."""
    if not isinstance(text, str):
        raise ConfigurationError(f"{text!r} is not a template: write a text, as in 'invoice:{{invoice_id}}'")
    if not text:
        raise ConfigurationError("a template must not be empty: write fields, as in '{principal}:{body.orderId}'")
    parts: list[str | Field] = []
    for token in TOKEN.finditer(text):
        if token["stray"]:
            brace = token["stray"]
            raise ConfigurationError(f"template {text!r} has an unbalanced {brace!r}: double it to mean the character")
        if token["field"] is None:
            literal = (
                token["text"] or token["brace"][0]
            )  # a ':' in it delimits, and other special characters are escaped
            parts.append(":".join(map(escaped, literal.split(":"))))
        else:
            parts.append(compile_field(text, token["field"], path_params, names))
    return parts


def compile_field(text: str, inner: str, path_params: Collection[str] | None, names: Collection[str] | None) -> Field:
    """Return the field that is written as `{inner}` in the template *text*."""
    found = FIELD.fullmatch(inner)
    head, mark, rest = (found["head"], found["mark"] or "", found["rest"] or "") if found else ("", "", "")
    if names is not None and head in names and mark != ":" and inner != "date":
        return argument_field(inner, head, rest.split(".") if rest else [])
    known = (*REQUEST_FIELDS, *TIME_FIELDS) if names is None else (*names, *CALL_FIELDS)
    given = head if names is not None and head in names else ""  # the parameter whose argument replaces the time
    match head + mark:
        case kind if kind not in known:
            hint = did_you_mean(inner, known) or did_you_mean(re.split("[.:]", inner)[0], known)
            shown = ", ".join(f"{{{name}<...>}}" if name[-1] in ".:" else f"{{{name}}}" for name in known)
            raise ConfigurationError(f"template {text!r} has an unknown field {{{inner}}}{hint}: choose from {shown}")
        case "path.":
            check_path_param(inner, rest, path_params)
            return Field(inner, lambda context: context["path"].get(rest))
        case "query.":
            return Field(inner, lambda context: single_value(inner, context["query"].get(rest)))
        case "header.":
            return Field(inner, lambda context: single_value(inner, context["headers"].get(rest.lower())))
        case "body." | "body:":
            steps = rest.split(".") if mark == "." else parse_pointer(rest)
            return Field(inner, lambda context: value_at(context["body"], steps))
        case "window:":
            return window_field(inner, rest, given)
        case "date" | "date:":
            return date_field(inner, rest, given)
        case "tick":
            return Field(inner, tick_name, 1.0, safe=True)
    return Field(inner, lambda context: context[inner])  # principal or tenant


def check_separated(text: str, parts: Sequence[str | Field]) -> None:
    """Refuse two fields without a ':' between them: `{a}{b}` cannot tell `x`, `yz` from `xy`, `z`."""
    between = ":"
    for part in parts:
        if isinstance(part, str):
            between += part
        elif ":" in between:
            between = ""
        else:
            raise ConfigurationError(
                f"template {text!r} needs a ':' before {{{part.text}}}, or different values could make the same key"
            )


# ── Fields ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def check_path_param(text: str, name: str, path_params: Collection[str] | None) -> None:
    if path_params is not None and name not in path_params:
        known = ", ".join(f"{{path.{each}}}" for each in path_params) or "none"
        hint = did_you_mean(name, path_params)
        raise ConfigurationError(f"{{{text}}} is not in the rule's path{hint}: its parameters are {known}")


def single_value(text: str, value: object) -> object:
    """Return a query parameter or header, which the framework gives as a text, or as a list of at most one text."""
    if not isinstance(value, list | tuple):
        return value
    if len(value) > 1:
        raise unusable(text, f"was given {len(value)} times; give it once")
    return value[0] if value else None


def window_field(text: str, rest: str, parameter: str = "") -> Field:
    """Return a field for the start of the epoch-aligned window that contains *now*: `20260219T120000Z`.

    With a *parameter*, its argument is the time instead of *now*, unless it is None.
    """
    seconds = duration(rest)
    if seconds < 1 or seconds != int(seconds):
        raise ConfigurationError(f"{{{text}}} is not a window: write one or more whole seconds, as in {{window:1h}}")

    def read(context: Context) -> object:
        argument = context["arguments"].get(parameter) if parameter else None
        if argument is not None and not (isinstance(argument, datetime) and argument.tzinfo is not None):
            return argument  # the caller's own name for the window
        moment = instant(context) if argument is None else argument
        return utc_text(moment.timestamp() // seconds * seconds)

    return Field(text, read, seconds)


def date_field(text: str, rest: str, parameter: str = "") -> Field:
    """Return a field for the calendar day of *now* in a time zone: `2026-02-19:Europe/Berlin`, or `2026-02-19` in UTC.

    The zone is written after the date, because a date alone is ambiguous.  A scheduled call has the date of its wall time.
    With a *parameter*, its argument is the date, unless it is None.
    """
    zone = time_zone(rest) if rest else UTC
    day = (0.0 if parameter else DAY) if rest in ("", "UTC") else LONGEST_DAY

    def read(context: Context) -> object:
        argument = context["arguments"].get(parameter) if parameter else None
        if isinstance(argument, datetime) and argument.tzinfo is not None:
            return argument.astimezone(zone).date()
        if argument is not None:
            return argument.date() if isinstance(argument, datetime) else argument
        scheduled = context["scheduled"]
        if scheduled is not None and rest in ("", scheduled.zone):
            return scheduled.date
        return instant(context).astimezone(zone).date()

    return Field(text, read, day, f":{escaped(rest)}" if rest else "")


def tick_name(context: Context) -> str:
    """Return the schedule's name for the scheduled time; for a call by hand, the current second."""
    scheduled = context["scheduled"]
    return utc_text(context["now"]) if scheduled is None else scheduled.name


def utc_text(moment: float) -> str:
    return datetime.fromtimestamp(moment // 1, UTC).strftime("%Y%m%dT%H%M%SZ")


def time_zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):  # an unknown name, an invalid one, or a directory such as 'America'
        hint = did_you_mean(name, available_timezones())
        raise ConfigurationError(
            f"time zone {name!r} is unknown{hint}: write an IANA name such as 'Europe/Berlin' "
            "(a system without a zone database needs the tzdata package)"
        ) from None


def instant(context: Context) -> datetime:
    return datetime.fromtimestamp(
        context["now"] // 1, UTC
    )  # whole seconds, because it rounds: the last moment of a day would be in the next


def argument_field(text: str, name: str, steps: Sequence[str]) -> Field:
    """Return a field for an argument, for a public attribute or member of it, or for an item: `{items.0.id}`."""
    for step in steps:
        if not PUBLIC_NAME.fullmatch(step) and not INDEX.fullmatch(step):
            raise ConfigurationError(
                f"{{{text}}} cannot be read: {step!r} is not a public attribute, a member or an index"
            )

    def read(context: Context) -> object:
        value = context["arguments"].get(name)
        for step in steps:
            if isinstance(value, Mapping):
                value = value.get(step)
            elif isinstance(value, list | tuple) and INDEX.fullmatch(step):
                value = value[int(step)] if int(step) < len(value) else None
            else:
                value = getattr(value, step, None)
        return value

    return Field(text, read)


# ── The text of a value ───────────────────────────────────────────────────────────────────────────────────────────────


def text_of(field: str, value: object) -> str:
    """Return the text for *value*, or raise InvalidKey if there is none, because an operation needs a name."""
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
    """Return plain digits without an exponent or trailing zeros, so that equal numbers have equal names."""
    small = not isinstance(value, int) or value.bit_length() < 3 * MOST_DIGITS
    exact = Decimal(repr(value) if isinstance(value, float) else value) if small else Decimal("Infinity")
    if not exact.is_finite() or abs(exact.adjusted()) > MOST_DIGITS:
        raise unusable(field, "is not a finite number of a sensible size; send another")
    text = format(exact, "f")
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text
