"""Finds the rules that `@idempotent` has attached to the views of Flask apps, also below other middlewares and mounts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ..._contract.contract import Contract
from ..._contract.paths import SAFE_METHODS
from ..._contract.rule import Rule
from ...errors import ConfigurationError
from ..views import rules_for

PARAMETER = re.compile(r"<(?:(?P<converter>[A-Za-z_]\w*)(?:\([^>]*\))?:)?(?P<name>[A-Za-z_]\w*)>")


def declare(contract: Contract, app: Any) -> None:
    """Add to the contract every rule that a view of *app* carries."""
    contract.add(*rules_in(app, "", set()))
    contract.check()


def rules_in(app: Any, prefix: str, seen: set[int]) -> Iterator[Rule]:
    """The rules of a Flask app, whether given as itself or as its `wsgi_app`, and of what a middleware keeps inside."""
    app = getattr(app, "__self__", app)
    if app is None or id(app) in seen:
        return
    seen.add(id(app))
    if hasattr(app, "url_map") and hasattr(app, "view_functions"):
        yield from rules_of_flask(app, prefix)
        return
    mounts = getattr(app, "mounts", None)  # Werkzeug's DispatcherMiddleware
    if isinstance(mounts, dict):
        for mount, inner in mounts.items():
            yield from rules_in(inner, prefix + mount, seen)
    for name in ("app", "application", "wsgi_app"):
        yield from rules_in(getattr(app, name, None), prefix, seen)


def rules_of_flask(app: Any, prefix: str) -> Iterator[Rule]:
    for route in app.url_map.iter_rules():
        methods = sorted(set(route.methods or ()) - SAFE_METHODS)
        for rule, served in rules_for(app.view_functions.get(route.endpoint), methods):
            yield bound(rule, f"{'|'.join(served)} {prefix}{pattern(app, route.rule)}", route)


def bound(rule: Rule, match: str, route: Any) -> Rule:
    """The rule for the requests that the route serves."""
    try:
        return rule.at(match)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"The route {route.rule!r} of {route.endpoint!r} cannot be written as a rule's match ({error.detail}); "
            "write a rule for it in the contract instead"
        ) from error


def pattern(app: Any, route: str) -> str:
    """Werkzeug's `/<int:id>/<path:rest>` as the contract writes it: `/{id}/{rest:path}`."""

    def parameter(found: re.Match[str]) -> str:
        converter = app.url_map.converters.get(found["converter"] or "default")
        rest = "" if getattr(converter, "part_isolating", True) else ":path"
        return f"{{{found['name']}{rest}}}"

    return PARAMETER.sub(parameter, route)
