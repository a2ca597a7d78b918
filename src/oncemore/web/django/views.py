"""Rules on Django's views: the decorators that attach them, and the look-up of the one that a request falls under."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, Unpack
from weakref import WeakSet

from django.conf import settings  # type: ignore[import-untyped]
from django.contrib.admindocs import utils as admindocs  # type: ignore[import-untyped]
from django.urls import Resolver404, get_resolver, resolve  # type: ignore[import-untyped]

from ..._contract.contract import Contract, Match
from ..._contract.profiles import DEFAULT
from ..._contract.rule import Rule, attach, called
from ..._contract.settings import Settings
from ...errors import ConfigurationError
from ..views import places, rules_for, served_by

F = TypeVar("F", bound=Callable[..., Any])
Rules = dict[tuple[int, str], Rule]  # by the id of the view that the URL configuration holds, and the method

PARAMETER = re.compile(r"<(?:(?P<converter>\w+):)?(?P<name>\w+)>")

log = logging.getLogger("oncemore.web")
marked: WeakSet[Any] = WeakSet()


def idempotent(match: str | None = None, **said: Unpack[Settings]) -> Callable[[F], F]:
    """A decorator for views, classes of views, their methods and actions: the requests they serve follow this rule."""
    called(match)
    return mark(Rule(match, **said))


def mark(rule: Rule) -> Callable[[F], F]:
    def decorate(view: F) -> F:
        marked.add(view)
        return attach(rule, view)

    return decorate


def required(view: F) -> F:
    """The view's requests must carry a key."""
    return mark(REQUIRED)(view)


def optional(view: F) -> F:
    """The view's requests are guarded if they carry a key."""
    return mark(OPTIONAL)(view)


def exempt(view: F) -> F:
    """The view's requests pass untouched, whatever the contract says of others."""
    return mark(EXEMPT)(view)


REQUIRED, OPTIONAL, EXEMPT = Rule(key="required"), Rule(key="optional"), Rule(idempotent=False)


class Views:
    """The rules on the views of a URL configuration, each found by resolving the request as Django does."""

    def __init__(self, contract: Contract) -> None:
        self.contract = contract
        self._rules: dict[Any, Rules] = {}
        self._declaring = threading.Lock()  # the first requests may come at once, and rules are declared once

    def match(self, request: Any) -> Match | None:
        """The rule on the view that will serve the request, if there is one."""
        urlconf = getattr(request, "urlconf", None) or settings.ROOT_URLCONF
        if urlconf not in self._rules:
            with self._declaring:
                if urlconf not in self._rules:
                    self._rules[urlconf] = declare(self.contract, urlconf)
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
    """Add to the contract every rule on a view of the URL configuration; which of them each view follows."""
    said: dict[tuple[int, str], Rule] = {}
    seen: set[int] = set()
    for route, view in routes(get_resolver(urlconf), ""):
        seen.update(map(id, lineage(view)))
        for rule, methods in rules_for(view, served_by(view)):
            here = bound(rule, methods, route)
            for method in filter(here.pattern.allows, methods):
                said.setdefault((id(view), method), here)
    contract.add(*dict.fromkeys(said.values()))
    contract.check()
    for view in marked:
        if id(view) not in seen:
            log.warning("%r has a rule, but no route of %s serves it: put its decorator outermost", view, urlconf)
    return {place: contract.rule(rule.name) for place, rule in said.items()}


def routes(resolver: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Every route below *resolver*, as it was written, and its view."""
    for pattern in resolver.url_patterns:
        route = prefix + str(pattern.pattern).removeprefix("^" if prefix else "")
        if hasattr(pattern, "url_patterns"):
            yield from routes(pattern, route)
        else:
            yield route, pattern.callback


def lineage(view: Any) -> Iterator[Any]:
    """The view, and all that its decorators have wrapped, where a mark may have been put."""
    for method in served_by(view):
        for place in places(view, method):
            while place is not None:
                yield place
                place = getattr(place, "__wrapped__", None)


def bound(rule: Rule, methods: list[str], route: str) -> Rule:
    """The rule for the requests to *route*; one that names its own requests stays as it is."""
    if rule.match != DEFAULT["match"]:
        return rule
    try:
        return rule.at(f"{'|'.join(methods)} {path_of(route)}")
    except ConfigurationError as error:
        raise ConfigurationError(
            f"The route {route!r} cannot be written as a rule's match ({error.detail}); name it in the decorator, as in "
            "@idempotent('POST /exports/{rest:path}')"
        ) from error


def path_of(route: str) -> str:
    """A route such as `^api/` + `orders/<int:id>/` as the contract writes it: `/api/orders/{id}/`."""
    path = admindocs.replace_named_groups(admindocs.remove_non_capturing_groups(route))
    path = admindocs.replace_metacharacters(admindocs.replace_unnamed_groups(path)).replace("\\", "")
    path = "/" + path.lstrip("/")
    return PARAMETER.sub(lambda found: f"{{{found['name']}{':path' * (found['converter'] == 'path')}}}", path)
