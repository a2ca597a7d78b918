"""A rule in OpenAPI's terms: parameters, headers, refusals, the `x-idempotency` extension, and the status lookup."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from ..._contract.keys import UUIDS
from ..._contract.keysource import KeySource
from ..._contract.rule import Rule
from ...errors import (
    CorruptRecord,
    Duplicate,
    Fenced,
    InProgress,
    InvalidKey,
    InvalidPayload,
    InvalidPrincipal,
    KeyExpired,
    MissingKey,
    NotFound,
    OncemoreError,
    OutcomeNotKept,
    PayloadMismatch,
    PayloadTooLarge,
    PreconditionFailed,
    PreconditionRequired,
    PrincipalFailed,
    RateLimited,
    StoreError,
    StoreTimeout,
    StoreUnavailable,
    Suspected,
    UnknownOutcome,
)

Json = dict[str, Any]

PROBLEM = "IdempotencyProblem"
PROBLEM_REF = {"$ref": f"#/components/schemas/{PROBLEM}"}
PROBLEM_SCHEMA: Json = {
    "type": "object",
    "description": "Why the operation was not performed, and what the caller can do (RFC 9457).",
    "properties": {
        "type": {"type": "string", "description": "The kind of problem, as a URI."},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string", "description": "What happened this time, and what to do about it."},
        "error_code": {"type": "string", "description": "The kind of problem, as a code for programs."},
        "retryable": {"type": "boolean", "description": "Whether the same request, with the same key, may work later."},
    },
    "required": ["type", "title", "status", "detail", "error_code", "retryable"],
}
ACCEPTED_SCHEMA: Json = {
    "type": "object",
    "properties": {
        "state": {"type": "string", "enum": ["running"]},
        "operation": {"type": "string"},
        "key": {"type": "string"},
        "status_url": {"type": "string", "description": "The URL of the operation's state."},
    },
    "required": ["state", "operation", "key", "status_url"],
}
RETRY_AFTER: Json = {"description": "Seconds to wait before a retry.", "schema": {"type": "integer", "minimum": 1}}
EXPIRES: Json = {"description": "The time until which a retry gets this response.", "schema": {"type": "string"}}


# ── Parameters ────────────────────────────────────────────────────────────────────────────────────────────────────────


def parameters(rule: Rule) -> Iterator[Json]:
    """Yield the headers that the rule reads."""
    key = rule.key
    if key.source == "header":
        told = f"A unique name for this operation. Send the same name if you retry it. {kept_for(rule)}"
        yield header_parameter(key.name, told, key.required or rule.if_match, key_schema(key))
    if rule.first_sent:
        told = "The time at which the operation was first sent, as an HTTP date; the same on every retry."
        yield header_parameter(rule.first_sent, told, False, {"type": "string"})
    if rule.if_match:
        told = "The ETag of the resource that the caller has read."
        yield header_parameter("If-Match", told, True, {"type": "string"})


def header_parameter(name: str, description: str, required: bool, schema: Json) -> Json:
    return {"name": name, "in": "header", "required": required, "description": description, "schema": schema}


def key_schema(key: KeySource) -> Json:
    """Return the schema of a key's header.  A strict key is sent in quotes, so its pattern includes them."""
    kind, _, pattern = key.format.partition(":")
    if kind == "regex":
        pattern = f"(?:{pattern})"
    elif kind in UUIDS:
        pattern = re.sub("a-f|ab", lambda found: found[0] + found[0].upper(), UUIDS[kind][0].pattern)
    if key.strict:
        return {"type": "string", "pattern": f'^"{pattern or ".+"}"$'}
    schema: Json = {"type": "string", "minLength": 1, "maxLength": key.max_length}
    if kind in UUIDS:
        schema["format"] = "uuid"
    return schema | ({"pattern": f"^{pattern}$"} if pattern else {})


def sentence(rule: Rule) -> str:
    """Return a sentence on how a request names its operation, or an empty text if a header does."""
    key = rule.key
    if key.source == "body":
        where = "/" + "/".join(key.at)
        return (
            f"Idempotent: `{where}` in the body names the operation; send the same value if you retry. {kept_for(rule)}"
        )
    if key.template is not None:
        return f"Idempotent: requests with the same `{key.template.text}` are one operation. {kept_for(rule)}"
    return ""


def kept_for(rule: Rule) -> str:
    return f"Its outcome is kept for {in_words(rule.policy.ttl)}."


