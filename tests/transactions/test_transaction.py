"""The claim, the effect and the outcome commit together, or none of them does: on every driver."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import threading
from collections.abc import Generator
from typing import Any

import pytest

from oncemore import Guard, Operation, Policy, Resolution
from oncemore._ledger.context import Op
from oncemore._ledger.decisions import Answer
from oncemore._runtime.plan import Sleep, arun
from oncemore.encryption import Seal
from oncemore.errors import (
    ConfigurationError,
    Duplicate,
    InProgress,
    KeyExpired,
    OncemoreError,
    PayloadMismatch,
    StoreUnavailable,
    Suspected,
    TransactionEnded,
    UnknownOutcome,
    WrongState,
)
from oncemore.stores.postgres.transactions import sqlstate_of

from .conftest import emptied, on_each_kind, opened
from .shops import ON_POSTGRES, POLICY, Performer, Shop

Performing = Generator[Any, Any, Any]


def asked(key: str = "k", **more: Any) -> Operation:
    return Operation("customer-1", key, **{"fingerprint": "same", "name": "refunds.create", **more})


def refund(shop: Shop, id: str = "", *, seconds: float = 0.0) -> Performer:
    def perform(op: Op) -> Performing:
        yield shop.insert(op, id or op.key)
        yield Sleep(seconds)
        return {"refund": id or op.key, "attempt": op.attempt}

    return perform


class Entered(threading.Event):
    """An event that is set when a performer starts.  The test sets *left* to end the performer's work."""

    def __init__(self) -> None:
        super().__init__()
        self.left = threading.Event()

    async def seen(self) -> None:
        while not self.is_set():
            await asyncio.sleep(0.005)


def slow(shop: Shop, entered: Entered, seconds: float, error: Exception | None = None) -> Performer:
    def perform(op: Op) -> Performing:
        yield shop.insert(op, op.key)
        entered.set()
        for _ in range(round(seconds / 0.02)):
            if not entered.left.is_set():
                yield Sleep(0.02)
        if error is not None:
            raise error
        return "slow"

    return perform


def failing(shop: Shop, error: Exception) -> Performer:
    def perform(op: Op) -> Performing:
        yield shop.insert(op, op.key)
        raise error

    return perform


def policy(**settings: Any) -> Policy:
    return dataclasses.replace(POLICY, **settings)


async def test_effect_and_outcome_commit_together_and_replay(shop: Shop) -> None:
    first = await shop.run(asked(), refund(shop))
    again = await shop.run(asked(), refund(shop))
    assert (first.how, again.how) == ("stored", "replayed")
    assert first.outcome == again.outcome
    assert shop.refunds() == ["k"]


async def test_another_process_replays_from_the_ledger(shop: Shop) -> None:
    first = await shop.run(asked(), refund(shop))
    shop.guard.cache.drop(asked().id)
    again = await shop.run(asked(), refund(shop))
    assert again.outcome == first.outcome
    assert again.how == "replayed"
    assert shop.refunds() == ["k"]


async def test_failure_leaves_no_effect_and_the_retry_performs(shop: Shop) -> None:
    with pytest.raises(RuntimeError, match="no luck"):
        await shop.run(asked(), failing(shop, RuntimeError("no luck")))
    assert shop.refunds() == []
    answer = await shop.run(asked(), refund(shop))
    assert answer.value == {"refund": "k", "attempt": 2}
    assert shop.refunds() == ["k"]


@pytest.mark.parametrize(
    "error", [RuntimeError("no luck"), WrongState("'p1' is 'authorized'")], ids=["error", "refusal"]
)
async def test_other_payload_is_refused_after_a_failure(shop: Shop, error: Exception) -> None:
    """A refusal that the performer raises counts as a failure like any other error."""
    with pytest.raises(type(error)):
        await shop.run(asked(), failing(shop, error))
    with pytest.raises(PayloadMismatch):
        await shop.run(asked(fingerprint="other"), refund(shop))
    assert shop.refunds() == []


