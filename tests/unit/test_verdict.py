"""Verdicts without a network: hints, statuses, faults, and hostile answers."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncemore.client.retry import RETRIED_STATUSES
from oncemore.client.verdict import (
    Fault,
    HttpReply,
    Verdict,
    http_date,
    is_replayed,
    judge_fault,
    judge_reply,
    rate_limit_reset,
    retry_after,
    should_retry,
)

NOW = 784111777.0  # Sun, 06 Nov 1994 08:49:37 GMT


class Fields(dict[str, str]):
    """Header fields, found in any case."""

    def __init__(self, **fields: str) -> None:
        super().__init__({name.replace("_", "-").lower(): value for name, value in fields.items()})

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(name.lower(), default)


def judge(status: int, body: bytes = b"", *, repeatable: bool = True, keyed: bool = True, **fields: str) -> Verdict:
    reply = HttpReply(status, Fields(**fields), body)
    return judge_reply(reply, repeatable=repeatable, keyed=keyed, statuses=RETRIED_STATUSES, now=NOW)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0),
        ("120", 120),
        ("Sun, 06 Nov 1994 08:50:37 GMT", 60),
        ("Sunday, 06-Nov-94 08:50:37 GMT", 60),
        ("Sun Nov  6 08:50:37 1994", 60),
        ("Sun, 06 Nov 1994 08:00:00 GMT", 0),  # past: now
        ("-1", None),
        ("1.5", None),
        ("+5", None),
        ("5 seconds", None),
        ("", None),
        ("9999999999", None),
        ("٣", None),
        ("Sun, 06 Nuv 1994 08:50:37 GMT", None),
        ("Sun, 40 Nov 1994 08:50:37 GMT", None),
        ("Sun, 06 Nov 1994 08:50:37 CET", None),
    ],
)
def test_retry_after_in_all_its_forms(text: str, seconds: float | None) -> None:
    assert retry_after(Fields(retry_after=text), NOW) == seconds


def test_a_date_is_measured_by_the_servers_own_clock() -> None:
    """Ours is wrong by a year."""
    fields = Fields(retry_after="Sun, 06 Nov 1994 08:50:37 GMT", date="Sun, 06 Nov 1994 08:50:07 GMT")
    assert retry_after(fields, NOW + 365 * 86400) == 30


@given(st.integers(0, 3124223999))  # a two-digit year is one of 1969 to 2068
def test_the_three_date_forms_mean_the_same(moment: int) -> None:
    when = time.gmtime(moment)
    month = "JanFebMarAprMayJunJulAugSepOctNovDec"[3 * when.tm_mon - 3 : 3 * when.tm_mon]
    clock = f"{when.tm_hour:02}:{when.tm_min:02}:{when.tm_sec:02}"
    fix = f"Mon, {when.tm_mday:02} {month} {when.tm_year} {clock} GMT"
    ctime = f"Mon {month} {when.tm_mday:2} {clock} {when.tm_year}"
    old = f"Monday, {when.tm_mday:02}-{month}-{when.tm_year % 100:02} {clock} GMT"
    assert http_date(fix) == http_date(ctime) == http_date(old) == moment


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({"ratelimit": '"default";r=0;t=30'}, 30),
        ({"ratelimit": '"default";r=5;t=30'}, None),
        ({"ratelimit": "limit=100, remaining=0, reset=20"}, 20),
        ({"ratelimit_remaining": "0", "ratelimit_reset": "7"}, 7),
        ({"ratelimit_remaining": "3", "ratelimit_reset": "7"}, None),
        ({"ratelimit_remaining": "0", "ratelimit_reset": "x"}, None),
        ({}, None),
    ],
)
def test_a_used_up_quota_says_when_it_is_refilled(fields: dict[str, str], seconds: float | None) -> None:
    assert rate_limit_reset(Fields(**fields)) == seconds
    assert judge(429, **fields).after == seconds
    assert judge(429, retry_after="1", **fields).after == 1


def test_transient_statuses_are_retried_and_others_final() -> None:
    for status in (429, 408, *range(500, 512)):
        verdict = judge(status)
        assert verdict.again, status
        assert verdict.at_once is (status == 408)
        assert verdict.blame is (status != 408)
    for status in range(200, 500):
        assert status in (408, 429) or not judge(status).again, status


def test_error_code_beats_the_status() -> None:
    codes = {
        "VALIDATION.amount": False,
        "AUTH.expired": False,
        "CONFLICT.idempotency.payload_mismatch": False,
        "CONFLICT.idempotency.in_progress": True,
        "RATE_LIMIT.exceeded": True,
        "DEPENDENCY.timeout": True,
        "DEPENDENCY.unavailable": True,
        "TRANSIENT.anything": True,
        "PROVIDER.duplicate": False,
    }
    for code, again in codes.items():
        body = json.dumps({"error_code": code}).encode()
        for status in (400, 409, 500, 503):
            assert judge(status, body, content_type="application/problem+json").again is again, (code, status)


@pytest.mark.parametrize(
    ("code", "known"),
    [("outcome_unknown", "unknown"), ("outcome_not_kept", "performed"), ("duplicate", "performed"), ("x", "refused")],
)
def test_conflict_that_tells_of_the_operation_is_believed(code: str, known: str) -> None:
    body = json.dumps({"error_code": f"CONFLICT.idempotency.{code}"}).encode()
    verdict = judge(409, body, content_type="application/problem+json")
    assert (verdict.again, verdict.known) == (False, known)


def test_should_retry_header_beats_document_and_code() -> None:
    body = b'{"retryable": true, "error_code": "VALIDATION.x"}'
    assert judge(400, body, content_type="application/json").again
    assert not judge(400, body, content_type="application/json", stripe_should_retry="false").again


def test_stripe_key_in_use_differs_from_mismatch() -> None:
    in_use = b'{"error": {"code": "idempotency_key_in_use", "type": "invalid_request_error"}}'
    mismatch = b'{"error": {"type": "idempotency_error"}}'
    assert judge(409, in_use, content_type="application/json").again
    assert not judge(400, mismatch, content_type="application/json").again


def test_409_with_retry_after_is_in_progress() -> None:
    assert not judge(409).again
    assert judge(409, retry_after="3").again
    assert judge(409, retry_after="3").known == "unknown"
    assert not judge(409, retry_after="3", keyed=False).again


@pytest.mark.parametrize("fields", [{"idempotency_status": "replayed"}, {"idempotent_replayed": "true"}])
def test_a_replayed_answer_is_final_whatever_it_says(fields: dict[str, str]) -> None:
    verdict = judge(500, stripe_should_retry="true", **fields)
    assert not verdict.again
    assert verdict.stored
    assert not verdict.blame
    assert is_replayed(Fields(**fields))
    assert not is_replayed(Fields(idempotency_status="stored"))


def test_what_cannot_be_repeated_is_not_tried_again() -> None:
    assert not judge(503, repeatable=False, keyed=False).again
    assert not judge_fault(Fault("timeout"), repeatable=False).again
    assert judge_fault(Fault("connection", sent=False), repeatable=False).again
    assert not judge_fault(Fault("error", fatal=True), repeatable=True).again


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[1]",
        b"{",
        b"\xff",
        b'{"retryable": "true", "error_code": 5}',
        b'{"error": [1]}',
        b'{"error": {"code": {}}}',
        b"[" * 100_000,
        b'{"a":' * 20_000,
        b'{"retryable": true}' + b" " * 70_000,
    ],
)
def test_a_hostile_problem_document_says_nothing(body: bytes) -> None:
    assert should_retry(Fields(content_type="application/json"), body) == (None, "")


@given(st.text(max_size=300), st.binary(max_size=300), st.integers(100, 999))
def test_no_answer_makes_judgement_fail(text: str, body: bytes, status: int) -> None:
    names = ("retry_after", "date", "ratelimit", "idempotency_status", "ratelimit_remaining", "ratelimit_reset")
    verdict = judge(status, body, content_type="application/json", **dict.fromkeys(names, text))
    assert verdict.after is None or 0 <= verdict.after < 2**40
