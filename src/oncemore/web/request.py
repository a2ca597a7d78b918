"""A request as every integration describes it: its path, its headers, its caller, and its fingerprint."""

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
        raise PayloadTooLarge(
            f"The body is longer than the {rule.max_request} bytes that are accepted; nothing was done"
        )


def native_mapping(request: Any) -> Any:
    """The dictionary of a framework's request: an ASGI scope, a WSGI environ, or the one behind a Django request."""
    if isinstance(request, dict):
        return request
    meta = getattr(request, "META", None)
    return {} if meta is None else getattr(request, "scope", None) or meta  # others, as Sanic's, may refuse to be asked


def mount_prefix(path: str, inner: str) -> str:
    """The prefix of an app that sees *path* as *inner*."""
    return path.removesuffix(inner) if path.endswith(inner) else ""


# ── Headers ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Fields(list[tuple[str, str]]):
    """The headers of an ASGI request, decoded, with the first value of each by name, because many are asked for."""

    __slots__ = ("first",)

    def __init__(self, raw: Iterable[tuple[bytes, bytes]]) -> None:
        super().__init__([(name.decode("latin-1"), value.decode("latin-1")) for name, value in raw])
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


# ── The caller: a key belongs to its principal, and no other principal ever sees its outcome ─────────────────────────

Principal = Callable[[Any], Any]  # from the framework's own request (ASGI scope, WSGI environ, ...) to a name

# Not cookies: they change between two attempts (the first response may set one), and a retry would not be recognised.
CREDENTIALS = frozenset({"authorization", "proxy-authorization", "x-api-key", "api-key"})
ANONYMOUS = "anonymous"
# In the text of an object without a name, of a coroutine, or of a method that was meant to be called.  The address differs
# from one request to the next, so no retry would be recognised.
ADDRESS = " at 0x"
LONGEST_CREDENTIALS = 4096  # credentials that are longer would fill our memory


class HeaderPrincipal:
    """A principal function that is given the headers (names in lower case), and so is the same for every framework."""

    def __call__(self, headers: Headers) -> Any:
        raise NotImplementedError


class StripeAccount(HeaderPrincipal):
    """The connected account that a platform calls for: the same key of another account is another operation."""

    def __call__(self, headers: Headers) -> str:
        for name in ("stripe-account", "stripe-context"):
            account = value_of(headers, name)
            if account:
                return f"{name}:{account}"
        return "platform"


def is_async(function: object) -> bool:
    """Whether calling *function* gives a coroutine; it may be an object with an async `__call__`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def principal_of(function: Principal | None, request: Request) -> Plan[str]:
    """The caller's name: the result of *function*, else the authenticated user, else a digest of the credentials."""
    if function is None:
        return user_of(request.native) or credentials_of(request.headers) or anonymous()
    try:
        found = function(request.headers if isinstance(function, HeaderPrincipal) else request.native)
        if hasattr(found, "__await__"):
            found = yield Call(lambda: found)
    except InvalidPrincipal:
        raise
    except Exception as error:
        log.exception("The principal function failed")
        raise PrincipalFailed("The principal could not be determined; nothing was done") from error
    if found is None or found == "":
        raise InvalidPrincipal("The caller is not known, and a key belongs to its caller: send your credentials")
    name = f"user:{found}"
    if isinstance(found, str):
        return name
    if ADDRESS in name:
        raise PrincipalFailed(f"The principal function gave a {type(found).__name__}, but a text or a number is needed")
    return name


def user_of(native: Any) -> str:
    """The user that the framework has authenticated, or an empty text."""
    if not isinstance(native, dict):
        user = getattr(native, "user", None)
    elif native.get("REMOTE_USER"):  # set by the WSGI server; no header can forge it
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
    """A digest of the headers by which the caller proves its identity."""
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
    """Let the next guarded request warn of its principal: each middleware that is made warns once of each kind."""
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
    """The principal that all callers without credentials share; warns once."""
    log.warning(
        "A guarded request came without a user or an Authorization or X-API-Key header (cookies do not count): such "
        "callers share one principal, and see each other's outcomes if they guess a key.  Give the "
        "middleware a principal function."
    )
    return ANONYMOUS


# ── Fingerprints ─────────────────────────────────────────────────────────────────────────────────────────────────────

Parts = tuple[str, str, str, str, bytes]  # method, path, query, media type, body

MOST_FINGERPRINTS = 4096  # that are remembered


class Fingerprints:
    """One fingerprinter for each rule, and the fingerprints of the latest requests: a repeat is not parsed again.

    Requests are remembered by a digest of their bytes, because a card number that was sent must not stay in memory.
    """

    def __init__(self, secrets: tuple[bytes, ...]) -> None:
        Fingerprinter(secrets=secrets)  # raises the error of a bad secret now, not at the first request
        self._secrets = secrets
        self._rules: dict[int, tuple[Rule, Fingerprinter]] = {}
        self._latest: OrderedDict[bytes, str] = OrderedDict()  # a plain dict takes long to find its oldest entry

    def of(self, rule: Rule, parts: Parts) -> str:
        """Return the fingerprint of a request under *rule*."""
        method, path, query, media_type, body = parts
        head = f"{id(rule)} {method!r} {path!r} {query!r} {media_type!r} "  # quoted, so that no two requests read alike
        digest = hashlib.sha256(head.encode() + body).digest()
        found = self._latest.get(digest)
        if found is None:
            found = self._latest[digest] = self.fingerprinter(rule).fingerprint(*parts)
            if len(self._latest) > MOST_FINGERPRINTS:
                self._latest.popitem(last=False)
        return found

    def matches(self, rule: Rule, parts: Parts, stored: str) -> bool:
        """Whether a *stored* fingerprint is of the same request."""
        return self.fingerprinter(rule).matches(stored, *parts)

    def fingerprinter(self, rule: Rule) -> Fingerprinter:
        """Return the fingerprinter of *rule*; kept by identity, because hashing a rule takes longer than all the rest."""
        found = self._rules.get(id(rule))
        if found is None:
            settings: Any = rule.fingerprint
            made = Fingerprinter(
                mode=settings.mode, include=settings.include, exclude=settings.exclude, secrets=self._secrets
            )
            found = self._rules[id(rule)] = (rule, made)  # with the rule, so that its identity is not used again
        return found[1]
