"""Verdicts on answers and errors: whether to try again, and whether the operation was performed.

The functions at the end read the server's advice: Retry-After, RateLimit, should-retry headers, problem documents.
"""

from __future__ import annotations

import http
import re
import ssl
from collections.abc import Sequence
from email.utils import mktime_tz, parsedate_tz
from functools import cache
from typing import Any, Literal, Protocol

import msgspec

Known = Literal["performed", "refused", "not_performed", "unknown"]

# Methods that HTTP itself declares repeatable.  All others need a key.
IDEMPOTENT_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE"})


class Headers(Protocol):
    """The header fields of an answer.  The case of a name does not matter."""

    def get(self, name: str, /) -> str | None: ...


class HttpReply(msgspec.Struct, frozen=True):
    """The parts of an answer that a verdict needs, and the library's own *response*."""

    status: int
    headers: Headers
    body: bytes = b""
    response: Any = None


class Fault(msgspec.Struct, frozen=True):
    """The meaning of an error.  *sent*: the server may have got the request.  *fatal*: the next attempt would fail too."""

    name: str
    sent: bool = True
    fatal: bool = False
    note: str = ""


class Verdict(msgspec.Struct, frozen=True):
    """Whether to try *again*, and why.

    *after* is the pause in seconds that the server asks for; *at_once* means no pause.  *blame*: it counts against
    the host's budget and breaker.  *stored*: the server replayed a stored answer, which will never change.
    """

    again: bool
    name: str
    note: str
    code: str = ""
    known: Known = "performed"
    after: float | None = None
    at_once: bool = False
    blame: bool = False
    stored: bool = False


ACCEPTED = Verdict(False, "200", "success")


def judge_reply(reply: HttpReply, *, repeatable: bool, keyed: bool, statuses: frozenset[int], now: float) -> Verdict:
    """Return the verdict on an answer.  *repeatable* says whether the request may safely be sent again."""
    status = reply.status
    if status < 400:
        return accepted(status)
    replayed = is_replayed(reply.headers)
    said, error_code = should_retry(reply.headers, reply.body)
    after = retry_after(reply.headers, now)
    if after is None:
        after = rate_limit_reset(reply.headers)
    wanted = said if said is not None else status in statuses or (status == 409 and keyed and after is not None)
    in_flight = status == 409 and wanted
    return Verdict(
        again=wanted and repeatable and not replayed,
        name=f"{status // 100}xx",
        note=_note(status, error_code, replayed=replayed, barred=wanted and not repeatable),
        code=str(status),
        known=KNOWN.get(error_code, "refused" if replayed or (status < 500 and not in_flight) else "unknown"),
        after=after,
        at_once=status == 408,
        blame=(status == 429 or status >= 500) and not replayed,
        stored=replayed,
    )


@cache
def accepted(status: int) -> Verdict:
    """Return the verdict on an answer that is no error.  The retry log names it 200; its code is the status."""
    if status in (307, 308):  # the operation is performed at another address, if at all
        return Verdict(False, "3xx", "redirected", str(status), known="refused")
    return Verdict(False, "200", "success", str(status))


def judge_fault(fault: Fault, *, repeatable: bool) -> Verdict:
    """Return the verdict on an error that came instead of an answer."""
    again = not fault.fatal and (repeatable or not fault.sent)
    note = fault.note or fault.name
    if not again and not fault.fatal:
        note += "; it may have been performed, and without a key it is not sent again"
    known: Known = "unknown" if fault.sent else "not_performed"
    return Verdict(again, fault.name, note, known=known, blame=not fault.fatal)


def find_fault(error: BaseException, faults: Sequence[tuple[type[BaseException], Fault]]) -> Fault:
    """Return the fault of the first class in *faults* that *error* is an instance of.  Any other error is fatal."""
    name = type(error).__name__
    for kind, fault in faults:
        if isinstance(error, kind):
            return Fault(fault.name, fault.sent, fault.fatal or _is_certificate_refused(error), name)
    return Fault("error", fatal=True, note=name)


