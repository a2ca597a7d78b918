"""The middleware's own responses: problem documents (RFC 9457) for errors, and responses made from values."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from http import HTTPStatus
from typing import Any
from urllib.parse import quote, urlencode

import msgspec

from .._contract.contract import Match
from .._ledger.model import Operation, Outcome
from .._ledger.values import replayed
from ..errors import InProgress, OncemoreError, OutcomeNotKept, PayloadMismatch, Refusal, StoreError

log = logging.getLogger("oncemore.web")

encode_json = msgspec.json.Encoder().encode

JSON = ("content-type", "application/json")
PROBLEM = ("content-type", "application/problem+json")


ProblemBody = Callable[[dict[str, Any]], Any]

# Sent in place of an error's own detail, which is for the operator: it may name functions, commands or a crashed attempt's note.
FOR_CLIENTS = {
    "CONFLICT.idempotency.outcome_unknown": (
        "An earlier attempt with this key was interrupted, and whether it took effect is not known.  Look the result up; do "
        "not send the request with a new key"
    ),
    "INTERNAL.principal_failed": "The caller could not be determined; nothing was done",
}


class Response(msgspec.Struct, frozen=True):
    """A complete response, without its Content-Length."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes


def status_line(status: int) -> str:
    """Return the status with its phrase, as WSGI and load balancers require it."""
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return f"{status} Unknown"


def problem_response(
    error: OncemoreError,
    match: Match | None,
    operation: Operation | None,
    base: str,
    status_path: str | None,
    mount: str = "",
    body: ProblemBody | None = None,
) -> Response:
    """Return the response to an operation that was refused, or could not be looked up.

    Args:
        error: The reason.
        match: The rule, if one was found.
        operation: The operation, if the request had a key.
        base: The text before the error's code in the `type` member.
        status_path: The path of the status lookup; None if there is none.
        mount: The prefix that the app is mounted at.
        body: Takes the members of the problem document and returns the JSON body to be sent instead.
    """
    is_accepted = isinstance(error, InProgress) and match is not None and match.rule.policy.in_flight == "accepted"
    if is_accepted and match and operation and status_path:
        return accepted(error, match, operation, status_path, mount.rstrip("/"))
    status = error.status
    if isinstance(error, PayloadMismatch) and match is not None:
        status = match.rule.policy.on_mismatch
    members = error.problem()
    members.update(type=base + error.code, status=status)
    if not isinstance(error, Refusal):  # its detail may name hosts, files and users
        log.error("%s: %s", error.code, error.detail)
        members["detail"] = error.title
    members["detail"] = FOR_CLIENTS.get(error.code, members["detail"])
    headers = retry_after(error, match)
    marker = match.rule.status_header if match is not None else None
    if marker and marker.name and marker.refused:
        headers.append((marker.name.lower(), marker.refused))
    if body is not None:
        try:
            return Response(status, [JSON, *headers], encode_json(body(dict(members))))
        except Exception:  # the client still gets the original error
            log.exception("The problem function failed; a problem document is sent instead")
    return Response(status, [PROBLEM, *headers], encode_json(members))


STRIPE_CODES = {"CONFLICT.idempotency.in_progress": "idempotency_key_in_use", "RATE_LIMIT.exceeded": "rate_limit"}


def stripe_problem(problem: dict[str, Any]) -> dict[str, Any]:
    """Return a problem document as the error body that Stripe's SDKs read, so that they raise their own exceptions."""
    code: str = problem["error_code"]
    if code.startswith("CONFLICT.idempotency."):
        kind = "idempotency_error"
    else:
        kind = "api_error" if problem["status"] >= 500 else "invalid_request_error"
    return {"error": {"type": kind, "message": problem["detail"], "code": STRIPE_CODES.get(code, code)}}


def retry_after(error: OncemoreError, match: Match | None) -> list[tuple[str, str]]:
    """Return the Retry-After header, if the error may be temporary."""
    seconds = error.retry_after
    if isinstance(error, InProgress) and match is not None:
        seconds = match.rule.retry_after
    if seconds is None and isinstance(error, StoreError):
        seconds = 1.0
    return [] if seconds is None else [("retry-after", str(max(1, math.ceil(seconds))))]


def accepted(error: OncemoreError, match: Match, operation: Operation, status_path: str, prefix: str) -> Response:
    """Return a 202: the operation is running, and its state is at the status URL."""
    path = status_path if status_path.startswith(f"{prefix}/") else prefix + status_path
    url = f"{quote(path)}?{urlencode({'operation': match.route, 'key': operation.key})}"
    body: dict[str, Any] = {"state": "running", "operation": match.route, "key": operation.key, "status_url": url}
    return Response(202, [JSON, ("location", url), *retry_after(error, match)], encode_json(body))


def value_response(outcome: Outcome) -> Outcome:
    """Return a 200 with a resolver's value as JSON, or without a body if the value is None.  Else raise OutcomeNotKept."""
    if outcome.kind != "value":
        raise OutcomeNotKept("The operation was performed once, but its response was not kept; look up its result")
    value = replayed(outcome, types=None)
    if value is None:
        return Outcome("response", 200)
    try:
        return Outcome("response", 200, (JSON,), encode_json(value))
    except (TypeError, ValueError) as error:
        raise OutcomeNotKept("The operation was performed once, but its result is not JSON; look it up") from error
