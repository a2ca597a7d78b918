"""The parts of the profiles `stripe` and `stripe-v2` that are no settings: the error bodies, and the connected account."""

from __future__ import annotations

from typing import Any

from .request import HeaderPrincipal, Headers, value_of

PROFILES = ("stripe", "stripe-v2")
ACCOUNT_HEADERS = ("stripe-account", "stripe-context")


def stripe_problem(problem: dict[str, Any]) -> dict[str, Any]:
    """The error body that Stripe's SDKs read, for a problem document: they raise IdempotencyError or InvalidRequestError."""
    code: str = problem["error_code"]
    if code.startswith("CONFLICT.idempotency."):
        kind = "idempotency_error"
    else:
        kind = "api_error" if problem["status"] >= 500 else "invalid_request_error"
    error = {"type": kind, "message": problem["detail"], "code": CODES.get(code, code)}
    return {"error": error}


CODES = {
    "CONFLICT.idempotency.in_progress": "idempotency_key_in_use",
    "RATE_LIMIT.exceeded": "rate_limit",
}


class StripeAccount(HeaderPrincipal):
    """The connected account that a platform calls for: the same key of another account is another operation."""

    def __call__(self, headers: Headers) -> str:
        for name in ACCOUNT_HEADERS:
            account = value_of(headers, name)
            if account:
                return f"{name}:{account}"
        return "platform"
