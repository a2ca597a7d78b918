"""Finds the rules that `@idempotent` has attached to endpoints, by the routes of Starlette-like apps and of Flask.

`oncemore.web.django.views` does the same for Django.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from .._contract.contract import Contract
from .._contract.paths import SAFE_METHODS, UNSAFE_METHODS
from .._contract.rule import Rule, rule_of
from ..errors import ConfigurationError

# ── Views: functions, classes with a method for each verb, actions of a ViewSet ────────────────────────────────────────


def rules_for(view: Any, methods: Iterable[str]) -> list[tuple[Rule, list[str]]]:
    """Return each rule that is attached to the view, with the *methods* to which it applies.

    A rule on a method or an action takes precedence over a rule on its class.
    """
    found: dict[int, tuple[Rule, list[str]]] = {}
    for method in methods:
        rule = next((rule for rule in map(rule_of, decorated_objects(view, method)) if rule is not None), None)
        if rule is not None:
            found.setdefault(id(rule), (rule, []))[1].append(method)
    return list(found.values())


def decorated_objects(view: Any, method: str) -> Iterator[Any]:
    """Yield the objects that a rule for *method* may be attached to, the most specific first."""
    while isinstance(view, partial):
        view = view.func
    owner = class_of(view)
    yield getattr(owner, actions_of(view).get(method.lower(), method.lower()), None)
    yield view
    yield owner


def unsafe_methods(view: Any) -> list[str]:
    """Return the methods by which a view may have effects: all of them for a function, which does not declare any."""
    owner, actions = class_of(view), actions_of(view)
    if actions:
        return [method for method in UNSAFE_METHODS if method.lower() in actions]
    if owner is not None:
        return [method for method in UNSAFE_METHODS if hasattr(owner, method.lower())]
    return list(UNSAFE_METHODS)


def class_of(view: Any) -> Any:
    """Return the view if it is a class (Starlette), or the class that made it by `as_view` (Flask, Django); else None."""
    return view if isinstance(view, type) else getattr(view, "view_class", None) or getattr(view, "cls", None)


def actions_of(view: Any) -> dict[str, str]:
    """Return the actions of a ViewSet of Django's REST framework, by method in lower case."""
    return getattr(view, "actions", None) or {}


# ── Starlette, FastAPI ─────────────────────────────────────────────────────────────────────────────────────────────────


def declare_starlette(contract: Contract, app: Any) -> None:
    """Add to the contract every rule on an endpoint of a Starlette-like app."""
    contract.add(*starlette_rules(starlette_routes(app)))
    contract.check()


def starlette_routes(app: Any) -> Any:
    """Return the routes of the first app that has any.  Begin with *app*, and follow `app` through its middlewares."""
    seen: set[int] = set()
    while app is not None and id(app) not in seen:
        seen.add(id(app))
        routes = getattr(app, "routes", None)
        if isinstance(routes, list):
            return routes
        app = getattr(app, "app", None)
    return []


def starlette_rules(routes: Any, prefix: str = "") -> Iterator[Rule]:
    for route in each_route(routes):
        path = prefix + (getattr(route, "path", None) or "")
        endpoint = getattr(route, "endpoint", None)
        methods = set(getattr(route, "methods", None) or unsafe_methods(endpoint))  # a class's route names none
        for rule, served in rules_for(endpoint, sorted(methods - SAFE_METHODS)):
            yield rule.at(f"{'|'.join(served)} {path}")
        yield from starlette_rules(getattr(route, "routes", None) or (), path)


def each_route(routes: Any) -> Iterator[Any]:
    """Return the single routes.  Newer versions of FastAPI keep an included router as one route without a path."""
    flattened = getattr(sys.modules.get("fastapi.routing"), "iter_route_contexts", iter)
    return flattened(routes)


# ── Flask ──────────────────────────────────────────────────────────────────────────────────────────────────────────────

FLASK_PARAMETER = re.compile(r"<(?:(?P<converter>[A-Za-z_]\w*)(?:\([^>]*\))?:)?(?P<name>[A-Za-z_]\w*)>")


def declare_flask(contract: Contract, app: Any) -> None:
    """Add to the contract every rule on a view of a Flask app, even below other middlewares and mounts."""
    contract.add(*flask_rules(app))
    contract.check()


def flask_rules(app: Any) -> Iterator[Rule]:
    for found, prefix in flask_apps(app):
        for route in found.url_map.iter_rules() if found is not None else ():
            methods = sorted(set(route.methods or ()) - SAFE_METHODS)
            for rule, served in rules_for(found.view_functions.get(route.endpoint), methods):
                yield at_flask_route(rule, f"{'|'.join(served)} {prefix}{flask_path(found, route.rule)}", route)


def flask_apps(app: Any, prefix: str = "", seen: frozenset[int] = frozenset()) -> Iterator[tuple[Any, str]]:
    """Yield each Flask app in *app* with the path that it is mounted at, and None for each app of another kind.

    *app* is the Flask app itself, its `wsgi_app`, or another middleware around it.
    """
    app = getattr(app, "__self__", app)
    if id(app) in seen:
        return
    seen = seen | {id(app)}
    if hasattr(app, "url_map") and hasattr(app, "view_functions"):
        yield app, prefix
        return
    mounts = getattr(app, "mounts", None)  # Werkzeug's DispatcherMiddleware
    for mount, inner in mounts.items() if isinstance(mounts, dict) else ():
        yield from flask_apps(inner, prefix + mount, seen)
    inside = [inner for name in ("app", "application", "wsgi_app") if (inner := getattr(app, name, None)) is not None]
    if not inside:
        yield None, prefix
    for inner in inside:
        yield from flask_apps(inner, prefix, seen)


def at_flask_route(rule: Rule, match: str, route: Any) -> Rule:
    try:
        return rule.at(match)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"The route {route.rule!r} of {route.endpoint!r} cannot be written as a rule's match ({error.detail}); "
            "write a rule for it in the contract instead"
        ) from error


def flask_path(app: Any, route: str) -> str:
    """Return a route such as Werkzeug's `/<int:id>/<path:rest>` as the contract writes it: `/{id}/{rest:path}`."""

    def parameter(found: re.Match[str]) -> str:
        converter = app.url_map.converters.get(found["converter"] or "default")
        rest = "" if getattr(converter, "part_isolating", True) else ":path"
        return f"{{{found['name']}{rest}}}"

    return FLASK_PARAMETER.sub(parameter, route)
