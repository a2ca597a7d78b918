"""The source of a rule's key (a header, a field of the body, a template, or none), and the syntax of the header."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from .._fingerprint.pointer import parse_pointer, value_at
from ..errors import ConfigurationError, InvalidKey, MissingKey
from .keys import MAX_LENGTH, KeyFormat, check_key, key_format, too_long
from .problems import Problems, did_you_mean, unknown
from .templates import Template, text_of

Source = Literal["header", "body", "template", "none"]

HEADER_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+", re.ASCII)
LONGEST = 1024

# The members of a key's table, for each source, with their defaults.  A key in the body is required: the contract says
# that it names the operation, and an operation without a name would pass unguarded.
MEMBERS: dict[str, dict[str, Any]] = {
    "header": {
        "name": "Idempotency-Key",
        "required": False,
        "strict": False,
        "format": "any",
        "max_length": MAX_LENGTH,
    },
    "body": {"at": "", "required": True, "format": "any", "max_length": MAX_LENGTH},
    "template": {"template": "", "max_length": MAX_LENGTH},
    "none": {},
}
WORDS: dict[str, dict[str, Any]] = {
    "required": {"required": True},
    "optional": {"required": False},
    "none": {"from": "none"},
}


@dataclass(frozen=True, slots=True)
class KeySource:
    """How to find the key of a request.  *name* is the header's, *at* the pointer into the body."""

    source: Source
    name: str = ""
    at: tuple[str, ...] = ()
    template: Template | None = None
    required: bool = True
    strict: bool = False
    format: KeyFormat = "any"
    max_length: int = MAX_LENGTH

    def read(self, lines: Sequence[str | bytes] = (), **context: Any) -> str | None:
        """Return the key, or None if an optional key was not sent.  Raise MissingKey or InvalidKey.

        *lines* are the header's field lines, and *context* are the arguments of `Template.render`.
        """
        if self.source == "header":
            if not lines and not self.required:
                return None
            return parse_key(lines, name=self.name, strict=self.strict, max_length=self.max_length, format=self.format)
        if self.template:
            return self.template.render(**context)
        return self.from_body(context.get("body")) if self.source == "body" else None

    def from_body(self, document: object) -> str | None:
        value, place = value_at(document, self.at), "/" + "/".join(self.at)
        if value is None and not self.required:
            return None
        if value is None:
            raise MissingKey(f"Send a unique {place} in the body, and the same one when you retry.")
        if isinstance(value, bool):
            raise InvalidKey(f"{place} is the idempotency key; send a text or a number.")
        return check_key(text_of(place, value), max_length=self.max_length, format=self.format)

    def __str__(self) -> str:
        where = {"header": self.name, "body": "/" + "/".join(self.at)}.get(self.source, "")
        where = self.template.text if self.template else where
        need = "optional " if not self.required else ""
        kind = f" ({self.format})" if self.format != "any" else ""
        return f"{need}{self.source} {where}{kind}".rstrip()


# ── The header's syntax: an RFC 9651 string with parameters, or (unless strict) the bare text ─────────────────────────

STRING = r'"(?:[ !#-\[\]-~]|\\["\\])*"'
# Parameters are ignored, so their values may be any text that cannot contain a second key.
PARAMETER = rf"; *[a-z*][a-z0-9_.*-]*(?:=(?:%?{STRING}|[!#-+\--:<-~]+))?"
QUOTED = re.compile(rf"({STRING})(?:{PARAMETER})*", re.ASCII)
ESCAPED = re.compile(r"\\(.)")

# No comma: a server may fold two header lines into one, and two keys must not become a third.  No quote: it is half a string.
BARE = re.compile(r"[ !#-+\--~]*", re.ASCII)
ROOM_FOR_PARAMETERS = 256

# Nearly all keys look like this.  If any format is accepted, they need no further check, which takes 6 % of a replay.
SIMPLE = re.compile(r"[0-9A-Za-z_.-]{1,64}", re.ASCII)


def parse_key(
    values: Sequence[str | bytes],
    *,
    name: str = "Idempotency-Key",
    strict: bool = False,
    max_length: int = MAX_LENGTH,
    format: KeyFormat = "any",
) -> str:
    """Return the key in the field lines of the header *name*, unquoted.  Raise MissingKey or InvalidKey."""
    if not values:
        raise MissingKey(f"Send a unique {name} header, and the same one when you retry.")
    if len(values) > 1:
        raise InvalidKey(f"The idempotency key was sent {len(values)} times; send the header once.")
    value = values[0]
    lenient = format == "any" and not strict and len(value) <= max_length
    if lenient and isinstance(value, str) and SIMPLE.fullmatch(value):
        return value
    text = field_text(value, max_length)
    key = unquoted(text) if text.startswith('"') else bare(text, strict)
    return check_key(key, max_length=max_length, format=format)