async def test_other_payload_is_refused_after_a_settle(shop: Shop) -> None:
    await shop.run(asked(), refund(shop))
    shop.guard.cache.drop(asked().id)
    with pytest.raises(PayloadMismatch):
        await shop.run(asked(fingerprint="other"), refund(shop, "second"))
    assert shop.refunds() == ["k"]


async def test_ten_concurrent_calls_perform_once(shop: Shop) -> None:
    answers = await asyncio.gather(*(shop.run(asked(), refund(shop, seconds=0.2)) for _ in range(10)))
    assert sorted(answer.how for answer in answers) == ["replayed"] * 9 + ["stored"]
    assert len({answer.outcome.body for answer in answers}) == 1
    assert shop.refunds() == ["k"]


async def test_waiter_performs_after_the_first_call_failed(shop: Shop) -> None:

    entered = Entered()
    first = asyncio.create_task(shop.run(asked(), slow(shop, entered, 0.2, RuntimeError())))
    await entered.seen()
    second = await shop.run(asked(), refund(shop))
    with pytest.raises(RuntimeError):
        await first
    assert second.how == "stored"
    assert shop.refunds() == ["k"]


async def test_wait_longer_than_the_databases_limit_is_accepted(shop: Shop) -> None:
    answer = await shop.run(asked(), refund(shop), policy=policy(wait="60d"))
    assert (answer.how, shop.refunds()) == ("stored", ["k"])


async def test_duplicate_without_wait_is_in_progress(shop: Shop) -> None:
    entered = Entered()
    first = asyncio.create_task(shop.run(asked(), slow(shop, entered, 4)))
    await entered.seen()
    with pytest.raises(InProgress):
        await shop.run(asked(), refund(shop), policy=policy(in_flight="conflict"))
    entered.left.set()
    assert (await first).how == "stored"
    assert shop.refunds() == ["k"]


async def test_waiting_ends_after_the_callers_wait(shop: Shop) -> None:
    entered = Entered()
    first = asyncio.create_task(shop.run(asked(), slow(shop, entered, 4)))
    await entered.seen()
    with pytest.raises(InProgress):
        await shop.run(asked(), refund(shop), wait=0.1)
    entered.left.set()
    assert (await first).how == "stored"


async def test_different_keys_do_not_wait_for_each_other(shop: Shop) -> None:
    answers = await asyncio.gather(*(shop.run(asked(f"k{n}"), refund(shop)) for n in range(20)))
    assert {answer.how for answer in answers} == {"stored"}
    assert len(shop.refunds()) == 20


async def test_unkept_outcome_is_rolled_back_with_its_effect(shop: Shop) -> None:
    answer = await shop.run(asked(), refund(shop), policy=policy(keep=lambda _: False))
    assert answer.how == "released"
    assert shop.refunds() == []
    assert (await shop.run(asked(), refund(shop))).how == "stored"


async def test_error_outcome_is_kept_and_its_effect_rolled_back(shop: Shop) -> None:
    settings = policy(errors=(LookupError,))
    first = await shop.run(asked(), failing(shop, LookupError("no such order")), policy=settings)
    assert first.outcome.kind == "error"
    assert isinstance(first.value, LookupError)
    again = await shop.run(asked(), refund(shop), policy=settings)
    assert (again.how, again.outcome) == ("replayed", first.outcome)
    assert shop.refunds() == []


@pytest.mark.parametrize("word", ["COMMIT", "ROLLBACK"])
async def test_transaction_ended_by_the_performer_is_noticed(shop: Shop, word: str) -> None:
    def perform(op: Op) -> Performing:
        yield shop.insert(op, "before")
        yield shop.sql(op, word)
        return "done"

    with pytest.raises(TransactionEnded, match="leave both to the guard"):
        await shop.run(asked(), perform)
    assert shop.refunds() == (["before"] if word == "COMMIT" else [])


@pytest.mark.parametrize("word", ["COMMIT", "ROLLBACK"])
async def test_transaction_replaced_by_the_performer_is_noticed(shop: Shop, word: str) -> None:
    def perform(op: Op) -> Performing:
        yield shop.sql(op, word)
        yield shop.sql(op, "BEGIN")
        yield shop.insert(op, "after")
        return "done"

    with pytest.raises(TransactionEnded, match="leave both to the guard"):
        await shop.run(asked(), perform)
    assert shop.refunds() == []


