"""Writes the contract into an OpenAPI document: keys, replays, refusals, retention, for every operation it guards."""

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
    """A copy of the OpenAPI 3 *document* with the contract's rule on each operation; applying it twice changes nothing.

    *prefix* stands before the document's paths if the contract names them in full.  With a *status_path*, the lookup of
    an operation by its key is documented, too.
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
    return copy.deepcopy(made)  # the same object is in many places here, and a reader may change one


def matches(document: Json, contract: Contract, prefix: str) -> Iterator[tuple[Rule, Json]]:
    """Each operation of the document that the contract has a rule for."""
    for path, item in document.get("paths", {}).items():
        for method in METHODS:
            if isinstance(item.get(method), dict):
                match = contract.match(method, prefix + path)
                if match is not None and (match.declared or contract.undeclared != "refuse"):
                    yield match.rule, item[method]


def describe(document: Json, rule: Rule, operation: Json, problem_base: str) -> bool:
    """Write the rule into the operation, unless it is there; return whether the operation is guarded."""
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
    """Add the header; if the operation has it already, its own words stay, and the schema is ours."""
    known = operation.setdefault("parameters", [])
    for place, given in enumerate(known):
        found: Json = resolved(document, given) or {}
        if found.get("in") == "header" and found.get("name", "").lower() == parameter["name"].lower():
            words = ("name", "description", "example", "examples")
            known[place] = {**parameter, **{word: found[word] for word in words if word in found}}
            return
    known.append(parameter)


def add_responses(document: Json, rule: Rule, responses: Json, problem_base: str) -> None:
    for status in responses:  # the operation's own; ours are not among them yet
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
    """A reference to the response, which most operations have in common."""
    known = document.setdefault("components", {}).setdefault("responses", {})
    names = (name if number == 1 else f"{name}-{number}" for number in itertools.count(1))
    free = next(each for each in names if known.setdefault(each, response) == response)
    return {"$ref": f"#/components/responses/{free}"}


def extend(document: Json, responses: Json, status: str, added: Json) -> None:
    """Add headers and contents to a response; its own stay."""
    found = resolved(document, responses[status]) if status in responses else {}
    if found is None:  # it is in another document
        return
    given = found.get("content", {})
    contents = {kind: either(given.get(kind, {}), content) for kind, content in added.get("content", {}).items()}
    responses[status] = {**added, **found, "headers": {**added.get("headers", {}), **found.get("headers", {})}}
    if given or contents:
        responses[status]["content"] = {**given, **contents}


def either(given: Json, added: Json) -> Json:
    """A content of either kind."""
    if given.get("schema", added["schema"]) == added["schema"]:
        return {**given, **added}
    merged: Json = {**given, "schema": {"anyOf": [given["schema"], added["schema"]]}}
    if "example" not in given and (examples := {**given.get("examples", {}), **added.get("examples", {})}):
        merged["examples"] = examples
    return merged


def resolved(document: Json, value: Json) -> Json | None:
    """The target of a reference within the document; None if it leads elsewhere, or nowhere."""
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


# The document that an app makes by itself (FastAPI)


def document(
    app: Any, contract: Contract, *, prefix: str = "", status_path: str | None = None, problem_base: str = PROBLEM_BASE
) -> None:
    """Make `app.openapi()`, and that of each app mounted in it, show the contract.

    The middleware does so for the app that it is added to.  *prefix* is where the app itself is mounted.
    """
    for found, mounted in documented(app, prefix):
        plain = found.openapi.plain if isinstance(found.openapi, Enriched) else found.openapi  # the last call counts
        lookup = status_path if mounted == prefix else None  # it is the outer app's
        options: Json = {"prefix": mounted, "status_path": lookup, "problem_base": problem_base}
        found.openapi = Enriched(found, plain, contract, options)


class Enriched:
    """The `openapi()` of an app, with the contract's rules.

    Made anew only if the app's own document or the contract has changed: anybody may ask for it, and it takes long to make.
    """

    latest: tuple[Json | None, tuple[Rule, ...], Json] = (None, (), {})  # the app's own document, the rules, and ours

    def __init__(self, app: Any, plain: Callable[[], Json], contract: Contract, options: Json) -> None:
        self.app = app
        self.plain = plain
        self.contract = contract
        self.options = options

    def __call__(self) -> Json:
        document = self.plain()
        made_from, made_with, made = self.latest
        if document is not made_from:  # it has new routes, which may have rules
            self.contract.add(*starlette_rules(getattr(self.app, "routes", ()), self.options["prefix"]))
        rules = self.contract.rules
        if document is not made_from or rules is not made_with:
            made = enrich(document, self.contract, **self.options)
            self.latest = (document, rules, made)
        return made


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
