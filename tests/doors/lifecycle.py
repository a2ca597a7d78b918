"""Tests of every middleware with repeats, from the first request to the last replay: part C of the cases."""

from __future__ import annotations

import time
import uuid
from email.utils import formatdate, parsedate_to_datetime
from urllib.parse import urlencode

import pytest

from oncemore import Policy

from .caller import PAYLOAD, Caller, refused, said

IN_PROGRESS = "CONFLICT.idempotency.in_progress"
USUAL_WAIT = Policy().wait  # in seconds: what is refused sooner has not waited for this


def uuid7(age: float) -> str:
    """Return a version 7 UUID whose time is *age* seconds ago."""
    stamp = int((time.time() - age) * 1000)
    tail = uuid.uuid4().hex
    return str(uuid.UUID(f"{stamp:012x}7{tail[:3]}8{tail[3:18]}"))


class LifecycleCases:
    """Part C of the cases: repeats one after the other and concurrently, kept outcomes and their retention."""

    def test_repeated_request_is_replayed(self, caller: Caller) -> None:
        first, second = caller.ask(), caller.ask()
        assert (said(first), said(second), caller.runs) == ("stored", "replayed", 1)
        assert (first.status_code, first.content) == (second.status_code, second.content) == (201, first.content)
        kept = ("content-type", "location", "etag")
        assert [second.headers[name] for name in kept] == [first.headers[name] for name in kept]

    def test_responses_have_the_time_of_expiry(self, caller: Caller) -> None:
        for answer in (caller.ask(), caller.ask()):
            expires = parsedate_to_datetime(answer.headers["idempotency-expires"]).timestamp()
            assert 86000 < expires - time.time() < 86500

    def test_ten_concurrent_requests_run_once(self, caller: Caller) -> None:
        answers = [caller.later("/default/slow") for _ in range(10)]
        caller.until(lambda: caller.waiting == 9)
        caller.open()
        results = [answer.result() for answer in answers]
        assert caller.runs == 1
        assert {(result.status_code, result.content) for result in results} == {(201, results[0].content)}
        assert sorted(str(said(result)) for result in results) == ["replayed"] * 9 + ["stored"]

    def test_duplicate_conflicts_without_waiting_if_the_rule_says_so(self, caller: Caller) -> None:
        first = caller.running("/conflict/slow")
        for answer in [caller.ask("/conflict/slow") for _ in range(9)]:
            assert refused(answer, 409, IN_PROGRESS)["retryable"] is True
            assert answer.headers["retry-after"] == "3"
        caller.open()
        assert first.result().status_code == 201
        assert said(caller.ask("/conflict/slow")) == "replayed"
        assert caller.runs == 1

    def test_in_progress_accepted_answers_with_a_status_url(self, caller: Caller) -> None:
        first = caller.running("/accepted/slow")
        answer = caller.ask("/accepted/slow")
        assert (answer.status_code, "retry-after" in answer.headers) == (202, True)
        url = answer.headers["location"]
        assert caller.look(url).json()["state"] == "running"
        caller.open()
        performed = first.result()
        shown = caller.look(url).json()
        assert (shown["state"], shown["response"]["status"]) == ("settled", 201)
        assert shown["response"]["body"] == performed.text
        assert caller.runs == 1

    def test_status_lookup_of_another_principal_is_not_found(self, caller: Caller) -> None:
        caller.ask()
        url = f"/idempotency?{urlencode({'operation': 'POST /default/create', 'key': caller.key})}"
        assert caller.look(url).json()["state"] == "settled"
        stranger = caller.look(url, authorization="Bearer of a stranger")
        refused(stranger, 404, "NOT_FOUND.idempotency.record")
        refused(caller.look(url + "0"), 404, "NOT_FOUND.idempotency.record")
        assert caller.runs == 1

    def test_status_lookup_accepts_name_or_route_and_quoted_keys(self, caller: Caller) -> None:
        key = uuid7(0)
        caller.ask("/named", key=key)
        for operation in ("things.create", "POST /named"):
            url = f"/idempotency?{urlencode({'operation': operation, 'key': key.upper()})}"
            assert caller.look(url).json()["response"]["status"] == 201
        assert caller.look("/idempotency?operation=things.create", key=key).json()["key"] == key

    def test_status_lookup_without_a_name_is_refused(self, caller: Caller) -> None:
        for query in ("", "?key=a", "?operation=a", "?operation=POST+/a&key=%00", "?operation=%ff&key=%ff"):
            answer = caller.look("/idempotency" + query)
            assert answer.status_code in (400, 404), query
            assert answer.headers["content-type"] == "application/problem+json"

    def test_waiting_ends_at_the_rules_limit(self, caller: Caller) -> None:
        first = caller.running("/impatient/slow")
        begun = time.monotonic()
        answer = caller.ask("/impatient/slow")
        refused(answer, 409, IN_PROGRESS)
        assert time.monotonic() - begun < USUAL_WAIT
        assert answer.headers["retry-after"] == "2"
        caller.open()
        assert first.result().status_code == 201
        assert caller.runs == 1

    def test_waiting_ends_with_the_callers_own_timeout(self, caller: Caller) -> None:
        for timeout in ("0.2", "200ms", "0"):
            first = caller.renew().running("/default/slow")
            begun = time.monotonic()
            refused(caller.ask("/default/slow", headers={"X-Request-Timeout": timeout}), 409, IN_PROGRESS)
            assert time.monotonic() - begun < USUAL_WAIT, timeout
            caller.open()
            assert first.result().status_code == 201
            assert caller.runs == 1, timeout

    def test_unreadable_timeout_is_ignored(self, caller: Caller) -> None:
        for timeout in ("soon", "-1", "", "1e9", "nan"):
            assert caller.renew().ask(headers={"X-Request-Timeout": timeout}).status_code == 201, timeout

    def test_waiting_duplicate_runs_if_the_first_fails(self, caller: Caller) -> None:
        first = caller.running("/default/slow", status="503,201")
        second = caller.later("/default/slow", status="503,201")
        caller.until(lambda: caller.waiting == 1)
        caller.open()
        assert (first.result().status_code, second.result().status_code) == (503, 201)
        assert caller.runs == 2

    def test_final_response_is_kept(self, caller: Caller) -> None:
        """201 stays 201."""
        for status in (200, 201, 202, 400, 402, 404, 409, 410, 422):
            caller.renew()
            first, second = [caller.ask("/default/status", status=f"{status},200") for _ in range(2)]
            assert (first.status_code, second.status_code, caller.runs) == (status, status, 1)
            assert (said(second), second.content) == ("replayed", first.content)

    def test_response_that_may_change_is_not_kept(self, caller: Caller) -> None:
        for status in (401, 403, 408, 425, 429, 500, 502, 503, 504):
            caller.renew()
            first, second, third = [caller.ask("/default/status", status=f"{status},201") for _ in range(3)]
            assert (first.status_code, second.status_code, third.status_code) == (status, 201, 201)
            assert (said(first), said(second), said(third), caller.runs) == ("unstored", "stored", "replayed", 2)
            assert "idempotency-reason" not in first.headers  # the rule does not keep such a status

    def test_an_exception_is_not_kept(self, caller: Caller) -> None:
        answers = [caller.ask("/default/raise") for _ in range(3)]
        assert [answer.status_code for answer in answers] == [500, 201, 201]
        assert answers[1].json()["attempt"] == 2
        assert caller.runs == 2

    def test_status_in_doubt_reaches_its_caller_and_is_not_repeated(self, caller: Caller) -> None:
        first, second, third = [caller.ask("/doubtful/status", status="502,201") for _ in range(3)]
        assert (first.status_code, said(first), first.json()["run"]) == (502, "unstored", 1)
        refused(second, 409, "CONFLICT.idempotency.outcome_unknown")
        refused(third, 409, "CONFLICT.idempotency.outcome_unknown")
        assert caller.runs == 1

    @pytest.mark.parametrize("path", ["/doubtful/time-out", "/default/doubt"])
    def test_exception_in_doubt_is_not_repeated(self, caller: Caller, path: str) -> None:
        first, second = caller.ask(path), caller.ask(path)
        assert first.status_code == 500
        refused(second, 409, "CONFLICT.idempotency.outcome_unknown")
        assert caller.runs == 1

    def test_error_page_in_doubt_is_not_repeated(self, caller: Caller) -> None:
        """For frameworks that turn every exception into a page, and do not report it."""
        first, second = caller.ask("/doubtful-page/doubt"), caller.ask("/doubtful-page/doubt")
        assert first.status_code == 500
        refused(second, 409, "CONFLICT.idempotency.outcome_unknown")
        assert caller.runs == 1

    @pytest.mark.parametrize("rule", ["doubtful", "doubtful-stream"])
    def test_stream_in_doubt_is_not_repeated(self, caller: Caller, rule: str) -> None:
        caller.open()
        first, second = [caller.ask(f"/{rule}/stream", status=502) for _ in range(2)]
        assert (first.status_code, first.content) == (502, b"firstsecond")
        refused(second, 409, "CONFLICT.idempotency.outcome_unknown")
        assert caller.runs == 1

    def test_rule_decides_which_responses_are_kept(self, caller: Caller) -> None:
        """Each rule keeps its own settings."""
        for rule, status, kept in (("keep-all", 500, True), ("keep-success", 422, False)):
            caller.renew()
            first, second = [caller.ask(f"/{rule}/status", status=f"{status},201") for _ in range(2)]
            assert (first.status_code, second.status_code) == (status, status if kept else 201)
            assert caller.runs == (1 if kept else 2)

    def test_a_repeat_can_be_rejected(self, caller: Caller) -> None:
        caller.ask("/reject/create")
        assert refused(caller.ask("/reject/create"), 409, "CONFLICT.idempotency.duplicate")["retryable"] is False
        assert caller.runs == 1

    def test_a_repeat_can_be_answered_with_a_plain_ok(self, caller: Caller) -> None:
        caller.ask("/ok/create")
        answer = caller.ask("/ok/create")
        assert (answer.status_code, answer.content, said(answer), caller.runs) == (200, b"", "replayed", 1)

    def test_after_the_retention_a_key_runs_as_new(self, caller: Caller) -> None:
        caller.ask("/brief/create")
        assert said(caller.ask("/brief/create")) == "replayed"
        time.sleep(0.7)
        assert said(caller.ask("/brief/create", payload={})) == "stored"
        assert caller.runs == 2

    def test_key_that_is_too_old_is_refused(self, caller: Caller) -> None:
        refused(caller.ask("/late/create", key=uuid7(3700)), 412, "PRECONDITION.idempotency.key_expired")
        old, young = (formatdate(time.time() - age, usegmt=True) for age in (3700, 5))
        late = caller.ask("/first-sent/create", headers={"Repeatability-First-Sent": old})
        refused(late, 412, "PRECONDITION.idempotency.key_expired")
        unreadable = caller.ask("/first-sent/create", headers={"Repeatability-First-Sent": "yesterday"})
        refused(unreadable, 400, "VALIDATION.idempotency.key_invalid")
        assert caller.runs == 0
        assert caller.ask("/late/create", key=uuid7(5)).status_code == 201
        assert caller.ask("/first-sent/create", headers={"Repeatability-First-Sent": young}).status_code == 201

    def test_a_conditional_update_needs_the_current_etag(self, caller: Caller) -> None:
        refused(caller.ask("/conditional/thing", method="PUT"), 428, "PRECONDITION.if_match_required")
        stale, current = {"If-Match": '"v9"'}, {"If-Match": '"v0"'}
        refused(caller.ask("/conditional/thing", method="PUT", headers=stale), 412, "PRECONDITION.if_match_failed")
        assert caller.runs == 0
        first = caller.ask("/conditional/thing", method="PUT", headers=current)
        assert (first.status_code, first.headers["etag"]) == (200, '"v1"')
        assert said(caller.ask("/conditional/thing", method="PUT", headers=current)) == "replayed"
        refused(
            caller.ask("/conditional/thing", method="PUT", key="other", headers=current),
            412,
            "PRECONDITION.if_match_failed",
        )
        assert caller.runs == 1

    def test_unique_by_runs_once_under_any_key(self, caller: Caller) -> None:
        order = {**PAYLOAD, "order": caller.case}
        first, second = (caller.ask("/unique/create", key=key, payload=order) for key in ("one", "two"))
        assert (first.content, caller.runs) == (second.content, 1)
        stranger = caller.ask("/unique/create", payload=order, headers={"Authorization": "Bearer of a stranger"})
        refused(stranger, 409, "CONFLICT.idempotency.duplicate")
        assert caller.runs == 1

    def test_suspect_recognises_the_same_request_under_a_new_key(self, caller: Caller) -> None:
        caller.ask("/suspicious/create", key="one")
        refused(caller.ask("/suspicious/create", key="two"), 409, "CONFLICT.idempotency.suspected_duplicate")
        assert caller.runs == 1