async def test_performers_own_commit_is_unknown(shop: Shop) -> None:

    def perform(op: Op) -> Performing:
        yield shop.insert(op, "before")
        yield shop.sql(op, "COMMIT")
        return "done"

    with pytest.raises(TransactionEnded):
        await shop.run(asked(), perform)
    shop.guard.store.shift = 60.0
    for _ in range(2):  # lapsed, then held
        with pytest.raises(UnknownOutcome):
            await shop.run(asked(), refund(shop))
    assert shop.refunds() == ["before"]
    await shop.guard.aresolve(*asked().id, Resolution.released())
    assert (await shop.run(asked(), refund(shop))).how == "stored"


@on_each_kind
async def test_slow_performers_own_commit_is_unknown(shop: Shop) -> None:
    """Its lease has ended, so a note of its failure must not allow a second refund."""

    def perform(op: Op) -> Performing:
        yield shop.insert(op, "before")
        yield shop.sql(op, "COMMIT")
        yield Sleep(0.2)
        return "done"

    with pytest.raises(TransactionEnded):
        await shop.run(asked(), perform, policy=policy(lease=0.1))
    with pytest.raises(UnknownOutcome):
        await shop.run(asked(), refund(shop))
    assert shop.refunds() == ["before"]


@on_each_kind
@pytest.mark.parametrize(("verdict", "expected"), [("settled", []), ("released", ["k"])])
async def test_resolver_decides_about_a_lapsed_lease(shop: Shop, verdict: str, expected: list[str]) -> None:
    await shop.guard.arun(asked("other"), lambda _: 1, policy=Policy())  # the tables are there
    lapsing = Policy(effect="lease", lease=0.01)
    await arun(shop.guard.store.claim(asked(), lease=lapsing.lease))
    shop.guard.store.shift = 60.0

    def resolver(op: Op) -> Resolution:
        return Resolution.settled("it happened") if verdict == "settled" else Resolution.released()

    answer = await shop.run(asked(), refund(shop), policy=policy(on_unknown="resolve", resolver=resolver))
    assert isinstance(answer, Answer)
    assert shop.refunds() == expected


async def test_operation_running_under_a_lease_is_waited_for(shop: Shop) -> None:
    """The rule's level was `lease` until the last deployment."""
    entered = asyncio.Event()

    async def slow(op: Op) -> str:
        entered.set()
        await asyncio.sleep(0.3)
        return "leased"

    first = asyncio.create_task(shop.guard.arun(asked(), slow, policy=Policy()))
    await entered.wait()
    with pytest.raises(InProgress):
        await shop.run(asked(), refund(shop), policy=policy(in_flight="conflict"))
    second = await shop.run(asked(), refund(shop))
    assert second.how == "replayed"
    assert (await first).value == "leased"
    assert shop.refunds() == []


@on_each_kind
async def test_lapsed_lease_is_taken_over_with_retry(shop: Shop) -> None:
    await arun(shop.guard.store.claim(asked(), lease=0.01))
    shop.guard.store.shift = 60.0
    answer = await shop.run(asked(), refund(shop), policy=policy(on_unknown="retry"))
    assert answer.value == {"refund": "k", "attempt": 2}


@on_each_kind
async def test_unknown_unique_order_is_refused_under_other_keys(shop: Shop) -> None:
    """The performer committed the effect itself, and the running record of the unique order with it."""

    def perform(op: Op) -> Performing:
        yield shop.insert(op, "before")
        yield shop.sql(op, "COMMIT")
        return "done"

    with pytest.raises(TransactionEnded):
        await shop.run(asked("k1", unique="order-1"), perform)
    shop.guard.store.shift = 60.0
    for _ in range(2):
        with pytest.raises(UnknownOutcome, match="order-1"):
            await shop.run(asked("k2", unique="order-1"), refund(shop))
    assert shop.refunds() == ["before"]
    retried = await shop.run(asked("k2", unique="order-1"), refund(shop), policy=policy(on_unknown="retry"))
    assert retried.how == "stored"


