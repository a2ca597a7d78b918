"""Responses of our own: problem documents (RFC 9457) for errors, and values that stand for no response."""

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

# Instead of a detail that is for the operator: it names functions, commands, or what a crashed attempt has left in its note.
FOR_CLIENTS = {
    "CONFLICT.idempotency.outcome_unknown": (
        "An earlier attempt with this key was interrupted, and whether it took effect is not known.  Look the result up; do "
        "not send the request with a new key"
    ),
    "INTERNAL.principal_failed": "The caller could not be determined; nothing was done",
}


class Response(msgspec.Struct, frozen=True):
    """A whole response, without its Content-Length."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes


def status_line(status: int) -> str:
    """The status with its phrase, as WSGI and load balancers want it."""
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
    """The response to an operation that was refused, or could not be looked up.

    Args:
        error: Why.
        match: The rule, if one was found.
        operation: The operation, if the request had a key.
        base: The text before the error's code in the `type` member.
        status_path: Where an operation that is still running can be looked up, if that is possible.
        mount: The prefix that the app is mounted at.
        body: From the members of the problem document to the JSON that is sent instead.
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
        except Exception:  # the client is told of its own error, not of this one
            log.exception("The problem function failed; a problem document is sent instead")
    return Response(status, [PROBLEM, *headers], encode_json(members))


STRIPE_CODES = {"CONFLICT.idempotency.in_progress": "idempotency_key_in_use", "RATE_LIMIT.exceeded": "rate_limit"}


def stripe_problem(problem: dict[str, Any]) -> dict[str, Any]:
    """The error body that Stripe's SDKs read, for a problem document: they raise IdempotencyError or InvalidRequestError."""
    code: str = problem["error_code"]
    if code.startswith("CONFLICT.idempotency."):
        kind = "idempotency_error"
    else:
        kind = "api_error" if problem["status"] >= 500 else "invalid_request_error"
    return {"error": {"type": kind, "message": problem["detail"], "code": STRIPE_CODES.get(code, code)}}


def retry_after(error: OncemoreError, match: Match | None) -> list[tuple[str, str]]:
    """When to retry, if the error may pass."""
    seconds = error.retry_after
    if isinstance(error, InProgress) and match is not None:
        seconds = match.rule.retry_after
    if seconds is None and isinstance(error, StoreError):
        seconds = 1.0
    return [] if seconds is None else [("retry-after", str(max(1, math.ceil(seconds))))]


def accepted(error: OncemoreError, match: Match, operation: Operation, status_path: str, prefix: str) -> Response:
    """202: the operation is running, and the status URL tells how it goes."""
    path = status_path if status_path.startswith(f"{prefix}/") else prefix + status_path
    url = f"{quote(path)}?{urlencode({'operation': match.route, 'key': operation.key})}"
    body: dict[str, Any] = {"state": "running", "operation": match.route, "key": operation.key, "status_url": url}
    return Response(202, [JSON, ("location", url), *retry_after(error, match)], encode_json(body))


def value_response(outcome: Outcome) -> Outcome:
    """The response that stands for a resolver's value, or for no value; OutcomeNotKept if there is none to show."""
    if outcome.kind != "value":
        raise OutcomeNotKept("The operation was performed once, but its response was not kept; look up its result")
    value = replayed(outcome, types=None)
    if value is None:
        return Outcome("response", 200)
    try:
        return Outcome("response", 200, (JSON,), encode_json(value))
    except (TypeError, ValueError) as error:
        raise OutcomeNotKept("The operation was performed once, but its result is no JSON; look it up") from error
