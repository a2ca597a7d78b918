"""The contents of HTML forms in one spelling: without differences of percent-encoding or boundary."""

from __future__ import annotations

import re

from ..errors import InvalidPayload

# Characters that clients may percent-encode without a change of meaning: not the separators & ; = and +.
PLAIN = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~!*'(),/:@?$[]")
ESCAPE = re.compile(r"%([0-9A-Fa-f]{2})")
URLENCODED = re.compile(rb"(?:[A-Za-z0-9\-._~!*'(),/:@?$\[\]&;=+]|%[0-9A-Fa-f]{2})*+")

PARAMETER = re.compile(r""";[ \t]*+([^\s;="]++)=(?:"((?:[^"\\]|\\.)*+)"|([^\s;"]*+))[ \t]*+""")
BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,\-./:=? ]{0,69}[0-9A-Za-z'()+_,\-./:=?]")  # RFC 2046

MAX_PARTS = 10_000


def respell(text: str) -> str:
    """Return a query or form in one spelling: escaped only if it must be, in upper case, and a space as `%20`."""
    if "%" not in text and "+" not in text:
        return text
    return ESCAPE.sub(_respell, text.replace("+", "%20"))


def _respell(match: re.Match[str]) -> str:
    character = chr(int(match[1], 16))
    return character if character in PLAIN else match[0].upper()


def read_urlencoded(body: bytes) -> bytes:
    """Return the fields in their order and one spelling; raises InvalidPayload if it is no form, such as JSON."""
    if not URLENCODED.fullmatch(body):
        raise InvalidPayload("The body is not an URL-encoded form")
    return respell(body.decode("ascii")).encode("ascii")


def in_any_order(form: bytes) -> bytes:
    """Return the fields of a form sorted by their names; several of one name, as in a list, keep their order."""
    fields = form.decode("ascii").split("&")
    return "&".join(sorted(fields, key=lambda field: field.partition("=")[0])).encode("ascii")


def read_multipart(content_type: str, body: bytes) -> bytes:
    """Return the parts in their order, each with its headers; raises InvalidPayload if it is not clearly multipart."""
    delimiter = b"--" + boundary_of(content_type)
    if not body.startswith(delimiter):
        raise InvalidPayload("The multipart body does not begin with its boundary")
    *parts, end = body.removeprefix(delimiter).split(b"\r\n" + delimiter, MAX_PARTS)
    if end.strip(b" \t\r\n") != b"--":
        raise InvalidPayload(f"The multipart body does not end with its boundary, or has more than {MAX_PARTS} parts")
    return b"".join(_part(part) for part in parts)


def _part(part: bytes) -> bytes:
    """Return headers and content, each after its length, so that neither can be taken for the other."""
    padding, _, rest = part.partition(b"\r\n")
    headers, blank, content = (b"\r\n" + rest).partition(b"\r\n\r\n")
    if padding.strip(b" \t") or not blank:
        raise InvalidPayload("The multipart body has a part without an end to its headers")
    return b"%d:%b%d:%b" % (len(headers), headers, len(content), content)


def boundary_of(content_type: str) -> bytes:
    """Return the boundary that the Content-Type names; raises InvalidPayload unless it names exactly one."""
    media_type, semicolon, parameters = content_type.partition(";")
    pairs: list[tuple[str, str]] = [
        (name.lower(), quoted or token) for name, quoted, token in PARAMETER.findall(semicolon + parameters)
    ]
    found = [value for name, value in pairs if name == "boundary"]
    if len(found) != 1 or not BOUNDARY.fullmatch(found[0]):
        raise InvalidPayload(f"The {media_type.strip()} body has no proper boundary")
    return found[0].encode("ascii")