def in_words(seconds: float) -> str:
    """Return a duration in words, such as "2 hours", in the largest unit that divides it."""
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length and seconds % length == 0:
            count = int(seconds // length)
            return f"{count} {unit}{'s' if count > 1 else ''}"
    return f"{seconds:g} seconds"


# ── Responses ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def answer_headers(rule: Rule) -> Json:
    """Return the headers that the middleware adds to the operation's own responses."""
    status = rule.status_header
    values = list(dict.fromkeys(filter(None, (status.stored, status.replayed, status.unstored))))
    told = "Whether the response was stored now, replayed from the ledger, or is not stored."
    shown = {status.name: {"description": told, "schema": {"type": "string", "enum": values}}} if status.name else {}
    expires = rule.status_header.expires
    return {**shown, expires: EXPIRES} if expires else shown


def refusals(rule: Rule) -> dict[int, list[type[OncemoreError]]]:
    """Return the problems that the middleware may send instead of the operation's response, by their status."""
    found: dict[int, list[type[OncemoreError]]] = {}
    for error, applies in REFUSALS:
        if applies(rule):
            status = rule.policy.on_mismatch if error is PayloadMismatch else error.status
            found.setdefault(status, []).append(error)
    return found


def always(rule: Rule) -> bool:
    return True


REFUSALS: tuple[tuple[type[OncemoreError], Callable[[Rule], bool]], ...] = (
    (MissingKey, lambda rule: (rule.key.required or rule.if_match) and rule.key.template is None),
    (InvalidKey, always),
    (InvalidPayload, always),
    (InvalidPrincipal, always),
    (PayloadTooLarge, always),
    (PayloadMismatch, lambda rule: rule.fingerprint.mode != "none"),
    (InProgress, lambda rule: rule.policy.in_flight != "accepted"),
    (UnknownOutcome, lambda rule: rule.policy.effect != "transaction" and rule.policy.on_unknown != "retry"),
    (Duplicate, lambda rule: rule.policy.on_duplicate == "reject" or rule.unique_by is not None),
    (Suspected, lambda rule: rule.policy.suspect in ("reject", "replay")),
    (OutcomeNotKept, lambda rule: rule.policy.on_duplicate == "replay"),
    (Fenced, lambda rule: rule.policy.effect != "transaction"),
    (KeyExpired, lambda rule: rule.policy.late == "refuse"),
    (PreconditionFailed, lambda rule: rule.if_match),
    (PreconditionRequired, lambda rule: rule.if_match),
    (RateLimited, lambda rule: rule.rate is not None),
    (PrincipalFailed, always),
    (StoreError, lambda rule: rule.store_down != "run"),
    (StoreUnavailable, lambda rule: rule.store_down != "run" or rule.policy.effect == "transaction"),
    (CorruptRecord, always),
    (StoreTimeout, lambda rule: rule.store_down != "run"),
)


def refusal(rule: Rule, status: int, errors: list[type[OncemoreError]], problem_base: str) -> Json:
    """Return the response for the problems that share a status."""
    types = [problem_base + error.code for error in errors]
    codes = [error.code for error in errors]
    narrowed = {"properties": {"type": {"enum": types}, "error_code": {"enum": codes}, "status": {"enum": [status]}}}
    header = rule.status_header
    refused = {header.name: {"schema": {"type": "string", "enum": [header.refused]}}} if header.refused else {}
    examples = {
        error.code: {
            "summary": error.title,
            "value": error().problem() | {"type": problem_base + error.code, "status": status},
        }
        for error in errors
    }
    content = {"application/problem+json": {"schema": {"allOf": [PROBLEM_REF, narrowed]}, "examples": examples}}
    retry = {"Retry-After": RETRY_AFTER} if any(error.retryable for error in errors) else {}
    headers = {"headers": {**refused, **retry}} if refused or retry else {}
    return {"description": "; ".join(error.title for error in errors) + ".", **headers, "content": content}


def accepted() -> Json:
    """Return the response to a duplicate of an operation that is still running."""
    return {
        "description": "The first request with this key is still running; its state is at the status URL.",
        "headers": {"Location": {"schema": {"type": "string"}}, "Retry-After": RETRY_AFTER},
        "content": {"application/json": {"schema": ACCEPTED_SCHEMA}},
    }


# ── The extension ─────────────────────────────────────────────────────────────────────────────────────────────────────


def extension(rule: Rule) -> Json:
    """Return the rule's settings for programs, as `x-idempotency`.  Durations are in seconds."""
    if not rule.idempotent:
        return {"name": rule.name, "idempotent": False}
    if rule.key.source == "none":
        return {"name": rule.name, "key": {"from": "none"}}
    policy = rule.policy
    table: Json = {
        "name": rule.name,
        "reverses": rule.reverses,
        "key": key_table(rule.key),
        "scope": word(rule.scope),
        "fingerprint": fingerprint_table(rule),
        "ttl": number(policy.ttl),
        "ttl_from": policy.ttl_from,
        "in_flight": policy.in_flight,
        "wait": number(policy.wait) if policy.in_flight == "wait" else None,
        "retry_after": number(rule.retry_after),
        "on_duplicate": policy.on_duplicate,
        "on_mismatch": policy.on_mismatch,
        "keep": word(policy.keep),
        "effect": policy.effect,
        "on_unknown": policy.on_unknown,
        "unique_by": rule.unique_by.text if rule.unique_by else None,
        "late": policy.late,
        "if_match": rule.if_match or None,
        "rate": {"count": rule.rate.count, "window": number(rule.rate.window)} if rule.rate else None,
    }
    return {name: value for name, value in table.items() if value is not None}


def key_table(key: KeySource) -> Json:
    table: Json = {"from": key.source, "required": key.required, "max_length": key.max_length}
    if key.template is not None:
        table["template"] = key.template.text
    elif key.source == "body":
        table |= {"at": "/" + "/".join(key.at), "format": key.format}
    else:
        table |= {"name": key.name, "format": key.format}
    return table


def fingerprint_table(rule: Rule) -> Json:
    fields = {"include": list(rule.fingerprint.include), "exclude": list(rule.fingerprint.exclude)}
    return {"mode": rule.fingerprint.mode, **{name: value for name, value in fields.items() if value}}


def word(value: object) -> object:
    """Return the word of a setting, or "custom" if the setting is a function of the application."""
    return value if isinstance(value, str) else "custom"


def number(seconds: float) -> float:
    return int(seconds) if seconds == int(seconds) else seconds


# ── The status lookup ─────────────────────────────────────────────────────────────────────────────────────────────────

TIME = {"description": "Seconds since 1970, or null."}
RESPONSE: Json = {
    "description": "The response that a retry gets, if it is stored.",
    "type": "object",
    "properties": {
        "status": {"type": "integer"},
        "kept": {"type": "boolean"},
        "headers": {"type": "array", "items": {"type": "array", "items": {"type": "string"}}},
        "body": {"type": "string"},
        "body_base64": {"type": "string", "description": "Instead of `body`, if the body is not UTF-8."},
    },
}
STATUS: Json = {
    "type": "object",
    "properties": {
        "operation": {"type": "string"},
        "key": {"type": "string"},
        "state": {"type": "string", "enum": ["running", "settled", "released", "unknown"]},
        "attempts": {"type": "integer"},
        "created_at": TIME,
        "expires_at": TIME,
        "response": RESPONSE,
    },
    "required": ["operation", "key", "state", "attempts"],
}
PROBLEMS: tuple[type[OncemoreError], ...] = (InvalidKey, InvalidPrincipal, NotFound, StoreUnavailable, StoreTimeout)


def status_item(problem_base: str) -> Json:
    """Return the path item of the status lookup."""
    asked = {"operation": "The operation's name, or its method and path.", "key": "The key that the request had."}
    problems = {str(error.status): problem_response(error, problem_base) for error in PROBLEMS}
    return {
        "get": {
            "operationId": "idempotency_status",
            "summary": "The state of an operation, by its key",
            "description": "Performs nothing, and shows callers only their own operations.",
            "parameters": [
                {
                    "name": name,
                    "in": "query",
                    "required": name == "operation",
                    "description": told,
                    "schema": {"type": "string"},
                }
                for name, told in asked.items()
            ],
            "responses": {
                "200": {"description": "The operation.", "content": {"application/json": {"schema": STATUS}}},
                **problems,
            },
        }
    }


def problem_response(error: type[OncemoreError], problem_base: str) -> Json:
    example = error().problem() | {"type": problem_base + error.code}
    content = {"schema": PROBLEM_REF, "example": example}
    return {"description": f"{error.title}.", "content": {"application/problem+json": content}}
