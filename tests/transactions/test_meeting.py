"""A claim inside a transaction that meets a record takes it over or leaves it, and the performer notices nothing."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Iterator
from typing import Any

import pytest

from oncemore import Guard, Operation, Record
from oncemore._ledger.context import Op
from oncemore._runtime.plan import run
from oncemore.errors import InvalidKey

from .conftest import emptied
from .shops import POLICY

pytestmark = pytest.mark.server

ASKED = Operation("customer-1", "k", "same", "refunds.create")


@pytest.fixture
def guard(shops_url: str) -> Iterator[Guard]:
    guard = Guard(emptied(shops_url), policy=POLICY)
    yield guard
    guard.close()


def failing(op: Op) -> None:
    raise RuntimeError("no luck")


def limit(op: Op) -> Any:
    return op.connection.execute("SELECT current_setting('lock_timeout')").fetchone()[0]


def test_performers_lock_timeout_is_restored_after_the_claim(guard: Guard) -> None:
    assert guard.run(ASKED, limit).value == "0"


def test_lock_timeout_is_restored_after_taking_over_a_failure(guard: Guard) -> None:
    with pytest.raises(RuntimeError):
        guard.run(ASKED, failing)
    answer = guard.run(ASKED, limit)
    assert (answer.value, answer.attempt) == ("0", 2)


@pytest.mark.parametrize("suspect", ["log", "flag"])
def test_lock_timeout_is_restored_after_meeting_a_twin(guard: Guard, suspect: Any) -> None:
    """The twin's record prevents a claim, and the performer goes on, but without the claim's lock_timeout of 1 ms."""
    policy = dataclasses.replace(POLICY, suspect=suspect, in_flight="conflict")
    for key in ("k1", "k2"):
        assert guard.run(Operation("customer-1", key, "same"), limit, policy=policy).value == "0"


def test_too_long_name_is_refused_before_anything_happens(guard: Guard) -> None:
    with pytest.raises(InvalidKey, match="room for"):
        guard.run(Operation("customer-1", secrets.token_hex(2000)), limit)


def test_record_taken_over_meanwhile_is_not_claimed_again(guard: Guard) -> None:
    """If two callers find a failed attempt, one performs, and the other one gets the outcome."""
    with pytest.raises(RuntimeError):
        guard.run(ASKED, failing)
    assert guard.store.lender is not None
    transaction = run(guard.store.lender.open())
    plan = transaction.begin(ASKED, lease=30.0, wait=1.0)
    taking = next(plan)
    for _ in ("connect", "begin and claim", "find"):  # a record is in the way, it was read, and it is free
        taking = plan.send(taking.run())
    assert guard.run(ASKED, lambda op: "other").how == "stored"
    looking = plan.send(taking.run())
    with pytest.raises(StopIteration) as end:
        plan.send(looking.run())
    run(transaction.abort())
    assert isinstance(end.value.value, Record)
    assert end.value.value.state == "settled"
