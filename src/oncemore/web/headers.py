"""Header fields: how a door passes them on, and which of them a replay may repeat."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

Headers = Sequence[tuple[str, str]]  # names in lower case, in the order they came


class Fields(list[tuple[str, str]]):
    """The headers of a request as ASGI has them, decoded, and their first values by name: a door asks for many."""

    __slots__ = ("first",)

    def __init__(self, raw: Iterable[tuple[bytes, bytes]]) -> None:
        super().__init__([(str(name, "latin-1"), str(value, "latin-1")) for name, value in raw])
        self.first = dict(reversed(self))


# What an inner GET, which asks for the resource's ETag, does not repeat of the request that would change it: of its body,
# and on what condition the resource is wanted, or which part of it.
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

# They belong to one connection, one client or one moment, and would be wrong, or worse, in anyone's second response.
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
    """The first value of the header *name*, or nothing."""
    if isinstance(headers, Fields):
        return headers.first.get(name, "")
    for found, value in headers:
        if found == name:
            return value
    return ""


def is_sent(headers: Headers, name: str) -> bool:
    """Whether the header *name* came at all, be it empty."""
    return name in headers.first if isinstance(headers, Fields) else bool(lines(headers, name))


def lines(headers: Headers, name: str) -> list[str]:
    """Each value that the header *name* came with."""
    if isinstance(headers, Fields) and name not in headers.first:
        return []
    return [value for found, value in headers if found == name]


def kept_headers(headers: Headers, allowed: frozenset[str] | None = None) -> tuple[tuple[str, str], ...]:
    """Those headers of a response that a replay repeats; with an allow-list, at most those on it."""
    kept = [field for field in headers if is_kept(field[0])]
    return tuple(kept if allowed is None else [field for field in kept if field[0] in allowed])


@lru_cache(maxsize=1024)
def is_kept(name: str) -> bool:
    return name not in NEVER_KEPT and not name.startswith(NEVER_KEPT_PREFIXES)
