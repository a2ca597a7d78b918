"""Templates: the contract's way of naming an operation from its request, its function's arguments and the time.

A name is text: `42` and `"42"` are the same, and so are `100`, `100.0` and `1e2`.  Values are escaped, and two fields
must have a `:` between them, so different texts never make the same name; a name too long is cut, and ends in a digest.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from ..errors import ConfigurationError
from .fields import COMPILE, TIME_FIELDS, Context, Field, argument_field
from .keys import MAX_LENGTH, SHORTEST_LIMIT, bounded, escaped
from .problems import did_you_mean

TOKEN = re.compile(r"(?P<brace>\{\{|\}\})|\{(?P<field>[^{}]*)\}|(?P<text>[^{}]+)|(?P<stray>[{}])")
FIELD = re.compile(r"(?P<head>[A-Za-z_][A-Za-z0-9_]*)(?:(?P<mark>[.:])(?P<rest>.+))?", re.ASCII)
NOTHING: Context = {}


@dataclass(frozen=True, slots=True)
class Template:
    """A compiled template; every mistake in its text is found here, not at the first request.

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
        """How many seconds one name stays in use: the longest time window in it, or 0 for ever."""
        return max((part.window for part in self.parts if isinstance(part, Field)), default=0.0)

    def forgotten(self, ttl: float) -> str:
        """What to say where outcomes are kept for less than a name stays in use; nothing where they are not."""
        if self.window <= ttl:
            return ""
        return (
            f"its time window is {self.window:g} s, but ttl only {ttl:g} s, so a repeat within the window would run again; "
            "make ttl as long as the window"
        )

    @property
    def constant(self) -> bool:
        """Whether it names no field, and so is the same for all."""
        return not any(isinstance(part, Field) for part in self.parts)

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
        now: float | datetime | None = None,
    ) -> str:
        """The name; an InvalidKey tells which field is missing, empty or not a single value.

        Names of headers are in lower case; *body* is the decoded document; *now* is epoch seconds or an aware datetime.
        """
        context: dict[str, object] = {"principal": principal, "tenant": tenant, "path": path, "query": query}
        context |= {"headers": headers, "body": body, "arguments": arguments, "now": now}
        texts = (part if isinstance(part, str) else part.render(context) for part in self.parts)
        return bounded("".join(texts), self.max_length)


def remembered(template: Template, ttl: float) -> Template:
    """The template, unless it stays in use for longer than outcomes are kept."""
    fault = template.forgotten(ttl)
    if fault:
        raise ConfigurationError(f"key {template.text!r}: {fault}")
    return template


def compiled(text: str, path_params: Collection[str] | None, names: Collection[str] | None) -> list[str | Field]:
    """The literals and fields of *text*, in turn."""
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
            parts.append(literal(token["text"] or token["brace"][0]))
        else:
            parts.append(compile_field(text, token["field"], path_params, names))
    return parts


def literal(text: str) -> str:
    """The template's own text: its ':' delimits, all else that could be mistaken is escaped."""
    return ":".join(map(escaped, text.split(":")))


def compile_field(text: str, inner: str, path_params: Collection[str] | None, names: Collection[str] | None) -> Field:
    found = FIELD.fullmatch(inner)
    head, mark, rest = (found["head"], found["mark"] or "", found["rest"] or "") if found else ("", "", "")
    if names is not None and head in names and mark != ":":
        return argument_field(inner, head, rest.split(".") if rest else [])
    if head + mark in (COMPILE if names is None else TIME_FIELDS):
        return COMPILE[head + mark](inner, rest, path_params)
    known = tuple(COMPILE) if names is None else (*names, *TIME_FIELDS)
    hint = did_you_mean(inner, known) or did_you_mean(re.split("[.:]", inner)[0], known)
    shown = ", ".join(f"{{{name}<...>}}" if name[-1] in ".:" else f"{{{name}}}" for name in known)
    raise ConfigurationError(f"template {text!r} has an unknown field {{{inner}}}{hint}: choose from {shown}")


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
