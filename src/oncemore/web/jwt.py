"""The principal from a JSON Web Token, verified before it is believed; needs `pip install 'oncemore[jwt]'`.

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
    """A principal function: the *claim* of the bearer token, which keeps its value when the token is renewed.

    The token is verified by PyJWT, its signature and its expiry, because a stored response is sent before the application
    has verified anything.  A request without a valid token gets 401, and nothing runs.

    Args:
        claim: The claim that names the caller, such as `"sub"`.
        key: The key that signatures are verified with, as `jwt.decode` takes it; or a list of keys while they rotate.
        algorithms: The algorithms that are accepted, such as `["RS256"]`.
        audience: The audience that a token must name; None if its tokens name none.
        issuer: The issuer that a token must name.
        leeway: Seconds by which clocks may differ.
    """
    if isinstance(algorithms, str) or not algorithms or any(name.lower() == "none" for name in algorithms):
        raise ConfigurationError(
            f"algorithms = {algorithms!r} verifies nothing: write the ones that your tokens are signed with, as in ['RS256']"
        )
    keys = list(key) if isinstance(key, list | tuple) else [key]
    if not all(keys):
        raise ConfigurationError("key is empty: give the key that your tokens' signatures are verified with")
    options = {"algorithms": list(algorithms), "audience": audience, "issuer": issuer, "leeway": leeway}
    return JwtPrincipal(claim, keys, options)


class JwtPrincipal(HeaderPrincipal):
    """One claim of the bearer token in the Authorization header."""

    def __init__(self, claim: str, keys: list[Any], options: dict[str, Any]) -> None:
        self.claim = claim
        self.keys = keys
        self.options = options

    def __call__(self, headers: Headers) -> Any:
        found = lines(headers, "authorization")
        scheme, _, token = found[0].partition(" ") if len(found) == 1 else ("", "", "")
        if scheme.lower() != "bearer":
            raise InvalidPrincipal("Send one Authorization header with a bearer token: the key belongs to its subject")
        name = self._verified(token.strip()).get(self.claim)
        if not isinstance(name, str | int) or isinstance(name, bool) or name == "":
            raise InvalidPrincipal(f"The bearer token has no {self.claim!r}, to which the key could belong")
        return name

    def _verified(self, token: str) -> dict[str, Any]:
        """The claims of the token, if one of the keys has signed it."""
        reason: Exception | None = None
        for key in self.keys:
            try:
                return pyjwt.decode(token, key, **self.options)
            except pyjwt.InvalidTokenError as error:
                reason = error
        raise InvalidPrincipal(f"The bearer token is not valid: {reason}") from reason
