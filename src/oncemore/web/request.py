"""A request as every integration describes it, and how its headers and its path are read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from .._contract.contract import Contract, Match
from .._contract.rule import Rule
from .._fingerprint.canonical import read_json
from .._ledger.context import CURRENT, current_operation
from .._ledger.model import Operation
from ..errors import InvalidPayload, PayloadTooLarge

__all__ = [
    "CURRENT",
    "GUARDED",
    "NOT_OF_A_GET",
    "Fields",
    "Headers",
    "Request",
    "check_length",
    "current_operation",
    "is_current",
    "is_sent",
    "kept_headers",
    "lines",
    "match_mounted",
    "mount_prefix",
    "native_mapping",
    "value_of",
]

Headers = Sequence[tuple[str, str]]  # names in lower case, in the order they came

GUARDED = "oncemore.guarded"  # in the ASGI scope or WSGI environ of a guarded request: its `Op`


class Request(msgspec.Struct, frozen=True, eq=False):
    """A request: names of headers in lower case, *path* decoded, *body* whole."""

    method: str
    path: str
    query: str
    headers: Headers
    body: bytes = b""
    native: Any = None  # the framework's own request, for the principal function

    def with_body(self, body: bytes) -> Request:
        return Request(self.method, self.path, self.query, self.headers, body, self.native)

    def json(self) -> Any:
        """The decoded body, for keys that are made from it."""
        try:
            return read_json(self.body)[0]
        except InvalidPayload as error:
            raise InvalidPayload(f"The idempotency key is made from the body; {error.detail}") from error


def check_length(rule: Rule, length: int) -> None:
    """Raise PayloadTooLarge if the body is larger than the rule allows."""
    if length > rule.max_request:
        raise PayloadTooLarge(f"The body may have {rule.max_request} bytes")


def native_mapping(request: Any) -> Any:
    """The dictionary of a framework's request: an ASGI scope, a WSGI environ, or the one behind a Django request."""
    return request if isinstance(request, dict) else getattr(request, "scope", None) or getattr(request, "META", {})


def is_current(operation: Operation, native: Mapping[str, Any]) -> bool:
    """Whether an outer middleware guards this operation of this request already: a second claim would wait for itself."""
    outer = CURRENT.get()
    return outer is not None and outer.operation.id == operation.id and native.get(GUARDED) is outer


# ── Paths of mounted apps ──────────────────────────────────────────────────────────────────────────────────────────────


def match_mounted(contract: Contract, method: str, path: str, inner: str) -> Match | None:
    """The rule for a request to *path*, which an app mounted below a prefix sees as *inner*; rules may name either."""
    found = contract.match(method, path)
    if path == inner or (found is not None and found.declared):
        return found
    within = contract.match(method, inner)
    return within if within is not None and within.declared else found


def mount_prefix(path: str, inner: str) -> str:
    """The prefix of an app that sees *path* as *inner*."""
    return path.removesuffix(inner) if path.endswith(inner) else ""


# ── Headers ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Fields(list[tuple[str, str]]):
    """The headers of an ASGI request, decoded, with the first value of each by name, because many are asked for."""

    __slots__ = ("first",)

    def __init__(self, raw: Iterable[tuple[bytes, bytes]]) -> None:
        super().__init__([(str(name, "latin-1"), str(value, "latin-1")) for name, value in raw])
        self.first = dict(reversed(self))


# An inner GET, which asks for the ETag of a resource, leaves these headers of the request out: they describe its body, or
# the condition on which the resource is wanted, or a part of it.
NOT_OF_A_GET = frozenset(
    {
        "content-length",
        "content-type",
        "if-match",
        "if-modified-since",
        "if-none-match",
        "if-range",
        "if-unmodified-since",
        "range",
    }
)

# These response headers belong to one connection, one client or one moment, and would be wrong in a replay.
NEVER_KEPT = frozenset(
    {
        "age",
        "alt-svc",
        "authentication-info",
        "authorization",
        "connection",
        "content-length",
        "date",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authentication-info",
        "proxy-authorization",
        "proxy-connection",
        "retry-after",
        "server",
        "set-cookie",
        "set-cookie2",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "via",
        "www-authenticate",
    }
)
NEVER_KEPT_PREFIXES = ("ratelimit", "x-ratelimit", "x-rate-limit", "idempotency-", "repeatability-")


def value_of(headers: Headers, name: str) -> str:
    """The first value of the header *name*, or an empty text."""
    if isinstance(headers, Fields):
        return headers.first.get(name, "")
    for found, value in headers:
        if found == name:
            return value
    return ""


def is_sent(headers: Headers, name: str) -> bool:
    """Whether the header *name* was sent, be it empty."""
    return name in headers.first if isinstance(headers, Fields) else bool(lines(headers, name))


def lines(headers: Headers, name: str) -> list[str]:
    """All values of the header *name*."""
    if isinstance(headers, Fields) and name not in headers.first:
        return []
    return [value for found, value in headers if found == name]


def kept_headers(headers: Headers, allowed: frozenset[str] | None = None) -> tuple[tuple[str, str], ...]:
    """The headers of a response that a replay repeats; with *allowed*, only those."""
    kept = [field for field in headers if is_kept(field[0])]
    return tuple(kept if allowed is None else [field for field in kept if field[0] in allowed])


@lru_cache(maxsize=1024)
def is_kept(name: str) -> bool:
    return name not in NEVER_KEPT and not name.startswith(NEVER_KEPT_PREFIXES)