def _is_certificate_refused(error: BaseException | None) -> bool:
    """Whether a refused certificate caused *error*: the next attempt would be refused too."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _note(status: int, error_code: str, *, replayed: bool, barred: bool) -> str:
    try:
        note = http.HTTPStatus(status).phrase.lower()
    except ValueError:
        note = "unnamed status"
    if error_code:
        note += f" ({error_code[:80]})"
    if replayed:
        note += "; a stored answer, so it is final"
    elif barred:
        note += "; without a key it is not sent again"
    return note


# Nine digits are thirty years.  A longer number is an attack or a mistake.
SECONDS = re.compile(r"[0-9]{1,9}")

# `"default";r=0;t=30` in the newer drafts, `limit=100, remaining=0, reset=30` in the older ones.
RATE_LIMITS = [
    re.compile(r"\br=(?P<left>\d{1,9})\b.*?\bt=(?P<reset>\d{1,9})\b", re.ASCII),
    re.compile(r"\bremaining=(?P<left>\d{1,9})\b.*?\breset=(?P<reset>\d{1,9})\b", re.ASCII),
]

# Prefixes of error codes, and whether to try again.  The first prefix that matches decides.
CODES = (
    ("CONFLICT.idempotency.in_progress", True),
    ("RATE_LIMIT.", True),
    ("DEPENDENCY.", True),
    ("TRANSIENT.", True),
    ("VALIDATION.", False),
    ("AUTH.", False),
    ("CONFLICT.", False),
    ("PRECONDITION.", False),
    ("PROVIDER.duplicate", False),
    ("idempotency_key_in_use", True),  # Stripe's code for a request that is still running
)

# Error codes that tell of an earlier attempt: this request was refused, but that attempt performed, or may have.
KNOWN: dict[str, Known] = {
    "CONFLICT.idempotency.outcome_unknown": "unknown",
    "CONFLICT.idempotency.outcome_not_kept": "performed",
    "CONFLICT.idempotency.duplicate": "performed",
}

MAX_PROBLEM = 64 * 1024


class Problem(msgspec.Struct):
    """The members of a problem document (or of Stripe's errors) that concern retries.  A server may send any types."""

    error_code: Any = None
    retryable: Any = None
    error: Any = None


decode_problem = msgspec.json.Decoder(Problem).decode


def http_date(text: str) -> float | None:
    """Return the seconds since the epoch for a date in any of HTTP's three forms, or None for any other text."""
    try:
        date = parsedate_tz(text) if text.endswith("GMT") or text[-4:].isdigit() else None
        return float(mktime_tz(date)) if date and 1 <= date[2] <= 31 else None
    except (ValueError, OverflowError, TypeError, IndexError):  # a server may send anything
        return None


def retry_after(headers: Headers, now: float) -> float | None:
    """Return the seconds of Retry-After, or None.  *now* is the wall clock, used if the server sends no Date."""
    text = headers.get("Retry-After")
    if text is None:
        return None
    if SECONDS.fullmatch(text):
        return float(text)
    until = http_date(text)
    if until is None:
        return None
    return max(0.0, until - (http_date(headers.get("Date") or "") or now))


def rate_limit_reset(headers: Headers) -> float | None:
    """Return the seconds until the quota is refilled, or None if the server does not say that it is used up."""
    for form in RATE_LIMITS:
        found = form.search((headers.get("RateLimit") or "")[:1024])
        if found:
            return float(found["reset"]) if int(found["left"]) == 0 else None
    left, reset = headers.get("RateLimit-Remaining"), headers.get("RateLimit-Reset")
    return float(reset) if left == "0" and reset and SECONDS.fullmatch(reset) else None


def is_replayed(headers: Headers) -> bool:
    """Whether the server says that this is a stored answer.  Another attempt would get the same one."""
    words = (headers.get("Idempotency-Status"), headers.get("Idempotent-Replayed"))
    return any((word or "").strip().lower() in ("replayed", "true") for word in words)


def should_retry(headers: Headers, body: bytes) -> tuple[bool | None, str]:
    """Return whether the server asks for a retry (None if it does not say), and its error code."""
    code, said = _problem(headers, body)
    header = headers.get("Stripe-Should-Retry") or headers.get("X-Should-Retry")
    if header in ("true", "false"):
        said = header == "true"
    if said is None:
        said = next((retry for prefix, retry in CODES if code.startswith(prefix)), None)
    return said, code


def _problem(headers: Headers, body: bytes) -> tuple[str, bool | None]:
    if not body or len(body) > MAX_PROBLEM or "json" not in (headers.get("Content-Type") or "").lower():
        return "", None
    try:
        problem = decode_problem(body)
    except (msgspec.MsgspecError, RecursionError):
        return "", None
    nested = problem.error if isinstance(problem.error, dict) else {}
    code = problem.error_code if isinstance(problem.error_code, str) else nested.get("code")
    said = problem.retryable if isinstance(problem.retryable, bool) else None
    return (code if isinstance(code, str) else ""), said
