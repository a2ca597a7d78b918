"""The digest of a request: equal for a repeated request, different for any other, and verifiable after an upgrade.

A fingerprint reads `c1:<hex>` or `c1.<key id>:<hex>`.  The part before the colon names its algorithm and secret, so a
stored fingerprint is always compared by its own algorithm:

| id | the form of the body |
|---|---|
| `c1` | canonical JSON (`application/json`, `application/*+json`), with the fields that count; see `canonical` |
| `f1` | an URL-encoded form: fields in their order, percent-encoding and `+` normalised |
| `f2` | the same in mode `unordered`: fields sorted by their names |
| `m1` | a multipart form, or any other `multipart/*`: parts in their order with their headers, whatever the boundary |
| `r1` | its bytes: every other media type, and each body that cannot be read as its own media type |
| `v1` | not a body, but the canonical JSON of a Python value: see fingerprint_of |

Method, path, query and media type count too, each after its length, so that none can be taken for part of another.  The
query is read as a form: its order counts, its percent-encoding does not.  The media type counts without its parameters:
a client or proxy that adds `; charset=utf-8` between two attempts repeats the same request, while JSON sent as plain
text does not.  No other header counts.  include and exclude apply to JSON; every other body is compared whole.  If a rule
changes them, retries of requests that it stored before are refused.

The digest is SHA-256, which processors compute faster than BLAKE2, or HMAC-SHA-256 under a secret, so that a reader
of the ledger cannot guess short payloads.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from ..errors import ConfigurationError, InvalidPayload
from .canonical import exact_value, read_json, write_json
from .pointer import parse_pointer, value_at

Mode = Literal["canonical", "unordered", "raw", "none"]
Pointer = tuple[str, ...]

SHORTEST_SECRET = 16

ALGORITHMS = {"application/json": "c1", "application/x-www-form-urlencoded": "f1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprinter:
    """Makes and compares the fingerprints of one rule's requests.

    *include* and *exclude* are JSON pointers (`/order/id`) or bare names of top-level members (`timestamp`): only the
    included fields count, and excluded fields do not.  *mode* `unordered` ignores the order of a form's fields, `raw`
    compares bodies byte by byte, and `none` compares nothing.  The first of *secrets* signs; all of them verify, and
    fingerprints without a secret stay valid.  To rotate, append the new secret in every process, then move it to the front,
    and remove the old one when the last record that it signed has expired.
    """

    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    mode: Mode = "canonical"
    secrets: Sequence[bytes] = field(default=(), repr=False)
    _include: tuple[Pointer, ...] = field(init=False, repr=False, compare=False)
    _exclude: tuple[Pointer, ...] = field(init=False, repr=False, compare=False)
    _keys: dict[str, bytes] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ConfigurationError(
                f"mode = {self.mode!r} is unknown: choose one of {', '.join(map(repr, get_args(Mode)))}"
            )
        if self.mode in ("raw", "none") and (self.include or self.exclude):
            raise ConfigurationError(f"mode = {self.mode!r} compares no fields: remove include and exclude or mode")
        include, exclude = parse_fields("include", self.include), parse_fields("exclude", self.exclude)
        check_selection(include, exclude)
        self._set(_include=include, _exclude=exclude, _keys=keys_by_id(self.secrets))
        self._set(include=tuple(self.include), exclude=tuple(self.exclude), secrets=tuple(self.secrets))

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def fingerprint(self, method: str, path: str, query: str, content_type: str, body: bytes) -> str:
        """Return the fingerprint of the request, to be stored in its record; it is empty in mode `none`."""
        if self.mode == "none":
            return ""
        media_type = media_type_of(content_type)
        algorithm = "r1" if self.mode == "raw" else algorithm_for(media_type)
        if algorithm == "f1" and self.mode == "unordered":
            algorithm = "f2"
        try:
            content = self._read(algorithm, content_type, body)
        except InvalidPayload:
            algorithm, content = "r1", body
        key_id = next(iter(self._keys))
        return sign(algorithm, key_id, self._keys[key_id], head(method, path, query, media_type), content)

    def matches(self, stored: str, method: str, path: str, query: str, content_type: str, body: bytes) -> bool:
        """Whether *stored* is the fingerprint of this request, by its own algorithm and secret; an empty one matches any.

        A fingerprint with an unknown algorithm or secret never matches: refusing is safe, performing is not.
        """
        if self.mode == "none" or not stored:
            return True
        algorithm, _, key_id = stored.partition(":")[0].partition(".")
        if key_id not in self._keys:
            return False
        try:
            content = self._read(algorithm, content_type, body)
        except InvalidPayload:
            return False
        expected = sign(
            algorithm, key_id, self._keys[key_id], head(method, path, query, media_type_of(content_type)), content
        )
        return hmac.compare_digest(expected.encode(), stored.encode("utf-8", "surrogatepass"))

    def _read(self, algorithm: str, content_type: str, body: bytes) -> bytes:
        """Return the bytes of *body* that the *algorithm* digests.  Raise InvalidPayload if it cannot read the body."""
        match algorithm:
            case "c1":
                value, text = read_json(body)
                whole = not self._include and not self._exclude
                return text if whole else write_json(select(value, self._include, self._exclude))
            case "f1":
                return read_urlencoded(body)
            case "f2":
                return in_any_order(read_urlencoded(body))
            case "m1":
                return read_multipart(content_type, body)
            case "r1":
                return body
        raise InvalidPayload(f"The fingerprint algorithm {algorithm!r} is unknown")


def fingerprint_of(value: Any) -> str:
    """Return the fingerprint of a Python value, such as a function's arguments: values with equal JSON have equal ones.

    Numbers are compared by value, not by type (`Decimal("100.00")` equals `100`; `True` does not equal `1`).  UUIDs, dates,
    times, enums, bytes, dataclasses, msgspec structs and pydantic models are compared by their contents, and sets in any order.
    """
    return sign("v1", "", b"", b"", write_json(exact_value(value)))


def media_type_of(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def algorithm_for(media_type: str) -> str:
    """Return the id of the algorithm that new fingerprints use for bodies of *media_type*."""
    if media_type.startswith("application/") and media_type.endswith("+json"):
        return "c1"
    if media_type.startswith("multipart/"):
        return "m1"
    return ALGORITHMS.get(media_type, "r1")


def head(method: str, path: str, query: str, media_type: str) -> bytes:
    """Return the compared parts of a request other than its body, each after its length."""
    query = respell(query) if query else ""
    parts = f"{len(method)}:{method}{len(path)}:{path}{len(query)}:{query}{len(media_type)}:{media_type}"
    return parts.encode("utf-8", "surrogatepass")


def sign(algorithm: str, key_id: str, key: bytes, head: bytes, content: bytes) -> str:
    """Return the fingerprint, with the names of its algorithm and secret."""
    message = b"%b\n%b\n%b" % (algorithm.encode(), head, content)
    if not key_id:
        return f"{algorithm}:{hashlib.sha256(message).hexdigest()}"
    return f"{algorithm}.{key_id}:{hmac.digest(key, message, 'sha256').hex()}"


def keys_by_id(secrets: Sequence[bytes]) -> dict[str, bytes]:
    """Return the secrets by the short ids in their fingerprints, the signing secret first; the empty id means no secret."""
    if isinstance(secrets, str | bytes) or not isinstance(secrets, Sequence) or {*map(type, secrets)} - {bytes}:
        raise ConfigurationError("secrets is not a list of bytes: write [secret], or [newest, older] while they rotate")
    if any(len(secret) < SHORTEST_SECRET for secret in secrets):
        raise ConfigurationError(
            f"A fingerprint secret needs {SHORTEST_SECRET} random bytes or more: secrets.token_bytes(32)"
        )
    keys = {hmac.digest(secret, b"oncemore fingerprint key id", "sha256").hex()[:12]: secret for secret in secrets}
    return {**keys, "": b""}


# ── Which fields of a JSON body count ─────────────────────────────────────────────────────────────────────────────────

ABSENT = object()  # stands for a missing member, which differs from null


def parse_fields(setting: str, fields: Sequence[str]) -> tuple[Pointer, ...]:
    """Return the pointers to the *fields* of a setting: JSON pointers, or bare names of top-level members."""
    if isinstance(fields, str) or not isinstance(fields, Sequence):
        raise ConfigurationError(f"{setting} = {fields!r} is not a list of fields: write [{fields!r}]")
    for each in fields:
        if not isinstance(each, str) or not each:
            raise ConfigurationError(
                f"{setting} has {each!r}: write a member's name, or a JSON pointer such as '/order/id'"
            )
        if each[0] != "/" and any(mark in each for mark in "./~#"):  # `order.id` would silently select nothing
            raise ConfigurationError(
                f"{setting} has {each!r}: write a JSON pointer, such as '/order/id' or '/order.id'"
            )
    return tuple(parse_pointer(each) if each[0] == "/" else (each,) for each in fields)


def check_selection(include: Sequence[Pointer], exclude: Sequence[Pointer]) -> None:
    """Raise ConfigurationError if an included field is excluded, because then bodies that differ in it would be equal."""
    for pointer in include:
        if any(pointer[: len(other)] == other for other in exclude):
            raise ConfigurationError(
                f"include has '/{'/'.join(pointer)}', which exclude leaves out: remove it from one of them"
            )


def select(value: Any, include: Sequence[Pointer], exclude: Sequence[Pointer]) -> Any:
    """Return the parts of *value* that count: only *include*, if given, and never *exclude*.  Changes *value*."""
    for pointer in exclude:
        _leave_out(value, pointer)
    if not include:
        return value
    found = ((pointer, value_at(value, pointer, ABSENT)) for pointer in sorted(set(include)))
    return [[list(pointer), part] for pointer, part in found if part is not ABSENT]


def _leave_out(value: Any, pointer: Pointer) -> None:
    """Remove a member from its object.  Set an element of an array to null instead, so that the others keep their places."""
    parent, last = value_at(value, pointer[:-1]), pointer[-1]
    if isinstance(parent, dict):
        parent.pop(last, None)
    elif isinstance(parent, list) and value_at(parent, (last,), ABSENT) is not ABSENT:
        parent[int(last)] = None


# ── Forms in one spelling: without differences of percent-encoding or boundary ────────────────────────────────────────

# Characters that mean the same with and without percent-encoding: all but the separators & ; = and +.
PLAIN = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~!*'(),/:@?$[]")
ESCAPE = re.compile(r"%([0-9A-Fa-f]{2})")
URLENCODED = re.compile(rb"(?:[A-Za-z0-9\-._~!*'(),/:@?$\[\]&;=+]|%[0-9A-Fa-f]{2})*+")

PARAMETER = re.compile(r""";[ \t]*+([^\s;="]++)=(?:"((?:[^"\\]|\\.)*+)"|([^\s;"]*+))[ \t]*+""")
BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,\-./:=? ]{0,69}[0-9A-Za-z'()+_,\-./:=?]")  # RFC 2046

MAX_PARTS = 10_000


def respell(text: str) -> str:
    """Return a query or form in one spelling: only necessary escapes, in upper case, and a space as `%20`."""
    if "%" not in text and "+" not in text:
        return text
    return ESCAPE.sub(_respell, text.replace("+", "%20"))


def _respell(match: re.Match[str]) -> str:
    character = chr(int(match[1], 16))
    return character if character in PLAIN else match[0].upper()


def read_urlencoded(body: bytes) -> bytes:
    """Return the fields in their order, in one spelling.  Raise InvalidPayload if the body is not a form, but JSON, say."""
    if not URLENCODED.fullmatch(body):
        raise InvalidPayload("The body is not a URL-encoded form")
    return respell(body.decode("ascii")).encode("ascii")


def in_any_order(form: bytes) -> bytes:
    """Return the fields of a form sorted by their names; fields of the same name keep their order."""
    fields = form.decode("ascii").split("&")
    return "&".join(sorted(fields, key=lambda field: field.partition("=")[0])).encode("ascii")


def read_multipart(content_type: str, body: bytes) -> bytes:
    """Return the parts in their order, each with its headers.  Raise InvalidPayload if the body is not valid multipart."""
    delimiter = b"--" + boundary_of(content_type)
    if not body.startswith(delimiter):
        raise InvalidPayload("The multipart body does not begin with its boundary")
    *parts, end = body.removeprefix(delimiter).split(b"\r\n" + delimiter, MAX_PARTS)
    if end.strip(b" \t\r\n") != b"--":
        raise InvalidPayload(f"The multipart body does not end with its boundary, or has more than {MAX_PARTS} parts")
    return b"".join(_part(part) for part in parts)


def _part(part: bytes) -> bytes:
    """Return headers and content, each after its length, so that different parts never look the same."""
    padding, _, rest = part.partition(b"\r\n")
    headers, blank, content = (b"\r\n" + rest).partition(b"\r\n\r\n")
    if padding.strip(b" \t") or not blank:
        raise InvalidPayload("The multipart body has a part without an end to its headers")
    return b"%d:%b%d:%b" % (len(headers), headers, len(content), content)


def boundary_of(content_type: str) -> bytes:
    """Return the boundary in the Content-Type.  Raise InvalidPayload unless it has exactly one."""
    media_type, semicolon, parameters = content_type.partition(";")
    pairs: list[tuple[str, str]] = [
        (name.lower(), quoted or token) for name, quoted, token in PARAMETER.findall(semicolon + parameters)
    ]
    found = [value for name, value in pairs if name == "boundary"]
    if len(found) != 1 or not BOUNDARY.fullmatch(found[0]):
        raise InvalidPayload(f"The {media_type.strip()} body has no proper boundary")
    return found[0].encode("ascii")
