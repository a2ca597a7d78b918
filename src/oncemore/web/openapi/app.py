"""Shows the contract in the OpenAPI document that an app makes by itself (FastAPI)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from ..._contract.contract import Contract
from ..._contract.rule import Rule
from ..discovery import each_route, starlette_rules
from . import PROBLEM_BASE, enrich
from .parts import Json


def document(
    app: Any, contract: Contract, *, prefix: str = "", status_path: str | None = None, problem_base: str = PROBLEM_BASE
) -> None:
    """Make `app.openapi()`, and that of each app mounted in it, show the contract.

    The middleware does so for the app that it is added to.  *prefix* is where the app itself is mounted.
    """
    for found, mounted in documented(app, prefix):
        plain = getattr(found.openapi, "plain", found.openapi)  # a second call replaces the first
        lookup = status_path if mounted == prefix else None  # it is the outer app's
        options: Json = {"prefix": mounted, "status_path": lookup, "problem_base": problem_base}
        found.openapi = Enriched(plain, found, contract, mounted, partial(enrich, contract=contract, **options))


def documented(app: Any, prefix: str) -> Iterator[tuple[Any, str]]:
    """Each app that makes a document, with the path that it is mounted at."""
    if makes_document(app):
        yield app, prefix
    for route in each_route(getattr(app, "routes", None) or ()):
        inner = getattr(route, "app", None)
        if inner is not app and getattr(inner, "routes", None):
            yield from documented(inner, prefix + (getattr(route, "path", None) or ""))


def makes_document(app: Any) -> bool:
    return callable(getattr(app, "openapi", None)) and hasattr(app, "openapi_schema")


def outermost(app: Any) -> Any:
    """The app itself, or the first one inside it that makes a document: a middleware keeps the next one in its `app`."""
    seen: set[int] = set()
    while app is not None and not makes_document(app) and id(app) not in seen:
        seen.add(id(app))
        app = getattr(app, "app", None)
    return app


class Enriched:
    """An app's `openapi`, made anew only when the app's own or the contract has changed."""

    def __init__(
        self, plain: Callable[[], Json], app: Any, contract: Contract, prefix: str, enriched: Callable[[Json], Json]
    ) -> None:
        self.plain = plain
        self._app = app
        self._contract = contract
        self._prefix = prefix
        self._enriched = enriched
        self._made: tuple[Json, tuple[Rule, ...], Json] | None = None

    def __call__(self) -> Json:
        document = self.plain()
        if self._made is None or self._made[0] is not document:  # it has new routes, which may have rules
            self._contract.add(*starlette_rules(getattr(self._app, "routes", ()), self._prefix))
            self._made = None
        rules = self._contract.rules
        if self._made is None or self._made[1] is not rules:
            self._made = (document, rules, self._enriched(document))
        return self._made[2]
