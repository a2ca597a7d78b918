"""The canonical form of JSON texts and of Python values: RFC 8785, made lossless.

White space is removed, members are sorted by UTF-16 code units, and strings have only the necessary escapes.  A number is
written with its exact decimal value, in ECMAScript's layout, with all its digits: `100.00`, `1e2` and `100` are all `100`,
`-0` is `0`, and `1E400` is `1e+400`.  So a number that is the same after conversion to a double and back has the form of
RFC 8785; a number that a double would round (`9007199254740993`, `0.10000000000000000001`) keeps its digits.

A text without a canonical form raises InvalidPayload: text that is not JSON in UTF-8 (NaN, Infinity, lone surrogates, a
byte order mark), an object that names a member twice, nesting deeper than the limit, an exponent of more than 18 digits.
Time and memory are in proportion to the length of the text, even if its numbers are huge.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import re
import uuid
from collections.abc import Callable, Mapping
from decimal import Decimal
from itertools import accumulate
from typing import Any

import msgspec

from ..errors import ConfigurationError, InvalidPayload

MAX_DEPTH = 100

STRING_ESCAPE = re.compile(rb"\\(?:u0022|.)", re.DOTALL)
STRING_OR_NUMBER = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[-+.0-9eE]++', re.DOTALL)
NUMBER = re.compile(r"(-?)(\d+)(?:\.(\d+))?(?:[eE]([+-]?)0*(\d*))?", re.ASCII)

FOUR_BYTE_LEADS = (b"\xf0", b"\xf1", b"\xf2", b"\xf3", b"\xf4")
NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}

# ECMAScript and msgspec write an integer in full up to this many digits; longer integers are treated as decimals.
LONGEST_INTEGER = 21
DIGITS_AS_ZEROS = bytes(ord("0") if byte in b"0123456789" else ord(" ") for byte in range(256))
LONG_RUN = b"0" * (LONGEST_INTEGER + 1)


def read_json(data: bytes, *, max_depth: int = MAX_DEPTH) -> tuple[Any, bytes]:
    """Return the value of the JSON text *data*, with exact numbers, and its canonical form; or raise InvalidPayload."""
    if data.count(b"[") + data.count(b"{") > max_depth and deeper_than(max_depth, data):
        raise InvalidPayload(f"The JSON is nested deeper than {max_depth} levels")
    try:
        long = LONG_RUN in data.translate(DIGITS_AS_ZEROS)
        value = DECODER.decode(with_long_integers_as_decimals(data) if long else data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidPayload(f"The body is not JSON: {error}") from error
    text = write_json(value)
    quotes = count_quotes(data) if b"\\" in data else data.count(b'"')
    # If a member is named twice, the decoder drops the first, and the quotes of its name are missing in the form.
    if text.count(b'"') != quotes:
        raise InvalidPayload("The JSON has an object that names a member twice")
    return value, text


def write_json(value: Any) -> bytes:
    """Return the canonical form of a value that `read_json` or `exact_value` made."""
    text = SORTED.encode(value)
    return text if text.isascii() or not needs_utf16_order(text) else AS_IS.encode(sort_by_utf16(value))


def needs_utf16_order(text: bytes) -> bool:
    """Whether *text* has characters of U+E000–U+FFFF and above U+FFFF: UTF-16 and code points sort these differently."""
    return (b"\xee" in text or b"\xef" in text) and any(lead in text for lead in FOUR_BYTE_LEADS)


def exact_number(text: str) -> msgspec.Raw:
    """Return the canonical form of the decimal number *text*, ready to be written."""
    if len(text) <= LONGEST_INTEGER and "." in text and "e" not in text and "E" not in text:
        short = text.rstrip("0").rstrip(".")
        if short != "-0" and not short.startswith(("0.000000", "-0.000000")):
            return msgspec.Raw(short)
    return msgspec.Raw(layout(*decimal_parts(text)))


def decimal_parts(text: str) -> tuple[str, str, int]:
    """Return sign, digits d and power n of the number sign 0.d × 10ⁿ; d has no zeros at its ends, and zero has no d."""
    match = NUMBER.fullmatch(text)
    if match is None or len(match[5] or "") > 18:
        raise InvalidPayload("The JSON has a number with an exponent of more than 18 digits")
    sign, whole, fraction, exponent_sign, exponent = match.groups("")
    digits = (whole + fraction).lstrip("0")
    power = int(exponent_sign + (exponent or "0")) + len(digits) - len(fraction)
    return sign, digits.rstrip("0"), power


def layout(sign: str, digits: str, power: int) -> str:
    """Return the number in the layout of ECMAScript's Number::toString, which RFC 8785 prescribes."""
    if not digits:
        return "0"
    if len(digits) <= power <= LONGEST_INTEGER:
        return f"{sign}{digits}{'0' * (power - len(digits))}"
    if 0 < power <= LONGEST_INTEGER:
        return f"{sign}{digits[:power]}.{digits[power:]}"
    if -6 < power <= 0:
        return f"{sign}0.{'0' * -power}{digits}"
    point = "." if len(digits) > 1 else ""
    return f"{sign}{digits[0]}{point}{digits[1:]}e{power - 1:+d}"


def deeper_than(limit: int, data: bytes) -> bool:
    """Whether the brackets of *data* nest deeper than *limit*; checked before decoding, which would recurse."""
    outside_strings = b"".join(STRING_ESCAPE.sub(b"", data).split(b'"')[::2])
    brackets = outside_strings.translate(None, NOT_BRACKETS)
    return max(accumulate(map(STEP.__getitem__, brackets)), default=0) > limit


def count_quotes(data: bytes) -> int:
    """Return the number of quotes that the canonical form has if no member was dropped: all in *data*, even `\\u0022`."""
    count = data.count(b'"')
    if b"\\u0022" in data:
        count += STRING_ESCAPE.findall(data).count(b"\\u0022")
    return count


def with_long_integers_as_decimals(data: bytes) -> bytes:
    """Return *data* with `.0` after each long integer, so that the decoder does not use int(), which has limits."""

    def spelled(match: re.Match[bytes]) -> bytes:
        token = match[0]
        return token + b".0" if len(token) > LONGEST_INTEGER and token.removeprefix(b"-").isdigit() else token

    return STRING_OR_NUMBER.sub(spelled, data)


def sort_by_utf16(value: Any) -> Any:
    """Return *value* with the members of every object in the order of their names' UTF-16 code units."""
    if isinstance(value, dict):
        return {name: sort_by_utf16(value[name]) for name in sorted(value, key=lambda name: name.encode("utf-16-be"))}
    return [sort_by_utf16(item) for item in value] if isinstance(value, list) else value


DECODER = msgspec.json.Decoder(float_hook=exact_number)
SORTED = msgspec.json.Encoder(order="deterministic")
AS_IS = msgspec.json.Encoder()


# ── Python values ─────────────────────────────────────────────────────────────────────────────────────────────────────


def exact_value(value: Any) -> Any:
    """Return *value* in the form that `write_json` takes: numbers with their exact value, objects as their fields.

    Raise ConfigurationError for a type that has no such form.
    """
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
    value.encode()  # raises UnicodeEncodeError for half a surrogate pair: see `exact_value`
    return str.__str__(value)


def _integer(value: int) -> Any:
    # Through Decimal, because str() refuses integers of more than some thousand digits.
    return int(value) if abs(value) < 10**LONGEST_INTEGER else exact_number(str(Decimal(value)))


def _number(text: str) -> msgspec.Raw:
    """Return the number.  NaN and the infinities are written without quotes, so that they equal no other value."""
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