@on_each_kind
async def test_turn_of_a_vanished_holder_is_taken_over(shop: Shop) -> None:
    """Requests that take turns share no outcome that could be unknown, also under a lease."""
    await arun(shop.guard.store.claim(Operation("serial", "/orders/1"), lease=0.01))
    shop.guard.store.shift = 60.0
    answer = await shop.run(asked(unique="/orders/1"), refund(shop), policy=policy(on_unique="serialize"))
    assert answer.how == "stored"


async def test_two_keys_for_one_order_make_one_refund(shop: Shop) -> None:
    """`unique_by` acts as a database constraint: the loser waits for the winner's commit, and replays."""
    answers = await asyncio.gather(
        *(shop.run(asked(f"k{n}", unique="order-1"), refund(shop, seconds=0.1)) for n in range(4))
    )
    assert len({answer.outcome.body for answer in answers}) == 1
    assert len(shop.refunds()) == 1


async def test_loser_performs_if_the_winner_fails(shop: Shop) -> None:
    entered = Entered()
    first = asyncio.create_task(shop.run(asked("k1", unique="order-1"), slow(shop, entered, 0.2, RuntimeError())))
    await entered.seen()
    second = await shop.run(asked("k2", unique="order-1"), refund(shop))
    with pytest.raises(RuntimeError):
        await first
    assert second.how == "stored"
    assert shop.refunds() == ["k2"]


@on_each_kind
async def test_another_principals_unique_order_is_refused_and_not_shown(shop: Shop) -> None:
    await shop.run(asked("k1", unique="order-1"), refund(shop))
    stranger = Operation("customer-2", "k2", "same", "refunds.create", unique="order-1")
    with pytest.raises(Duplicate):
        await shop.run(stranger, refund(shop))
    with pytest.raises(Duplicate):
        await shop.run(asked("k3", unique="order-1"), refund(shop), policy=policy(on_unique="reject"))
    assert shop.refunds() == ["k1"]


@on_each_kind
async def test_outcome_that_is_no_success_leaves_the_order_free(shop: Shop) -> None:
    settings = policy(errors=(LookupError,), keep="final")
    first = await shop.run(asked("k1", unique="order-1"), failing(shop, LookupError()), policy=settings)
    assert first.outcome.kind == "error"
    assert (await shop.run(asked("k2", unique="order-1"), refund(shop))).how == "stored"


@on_each_kind
@pytest.mark.parametrize("state", ["running", "held"])
async def test_order_claimed_under_a_lease_is_not_taken(shop: Shop, state: str) -> None:
    lease = await arun(shop.guard.store.claim(Operation("unique|refunds.create", "order-1"), lease=30))
    if state == "held":
        await arun(shop.guard.store.hold(lease))  # type: ignore[arg-type]
    with pytest.raises(InProgress if state == "running" else UnknownOutcome):
        await shop.run(asked("k2", unique="order-1"), refund(shop))
    assert shop.refunds() == []


@on_each_kind
async def test_same_request_under_another_key_is_suspected(shop: Shop) -> None:
    settings = policy(suspect="reject")
    await shop.run(asked("k1"), refund(shop), policy=settings)
    with pytest.raises(Suspected):
        await shop.run(asked("k2"), refund(shop), policy=settings)
    assert shop.refunds() == ["k1"]


@on_each_kind
async def test_suspected_twin_can_replay_the_first(shop: Shop) -> None:
    settings = policy(suspect="replay")
    first = await shop.run(asked("k1"), refund(shop), policy=settings)
    second = await shop.run(asked("k2"), refund(shop), policy=settings)
    assert second.outcome == first.outcome
    assert shop.refunds() == ["k1"]


@on_each_kind
async def test_too_old_key_is_refused(shop: Shop) -> None:
    with pytest.raises(KeyExpired):
        await shop.run(asked(issued_at=1.0), refund(shop), policy=policy(late="refuse"))
    assert shop.refunds() == []


