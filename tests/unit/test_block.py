"""`with guard.attempt(operation) as attempt`: a block of code that happens once."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from oncemore import Guard, Operation, Outcome, Policy
from oncemore._runtime.plan import run
from oncemore.errors import ConfigurationError, CorruptRecord, Fenced, InProgress, UnknownOutcome
from oncemore.testing.clock import Clock

ASKED = Operation("customer-1", "k", "same", "payments.create")
LEVELS = ("lease", "transaction", "steps")


class Declined(Exception):
    pass


@pytest.fixture(params=LEVELS)
def policy(request: pytest.FixtureRequest) -> Policy:
    return Policy(effect=request.param, errors=(Declined,), doubt=(TimeoutError,))


@pytest.fixture
def guard(tmp_path: Path) -> Any:
    guard = Guard(f"sqlite:///{tmp_path}/once.db")
    yield guard
    guard.close()


def state(guard: Guard) -> str | None:
    record = guard.find(*ASKED.id)
    return None if record is None else record.state


def test_block_performs_once_and_then_has_the_value(guard: Guard, policy: Policy) -> None:
    performed = []
    for attempt_number in range(3):
        with guard.attempt(ASKED, policy=policy) as attempt:
            if attempt.fresh:
                assert (attempt.op.key, attempt.value) == ("k", None)
                performed.append(attempt_number)
                attempt.result = {"receipt": 7}
                assert attempt.result == {"receipt": 7}
        assert attempt.value == {"receipt": 7}
    assert performed == [0]


async def test_awaited_block_performs_once_and_then_has_the_value(guard: Guard) -> None:
    performed = []
    for _ in range(3):
        async with guard.attempt(ASKED) as attempt:
            if attempt.fresh:
                await asyncio.sleep(0)
                performed.append(attempt.op.attempt)
                attempt.result = "receipt"
        assert attempt.value == "receipt"
    assert performed == [1]


def test_block_without_a_result_is_settled(guard: Guard) -> None:
    def leave() -> bool:
        with guard.attempt(ASKED) as attempt:
            return attempt.fresh

    assert [leave(), leave(), state(guard)] == [True, False, "settled"]


def test_block_may_keep_a_response(guard: Guard) -> None:
    for _ in range(2):
        with guard.attempt(ASKED) as attempt:
            if attempt.fresh:
                attempt.result = Outcome("response", 201, (), b"made")
        assert attempt.value == Outcome("response", 201, (), b"made")


def test_exception_in_a_block_frees_the_key(guard: Guard, policy: Policy) -> None:
    with pytest.raises(ValueError, match="no luck"), guard.attempt(ASKED, policy=policy):
        raise ValueError("no luck")
    assert state(guard) == "released"
    with guard.attempt(ASKED, policy=policy) as attempt:
        assert attempt.fresh


def test_exception_that_is_the_outcome_is_raised_on_entering(guard: Guard, policy: Policy) -> None:
    with pytest.raises(Declined, match="funds"), guard.attempt(ASKED, policy=policy):
        raise Declined("funds")
    assert state(guard) == "settled"
    with pytest.raises(Declined, match="funds"), guard.attempt(ASKED, policy=policy):
        pytest.fail("entered")


async def test_block_in_doubt_or_cut_off_is_held(guard: Guard) -> None:
    for error in (TimeoutError("read"), asyncio.CancelledError()):
        with pytest.raises(type(error)):
            async with guard.attempt(ASKED, policy=Policy(doubt=(TimeoutError,))):
                raise error
        with pytest.raises(UnknownOutcome):
            async with guard.attempt(ASKED):
                pytest.fail("entered")
        await guard.adelete(*ASKED.id)


def test_late_owners_block_has_its_successors_value(guard: Guard) -> None:
    retry = Policy(on_unknown="retry", errors=(Declined,))
    with guard.attempt(ASKED, policy=retry) as attempt:
        Clock(guard.store).advance(31)
        guard.run(ASKED, lambda op: "theirs", policy=retry)
        attempt.result = "mine"
    assert attempt.value == "theirs"

    def decline(op: Any) -> None:
        raise Declined("theirs")

    def overtaken(operation: Operation, perform: Any) -> None:
        with guard.attempt(operation, policy=retry):
            Clock(guard.store).advance(31)
            perform(operation)

    with pytest.raises(Declined, match="theirs"):
        overtaken(Operation("customer-1", "k2"), lambda operation: guard.run(operation, decline, policy=retry))
    with pytest.raises(Fenced):
        overtaken(Operation("customer-1", "k3"), lambda operation: run(guard.store.claim(operation, lease=30)))


def test_block_shares_its_transaction(guard: Guard) -> None:
    policy = Policy(effect="transaction")
    with guard.attempt(ASKED, policy=policy) as attempt:
        attempt.op.connection.execute("CREATE TABLE refunds (id TEXT)")
    with suppress(ValueError), guard.attempt(Operation("s", "k2"), policy=policy) as attempt:
        attempt.op.connection.execute("INSERT INTO refunds VALUES ('rolled back')")
        raise ValueError
    with guard.attempt(Operation("s", "k3"), policy=policy) as attempt:
        attempt.result = attempt.op.connection.execute("SELECT count(*) FROM refunds").fetchone()[0]
    assert attempt.value == 0


def test_block_that_does_not_perform_has_no_result(guard: Guard) -> None:
    attempt = guard.attempt(ASKED)
    with pytest.raises(ConfigurationError, match=r"Ask `if attempt.fresh:` first"):
        attempt.result = "mine"
    guard.run(ASKED, lambda op: "theirs")
    with pytest.raises(ConfigurationError, match=r"so it has no result"), attempt:
        attempt.result = "mine"
    with attempt, pytest.raises(ConfigurationError, match=r"so it has no op"):
        assert attempt.op
    assert attempt.value == "theirs"


def test_block_that_cannot_be_entered_again_is_not_fresh(guard: Guard) -> None:
    block = guard.attempt(ASKED, policy=Policy(errors=(Declined,)), wait=0.0)
    with pytest.raises(TimeoutError), block:
        raise TimeoutError
    held = run(guard.store.claim(ASKED, lease=30.0))
    assert held
    with pytest.raises(InProgress), block:
        pass
    assert not block.fresh


def test_block_waits_no_longer_than_it_is_told(guard: Guard) -> None:
    with guard.attempt(ASKED), pytest.raises(InProgress), guard.attempt(ASKED, wait=0):
        pytest.fail("entered")


def test_block_that_ends_is_not_renewed(guard: Guard) -> None:
    with guard.attempt(ASKED):
        assert guard.heartbeat.threads.renewals
    assert guard.heartbeat.threads.renewals == set()


def test_block_of_a_corrupt_record_is_not_entered(guard: Guard) -> None:
    lease = run(guard.store.claim(ASKED, lease=30))
    run(guard.store.settle(lease, Outcome("value", body=b"\xc1"), retention=60))  # type: ignore[arg-type]
    with pytest.raises(CorruptRecord), guard.attempt(ASKED):
        pytest.fail("entered")
