"""Finds the rules that `@idempotent` has attached to endpoints, by walking the routes of a Starlette-like app."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from .._contract.contract import Contract
from .._contract.paths import SAFE_METHODS
from .._contract.rule import Rule
from .views import rules_for, served_by


def declare(contract: Contract, app: Any) -> None:
    """Add to the contract every rule that an endpoint of *app* carries."""
    contract.add(*rules_in(routes_of(app)))
    contract.check()


def routes_of(app: Any) -> Any:
    """The routes of the innermost app that has any: a middleware keeps the next one in its `app`."""
    seen: set[int] = set()
    while app is not None and id(app) not in seen:
        seen.add(id(app))
        routes = getattr(app, "routes", None)
        if isinstance(routes, list):
            return routes
        app = getattr(app, "app", None)
    return []


def rules_in(routes: Any, prefix: str = "") -> Iterator[Rule]:
    for route in each(routes):
        path = prefix + (getattr(route, "path", None) or "")
        endpoint = getattr(route, "endpoint", None)
        methods = set(getattr(route, "methods", None) or served_by(endpoint))  # the route of a class names none
        for rule, served in rules_for(endpoint, sorted(methods - SAFE_METHODS)):
            yield rule.at(f"{'|'.join(served)} {path}")
        yield from rules_in(getattr(route, "routes", None) or (), path)


def each(routes: Any) -> Iterator[Any]:
    """The routes one by one: newer FastAPIs keep those of an included router together, as one that has no path."""
    flattened = getattr(sys.modules.get("fastapi.routing"), "iter_route_contexts", iter)
    return flattened(routes)
