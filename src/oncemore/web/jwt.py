"""Reads the principal from a JSON Web Token and verifies the token; needs `pip install 'oncemore[jwt]'`.

IdempotencyMiddleware(app, guard=guard, principal=jwt("sub", key=PUBLIC_KEY, algorithms=["RS256"]))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .._ledger.connect import naming_extras
from ..errors import ConfigurationError, InvalidPrincipal
from .request import HeaderPrincipal, Headers, lines

with naming_extras("oncemore.web.jwt"):
    import jwt as pyjwt

__all__ = ["jwt"]


def jwt(
    claim: str,
    *,
    key: Any,
    algorithms: Sequence[str],
    audience: str | Sequence[str] | None = None,
    issuer: str | Sequence[str] | None = None,
    leeway: float = 0,
) -> HeaderPrincipal:
    """Return a principal function that reads the *claim* of the bearer token: it stays the same if the token is renewed.

    PyJWT verifies the token's signature and expiry, because a stored response is sent before the application has verified
    anything.  A request without a valid token gets 401, and nothing runs.

    Args:
        claim: The claim that names the caller, such as `"sub"`.
        key: The key that signatures are verified with, as `jwt.decode` takes it; or a list of keys while they rotate.
        algorithms: The accepted algorithms, such as `["RS256"]`.
        audience: The audience that a token must name; None if your tokens name no audience.
        issuer: The issuer that a token must name; None accepts any.
        leeway: The seconds by which clocks may differ.
    """
    if isinstance(algorithms, str) or not algorithms or any(name.lower() == "none" for name in algorithms):
        raise ConfigurationError(
            f"algorithms = {algorithms!r} verifies nothing: list the algorithms of your tokens, as in ['RS256']"
        )
    keys = list(key) if isinstance(key, list | tuple) else [key]
    if not all(keys):
        raise ConfigurationError("key is empty: give the key that your tokens' signatures are verified with")
    options = {"algorithms": list(algorithms), "audience": audience, "issuer": issuer, "leeway": leeway}
    return JwtPrincipal(claim, keys, options)


class JwtPrincipal(HeaderPrincipal):
    """Returns one claim of the bearer token in the Authorization header."""

    def __init__(self, claim: str, keys: list[Any], options: dict[str, Any]) -> None:
        self.claim = claim
        self.keys = keys
        self.options = options

    def __call__(self, headers: Headers) -> Any:
        found = lines(headers, "authorization")
        scheme, _, token = found[0].partition(" ") if len(found) == 1 else ("", "", "")
        if scheme.lower() != "bearer":
            raise InvalidPrincipal("Send one Authorization header with a bearer token: keys belong to its owner")
        name = self._verified(token.strip()).get(self.claim)
        if not isinstance(name, str | int) or isinstance(name, bool) or name == "":
            raise InvalidPrincipal(f"The bearer token has no claim {self.claim!r}, which names the owner of the key")
        return name

    def _verified(self, token: str) -> dict[str, Any]:
        """Return the claims of the token.  Raise InvalidPrincipal if no key verifies it."""
        reason: Exception | None = None
        for key in self.keys:
            try:
                return pyjwt.decode(token, key, **self.options)
            except pyjwt.InvalidTokenError as error:
                reason = error
        raise InvalidPrincipal(f"The bearer token is not valid: {reason}") from reason
