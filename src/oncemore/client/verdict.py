"""Pure judgement: is an answer or an error final, or worth another attempt, and what is then known of the outcome?"""

from __future__ import annotations

import http
from functools import cache
from typing import Any, Literal

import msgspec

from .hints import Headers, is_replayed, rate_limit_reset, retry_after, should_retry

Known = Literal["performed", "refused", "not_performed", "unknown"]

# Methods that HTTP itself declares repeatable; all others need a key.
IDEMPOTENT_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE"})


class Reply(msgspec.Struct, frozen=True):
    """A server's answer: what judgement needs of it, and the library's own *response*."""

    status: int
    headers: Headers
    body: bytes = b""
    response: Any = None


class Fault(msgspec.Struct, frozen=True):
    """What an error means.  *sent*: the server may have got the request.  *fatal*: the next attempt would fail alike."""

    name: str
    sent: bool = True
    fatal: bool = False
    note: str = ""


class Verdict(msgspec.Struct, frozen=True):
    """Whether to try *again*, and why.

    *after* is the server's wish, *blame* counts against the host, *stored* marks an answer that will never change.
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


def judge_reply(reply: Reply, *, repeatable: bool, keyed: bool, statuses: frozenset[int], now: float) -> Verdict:
    """The verdict on an answer; *repeatable* tells whether sending the request again is harmless."""
    status = reply.status
    if status < 400:
        return accepted(status)
    replayed = is_replayed(reply.headers)
    said, error_code = should_retry(reply.headers, reply.body)
    after = server_wish(reply, now)
    wanted = said if said is not None else status in statuses or (status == 409 and keyed and after is not None)
    in_flight = status == 409 and wanted
    return Verdict(
        again=wanted and repeatable and not replayed,
        name=f"{status // 100}xx",
        note=_note(status, error_code, replayed=replayed, barred=wanted and not repeatable),
        code=str(status),
        known="refused" if replayed or (status < 500 and not in_flight) else "unknown",
        after=after,
        at_once=status == 408,
        blame=(status == 429 or status >= 500) and not replayed,
        stored=replayed,
    )


@cache
def accepted(status: int) -> Verdict:
    """The seeds' log writes every success as 200 and gives the status itself as its code."""
    if status in (307, 308):
        return Verdict(False, "3xx", "to be asked elsewhere", str(status), known="refused")
    return Verdict(False, "200", "success", str(status))


def judge_fault(fault: Fault, *, repeatable: bool) -> Verdict:
    """The verdict on an error that came instead of an answer."""
    again = not fault.fatal and (repeatable or not fault.sent)
    note = fault.note or fault.name
    if not again and not fault.fatal:
        note += "; it may have been performed, and without a key it is not sent again"
    known: Known = "unknown" if fault.sent else "not_performed"
    return Verdict(again, fault.name, note, known=known, blame=not fault.fatal)


def server_wish(reply: Reply, now: float) -> float | None:
    """How long the server asks to wait: Retry-After before RateLimit."""
    after = retry_after(reply.headers, now)
    return after if after is not None else rate_limit_reset(reply.headers)


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
