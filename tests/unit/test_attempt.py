"""One attempt at an operation: the record that each of its ends leaves in the ledger, on all three levels."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from oncemore import Guard, Operation, Outcome, Policy
from oncemore._ledger.attempt import LeaseAttempt
from oncemore._ledger.events import Event
from oncemore._ledger.transaction_attempt import TransactionRefused
from oncemore._ledger.transactions import Again
from oncemore._runtime.heartbeat import Renewal
from oncemore._runtime.plan import Sleep, arun, run
from oncemore.errors import (
    ConfigurationError,
    Duplicate,
    Fenced,
    InProgress,
    PayloadMismatch,
    ProviderDuplicate,
    RateLimited,
    StoreUnavailable,
    UnknownOutcome,
)
from oncemore.testing.clock import Clock

from .test_guard import kinds

ASKED = Operation("customer-1", "k", "same", "refunds.create")
OTHER = Operation("customer-1", "k", "another", "refunds.create")
CREATED = Outcome("response", 201, (), b"made")
LEVELS = ("lease", "transaction", "steps")


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
def guard(tmp_path: Path, events: list[Event]) -> Iterator[Guard]:
    guard = Guard(f"sqlite:///{tmp_path}/once.db", observers=[events.append])
    yield guard
    guard.close()


def begun(guard: Guard, level: Any, operation: Operation = ASKED, **settings: Any) -> LeaseAttempt:
    """An attempt that has begun, and may perform."""
    attempt = guard.new_attempt(operation, Policy(effect=level, **settings))
    assert run(attempt.begin()) is None
    assert attempt.op.key == operation.key
    return attempt


def state(guard: Guard) -> str | None:
    record = guard.find(*ASKED.id)
    return None if record is None else record.state


@pytest.mark.parametrize("level", LEVELS)
def test_settled_attempt_is_replayed_and_ends_once(guard: Guard, level: str) -> None:
    attempt = begun(guard, level)
    assert run(attempt.settle(CREATED)).how == "stored"
    for late in (attempt.fail(RuntimeError()), attempt.release(), attempt.withdraw()):
        assert run(late) is None
    assert state(guard) == "settled"
    again = run(guard.new_attempt(ASKED, Policy(effect=level)).begin())  # type: ignore[arg-type]
    assert again is not None
    assert (again.how, again.outcome) == ("replayed", CREATED)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "end",
    [lambda attempt: attempt.fail(RuntimeError("no luck")), lambda attempt: attempt.release()],
    ids=["fail", "release"],
)
def test_failed_attempt_is_released_and_its_key_stays_bound(
    guard: Guard, level: str, end: Callable[[LeaseAttempt], Any]
) -> None:
    attempt = begun(guard, level)
    assert run(end(attempt)) is None
    assert run(attempt.fail(KeyboardInterrupt())) is None  # the first end counts
    assert state(guard) == "released"
    with pytest.raises(PayloadMismatch):
        run(guard.new_attempt(OTHER, attempt.policy).begin())
    run(begun(guard, level).settle(CREATED))


@pytest.mark.parametrize("level", LEVELS)
def test_withdrawn_first_attempt_is_forgotten(guard: Guard, events: list[Event], level: str) -> None:
    attempt = begun(guard, level)
    run(attempt.withdraw(RateLimited("too many")))
    run(attempt.withdraw())
    assert state(guard) is None
    assert (events[-1].kind, events[-1].code) == ("refused", RateLimited.code)
    run(begun(guard, level, OTHER).settle(CREATED))


@pytest.mark.parametrize("level", ["lease", "steps"])
def test_withdrawn_later_attempt_leaves_the_key_bound(guard: Guard, level: str) -> None:
    run(begun(guard, level).fail(RuntimeError("no luck")))
    run(begun(guard, level).withdraw())
    assert state(guard) == "released"


@pytest.mark.parametrize("level", LEVELS)
def test_dropped_attempt_is_not_renewed_and_can_be_taken_over(guard: Guard, level: str) -> None:
    attempt = begun(guard, level)
    attempt.drop()
    assert guard.heartbeat.threads.renewals == set()
    Clock(guard.store).advance(31)
    run(begun(guard, level, on_unknown="retry").settle(CREATED))


@pytest.mark.parametrize("level", LEVELS)
def test_interrupted_attempt_is_as_on_unknown_says(guard: Guard, level: str) -> None:
    run(begun(guard, level).fail(KeyboardInterrupt()))
    assert state(guard) == {"lease": "held", "transaction": None, "steps": "released"}[level]


def test_interrupted_attempt_that_has_lost_its_lease_leaves_it_alone(guard: Guard, events: list[Event]) -> None:
    attempt = begun(guard, "lease")
    attempt.renewal.lost = True
    run(attempt.fail(KeyboardInterrupt()))
    assert (state(guard), kinds(events)) == ("running", ["claimed"])


@pytest.mark.parametrize("level", ["lease", "steps"])
def test_lease_is_renewed_from_begin_to_the_end(guard: Guard, level: str) -> None:
    attempt = begun(guard, level, ASKED)
    assert guard.heartbeat.threads.renewals == {attempt.renewal}
    run(attempt.settle(CREATED))
    assert guard.heartbeat.threads.renewals == set()


def test_unique_part_ends_with_its_attempt(guard: Guard) -> None:
    asked = Operation("customer-1", "k", "same", "refunds.create", unique="order-7")
    unique = ("unique|refunds.create", "order-7")
    for end in (LeaseAttempt.withdraw, LeaseAttempt.release):
        attempt = begun(guard, "lease", asked)
        assert len(guard.heartbeat.threads.renewals) == 2
        with pytest.raises(InProgress):
            run(
                guard.new_attempt(
                    Operation("bob", "k2", unique="order-7", name=asked.name), Policy(in_flight="conflict")
                ).begin()
            )
        run(end(attempt))
        assert guard.heartbeat.threads.renewals == set()
        record = guard.find(*unique)
        assert record is None or record.state == "released"
    run(begun(guard, "lease", asked).settle(CREATED))
    with pytest.raises(Duplicate):
        run(guard.new_attempt(Operation("bob", "k2", unique="order-7", name=asked.name), Policy()).begin())


async def test_attempt_cut_off_while_it_decides_leaves_the_doubt(guard: Guard) -> None:
    """A claim that took over a crashed attempt is never given back as if nothing had happened."""
    asked = asyncio.Event()

    async def resolver(op: Any) -> Any:
        asked.set()
        await asyncio.sleep(60)

    await arun(guard.store.claim(ASKED, lease=0.0))
    attempt = guard.new_attempt(ASKED, Policy(on_unknown="resolve", resolver=resolver))
    task = asyncio.create_task(arun(attempt.begin()))
    await asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    record = await guard.afind(*ASKED.id)
    assert record is not None
    assert (record.state, record.lease_until <= record.now) == ("running", True)
    with pytest.raises(UnknownOutcome):
        await guard.arun(ASKED, lambda op: "again", policy=Policy(on_unknown="hold"))
    assert guard.heartbeat.on_loop().renewals == set()


def test_doubt_stays_if_the_store_fails_while_it_is_left(guard: Guard, events: list[Event]) -> None:
    run(guard.store.claim(ASKED, lease=0.0))

    def interrupted(op: Any) -> Any:
        run(guard.store.hold(op.lease))  # an operator was quicker
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        guard.run(ASKED, lambda op: None, policy=Policy(on_unknown="resolve", resolver=interrupted))
    assert state(guard) == "held"
    assert events[-1].kind == "failed"


# Transactions


def refusing(attempt: Any) -> None:
    def refused() -> Any:
        raise Again("a deadlock")
        yield

    attempt.transaction.commit = refused


def test_refused_commit_is_rolled_back_and_may_be_tried_again(guard: Guard) -> None:
    attempt = begun(guard, "transaction")
    refusing(attempt)
    with pytest.raises(TransactionRefused, match="a deadlock") as refused:
        run(attempt.settle(CREATED))
    assert (refused.value.status, refused.value.retry_after) == (503, 1.0)
    assert state(guard) is None
    run(begun(guard, "transaction").settle(CREATED))


def test_refused_statement_is_rolled_back_and_may_be_tried_again(guard: Guard) -> None:
    with pytest.raises(TransactionRefused, match="a deadlock"):
        run(begun(guard, "transaction").fail(Again("a deadlock")))
    assert state(guard) is None


def test_outcome_that_is_not_kept_is_rolled_back_and_remembered(guard: Guard) -> None:
    attempt = begun(guard, "transaction")
    assert run(attempt.settle(Outcome("response", 503))).how == "released"
    assert state(guard) == "released"


def test_cached_outcome_of_another_payload_is_refused(guard: Guard, events: list[Event]) -> None:
    run(begun(guard, "transaction").settle(CREATED))
    with pytest.raises(PayloadMismatch):
        run(guard.new_attempt(OTHER, Policy(effect="transaction")).begin())
    assert events[-1].kind == "refused"


def test_plan_of_a_commit_that_is_dropped_returns_the_connection(guard: Guard) -> None:
    plan = begun(guard, "transaction").settle(CREATED)
    next(plan)
    plan.close()
    run(begun(guard, "transaction").settle(CREATED))


def test_transaction_needs_a_database() -> None:
    with pytest.raises(ConfigurationError, match="lends no connection"):
        run(Guard("memory://").new_attempt(ASKED, Policy(effect="transaction")).begin())


def test_redirected_transaction_is_forgotten(guard: Guard) -> None:
    run(begun(guard, "transaction").withdraw())
    assert state(guard) is None


@pytest.mark.parametrize("level", ["transaction", "steps"])
def test_provider_duplicate_does_not_finish_half_an_operation(guard: Guard, level: Any) -> None:
    def duplicate(op: Any) -> None:
        raise ProviderDuplicate("done before", result="receipt")

    with pytest.raises(ProviderDuplicate):
        guard.run(ASKED, duplicate, policy=Policy(effect=level))
    assert state(guard) in ("released", None)


def test_error_outcome_that_the_database_goes_on_refusing_is_unavailable(
    guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The performer is not called again for it, and the caller may retry."""
    lender: Any = guard.store.lender
    opened, calls = lender.open, []

    def refused(*_: object, **__: object) -> Any:
        raise Again("a deadlock")
        yield

    def reopened() -> Any:
        transaction = yield from opened()
        transaction.begin = refused
        return transaction

    def declined(op: Any) -> None:
        calls.append(op)
        monkeypatch.setattr(lender, "open", reopened)
        raise LookupError("declined")

    monkeypatch.setattr(guard.store, "lender", lender, raising=False)
    with pytest.raises(TransactionRefused, match="2 times: a deadlock"):
        guard.run(ASKED, declined, policy=Policy(effect="transaction", errors=(LookupError,), reruns=1))
    assert len(calls) == 1


