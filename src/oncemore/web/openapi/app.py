"""Shows the contract in the OpenAPI document that an app makes by itself (FastAPI)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from ..._contract.contract import Contract
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
        again = getattr(found.openapi, "func", None) is enriched  # the last call counts
        plain = found.openapi.args[1] if again else found.openapi
        lookup = status_path if mounted == prefix else None  # it is the outer app's
        options: Json = {"prefix": mounted, "status_path": lookup, "problem_base": problem_base}
        found.openapi = partial(enriched, found, plain, contract, **options)


def enriched(app: Any, plain: Callable[[], Json], contract: Contract, *, prefix: str, **options: Any) -> Json:
    """The document that *plain* makes, with the rules of the contract, and those on routes that were added since."""
    contract.add(*starlette_rules(getattr(app, "routes", ()), prefix))
    return enrich(plain(), contract, prefix=prefix, **options)


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
