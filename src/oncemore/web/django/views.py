"""Rules on Django's views: the decorators that attach them, and the lookup of a request's rule by its URL."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, Unpack
from weakref import WeakSet

from django.conf import settings as django_settings  # type: ignore[import-untyped]
from django.urls import Resolver404, get_resolver, get_script_prefix, resolve  # type: ignore[import-untyped]

from ..._contract.contract import Contract, Match
from ..._contract.paths import ANY, UNSAFE_METHODS
from ..._contract.profiles import DEFAULT
from ..._contract.rule import Rule, attach, check_called
from ..._contract.settings import Settings
from ...errors import ConfigurationError
from ..discovery import decorated_objects, rules_for, unsafe_methods
from ..unserved import Route, route_at, warn_of_routes
from ._compat import ninja_operations, path_of

F = TypeVar("F", bound=Callable[..., Any])
Rules = dict[tuple[int, str], Rule]  # the key is the id of the view in the URL configuration, and the method

log = logging.getLogger("oncemore.web")
marked: WeakSet[Any] = WeakSet()  # the views that a decorator has given a rule


def idempotent(match: str | None = None, **settings: Unpack[Settings]) -> Callable[[F], F]:
    """Return a decorator for a view, a class of views, a method or an action: its requests follow this rule."""
    check_called(match)
    return mark(Rule(match, **settings))


def mark(rule: Rule) -> Callable[[F], F]:
    def decorate(view: F) -> F:
        marked.add(view)
        return attach(rule, view)

    return decorate


def required(view: F) -> F:
    """Decorate a view: its requests must have a key."""
    return mark(REQUIRED)(view)


def optional(view: F) -> F:
    """Decorate a view: its requests are guarded if they have a key."""
    return mark(OPTIONAL)(view)


def exempt(view: F) -> F:
    """Decorate a view: its requests pass untouched, even if a rule of the contract matches them."""
    return mark(EXEMPT)(view)


REQUIRED, OPTIONAL, EXEMPT = Rule(key="required"), Rule(key="optional"), Rule(idempotent=False)


class Views:
    """Finds the rule on a request's view by resolving its URL as Django does."""

    def __init__(self, contract: Contract, status_path: str | None = None) -> None:
        self.contract = contract
        self.status_path = status_path
        self._rules: dict[Any, Rules] = {}
        self._declaring = threading.Lock()  # several first requests may come at the same time

    def match(self, request: Any) -> Match | None:
        """Return the rule on the view that will serve the request, or None if it has none."""
        urlconf = getattr(request, "urlconf", None) or django_settings.ROOT_URLCONF
        if urlconf not in self._rules:
            with self._declaring:
                if urlconf not in self._rules:
                    self._rules[urlconf] = declare(self.contract, urlconf)
                    if getattr(request, "urlconf", None) is None:  # the project's own configuration
                        warn_of_routes(self.contract, served(), self.status_path, get_script_prefix().rstrip("/"))
        rules = self._rules[urlconf]
        if not rules:
            return None
        try:
            found = resolve(request.path_info, urlconf)
        except Resolver404:
            return None
        rule = rules.get((id(found.func), request.method))
        if rule is None:
            return None
        route = rule.name if rule.one_route else f"{request.method} {request.path.rstrip('/') or '/'}"
        return Match(rule, {name: str(value) for name, value in found.kwargs.items()}, route)


def declare(contract: Contract, urlconf: Any) -> Rules:
    """Add to the contract every rule on a view of the URL configuration; return the rule of each view and method."""
    found: dict[tuple[int, str], Rule] = {}
    seen: set[int] = set()
    for route, view in routes(get_resolver(urlconf), ""):
        seen.update(map(id, lineage(view)))
        for function, methods in functions_of(view):
            for rule, served in rules_for(function, methods):
                here = at_route(rule, served, route)
                for method in filter(here.pattern.allows, served):
                    found.setdefault((id(view), method), here)
    contract.add(*dict.fromkeys(found.values()))
    contract.check()
    for view in marked:
        if id(view) not in seen:
            log.warning("%r has a rule, but no route of %s serves it: put its decorator outermost", view, urlconf)
    return {place: contract.rule(rule.name) for place, rule in found.items()}


def routes(resolver: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield every route below *resolver*, as it was written, with its view."""
    for pattern in resolver.url_patterns:
        route = prefix + str(pattern.pattern).removeprefix("^" if prefix else "")
        if hasattr(pattern, "url_patterns"):
            yield from routes(pattern, route)
        else:
            yield route, pattern.callback


def served() -> Iterator[Route]:
    """Yield the routes of the project's URL configuration, each for any method: a view does not declare its methods."""
    for route, _ in routes(get_resolver(django_settings.ROOT_URLCONF), ""):
        yield route_at(path_of(route), {ANY})


def functions_of(view: Any) -> list[tuple[Any, list[str]]]:
    """Return the functions of a view, each with the methods by which it may have effects: Django Ninja has several."""
    found = [(each.view_func, [m for m in UNSAFE_METHODS if m in each.methods]) for each in ninja_operations(view)]
    return found or [(view, unsafe_methods(view))]


def lineage(view: Any) -> Iterator[Any]:
    """Yield all objects that a rule of the view may be attached to, and the functions that their decorators have wrapped."""
    for function, methods in functions_of(view):
        for method in methods:
            for place in decorated_objects(function, method):
                while place is not None:
                    yield place
                    place = getattr(place, "__wrapped__", None)


def at_route(rule: Rule, methods: list[str], route: str) -> Rule:
    """Return the rule for the requests to *route*; a rule that has a `match` of its own is returned as it is."""
    if rule.match != DEFAULT["match"]:
        return rule
    try:
        return rule.at(f"{'|'.join(methods)} {path_of(route)}")
    except ConfigurationError as error:
        raise ConfigurationError(
            f"The route {route!r} cannot be written as a rule's match ({error.detail}); name it in the decorator, as in "
            "@idempotent('POST /exports/{rest:path}')"
        ) from error