@on_each_kind
async def test_expired_audited_record_makes_way_for_a_new_one(shop: Shop) -> None:
    settings = policy(expired="keep", ttl="1h")
    await shop.run(asked(), refund(shop, "first"), policy=settings)
    shop.guard.cache.drop(asked().id)
    shop.guard.store.shift = 7200.0
    assert (await shop.run(asked(), refund(shop, "second"), policy=settings)).how == "stored"
    assert (await shop.guard.astats()).archived == 1


@on_each_kind
async def test_retention_from_the_last_access_is_extended(shop: Shop) -> None:
    settings = policy(ttl_from="access", ttl="1h")
    await shop.run(asked(), refund(shop), policy=settings)
    shop.guard.store.shift = 3000.0
    assert (await shop.run(asked(), refund(shop), policy=settings)).how == "replayed"
    shop.guard.store.shift = 6000.0
    assert (await shop.run(asked(), refund(shop), policy=settings)).how == "replayed"


@on_each_kind
async def test_outcomes_are_sealed_in_transactions(shop: Shop) -> None:
    store = shop.guard.store
    sealed = Guard(store, policy=POLICY, seal=Seal([secrets.token_bytes(32)]))
    settings = policy(suspect="replay")
    first = await shop.run(asked(unique="order-1"), refund(shop), sealed, policy=settings)
    sealed.cache.drop(asked().id)
    assert (await shop.run(asked(), refund(shop), sealed, policy=settings)).outcome == first.outcome
    twin = await shop.run(asked("k2", unique="order-1"), refund(shop), sealed, policy=settings)
    assert twin.outcome == first.outcome
    record = await shop.guard.afind(*asked().id)
    assert record is not None
    assert record.outcome is not None
    assert b"refund" not in record.outcome.body


async def test_cancelled_performer_is_rolled_back(shop: Shop) -> None:
    """A thread cannot be cancelled, so there the performer raises the interrupt itself."""
    entered = Entered()
    if shop.sync:

        def interrupted(op: Op) -> Performing:
            yield shop.insert(op, op.key)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            await shop.run(asked(), interrupted)
    else:
        task = asyncio.create_task(shop.run(asked(), slow(shop, entered, 10)))
        await entered.seen()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert shop.refunds() == []
    assert (await shop.run(asked(), refund(shop))).value == {"refund": "k", "attempt": 1}


async def test_deferred_constraint_fails_like_the_performer(postgres_shop: Shop) -> None:
    """The store is not at fault, and a retry would not help."""
    shop = postgres_shop
    shop.execute("ALTER TABLE refunds ADD CONSTRAINT one UNIQUE (made_in) DEFERRABLE INITIALLY DEFERRED")

    def perform(op: Op) -> Performing:
        yield shop.insert(op, "first")
        yield shop.insert(op, "second")
        return "done"

    with pytest.raises(Exception) as raised:
        await shop.run(asked(), perform)
    assert sqlstate_of(raised.value) == "23505"
    assert not isinstance(raised.value, OncemoreError)
    assert shop.refunds() == []


class Refused(Exception):
    """Stands for a driver's error when the database refuses a transaction because of another one."""

    sqlstate = "40001"
    sqlite_errorcode = 5


@pytest.mark.parametrize("errors", [(), (Exception,)])
async def test_transaction_refused_by_database_is_run_again(shop: Shop, errors: tuple[type[Exception], ...]) -> None:
    """The refusal is no outcome, even if the policy keeps all errors."""
    runs: list[int] = []

    def perform(op: Op) -> Performing:
        yield shop.insert(op, f"run-{len(runs)}")
        runs.append(op.attempt)
        if len(runs) < 3:
            raise Refused
        return "done"

    answer = await shop.run(asked(), perform, policy=policy(errors=errors))
    assert (answer.how, answer.value) == ("stored", "done")
    assert runs == [1, 1, 1]
    assert shop.refunds() == ["run-2"]