def test_interrupt_while_a_failure_is_remembered_is_raised(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = begun(guard, "transaction")

    def interrupted() -> Any:
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(attempt.lender, "open", interrupted)  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        run(attempt.fail(RuntimeError("no luck")))


# Plans that nobody drives on: nothing more can be asked


def paused(store: Any, verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the store's *verb* wait for a minute before it answers."""
    found = getattr(store, verb)

    def slowly(*args: Any, **options: Any) -> Any:
        yield Sleep(60)
        return (yield from found(*args, **options))

    monkeypatch.setattr(store, verb, slowly)


def test_unique_attempt_dropped_while_it_settles_asks_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = Guard("memory://")
    attempt = begun(guard, "lease", Operation("customer-1", "k", unique="order-7"))
    paused(guard.store, "settle", monkeypatch)
    plan = attempt.settle(CREATED)
    assert isinstance(next(plan), Sleep)
    plan.close()
    assert state(guard) == "running"
    assert guard.heartbeat.threads.renewals == set()


def test_steps_dropped_while_they_open_or_end_ask_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = Guard("memory://")
    run(begun(guard, "steps").fail(RuntimeError("no luck")))
    attempt = guard.new_attempt(ASKED, Policy(effect="steps"))
    with monkeypatch.context() as patch:
        paused(guard.store, "find", patch)
        plan = attempt.begin()
        assert isinstance(next(plan), Sleep)  # before the claim
        assert isinstance(plan.send(None), Renewal)
        attempt.renewal.run()
        assert isinstance(plan.send(None), Sleep)  # after it
        plan.close()
    assert (state(guard), guard.heartbeat.threads.renewals) == ("running", set())
    Clock(guard.store).advance(31)
    later = begun(guard, "steps")
    paused(guard.store, "find", monkeypatch)
    ending = later.settle(CREATED)
    assert isinstance(next(ending), Sleep)
    ending.close()
    later.drop()


def test_unopened_steps_are_left_to_the_next_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows whether a step was taken, so the operation is not released as if none had been."""
    guard, finds = Guard("memory://"), []
    run(begun(guard, "steps").fail(RuntimeError("no luck")))
    find = guard.store.find

    def down_after_the_claim(*args: Any) -> Any:
        finds.append(args)
        if len(finds) > 1:
            raise StoreUnavailable("down")
        return (yield from find(*args))

    with monkeypatch.context() as patch:
        patch.setattr(guard.store, "find", down_after_the_claim)
        with pytest.raises(StoreUnavailable):
            run(guard.new_attempt(ASKED, Policy(effect="steps")).begin())
    record = guard.find(*ASKED.id)
    assert record is not None
    assert (record.state, record.lease_until <= record.now) == ("running", True)


def test_lost_unique_part_is_reported_once(guard: Guard, events: list[Event]) -> None:
    asked = Operation("alice", "k1", unique="order-7", name="orders.pay")
    attempt = begun(guard, "lease", asked)
    Clock(guard.store).advance(31)
    run(guard.store.claim(Operation("unique|orders.pay", "order-7", name="orders.pay"), lease=30))
    with pytest.raises(Fenced):
        run(attempt.settle(CREATED))
    assert [event.operation.id for event in events if event.kind == "refused"] == [asked.id]
