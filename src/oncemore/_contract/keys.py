"""Check keys, which are the callers' names for operations, and join names unambiguously."""

from __future__ import annotations

import re
from functools import lru_cache
from hashlib import sha256

from ..errors import ConfigurationError, InvalidKey
from .problems import did_you_mean

MAX_LENGTH = 255

# "any", "uuid", "uuid4", "uuid7", or "regex:" and a pattern that must match the whole key.
KeyFormat = str

# ── Formats ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def check_key(key: str, *, max_length: int = MAX_LENGTH, format: KeyFormat = "any") -> str:
    """Return the key, or raise an InvalidKey that names the fault.

    A key in the format of a UUID is returned in lower case, with or without hyphens, as it was sent.
    """
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


def too_long(max_length: int) -> InvalidKey:
    return InvalidKey(f"The idempotency key is too long; at most {max_length} characters are accepted.")


def check_name(key: object, what: str) -> str:
    """Return a key that was made by code, if it is valid.  The error calls it *what*."""
    if not isinstance(key, str):
        raise InvalidKey(f"{what} is {key!r}; it must be a text")
    try:
        return check_key(key)
    except InvalidKey as error:
        raise InvalidKey(error.detail.replace("The idempotency key", what)) from None


def uuid_pattern(version: str) -> re.Pattern[str]:
    """Return the pattern of a UUID: 36 characters with hyphens, or 32 hexadecimal digits without."""
    parts = ("[0-9a-f]{8}", "[0-9a-f]{4}", f"{version}[0-9a-f]{{3}}", "[89ab][0-9a-f]{3}", "[0-9a-f]{12}")
    return re.compile("|".join(hyphen.join(parts) for hyphen in ("-", "")), re.I | re.ASCII)


UUID7 = uuid_pattern("7")
FORMS = "in its usual form of 36 characters, or as 32 hexadecimal digits."
UUIDS = {
    "uuid": (uuid_pattern("[1-8]"), f"be a UUID (RFC 9562) {FORMS}"),
    "uuid4": (uuid_pattern("4"), f"be a random UUID (version 4) {FORMS}"),
    "uuid7": (UUID7, f"be a time-ordered UUID (version 7) {FORMS}"),
}
FORMATS = {"any": (re.compile(".*", re.DOTALL), ""), **UUIDS}


@lru_cache(maxsize=256)
def key_format(format: KeyFormat) -> tuple[re.Pattern[str], str]:
    """Return the pattern of keys of *format*, and the end of the error's sentence "The idempotency key must ..."."""
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


def uuid7_time(key: str, format: KeyFormat = "any") -> float | None:
    """Return the time in a version 7 UUID (seconds since the epoch), or None for any other key.

    Without hyphens, *format* must be "uuid7", because one in 64 digests of 32 digits looks like such a UUID.
    """
    if not UUID7.fullmatch(key) or ("-" not in key and format != "uuid7"):
        return None
    return int(key.replace("-", "")[:12], 16) / 1000


# ── Names made of parts ───────────────────────────────────────────────────────────────────────────────────────────────

# ':' delimits, '%' escapes, '~' marks a shortened name; stores reject control characters and lone surrogates.
UNSAFE = re.compile("[%:~\x00-\x1f\x7f-\x9f\ud800-\udfff]")
DIGEST_LENGTH = 64
SHORTEST_LIMIT = DIGEST_LENGTH + 1


def join(first: str, *rest: str) -> str:
    """Return one name for a list of names, such as `a:b`.  Different lists never give the same name."""
    return bounded(":".join(map(escaped, (first, *rest))))


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
