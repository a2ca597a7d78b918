"""A request in the form that all middlewares share: its path, headers, caller and fingerprint."""

from __future__ import annotations

import hashlib
import inspect
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from .._contract.rule import Rule
from .._fingerprint.canonical import read_json
from .._fingerprint.fingerprint import Fingerprinter
from .._runtime.plan import Call, Plan
from ..errors import InvalidPayload, InvalidPrincipal, PayloadTooLarge, PrincipalFailed

log = logging.getLogger("oncemore.web")

Headers = Sequence[tuple[str, str]]  # names in lower case, in the order of the request

GUARDED = "oncemore.guarded"  # in the ASGI scope or WSGI environ of a guarded request: its `Op`


class Request(msgspec.Struct, frozen=True, eq=False):
    """A request.  The names of its headers are in lower case, *path* is decoded, and *body* is complete."""

    method: str
    path: str
    query: str
    headers: Headers
    body: bytes = b""
    native: Any = None  # the framework's own request, for the principal function

    def with_body(self, body: bytes) -> Request:
        return Request(self.method, self.path, self.query, self.headers, body, self.native)

    def json(self) -> Any:
        """Return the body decoded from JSON, for a key that is made from it."""
        try:
            return read_json(self.body)[0]
        except InvalidPayload as error:
            raise InvalidPayload(f"The idempotency key is made from the body; {error.detail}") from error


def check_length(rule: Rule, length: int) -> None:
    """Raise PayloadTooLarge if the body is larger than the rule allows."""
    if length > rule.max_request:
        raise PayloadTooLarge(
            f"The body is longer than the {rule.max_request} bytes that are accepted; nothing was done"
        )


def native_mapping(request: Any) -> Any:
    """Return the dictionary of a framework's request: an ASGI scope, a WSGI environ, or either behind a Django request."""
    if isinstance(request, dict):
        return request
    meta = getattr(request, "META", None)
    return {} if meta is None else getattr(request, "scope", None) or meta  # only Django's: Sanic's `scope` may raise


def mount_prefix(path: str, inner: str) -> str:
    """Return the prefix that an app is mounted at, if it sees *path* as *inner*."""
    return path.removesuffix(inner) if path.endswith(inner) else ""


# ── Headers ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Fields(list[tuple[str, str]]):
    """The decoded headers of a request, with the first value of each name in a dictionary, for fast lookups."""

    __slots__ = ("first",)

    def __init__(self, raw: Iterable[tuple[bytes, bytes]]) -> None:
        super().__init__([(name.decode("latin-1"), value.decode("latin-1")) for name, value in raw])
        self.first = dict(reversed(self))


# To find the ETag of a resource, the middleware sends the app an inner GET without these headers of the request: they
# describe the request's body, its condition, or a part of the resource.
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
    """Return the first value of the header *name*, or an empty text."""
    if isinstance(headers, Fields):
        return headers.first.get(name, "")
    for found, value in headers:
        if found == name:
            return value
    return ""


def is_sent(headers: Headers, name: str) -> bool:
    """Whether the header *name* was sent, even if it is empty."""
    return name in headers.first if isinstance(headers, Fields) else bool(lines(headers, name))


def lines(headers: Headers, name: str) -> list[str]:
    """Return all values of the header *name*."""
    if isinstance(headers, Fields) and name not in headers.first:
        return []
    return [value for found, value in headers if found == name]


def kept_headers(headers: Headers, allowed: frozenset[str] | None = None) -> tuple[tuple[str, str], ...]:
    """Return the headers of a response that a replay repeats; if *allowed* is given, no others than these."""
    kept = [field for field in headers if is_kept(field[0])]
    return tuple(kept if allowed is None else [field for field in kept if field[0] in allowed])


@lru_cache(maxsize=1024)
def is_kept(name: str) -> bool:
    return name not in NEVER_KEPT and not name.startswith(NEVER_KEPT_PREFIXES)


# ── The caller: a key belongs to its principal, and no other principal ever sees its outcome ─────────────────────────

Principal = Callable[[Any], Any]  # takes the framework's own request (ASGI scope, WSGI environ, ...), returns a name

# Cookies are not here, because they change between two attempts: after the first response sets one, a retry is not recognised.
CREDENTIALS = frozenset({"authorization", "proxy-authorization", "x-api-key", "api-key"})
ANONYMOUS = "anonymous"
# In the text of an object without its own `__str__`, such as a coroutine or a method that was not called.  The address
# differs from one request to the next, so no retry would be recognised.
ADDRESS = " at 0x"
LONGEST_CREDENTIALS = 4096  # digests of longer credentials are not cached, because they would fill the memory


class HeaderPrincipal:
    """A principal function that takes the headers (names in lower case), and so works with every framework."""

    def __call__(self, headers: Headers) -> Any:
        raise NotImplementedError


class StripeAccount(HeaderPrincipal):
    """Returns the connected account that a platform calls for: the same key of another account is another operation."""

    def __call__(self, headers: Headers) -> str:
        for name in ("stripe-account", "stripe-context"):
            account = value_of(headers, name)
            if account:
                return f"{name}:{account}"
        return "platform"


