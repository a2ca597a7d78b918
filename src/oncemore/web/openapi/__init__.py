"""Writes the contract into an OpenAPI document: keys, replays, refusals and retention of each guarded operation."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from ..._contract.contract import Contract
from ..._contract.rule import Rule
from ...errors import ConfigurationError
from ..discovery import each_route, starlette_rules
from . import parts
from .parts import Json

METHODS = ("post", "put", "patch", "delete")
PROBLEM_BASE = "urn:oncemore:error:"


def enrich(
    document: Json,
    contract: Contract,
    *,
    prefix: str = "",
    status_path: str | None = None,
    problem_base: str = PROBLEM_BASE,
) -> Json:
    """Return a copy of the OpenAPI 3 *document* with the contract's rule on each operation.  A second call changes nothing.

    *prefix* is put before the document's paths to find their rules.  With a *status_path*, the status lookup is documented,
    too.
    """
    if not str(document.get("openapi", "")).startswith("3."):
        raise ConfigurationError(
            "The document is not OpenAPI 3: its `openapi` member must say 3.x, and is missing or older"
        )
    made = copy.deepcopy(document)
    guarded = [describe(made, rule, operation, problem_base) for rule, operation in matches(made, contract, prefix)]
    if any(guarded):
        made.setdefault("components", {}).setdefault("schemas", {})[parts.PROBLEM] = parts.PROBLEM_SCHEMA
        if status_path:
            made["paths"].setdefault(status_path, parts.status_item(problem_base))
    return copy.deepcopy(made)  # so that no object is in two places: a caller may change one of them


def matches(document: Json, contract: Contract, prefix: str) -> Iterator[tuple[Rule, Json]]:
    """Yield each operation of the document that the contract has a rule for, after its rule."""
    for path, item in document.get("paths", {}).items():
        for method in METHODS:
            if isinstance(item.get(method), dict):
                match = contract.match(method, prefix + path)
                if match is not None and (match.declared or contract.undeclared != "refuse"):
                    yield match.rule, item[method]


def describe(document: Json, rule: Rule, operation: Json, problem_base: str) -> bool:
    """Write the rule into the operation unless it is there already.  Return whether the operation is guarded."""
    table = parts.extension(rule)
    guarded = rule.idempotent and rule.key.source != "none"
    if operation.get("x-idempotency") == table:
        return guarded
    operation["x-idempotency"] = table
    if rule.retry:
        operation["x-retry"] = {"preset": rule.retry}
    if not guarded:
        return False
    for parameter in parts.parameters(rule):
        add_parameter(document, operation, parameter)
    said, sentence = operation.get("description", ""), parts.sentence(rule)
    if sentence and sentence not in said:
        operation["description"] = f"{said}\n\n{sentence}" if said else sentence
    operation["responses"] = {str(status): response for status, response in operation.get("responses", {}).items()}
    add_responses(document, rule, operation["responses"], problem_base)
    return True


def add_parameter(document: Json, operation: Json, parameter: Json) -> None:
    """Add the header.  If the operation has it already, keep its name, description and examples, and replace its schema."""
    known = operation.setdefault("parameters", [])
    for place, given in enumerate(known):
        found: Json = resolved(document, given) or {}
        if found.get("in") == "header" and found.get("name", "").lower() == parameter["name"].lower():
            words = ("name", "description", "example", "examples")
            known[place] = {**parameter, **{word: found[word] for word in words if word in found}}
            return
    known.append(parameter)


def add_responses(document: Json, rule: Rule, responses: Json, problem_base: str) -> None:
    for status in responses:  # before the refusals are added, so only the operation's own responses
        extend(document, responses, status, {"headers": parts.answer_headers(rule)})
    if rule.policy.on_duplicate == "ok":
        responses.setdefault("200", {"description": "It was performed before.", "headers": parts.answer_headers(rule)})
    elif rule.replay_status == 200:
        first = next((responses[status] for status in sorted(responses) if status.startswith("2")), None)
        responses.setdefault("200", first or {"description": "It was performed before."})
    if rule.policy.in_flight == "accepted":
        extend(document, responses, "202", parts.accepted())
    for code, errors in parts.refusals(rule).items():
        refusal = parts.refusal(rule, code, errors, problem_base)
        if str(code) in responses:
            extend(document, responses, str(code), refusal)
        else:
            responses[str(code)] = shared(document, f"Idempotency{code}", refusal)


def shared(document: Json, name: str, response: Json) -> Json:
    """Put the response into the document's components, because many operations share it, and return a reference to it."""
    known = document.setdefault("components", {}).setdefault("responses", {})
    names = (name if number == 1 else f"{name}-{number}" for number in itertools.count(1))
    free = next(each for each in names if known.setdefault(each, response) == response)
    return {"$ref": f"#/components/responses/{free}"}