def field_text(value: str | bytes, max_length: int) -> str:
    """Return the field line as text.  Refuse it first if it is too long for any key."""
    if len(value) > 2 * max_length + 2 + ROOM_FOR_PARAMETERS:
        raise too_long(max_length)
    if not value.isascii():
        raise InvalidKey("The idempotency key has characters outside ASCII; send visible ASCII characters only.")
    text = value.decode("ascii") if isinstance(value, bytes) else value
    return text.strip(" ")


def unquoted(text: str) -> str:
    found = QUOTED.fullmatch(text)
    if not found:
        raise InvalidKey(
            'The idempotency key is not a well-formed quoted string; close the quotes, escape only \\" and \\\\, '
            "and send one key without tabs or line breaks."
        )
    return ESCAPED.sub(r"\1", found[1][1:-1])


def bare(text: str, strict: bool) -> str:
    if strict and text:
        raise InvalidKey('The idempotency key must be a quoted string; put it in double quotes, as in "8e03978e".')
    if not BARE.fullmatch(text):
        raise InvalidKey(
            "The idempotency key has a comma, quote or control character; use letters, digits and hyphens."
        )
    return text


# ── The contract's table of a key ─────────────────────────────────────────────────────────────────────────────────────


def key_table(value: object) -> dict[str, Any]:
    """Return the table that a short form stands for.  A table gets only the source that its members imply."""
    if isinstance(value, str):
        kind, colon, rest = value.partition(":")
        if colon and kind in ("body", "template"):
            return {"from": kind, "at" if kind == "body" else kind: rest}
        if value in WORDS:
            return dict(WORDS[value])
        hint = did_you_mean(value, WORDS)
        raise ConfigurationError(
            f"{value!r} is unknown{hint}: write required, optional, none, body:/pointer or template:..."
        )
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"{value!r} is not a key: write a text such as 'required', or a table")
    table = dict(value)
    implied = "body" if "at" in table else "template" if "template" in table else "header" if "name" in table else None
    return table if "from" in table or implied is None else {"from": implied, **table}


def merged_key(weaker: Mapping[str, Any], stronger: Mapping[str, Any]) -> dict[str, Any]:
    """Return *stronger* over *weaker*.  The members of *weaker* count only if the source stays the same."""
    source = stronger.get("from", weaker["from"])
    return {**(weaker if weaker["from"] == source else {}), **stronger, "from": source}


def key_source(table: Mapping[str, Any], path_params: tuple[str, ...] | None) -> KeySource:
    """Return the source that a complete table describes.  One ConfigurationError names all problems in it."""
    source = table["from"]
    if source not in get_args(Source):
        raise unknown(source, get_args(Source))
    problems, values = Problems(), {}
    for name in sorted(table.keys() - MEMBERS[source].keys() - {"from"}):
        hint = did_you_mean(name, MEMBERS[source])
        problems.append(f"{name!r} has no meaning for a key from {source}{hint}: drop it")
    for name, usual in MEMBERS[source].items():
        with problems.collecting(name):
            values[name] = CHECKS[name](table.get(name, usual))
    if source == "template" and not problems:
        with problems.collecting():
            values["template"] = Template(values["template"], path_params, max_length=values["max_length"])
    if problems:
        raise ConfigurationError("; ".join(problems))
    return KeySource(source, **values)


# ── Members of the table ───────────────────────────────────────────────────────────────────────────────────────


def header_name(value: object) -> str:
    if not isinstance(value, str) or not HEADER_NAME.fullmatch(value):
        raise ConfigurationError(f"{value!r} is not a header's name: write one such as 'Idempotency-Key'")
    return value


def flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigurationError(f"{value!r} is not true or false: write one of them")
    return value


def length(value: object) -> int:
    if type(value) is not int or not 1 <= value <= LONGEST:
        raise ConfigurationError(f"{value!r} is not a length: write a number from 1 to {LONGEST}")
    return value


def known_format(value: object) -> KeyFormat:
    key_format(str(value))
    return str(value)


CHECKS: dict[str, Callable[[Any], Any]] = {
    "name": header_name,
    "at": lambda value: parse_pointer(str(value)),
    "template": str,
    "required": flag,
    "strict": flag,
    "format": known_format,
    "max_length": length,
}
