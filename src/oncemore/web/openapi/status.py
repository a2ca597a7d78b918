"""The lookup of an operation by its key, as OpenAPI tells it."""

from __future__ import annotations

from ...errors import InvalidKey, InvalidPrincipal, NotFound, OncemoreError, StoreTimeout, StoreUnavailable
from .parts import PROBLEM_REF, Json

TIME = {"description": "Seconds since 1970, or null where there is none."}
RESPONSE: Json = {
    "description": "The response that a retry gets, where it was kept.",
    "type": "object",
    "properties": {
        "status": {"type": "integer"},
        "kept": {"type": "boolean"},
        "headers": {"type": "array", "items": {"type": "array", "items": {"type": "string"}}},
        "body": {"type": "string"},
        "body_base64": {"type": "string", "description": "Instead of `body`, where it is no text."},
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
    """The path at which a caller looks up what became of its operation."""
    asked = {"operation": "The operation's name, or its method and path.", "key": "The key that it was sent with."}
    problems = {str(error.status): problem_response(error, problem_base) for error in PROBLEMS}
    return {
        "get": {
            "operationId": "idempotency_status",
            "summary": "What became of an operation, by its key",
            "description": "Never performs anything, and shows callers only their own operations.",
            "parameters": [
                {"name": name, "in": "query", "required": name == "operation", "description": told, "schema": text()}
                for name, told in asked.items()
            ],
            "responses": {
                "200": {"description": "What is known.", "content": {"application/json": {"schema": STATUS}}},
                **problems,
            },
        }
    }


def text() -> Json:
    return {"type": "string"}


def problem_response(error: type[OncemoreError], problem_base: str) -> Json:
    example = error().problem() | {"type": problem_base + error.code}
    content = {"schema": PROBLEM_REF, "example": example}
    return {"description": f"{error.title}.", "content": {"application/problem+json": content}}