def extend(document: Json, responses: Json, status: str, added: Json) -> None:
    """Add headers and contents to a response, and keep its own."""
    found = resolved(document, responses[status]) if status in responses else {}
    if found is None:  # the reference cannot be followed: it may lead to another document
        return
    given = found.get("content", {})
    contents = {kind: either(given.get(kind, {}), content) for kind, content in added.get("content", {}).items()}
    responses[status] = {**added, **found, "headers": {**added.get("headers", {}), **found.get("headers", {})}}
    if given or contents:
        responses[status]["content"] = {**given, **contents}


def either(given: Json, added: Json) -> Json:
    """Return a content that allows both schemas."""
    if given.get("schema", added["schema"]) == added["schema"]:
        return {**given, **added}
    merged: Json = {**given, "schema": {"anyOf": [given["schema"], added["schema"]]}}
    if "example" not in given and (examples := {**given.get("examples", {}), **added.get("examples", {})}):
        merged["examples"] = examples
    return merged


def resolved(document: Json, value: Json) -> Json | None:
    """Return *value*, or the target of its reference; None if the document does not contain the target."""
    seen: list[str] = []
    while "$ref" in value:
        target = value["$ref"]
        if not target.startswith("#/") or target in seen:
            return None
        seen.append(target)
        found: Any = document
        for name in target[2:].split("/"):
            found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
        if not isinstance(found, dict):
            return None
        value = found
    return value


# The document that an app makes itself (FastAPI)


def document(
    app: Any, contract: Contract, *, prefix: str = "", status_path: str | None = None, problem_base: str = PROBLEM_BASE
) -> None:
    """Make `app.openapi()` show the contract, and do the same for each app mounted in *app*.

    The middleware calls this for the app that it is added to.  *prefix* is the path at which *app* itself is mounted.
    """
    for found, mounted in documented(app, prefix):
        plain = found.openapi.plain if isinstance(found.openapi, Enriched) else found.openapi  # called again
        lookup = status_path if mounted == prefix else None  # only the outer app has the status lookup
        options: Json = {"prefix": mounted, "status_path": lookup, "problem_base": problem_base}
        found.openapi = Enriched(found, plain, contract, options)


class Enriched:
    """Replaces the `openapi()` of an app: returns its document with the contract's rules.

    The result is made again only if the app's own document or the contract has changed, because it takes long to make.
    """

    latest: tuple[Json | None, tuple[Rule, ...], Json] = (None, (), {})  # the app's own document, the rules, the result

    def __init__(self, app: Any, plain: Callable[[], Json], contract: Contract, options: Json) -> None:
        self.app = app
        self.plain = plain
        self.contract = contract
        self.options = options

    def __call__(self) -> Json:
        document = self.plain()
        made_from, made_with, made = self.latest
        if document is not made_from:  # a new document may have new routes with rules
            self.contract.add(*starlette_rules(getattr(self.app, "routes", ()), self.options["prefix"]))
        rules = self.contract.rules
        if document is not made_from or rules is not made_with:
            made = enrich(document, self.contract, **self.options)
            self.latest = (document, rules, made)
        return made


def documented(app: Any, prefix: str) -> Iterator[tuple[Any, str]]:
    """Yield each app that makes a document, with the path that it is mounted at."""
    if makes_document(app):
        yield app, prefix
    for route in each_route(getattr(app, "routes", None) or ()):
        inner = getattr(route, "app", None)
        if inner is not app and getattr(inner, "routes", None):
            yield from documented(inner, prefix + (getattr(route, "path", None) or ""))


def makes_document(app: Any) -> bool:
    return callable(getattr(app, "openapi", None)) and hasattr(app, "openapi_schema")


def outermost(app: Any) -> Any:
    """Return the app, or the first one inside it, that makes a document: a middleware has the next app in `app`."""
    seen: set[int] = set()
    while app is not None and not makes_document(app) and id(app) not in seen:
        seen.add(id(app))
        app = getattr(app, "app", None)
    return app