@on_each_kind
async def test_refusal_of_the_ledger_is_no_outcome(shop: Shop) -> None:
    await arun(shop.guard.store.claim(Operation("unique|refunds.create", "order-1"), lease=30))
    settings = policy(errors=(Exception,))
    with pytest.raises(InProgress):
        await shop.run(asked(unique="order-1"), refund(shop), policy=settings)
    assert await shop.guard.afind(*asked().id) is None


@on_each_kind
async def test_refused_transaction_is_not_run_again_for_ever(shop: Shop) -> None:
    runs: list[int] = []

    def perform(op: Op) -> Performing:
        yield shop.insert(op, op.key)
        runs.append(op.attempt)
        raise Refused

    with pytest.raises(StoreUnavailable, match="2 times"):
        await shop.run(asked(), perform, policy=policy(reruns=1))
    assert len(runs) == 2
    assert shop.refunds() == []


@on_each_kind
async def test_events_are_emitted_for_each_transition(shop: Shop) -> None:
    told: list[str] = []
    guard = Guard(shop.guard.store, policy=POLICY, observers=[lambda event: told.append(event.kind)])
    await shop.run(asked(), refund(shop), guard)
    guard.cache.drop(asked().id)
    await shop.run(asked(), refund(shop), guard)
    with pytest.raises(RuntimeError):
        await shop.run(asked("k2"), failing(shop, RuntimeError()), guard)
    with pytest.raises(PayloadMismatch):
        await shop.run(asked("k2", fingerprint="other"), refund(shop), guard)
    assert told == ["claimed", "settled", "replayed", "claimed", "released", "refused"]


def test_store_without_transactions_names_the_stores_with_them() -> None:
    with pytest.raises(ConfigurationError, match="postgresql://"):
        Guard("memory://", policy=POLICY).run(asked(), lambda op: None)


def test_leased_operation_has_no_connection() -> None:
    with pytest.raises(ConfigurationError, match="effect = 'transaction'"):
        Guard("memory://").run(asked(), lambda op: op.connection)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.server) for name in ("psycopg", "psycopg-async", "pool", "pool-async")],
)
async def test_statements_deallocated_by_the_performer_are_prepared_again(name: str, shops_url: str) -> None:
    """psycopg deallocates all prepared statements after its own rollback, also to a savepoint."""

    def forgetful(op: Op) -> Performing:
        yield shop.insert(op, op.key)
        yield shop.sql(op, "DEALLOCATE ALL")
        return "done"

    def failing_so(op: Op) -> Performing:
        yield shop.sql(op, "DEALLOCATE ALL")
        raise RuntimeError

    async for shop in opened(ON_POSTGRES[name], emptied(shops_url)):
        for n in range(3):
            assert (await shop.run(asked(f"k{n}"), forgetful)).how == "stored"
        with pytest.raises(RuntimeError):
            await shop.run(asked("failed"), failing_so)
        with pytest.raises(PayloadMismatch):
            await shop.run(asked("failed", fingerprint="other"), refund(shop))
        assert shop.refunds() == ["k0", "k1", "k2"]


@pytest.mark.server
@pytest.mark.parametrize("kind", ["psycopg", "psycopg-async"])
async def test_failing_statements_do_not_pile_up_on_the_server(kind: str, shops_url: str) -> None:
    """Each statement is prepared once, or again after psycopg prepares its own first one, but not at each failure."""
    async for shop in opened(ON_POSTGRES[kind], f"{emptied(shops_url)}?application_name=shop&schema=public&pool=1"):
        shop.execute("ALTER TABLE refunds ADD CONSTRAINT one UNIQUE (made_in) DEFERRABLE INITIALLY DEFERRED")
        await shop.run(asked("first"), refund(shop))
        for n in range(20):
            with pytest.raises(Exception, match="duplicate key"):
                await shop.run(asked(f"failing-{n}"), refund(shop))
        counted = await shop.run(asked("last"), counting(shop))
        assert counted.value <= 10


def counting(shop: Shop) -> Performer:
    def perform(op: Op) -> Performing:
        return (yield shop.ask(op, "SELECT count(*) FROM pg_prepared_statements WHERE name LIKE 'oncemore%'"))

    return perform
