"""The service's own refusals, beside those of oncemore: sent as application/problem+json, like them."""

from __future__ import annotations

from fastapi import Request
from fastapi.responses import JSONResponse

from oncemore.errors import OncemoreError, Refusal


class Missing(Refusal):
    """The resource does not exist, or belongs to somebody else."""

    code, status, title = "NOT_FOUND.resource", 404, "The resource does not exist"


class NotAllowed(Refusal):
    """The path has other methods."""

    code, status, title = "VALIDATION.method", 405, "The method is not allowed"


class Invalid(Refusal):
    """The body lacks a field, or has a value that is not allowed."""

    code, status, title = "VALIDATION.payload", 422, "The request is not valid"


class WrongCode(Refusal):
    """The code is not the one that was sent, or is too old."""

    code, status, title = "AUTH.wrong_code", 401, "The code is not right"


class Broken(OncemoreError):
    """The failure that a test has asked for."""

    code, status, title, retryable = "INTERNAL.test_fault", 500, "A test has asked for this failure", True


async def problem_response(_: Request, error: Exception) -> JSONResponse:
    """Return an error of this service or of oncemore as a problem document."""
    assert isinstance(error, OncemoreError)
    headers = {"Retry-After": "1"} if error.retryable else {}
    return JSONResponse(error.problem(), error.status, headers, media_type="application/problem+json")
