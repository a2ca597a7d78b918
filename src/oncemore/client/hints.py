"""What a server says about trying again: Retry-After, RateLimit, its should-retry header, and its problem document."""

from __future__ import annotations

import calendar
import re
import time
from typing import Any, Protocol

import msgspec


class Headers(Protocol):
    """The header fields of an answer; names are found in any case."""

    def get(self, name: str, /) -> str | None: ...


# Nine digits are thirty years of seconds: more of them is an attack, or a mistake.
SECONDS = re.compile(r"[0-9]{1,9}")

MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
CLOCK = r"(?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)"
HTTP_DATES = [
    re.compile(rf"[A-Z][a-z]{{2}}, (?P<day>\d\d) (?P<month>[A-Z][a-z]{{2}}) (?P<year>\d{{4}}) {CLOCK} GMT", re.ASCII),
    re.compile(rf"[A-Z][a-z]+, (?P<day>\d\d)-(?P<month>[A-Z][a-z]{{2}})-(?P<year>\d\d) {CLOCK} GMT", re.ASCII),
    re.compile(rf"[A-Z][a-z]{{2}} (?P<month>[A-Z][a-z]{{2}}) (?P<day>[ \d]\d) {CLOCK} (?P<year>\d{{4}})", re.ASCII),
]

# `"default";r=0;t=30` in the newer drafts, `limit=100, remaining=0, reset=30` in the older ones.
RATE_LIMITS = [
    re.compile(r"\br=(?P<left>\d{1,9})\b.*?\bt=(?P<reset>\d{1,9})\b", re.ASCII),
    re.compile(r"\bremaining=(?P<left>\d{1,9})\b.*?\breset=(?P<reset>\d{1,9})\b", re.ASCII),
]

# The taxonomy of error codes; the first that fits decides.
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
    ("idempotency_key_in_use", True),  # Stripe's word for a request that is still running
)

MAX_PROBLEM = 64 * 1024


class Problem(msgspec.Struct):
    """The members of a problem document (or of Stripe's errors) that speak about retries; their types are not trusted."""

    error_code: Any = None
    retryable: Any = None
    error: Any = None


decode_problem = msgspec.json.Decoder(Problem).decode


def http_date(text: str, now: float) -> float | None:
    """Seconds since the epoch, from any of the three forms that HTTP knows; None if it is none of them."""
    for form in HTTP_DATES:
        if found := form.fullmatch(text):
            part = found.groupdict()
            break
    else:
        return None
    year = int(part["year"]) if len(part["year"]) == 4 else _century(int(part["year"]), now)
    if part["month"] not in MONTHS or not 1 <= int(part["day"]) <= 31:
        return None
    month = MONTHS.index(part["month"]) + 1
    moment = (year, month, int(part["day"]), int(part["hour"]), int(part["minute"]), int(part["second"]))
    return float(calendar.timegm(moment)) if year >= 1970 else 0.0


def _century(year: int, now: float) -> int:
    """The year of a two-digit one: never more than fifty years ahead."""
    this_year = time.gmtime(now).tm_year
    year += this_year - this_year % 100
    return year - 100 if year > this_year + 50 else year


def retry_after(headers: Headers, now: float) -> float | None:
    """Seconds that the server asks to wait; *now* is the wall clock, used only where the server does not tell its own."""
    text = headers.get("Retry-After")
    if text is None:
        return None
    if SECONDS.fullmatch(text):
        return float(text)
    until = http_date(text, now)
    if until is None:
        return None
    return max(0.0, until - (http_date(headers.get("Date") or "", now) or now))


def rate_limit_reset(headers: Headers) -> float | None:
    """Seconds until the quota is refilled, where the server says that it is used up."""
    for form in RATE_LIMITS:
        found = form.search((headers.get("RateLimit") or "")[:1024])
        if found:
            return float(found["reset"]) if int(found["left"]) == 0 else None
    left, reset = headers.get("RateLimit-Remaining"), headers.get("RateLimit-Reset")
    return float(reset) if left == "0" and reset and SECONDS.fullmatch(reset) else None


def is_replayed(headers: Headers) -> bool:
    """Whether the answer is a stored one, so that asking again can only bring the same."""
    words = (headers.get("Idempotency-Status"), headers.get("Idempotent-Replayed"))
    return any((word or "").strip().lower() in ("replayed", "true") for word in words)


def should_retry(headers: Headers, body: bytes) -> tuple[bool | None, str]:
    """The server's own word on retrying (None: it said nothing), and its error code."""
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
