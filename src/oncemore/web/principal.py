"""The caller's identity: a key belongs to its principal, and no other principal ever sees its outcome."""

from __future__ import annotations

import hashlib
import inspect
import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from ..errors import InvalidPrincipal, PrincipalFailed
from .request import Fields, Headers, Request

log = logging.getLogger("oncemore.web")

Principal = Callable[[Any], Any]  # from the framework's own request (ASGI scope, WSGI environ, ...) to a name

# Not cookies: they change between two attempts (the first response may set one), and a retry would not be recognised.
CREDENTIALS = frozenset({"authorization", "proxy-authorization", "x-api-key", "api-key"})
ANONYMOUS = "anonymous"
# In the text of an object without a name, of a coroutine, or of a method that was meant to be called.  The address differs
# from one request to the next, so no retry would be recognised.
ADDRESS = " at 0x"
LONGEST_REMEMBERED = 4096  # credentials that are longer would fill our memory


def principal_of(function: Principal | None, request: Request) -> str:
    """The caller's name: the result of *function*, else the authenticated user, else a digest of the credentials."""
    if function is None:
        return user_of(request.native) or credentials_of(request.headers) or anonymous()
    try:
        found = function(request.native)
    except Exception as error:
        log.exception("The principal function failed")
        raise PrincipalFailed("The principal could not be determined; nothing was done") from error
    if found is None or found == "":
        raise InvalidPrincipal("The caller is not known, and a key must belong to someone")
    name = f"user:{found}"
    if inspect.iscoroutine(found):
        found.close()
    if ADDRESS in name and not isinstance(found, str):
        raise PrincipalFailed(f"The principal function gave a {type(found).__name__}, but a text or a number is needed")
    return name


def user_of(native: Any) -> str:
    """The user whom the framework has authenticated, or an empty text."""
    if isinstance(native, dict) and native.get("REMOTE_USER"):  # set by the WSGI server; no header can forge it
        return f"user:{native['REMOTE_USER']}"
    user = native.get("user") if isinstance(native, dict) else getattr(native, "user", None)
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
    found = [field for field in headers if field[0] in CREDENTIALS]
    if not found:
        return ""
    short = sum(len(value) for _, value in found) <= LONGEST_REMEMBERED
    return (remembered_digest if short else digest)(tuple(found))


def digest(credentials: tuple[tuple[str, str], ...]) -> str:
    hashed = hashlib.sha256()
    for name, value in credentials:
        hashed.update(f"{name}:{len(value)}:{value}\n".encode("utf-8", "surrogateescape"))
    return f"credentials:{hashed.hexdigest()[:32]}"


remembered_digest = lru_cache(maxsize=4096)(digest)


@lru_cache(maxsize=1)
def anonymous() -> str:
    """The principal that all callers without credentials share; warns once."""
    log.warning(
        "A guarded request came without a user or an Authorization or X-API-Key header (cookies do not count): such "
        "callers share one principal, and see each other's outcomes if they guess a key.  Give the "
        "middleware a principal function."
    )
    return ANONYMOUS
