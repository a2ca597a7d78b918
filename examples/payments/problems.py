"""The errors of this service, with the code, status and `retryable` that its callers get."""

from __future__ import annotations

from typing import Any


class Problem(Exception):
    """The base class; sent as application/problem+json."""

    code = "INTERNAL.error"
    status = 500
    title = "Something went wrong"
    retryable = False

    def problem(self) -> dict[str, Any]:
        return {
            "type": f"urn:payments:error:{self.code}",
            "title": self.title,
            "status": self.status,
            "detail": str(self) or self.title,
            "error_code": self.code,
            "retryable": self.retryable,
        }


class NotFound(Problem):
    code, status, title = "NOT_FOUND.resource", 404, "The resource does not exist"


class OrderPaid(Problem):
    code, status, title = "CONFLICT.order_paid", 409, "The order has a payment already"


class WrongStatus(Problem):
    code, status, title = "CONFLICT.state", 409, "The payment's status does not allow this"


class TooMuch(Problem):
    code, status, title = "VALIDATION.amount", 422, "The amount is more than can be refunded"


class Invalid(Problem):
    code, status, title = "VALIDATION.payload", 422, "The request is not valid"


class ProviderTimeout(Problem):
    code, status, title, retryable = "DEPENDENCY.timeout", 504, "The provider did not answer in time", True


class ProviderUnavailable(Problem):
    code, status, title, retryable = "DEPENDENCY.unavailable", 503, "The provider cannot be reached", True


class Declined(Problem):
    code, status, title = "PROVIDER.declined", 402, "The provider refuses to move the money"
