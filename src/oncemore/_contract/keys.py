"""Keys: reads the caller's name for an operation from its header, checks it, and joins names unambiguously."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256

from ..errors import ConfigurationError, InvalidKey, MissingKey
from .problems import did_you_mean

MAX_LENGTH = 255

# "any", "uuid", "uuid4", "uuid7", or "regex:" and a pattern that must match the whole key.
KeyFormat = str

# ── The header's syntax: an RFC 9651 string with parameters, or (unless strict) the bare text ─────────────────────────

STRING = r'"(?:[ !#-\[\]-~]|\\["\\])*"'
# Parameters have no meaning here: any text that cannot hold a second key may be the value of one.
PARAMETER = rf"; *[a-z*][a-z0-9_.*-]*(?:=(?:%?{STRING}|[!#-+\--:<-~]+))?"
QUOTED = re.compile(rf"({STRING})(?:{PARAMETER})*", re.ASCII)
ESCAPED = re.compile(r"\\(.)")

# No comma: a server may fold two header lines into one, and two keys must not become a third.  No quote: half a string.
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
    """Return the key in the field lines of the header *name*, unquoted; an error tells the caller what to change."""
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
    """Return the field line as text; refuse it first if no key in it could be short enough."""
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


def too_long(max_length: int) -> InvalidKey:
    return InvalidKey(f"The idempotency key is too long; at most {max_length} characters are accepted.")


# ── Formats ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def check_key(key: str, *, max_length: int = MAX_LENGTH, format: KeyFormat = "any") -> str:
    """Return the key in its one spelling (a UUID in lower case); raises an InvalidKey that says what is wrong with it."""
    if not key.strip():
        raise InvalidKey("The idempotency key is empty; send a unique value.")
    if len(key) > max_length:
        raise too_long(max_length)
    if not key.isprintable():
        raise InvalidKey("The idempotency key has unprintable characters; send visible characters only.")
    pattern, what = key_format(format)
    if not pattern.fullmatch(key):
        raise InvalidKey(f"The idempotency key must {what}")
    return key.lower() if format in UUIDS else key


def check_name(key: object, what: str) -> str:
    """Return a key that was made by code; the error calls it *what*."""
    if not isinstance(key, str):
        raise InvalidKey(f"{what} is {key!r}; it must be a text")
    return check_key(key)


def uuid_pattern(version: str) -> re.Pattern[str]:
    return re.compile(
        rf"[0-9a-f]{{8}}-[0-9a-f]{{4}}-{version}[0-9a-f]{{3}}-[89ab][0-9a-f]{{3}}-[0-9a-f]{{12}}", re.I | re.ASCII
    )


UUID7 = uuid_pattern("7")
UUIDS = {
    "uuid": (uuid_pattern("[1-8]"), "be a UUID (RFC 9562) in its usual form of 36 characters."),
    "uuid4": (uuid_pattern("4"), "be a random UUID (version 4) in its usual form of 36 characters."),
    "uuid7": (UUID7, "be a time-ordered UUID (version 7) in its usual form of 36 characters."),
}
FORMATS = {"any": (re.compile(".*", re.DOTALL), ""), **UUIDS}


@lru_cache(maxsize=256)
def key_format(format: KeyFormat) -> tuple[re.Pattern[str], str]:
    """Return the pattern of a key of *format*, and what the error says that the key must do."""
    if format in FORMATS:
        return FORMATS[format]
    kind, colon, pattern = format.partition(":")
    if kind != "regex" or not colon:
        hint = did_you_mean(format, (*FORMATS, "regex:"))
        raise ConfigurationError(
            f"key format {format!r} is unknown{hint}: choose any, uuid, uuid4, uuid7, 'regex:<pattern>'"
        )
    try:
        return re.compile(pattern), f"match the pattern {pattern}"
    except re.error as error:
        raise ConfigurationError(f"key format 'regex:{pattern}' is not a regular expression: {error}") from None


def uuid7_time(key: str) -> float | None:
    """Return the time in a version 7 UUID (seconds since the epoch), or None for any other key."""
    if not UUID7.fullmatch(key):
        return None
    return int(key[:8] + key[9:13], 16) / 1000


# ── Names made of parts ───────────────────────────────────────────────────────────────────────────────────────────────

# ':' delimits, '%' escapes, '~' marks a shortened name; stores reject control characters and lone surrogates.
UNSAFE = re.compile("[%:~\x00-\x1f\x7f-\x9f\ud800-\udfff]")
DIGEST_LENGTH = 64
SHORTEST_LIMIT = DIGEST_LENGTH + 1


def join(first: str, *rest: str, limit: int = MAX_LENGTH) -> str:
    """Return one name for a list of names: `a:b` if they are simple.  Different lists never give the same name."""
    return bounded(":".join(map(escaped, (first, *rest))), limit)


def escaped(part: str) -> str:
    """Return *part* with each character that would make a joined name ambiguous written as `%XX`."""
    return UNSAFE.sub(percent_encoded, part)


def percent_encoded(found: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in found[0].encode("utf-8", "surrogatepass"))


def bounded(name: str, limit: int = MAX_LENGTH) -> str:
    """Return *name* if it fits in *limit*, else its beginning, a `~` (which no escaped part has) and its digest."""
    if len(name) <= limit:
        return name
    return f"{name[: limit - SHORTEST_LIMIT]}~{sha256(name.encode()).hexdigest()}"
