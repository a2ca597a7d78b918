"""Tests of every middleware when the ledger is down or the lease ends: part C of the cases."""

from __future__ import annotations

import time

import pytest

from oncemore.testing.crashes import SECRET

from .caller import Caller, refused, said


class FaultCases:
    """Part C of the cases: leases, and a store that is down."""

    def test_a_handler_may_take_longer_than_its_lease(self, caller: Caller) -> None:
        """The lease is renewed while the app works."""
        first = caller.running("/short-lease/slow")
        time.sleep(1.0)
        second = caller.later("/short-lease/slow")
        caller.until(lambda: caller.waiting == 1)
        caller.open()
        assert (said(first.result()), said(second.result()), caller.runs) == ("stored", "replayed", 1)

    @pytest.mark.parametrize(
        ("rule", "status", "code"),
        [("down-claim", 503, "DEPENDENCY.unavailable"), ("down-late", 504, "DEPENDENCY.timeout")],
    )
    def test_without_a_ledger_nothing_runs(self, caller: Caller, rule: str, status: int, code: str) -> None:
        answer = caller.ask(f"/{rule}/create")
        problem = refused(answer, status, code)
        assert problem["retryable"] is True
        assert SECRET not in answer.text  # what went wrong inside is for the log
        assert int(answer.headers["retry-after"]) >= 1
        assert caller.runs == 0

    def test_a_rule_may_run_without_a_ledger(self, caller: Caller) -> None:
        """The contract allows it, and each time is logged."""
        assert [caller.ask("/down-run/create").status_code for _ in range(2)] == [201, 201]
        assert caller.runs == 2

    def test_an_outcome_that_cannot_be_stored_still_reaches_the_client(self, caller: Caller) -> None:
        """The record stays running until its lease ends."""
        answer = caller.ask("/down-settle/create")
        assert (answer.status_code, said(answer)) == (201, "unstored")
        assert answer.headers["idempotency-reason"] == "store"
        impatient = {"X-Request-Timeout": "0"}
        refused(caller.ask("/down-settle/create", headers=impatient), 409, "CONFLICT.idempotency.in_progress")
        assert caller.runs == 1
        time.sleep(0.7)
        assert caller.ask("/down-settle/create").json()["attempt"] == 2
