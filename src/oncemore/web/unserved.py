"""Finds the rules of a contract that no route of the app serves: a typing error in a path leaves a route unguarded."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from .._contract.contract import Contract
from .._contract.paths import ANY, Pattern, Segment
from .._contract.problems import did_you_mean
from ..errors import ConfigurationError
from .discovery import each_route, flask_apps, flask_path, starlette_routes

log = logging.getLogger("oncemore.web")

PATH_END = ":path}"


class Route(NamedTuple):
    """One route of the app: the methods that it serves, and its path as a contract writes it."""

    methods: frozenset[str]
    pattern: Pattern


class UnknownRoutes(Exception):
    """Raised if some routes of the app cannot be listed, so nobody can say which rules are served."""


def warn_of_routes(contract: Contract, routes: Iterable[Route], status_path: str | None, prefix: str = "") -> None:
    """Log a warning for each rule that no route serves, and one if the status lookup hides a route of the app."""
    try:
        known = list(routes)
    except UnknownRoutes:
        return
    for problem in unserved(contract, known, prefix):
        log.warning("%s", problem)
    if any(route.methods & {"GET", ANY} and path_of(route.pattern) == status_path for route in known):
        log.warning(
            "The app has a route GET %s, which the middleware's status lookup hides: give the middleware another "
            "status_path, or status_path=None",
            status_path,
        )


def unserved(contract: Contract, routes: Iterable[Route], prefix: str = "") -> list[str]:
    """Return a sentence for each rule that no route serves, or an empty list if the routes are not known.

    *prefix* is the path at which the app is mounted: rules may name a path with or without it.
    """
    try:
        known = list(routes)
    except UnknownRoutes:
        known = []
    if not known:
        return []
    mounted = [*known, *(route_at(prefix + path_of(each.pattern), each.methods) for each in known if prefix)]
    served = [f"{method} {path_of(each.pattern)}" for each in known for method in sorted(each.methods - {ANY})]
    found = []
    for rule in contract.rules:
        if not any(serves(route, rule.pattern) for route in mounted):
            hint = did_you_mean(rule.match, served)
            found.append(
                f"No route of the app serves the rule {rule.match!r}, so it guards nothing{hint}: correct its path"
            )
    return found


def serves(route: Route, rule: Pattern) -> bool:
    """Whether a request to *route* may match the *rule*."""
    methods = set(rule.methods)
    if ANY not in methods and ANY not in route.methods and methods.isdisjoint(route.methods):
        return False
    return overlap(route.pattern.segments, rule.segments)


def overlap(some: tuple[Segment, ...], others: tuple[Segment, ...]) -> bool:
    """Whether one path may match both; a parameter matches any text, and the rest of a path any number of segments."""
    for one, other in zip(some, others, strict=False):
        if one.rest or other.rest:
            return True
        if not (one.param or other.param) and one.prefix != other.prefix:
            return False
    longer = (some if len(some) > len(others) else others)[min(len(some), len(others)) :]
    return not longer or longer[0].rest


def path_of(pattern: Pattern) -> str:
    path = pattern.text.rpartition(" ")[2]
    return "/{rest:path}" if path == ANY else path


def route_at(path: str, methods: Iterable[str]) -> Route:
    """Return the route at a framework's path.  After a parameter of several segments, the path is cut off: all match."""
    head, end, tail = path.partition(PATH_END)
    if end and tail.strip("/"):
        path = head + end
    try:
        return Route(frozenset(methods), Pattern(f"* {path if path.startswith('/') else '/' + path}"))
    except ConfigurationError as error:  # for instance because of two parameters in one segment
        raise UnknownRoutes from error


# ── The routes of Starlette-like apps and of Flask; those of Django are in `oncemore.web.django.views` ────────────────


def starlette_served(app: Any, prefix: str = "") -> Iterator[Route]:
    """Yield the routes of the Starlette-like app in *app*, if there is such an app."""
    for route in each_route(starlette_routes(app)):
        path = prefix + (getattr(route, "path", None) or "")
        inner = getattr(route, "routes", None)
        if getattr(route, "endpoint", None) is not None:
            yield route_at(path, getattr(route, "methods", None) or {ANY})
        elif isinstance(inner, list) and inner:
            yield from starlette_served(route, path)
        elif getattr(route, "app", None) is not None:  # another kind of app is mounted here
            yield route_at(f"{path.rstrip('/')}/{{rest:path}}", {ANY})
        else:
            raise UnknownRoutes


def flask_served(app: Any) -> Iterator[Route]:
    """Yield the routes of the Flask app in *app*, given as itself, as its `wsgi_app`, or inside another middleware."""
    for found, prefix in flask_apps(app):
        if found is None:
            raise UnknownRoutes
        for route in found.url_map.iter_rules():
            yield route_at(prefix + flask_path(found, route.rule), route.methods or {ANY})
