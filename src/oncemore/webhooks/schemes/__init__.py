"""The signature schemes of webhook senders, one file each.  A new one is a file and a line in SCHEMES."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from ..._contract.problems import did_you_mean
from ...errors import ConfigurationError
from .github import GithubScheme
from .hmac import HmacScheme
from .scheme import Scheme
from .shopify import ShopifyScheme
from .slack import SlackScheme
from .standard import StandardScheme
from .stripe import StripeScheme

__all__ = ["SCHEMES", "Scheme", "make_scheme"]

SCHEMES: dict[str, Callable[..., Scheme]] = {
    "standard": StandardScheme,
    "svix": StandardScheme,
    "stripe": StripeScheme,
    "github": GithubScheme,
    "shopify": ShopifyScheme,
    "slack": SlackScheme,
    "hmac": HmacScheme,
}


def make_scheme(scheme: str | Scheme, secrets: Sequence[str | bytes] | str | bytes, options: dict[str, Any]) -> Scheme:
    """Return the scheme of that name with its *secrets*, or *scheme* itself if it is one of the user's own."""
    if not isinstance(scheme, str):
        if not hasattr(scheme, "verify") or secrets or options:
            raise ConfigurationError(
                f"scheme = {scheme!r}: name one of {', '.join(SCHEMES)}, or give an object with verify() and describe(), "
                "which has its secrets and options itself"
            )
        return scheme
    if scheme not in SCHEMES:
        raise ConfigurationError(
            f"{scheme!r} is not a signature scheme{did_you_mean(scheme, SCHEMES)}; known are {', '.join(SCHEMES)}"
        )
    make = SCHEMES[scheme]
    known = [name for name in inspect.signature(make).parameters if name != "secrets"]
    for name in options:
        if name not in known:
            raise ConfigurationError(
                f"The scheme {scheme!r} has no option {name!r}{did_you_mean(name, known)}; it has {', '.join(known)}"
            )
    return make([secrets] if isinstance(secrets, str | bytes) else secrets, **options)
