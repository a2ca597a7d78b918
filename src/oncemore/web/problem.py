"""Refusals and faults as HTTP shows them: problem documents (RFC 9457), each with what the caller can do."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

import msgspec

from ..errors import (
    InProgress,
    OncemoreError,
    PayloadMismatch,
    Refusal,
    StoreError,
)

if TYPE_CHECKING:
    from .._contract.contract import Match
    from .._ledger.model import Operation
    from .door import Door

log = logging.getLogger("oncemore.web")

encode_json = msgspec.json.Encoder().encode

JSON = ("content-type", "application/json")
PROBLEM = ("content-type", "application/problem+json")


class Response(msgspec.Struct, frozen=True):
    """A whole response; its length is the door's to add."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes


def problem(
    door: Door, error: OncemoreError, match: Match | None, operation: Operation | None, mount: str = ""
) -> Response:
    """The response to an operation that was refused, or could not be looked up; *mount* is where the app is mounted."""
    if isinstance(error, InProgress) and match and operation and match.rule.policy.in_flight == "accepted":
        return accepted(door, error, match, operation, mount)
    status = error.status
    if isinstance(error, PayloadMismatch) and match is not None:
        status = match.rule.policy.on_mismatch
    members = error.problem()
    members.update(type=door.problem_base + error.code, status=status)
    if not isinstance(error, Refusal):  # what went wrong here is for us to know: it may name hosts, files and users
        log.error("%s: %s", error.code, error.detail)
        members["detail"] = error.title
    headers = [PROBLEM, *retry_after(error, match), *refused_status(match)]
    return Response(status, headers, encode_json(members))


def retry_after(error: OncemoreError, match: Match | None) -> list[tuple[str, str]]:
    """When to come back, for errors that time can mend."""
    seconds = error.retry_after
    if isinstance(error, InProgress) and match is not None:
        seconds = match.rule.retry_after
    if seconds is None and isinstance(error, StoreError):
        seconds = 1.0
    return [] if seconds is None else [("retry-after", str(max(1, math.ceil(seconds))))]


def refused_status(match: Match | None) -> list[tuple[str, str]]:
    header = match.rule.status_header if match is not None else None
    return [(header.name.lower(), header.refused)] if header and header.name and header.refused else []


def accepted(door: Door, error: OncemoreError, match: Match, operation: Operation, mount: str) -> Response:
    """202: it is running, and the status URL tells how it goes."""
    prefix = mount.rstrip("/")
    path = door.status_path if door.status_path.startswith(f"{prefix}/") else prefix + door.status_path
    url = f"{quote(path)}?{urlencode({'operation': match.route, 'key': operation.key})}"
    body: dict[str, Any] = {"state": "running", "operation": match.route, "key": operation.key, "status_url": url}
    return Response(202, [JSON, ("location", url), *retry_after(error, match)], encode_json(body))