def is_async(function: object) -> bool:
    """Whether *function* is async, or an object with an async `__call__`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def principal_of(function: Principal | None, request: Request) -> Plan[str]:
    """Return the caller's name: the result of *function* if given, else the authenticated user or the credentials' digest."""
    if function is None:
        return user_of(request.native) or credentials_of(request.headers) or anonymous()
    try:
        found = function(request.headers if isinstance(function, HeaderPrincipal) else request.native)
        if hasattr(found, "__await__"):
            found = yield Call(lambda: found)
    except InvalidPrincipal:
        raise
    except Exception as error:
        log.exception("The principal function failed, so the request is refused")
        raise PrincipalFailed("The principal could not be determined; nothing was done") from error
    if found is None or found == "":
        raise InvalidPrincipal("The caller is not known, and a key belongs to its caller: send your credentials")
    name = f"user:{found}"
    if isinstance(found, str):
        return name
    if ADDRESS in name:
        raise PrincipalFailed(f"The principal function returned a {type(found).__name__}: return a text or a number")
    return name


def user_of(native: Any) -> str:
    """Return the user that the framework has authenticated, or an empty text."""
    if not isinstance(native, dict):
        user = getattr(native, "user", None)
    elif native.get("REMOTE_USER"):  # set by the WSGI server; a header cannot forge it
        return f"user:{native['REMOTE_USER']}"
    else:
        user = native.get("user")
    if user is None or not getattr(user, "is_authenticated", False):
        return ""
    for name in ("pk", "id", "identity", "username", "display_name"):
        try:
            found = getattr(user, name, None)
        except NotImplementedError:  # raised by Starlette if a user has no identity
            continue
        if found not in (None, "") and not callable(found):
            return f"user:{found}"
    return ""


def credentials_of(headers: Headers) -> str:
    """Return a digest of the headers by which the caller proves its identity, or an empty text without them."""
    if isinstance(headers, Fields) and CREDENTIALS.isdisjoint(headers.first):
        return ""
    found = tuple([field for field in headers if field[0] in CREDENTIALS])
    if not found:
        return ""
    warn_of_credentials()
    longest = max([len(value) for _, value in found])
    return (remembered_digest if longest <= LONGEST_CREDENTIALS else digest)(found)


def digest(credentials: tuple[tuple[str, str], ...]) -> str:
    hashed = hashlib.sha256()
    for name, value in credentials:
        hashed.update(f"{name}:{len(value)}:{value}\n".encode("utf-8", "surrogateescape"))
    return f"credentials:{hashed.hexdigest()[:32]}"


remembered_digest = lru_cache(maxsize=4096)(digest)


def warn_again() -> None:
    """Let the next guarded requests warn again of missing principals: each new middleware warns once of each kind."""
    warn_of_credentials.cache_clear()
    anonymous.cache_clear()


@lru_cache(maxsize=1)
def warn_of_credentials() -> None:
    """Warn once that keys belong to credentials, which may be renewed between a request and its retry."""
    log.warning(
        "No principal function is given, so keys belong to the credentials in the headers (Authorization, X-API-Key): if a "
        "client's token is renewed before it retries, it is taken for another caller, and its operation runs again.  Give "
        "the middleware a principal, such as principal=jwt('sub', key=..., algorithms=[...]) of oncemore.web.jwt."
    )


@lru_cache(maxsize=1)
def anonymous() -> str:
    """Return the principal that all callers without credentials share; warn once."""
    log.warning(
        "A guarded request came without a user or an Authorization or X-API-Key header (cookies do not count): such "
        "callers share one principal, and see each other's outcomes if they guess a key.  Give the "
        "middleware a principal function."
    )
    return ANONYMOUS


# ── Fingerprints ─────────────────────────────────────────────────────────────────────────────────────────────────────

Parts = tuple[str, str, str, str, bytes]  # method, path, query, media type, body

MOST_FINGERPRINTS = 4096  # the most fingerprints to remember


class Fingerprints:
    """Makes fingerprints with one fingerprinter for each rule, and remembers the latest: a repeat is not parsed again.

    The requests themselves are remembered only as digests, because a card number must not stay in memory.
    """

    def __init__(self, secrets: tuple[bytes, ...]) -> None:
        Fingerprinter(secrets=secrets)  # raises now if a secret is bad, not at the first request
        self._secrets = secrets
        self._rules: dict[int, tuple[Rule, Fingerprinter]] = {}
        self._latest: OrderedDict[bytes, str] = OrderedDict()  # a plain dict is slow at removing its oldest entry

    def of(self, rule: Rule, parts: Parts) -> str:
        """Return the fingerprint of a request under *rule*."""
        method, path, query, media_type, body = parts
        head = f"{id(rule)} {method!r} {path!r} {query!r} {media_type!r} "  # quoted, so that two requests never look the same
        digest = hashlib.sha256(head.encode() + body).digest()
        found = self._latest.get(digest)
        if found is None:
            found = self._latest[digest] = self.fingerprinter(rule).fingerprint(*parts)
            if len(self._latest) > MOST_FINGERPRINTS:
                self._latest.popitem(last=False)
        return found

    def matches(self, rule: Rule, parts: Parts, stored: str) -> bool:
        """Whether the *stored* fingerprint is of the same request."""
        return self.fingerprinter(rule).matches(stored, *parts)

    def fingerprinter(self, rule: Rule) -> Fingerprinter:
        """Return the fingerprinter of *rule*.  It is looked up by the rule's identity, because hashing a rule is slow."""
        found = self._rules.get(id(rule))
        if found is None:
            settings: Any = rule.fingerprint
            made = Fingerprinter(
                mode=settings.mode, include=settings.include, exclude=settings.exclude, secrets=self._secrets
            )
            found = self._rules[id(rule)] = (rule, made)  # holds the rule, so that its id is not reused
        return found[1]
