"""What a rule means to whoever calls the operation, in OpenAPI's terms: parameters, headers, refusals, an extension."""

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
        "type": {"type": "string", "description": "What kind of problem it is."},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string", "description": "What happened this time, and how to mend it."},
        "error_code": {"type": "string", "description": "The kind of problem, as one word for programs."},
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
        "status_url": {"type": "string", "description": "Where to look how it goes."},
    },
    "required": ["state", "operation", "key", "status_url"],
}
RETRY_AFTER: Json = {"description": "Seconds to wait before a retry.", "schema": {"type": "integer", "minimum": 1}}
EXPIRES: Json = {"description": "Until when a retry gets this same response.", "schema": {"type": "string"}}


# ── What the caller sends ─────────────────────────────────────────────────────────────────────────────────────────────


def parameters(rule: Rule) -> Iterator[Json]:
    """The headers that the rule reads."""
    key = rule.key
    if key.source == "header":
        told = f"A unique name for this operation, and the same one when you retry it. {kept_for(rule)}"
        yield header_parameter(key.name, told, key.required or rule.if_match, key_schema(key))
    if rule.first_sent:
        told = "When the operation was first sent, as an HTTP date; the same on every retry."
        yield header_parameter(rule.first_sent, told, False, {"type": "string"})
    if rule.if_match:
        told = "The ETag of the resource as the caller knows it."
        yield header_parameter("If-Match", told, True, {"type": "string"})


def header_parameter(name: str, description: str, required: bool, schema: Json) -> Json:
    return {"name": name, "in": "header", "required": required, "description": description, "schema": schema}


def key_schema(key: KeySource) -> Json:
    """What a key's header may hold.  A strict one is written in quotes, which count for its pattern."""
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
    """How the operation is named, where no header does it."""
    key = rule.key
    if key.source == "body":
        where = "/" + "/".join(key.at)
        return (
            f"Idempotent: `{where}` in the body names the operation; send the same one when you retry. {kept_for(rule)}"
        )
    if key.template is not None:
        return f"Idempotent: requests with the same `{key.template.text}` are one operation. {kept_for(rule)}"
    return ""


def kept_for(rule: Rule) -> str:
    return f"Its outcome is kept for {spelt(rule.policy.ttl)}."


def spelt(seconds: float) -> str:
    """A duration as people say it, in the largest unit that divides it."""
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length and seconds % length == 0:
            count = int(seconds // length)
            return f"{count} {unit}{'s' if count > 1 else ''}"
    return f"{seconds:g} seconds"


# ── What the caller gets ──────────────────────────────────────────────────────────────────────────────────────────────


def answer_headers(rule: Rule) -> Json:
    """The headers that the door adds to the operation's own responses."""
    status = rule.status_header
    values = list(dict.fromkeys(filter(None, (status.stored, status.replayed, status.unstored))))
    told = "How the response came: from this request, from the ledger, or without being kept."
    shown = {status.name: {"description": told, "schema": {"type": "string", "enum": values}}} if status.name else {}
    return {**shown, "Idempotency-Expires": EXPIRES}


def refusals(rule: Rule) -> dict[int, list[type[OncemoreError]]]:
    """The problems that the door may answer with instead of the operation, by their status."""
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
    (StoreUnavailable, lambda rule: rule.store_down != "run"),
    (CorruptRecord, always),
    (StoreTimeout, lambda rule: rule.store_down != "run"),
)


def refusal(rule: Rule, status: int, errors: list[type[OncemoreError]], problem_base: str) -> Json:
    """The response for those problems, which share a status."""
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
    """The response to a repeat of what is still running."""
    return {
        "description": "The first request with this key is still running; the status URL tells how it goes.",
        "headers": {"Location": {"schema": {"type": "string"}}, "Retry-After": RETRY_AFTER},
        "content": {"application/json": {"schema": ACCEPTED_SCHEMA}},
    }
