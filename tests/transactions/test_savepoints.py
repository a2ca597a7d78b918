"""A performer that rolls back to its own savepoint keeps its transaction, also if psycopg has prepared statements."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from oncemore import Guard, Operation, Policy
from oncemore._ledger.attempt import LeaseAttempt
from oncemore._ledger.model import Outcome
from oncemore._runtime.plan import run

pytestmark = pytest.mark.server


def test_savepoint_rollback_on_warm_connection_commits_at_first_try(postgres_url: str, postgres_schema: str) -> None:
    guard = Guard(f"{postgres_url}?schema={postgres_schema}&pool=1")
    policy = Policy(effect="transaction")

    def perform(connection: Any, *, roll_back: bool) -> None:
        for _ in range(8):  # often enough that psycopg prepares the statement
            connection.execute("SELECT 1")
        if roll_back:
            with pytest.raises(psycopg.errors.DivisionByZero), connection.transaction():
                connection.execute("SELECT 1 / 0")

    for number in range(6):
        attempt: LeaseAttempt = guard.new_attempt(Operation("s", str(number)), policy)
        assert run(attempt.begin()) is None
        perform(attempt.op.connection, roll_back=number >= 3)
        assert run(attempt.settle(Outcome("value", body=b"\xc0"))).how == "stored"
    guard.close()
