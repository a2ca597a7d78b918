"""Defence in depth: one payment per order whatever the key, twins, and keys that are too old."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from oncemore import Guard, Op, Operation, Outcome, Policy, Resolution
from oncemore._ledger.attempt import Perform
from oncemore._ledger.model import Lease
from oncemore._runtime.heartbeat import Renewal
from oncemore._runtime.plan import Plan, Sleep, arun, run
from oncemore.errors import (
    Duplicate,
    Fenced,
    InProgress,
    KeyExpired,
    OutcomeNotKept,
    PayloadMismatch,
    StoreUnavailable,
    Suspected,
    UnknownOutcome,
)
from oncemore.stores.memory import MemoryStore
from oncemore.testing.clock import Clock

from .conftest import Caller
from .stepping import elsewhere
from .test_guard import CREATED, Effect, kinds


def pay(key: str, *, scope: str = "pay|alice", order: str | None = "order-7") -> Operation:
    return Operation(scope, key, "c1:aa", "payments.create", unique=order)


# unique_by


def test_a_second_key_for_one_order_replays_the_first_payment(guard, call) -> None:
    effect = Effect()
    assert call(guard, pay("k1"), effect).how == "stored"
    second = call(guard, pay("k2"), effect)
    assert (second.how, second.outcome, effect.count) == ("replayed", CREATED, 1)
    assert call(guard, pay("k2"), effect).outcome == CREATED
    assert call(guard, pay("k3", order="order-8"), effect).how == "stored"
    assert effect.count == 2


def test_a_second_key_for_one_order_may_be_rejected(guard, call) -> None:
    policy = Policy(on_unique="reject")
    effect = Effect()
    call(guard, pay("k1"), effect, policy=policy)
    with pytest.raises(Duplicate, match="order-7"):
        call(guard, pay("k2"), effect, policy=policy)
    assert call(guard, pay("k1"), effect, policy=policy).how == "replayed"
    assert effect.count == 1


def test_another_principal_neither_pays_again_nor_sees_the_payment(guard, call) -> None:
    effect = Effect()
    call(guard, pay("k1"), effect)
    with pytest.raises(Duplicate):
        call(guard, pay("k2", scope="pay|bob"), effect)
    assert effect.count == 1


@pytest.mark.parametrize("failure", [OSError("declined"), Outcome("response", 402), Outcome("response", 503)])
def test_a_failed_payment_leaves_the_order_free(guard, call, failure) -> None:
    effect = Effect([failure, CREATED])
    try:
        first = call(guard, pay("k1"), effect)
        assert first.outcome == failure
    except OSError:
        pass
    assert call(guard, pay("k2", scope="pay|bob"), effect).how == "stored"
    assert effect.count == 2


def test_ledger_refusal_is_never_stored_as_an_error(guard, call) -> None:
    policy = Policy(on_unique="reject", errors=(Exception,))
    call(guard, pay("k1"), Effect(), policy=policy)
    for _ in range(2):
        with pytest.raises(Duplicate):
            call(guard, pay("k2"), Effect(), policy=policy)
    assert guard.find("pay|alice", "k2") is None


def test_two_keys_race_for_one_order_and_one_pays(guard) -> None:
    effect = Effect()

    def slowly(op: Op) -> Outcome:
        time.sleep(0.05)
        return effect(op)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda n: guard.run(pay(f"k{n}"), slowly), range(8)))
    assert effect.count == 1
    assert {answer.outcome for answer in answers} == {CREATED}


def test_the_owners_mark_is_never_shown(guard, call) -> None:
    outcome = Outcome("response", 201, (("x", "y"),), b"")
    for key in ("k1", "k2"):
        assert call(guard, pay(key), Effect([outcome])).outcome == outcome
    assert run(guard.store.find("unique|payments.create", "order-7")).outcome != outcome


def test_a_payment_of_unknown_outcome_holds_its_order(guard, call) -> None:
    run(guard.store.claim(Operation("unique|payments.create", "order-7", name="payments.create"), lease=30))
    Clock(guard.store).advance(31)
    effect = Effect()
    for _ in range(2):
        with pytest.raises(UnknownOutcome):
            call(guard, pay("k2"), effect)
    assert effect.count == 0


def test_a_payment_that_a_resolver_found_belongs_to_who_asked(guard, call) -> None:
    run(guard.store.claim(Operation("unique|payments.create", "order-7", name="payments.create"), lease=30))
    Clock(guard.store).advance(31)
    policy = Policy(on_unknown="resolve", resolver=lambda op: Resolution.settled(CREATED))
    effect = Effect()
    assert [call(guard, pay(key), effect, policy=policy).outcome for key in ("k1", "k2")] == [CREATED, CREATED]
    with pytest.raises(Duplicate):
        call(guard, pay("k3", scope="pay|bob"), effect, policy=policy)
    assert effect.count == 0


@pytest.mark.parametrize("awaits", [False, True])
def test_other_key_cannot_resolve_an_unknown_order(guard, awaits) -> None:
    """The provider knows a key derived from the payer's own key, which another key does not know."""
    provider: dict[str, Outcome] = {}
    call = Caller(asyncio.Runner() if awaits else None)

    def resolve(op: Op) -> Resolution:
        found = provider.get(op.derive("charge"))
        return Resolution.released() if found is None else Resolution.settled(found)

    async def aresolve(op: Op) -> Resolution:
        return resolve(op)

    def charge(op: Op) -> Outcome:
        provider[op.derive("charge")] = CREATED
        if len(provider) == 1:
            raise KeyboardInterrupt
        return CREATED

    policy = Policy(on_unknown="resolve", resolver=aresolve if awaits else resolve)
    with pytest.raises(KeyboardInterrupt):
        call(guard, pay("k1"), charge, policy=policy)
    for _ in range(2):
        with pytest.raises(UnknownOutcome):
            call(guard, pay("k2"), charge, policy=policy)
    assert call(guard, pay("k1"), charge, policy=policy).outcome == CREATED
    assert call(guard, pay("k2"), charge, policy=policy).outcome == CREATED
    with pytest.raises(Duplicate):
        call(guard, pay("k3", scope="pay|bob"), charge, policy=policy)
    assert len(provider) == 1


def test_resolved_payment_keeps_the_order_as_settled(guard, call) -> None:
    """It died between the two settles: the order's own was made."""
    policy = Policy(on_unknown="resolve", resolver=lambda op: Resolution.settled(CREATED))
    call(guard, pay("k2"), Effect(), policy=policy)
    settled = guard.find("unique|payments.create", "order-7")
    run(guard.store.claim(pay("k1"), lease=30))
    Clock(guard.store).advance(31)
    assert call(guard, pay("k1"), Effect(), policy=policy).outcome == CREATED
    assert guard.find("unique|payments.create", "order-7").token == settled.token


def test_order_with_resolved_declined_payment_is_free(guard, call) -> None:
    declined = Outcome("response", 402)
    policy = Policy(on_unknown="resolve", resolver=lambda op: Resolution.settled(declined))
    with pytest.raises(KeyboardInterrupt):
        guard.run(pay("k1"), Effect([KeyboardInterrupt()]), policy=policy)
    assert call(guard, pay("k1"), Effect(), policy=policy).outcome == declined
    assert call(guard, pay("k2"), Effect(), policy=policy).how == "stored"


def test_an_order_whose_record_is_unreadable_is_not_paid_again(guard, call) -> None:
    effect = Effect()
    call(guard, pay("k1"), effect)
    id = ("unique|payments.create", "order-7")
    guard.store._records[id] = msgspec.structs.replace(guard.find(*id), outcome=None)
    with pytest.raises(Duplicate):
        call(guard, pay("k2"), effect)
    assert effect.count == 1


def test_an_order_that_is_being_paid_may_be_refused(guard, call) -> None:
    run(guard.store.claim(Operation("unique|payments.create", "order-7", name="payments.create"), lease=30))
    with pytest.raises(InProgress):
        call(guard, pay("k2"), Effect(), policy=Policy(in_flight="conflict"))
    assert guard.find("pay|alice", "k2") is None


@pytest.mark.parametrize("headers", [(), (("content-type", "application/json"),)])
def test_order_settled_by_operator_is_not_paid_again(guard, call, headers) -> None:
    """The outcome that a person gives has no owner's mark, and its own first header is not taken for one."""
    inner = Operation("unique|payments.create", "order-7", name="payments.create")
    run(guard.store.hold(run(guard.store.claim(inner, lease=30))))
    guard.resolve(*inner.id, Resolution.settled(Outcome("response", 201, headers, b"{}")))
    effect = Effect()
    with pytest.raises(Duplicate):
        call(guard, pay("k2"), effect)
    assert effect.count == 0


def test_unkept_payment_is_not_answered_with_empty_response(guard, call) -> None:
    effect = Effect([Outcome("tombstone", 201)])
    call(guard, pay("k1"), effect)
    for _ in range(2):
        with pytest.raises(OutcomeNotKept):
            call(guard, pay("k2"), effect)
    assert effect.count == 1


@pytest.mark.parametrize("scope", ["pay|alice", "pay|bob"])
def test_late_payer_never_sees_another_principals_payment(guard, call, scope) -> None:
    """It slept through its lease, and another key has paid the order meanwhile."""
    policy = Policy(on_unknown="retry")
    theirs = Outcome("response", 201, (), b"theirs")

    def late(op: Op) -> Outcome:
        Clock(guard.store).advance(31)
        answer = elsewhere(lambda: Guard(guard.store).run(pay("k2", scope=scope), lambda op: theirs, policy=policy))
        assert answer.how == "stored"
        return CREATED

    if scope == "pay|alice":
        answer = call(guard, pay("k1"), late, policy=policy)
        assert (answer.how, answer.outcome) == ("replayed", theirs)
        return
    with pytest.raises(Fenced):
        call(guard, pay("k1"), late, policy=policy)
    with pytest.raises(Duplicate):
        call(guard, pay("k1"), Effect(), policy=policy)


# suspect


def request(key: str, *, fingerprint: str = "c1:aa", scope: str = "pay|alice") -> Operation:
    return Operation(scope, key, fingerprint, "payments.create")


@pytest.mark.parametrize("action", ["log", "flag"])
def test_a_twin_is_noticed_and_runs(guard, call, events, action) -> None:
    policy = Policy(suspect=action)
    effect = Effect()
    call(guard, request("k1"), effect, policy=policy)
    assert call(guard, request("k2"), effect, policy=policy).how == "stored"
    assert effect.count == 2
    assert "suspected" in kinds(events)
    note = "suspected duplicate of k1" if action == "flag" else ""
    assert guard.find("pay|alice", "k2").note == note


def test_a_twin_is_rejected(guard, call) -> None:
    policy = Policy(suspect="reject")
    effect = Effect()
    call(guard, request("k1"), effect, policy=policy)
    with pytest.raises(Suspected):
        call(guard, request("k2"), effect, policy=policy)
    assert effect.count == 1


def test_a_twin_gets_the_others_outcome(guard, call) -> None:
    policy = Policy(suspect="replay")
    effect = Effect()
    call(guard, request("k1"), effect, policy=policy)
    assert [call(guard, request("k2"), effect, policy=policy).how for _ in range(2)] == ["replayed", "replayed"]
    assert effect.count == 1


def test_twin_of_unkept_response_is_refused(guard, call) -> None:
    policy = Policy(suspect="replay")
    effect = Effect([Outcome("tombstone", 201)])
    call(guard, request("k1"), effect, policy=policy)
    for _ in range(2):
        with pytest.raises(OutcomeNotKept):
            call(guard, request("k2"), effect, policy=policy)
    assert effect.count == 1


def test_twin_of_a_running_operation_is_refused(guard, call) -> None:
    policy = Policy(suspect="replay")
    call(guard, request("k0"), Effect(), policy=policy)
    guard.delete("pay|alice", "k0")
    with pytest.raises(Suspected):
        call(guard, request("k2"), Effect(), policy=policy)


@pytest.mark.parametrize(
    "other",
    [request("k1"), request("k2", fingerprint="c1:bb"), request("k2", scope="pay|bob")],
    ids=["the same key", "another payload", "another principal"],
)
def test_what_is_no_twin_is_no_suspect(guard, call, other) -> None:
    policy = Policy(suspect="reject")
    call(guard, request("k1"), Effect(), policy=policy)
    assert call(guard, other, Effect(), policy=policy).outcome == CREATED


def test_after_the_window_a_twin_is_a_new_request(guard, call) -> None:
    policy = Policy(suspect="reject")
    effect = Effect()
    call(guard, request("k1"), effect, policy=policy)
    Clock(guard.store).advance(31)
    call(guard, request("k2"), effect, policy=policy)
    assert effect.count == 2


def test_the_marks_of_suspicion_are_purged(guard, call) -> None:
    call(guard, request("k1"), Effect(), policy=Policy(suspect="log"))
    Clock(guard.store).advance(31)
    assert guard.purge() == 1


# late


def dated(age: float) -> Operation:
    return Operation("pay|alice", "k1", "c1:aa", issued_at=time.time() - age)


def test_a_key_older_than_the_retention_is_refused(guard, call) -> None:
    effect = Effect()
    with pytest.raises(KeyExpired):
        call(guard, dated(3601), effect, policy=Policy(ttl="1h", late="refuse"))
    assert effect.count == 0


@pytest.mark.parametrize(("age", "late"), [(3000, "refuse"), (3601, "run")])
def test_any_other_key_runs(guard: Guard, call, age, late) -> None:
    assert call(guard, dated(age), Effect(), policy=Policy(ttl="1h", late=late)).how == "stored"


def test_an_old_key_whose_outcome_is_still_there_replays(guard, call) -> None:
    call(guard, dated(0), Effect(), policy=Policy(ttl="1h"))
    assert call(guard, dated(3601), Effect(), policy=Policy(ttl="1h", late="refuse")).how == "replayed"


@pytest.mark.parametrize(("status", "state"), [(201, "settled"), (402, "settled"), (503, "released")])
async def test_cancel_while_settling_unique_leaves_no_doubt(tmp_path: Path, status: int, state: str) -> None:
    """The outcome is known, and is written for the order too, so its own key must not be held."""
    guard = Guard(f"sqlite:///{tmp_path / 'once.db'}?thread=always")

    async def pay_and_be_cancelled(op: Op) -> Outcome:
        asyncio.current_task().cancel()  # type: ignore[union-attr]
        return Outcome("response", status)

    task = asyncio.create_task(guard.arun(pay("k1"), pay_and_be_cancelled))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await guard.afind("pay|alice", "k1")).state == state  # type: ignore[union-attr]
    again, other = Effect(), Effect()
    assert (await guard.arun(pay("k1"), again)).how == ("stored" if state == "released" else "replayed")
    assert (await guard.arun(pay("k2"), other)).how == ("stored" if status == 402 else "replayed")
    assert (again.count, other.count) == (int(status == 503), int(status == 402))
    await guard.aclose()


async def test_late_caller_cancelled_while_settling_unique_is_cancelled(
    tmp_path: Path,
) -> None:
    """Its key has a new holder.  The caller does not ask any more, so that error must not replace the cancellation."""
    guard = Guard(f"sqlite:///{tmp_path / 'once.db'}?thread=always")

    async def pay_late_and_be_cancelled(op: Op) -> Outcome:
        guard.store.shift += 31
        assert isinstance(await arun(guard.store.claim(pay("k1"), lease=30.0)), Lease)
        asyncio.current_task().cancel()  # type: ignore[union-attr]
        return CREATED

    task = asyncio.create_task(guard.arun(pay("k1"), pay_late_and_be_cancelled))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await guard.afind("pay|alice", "k1")).state == "running"  # type: ignore[union-attr]
    await guard.aclose()


def test_abandoned_payment_is_unknown_after_its_lease(guard) -> None:
    """A loop that was shut down drops its plans wherever they are, and nothing more can be asked then."""
    plan = guard.guarded(pay("k1"), Effect(), Policy())
    effect = next(plan)
    while not isinstance(effect, Perform):
        effect = plan.send(effect.run())
    plan.close()
    with pytest.raises(InProgress):
        guard.run(pay("k1"), Effect(), policy=Policy(in_flight="conflict"))
    Clock(guard.store).advance(31)
    with pytest.raises(UnknownOutcome):
        guard.run(pay("k1"), Effect())


# What goes wrong before anything was performed


async def test_cancel_while_waiting_for_unique_does_nothing(guard, events) -> None:
    """Its key is not in doubt, because it waited for another key's payment."""
    paying, paid = asyncio.Event(), asyncio.Event()

    async def pay_slowly(op: Op) -> Outcome:
        paying.set()
        await paid.wait()
        return Outcome("response", 503)

    first = asyncio.create_task(guard.arun(pay("k1"), pay_slowly))
    await paying.wait()
    second = asyncio.create_task(guard.arun(pay("k2"), Effect()))
    await asyncio.sleep(0.05)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert await guard.afind("pay|alice", "k2") is None
    paid.set()
    await first
    effect = Effect()
    assert (await guard.arun(pay("k2"), effect)).how == "stored"
    assert effect.count == 1


@pytest.mark.parametrize("failure", [StoreUnavailable("down"), KeyboardInterrupt()])
def test_failed_search_for_twins_leaves_the_key_free(guard, call, monkeypatch, failure) -> None:
    """Nothing was performed, so nothing is in doubt."""
    claim = guard.store.claim

    def fail_on_the_mark(operation: Operation, *, lease: float, request: bytes = b""):
        if operation.name == "oncemore.suspect":
            raise failure
        return (yield from claim(operation, lease=lease))

    effect, policy = Effect(), Policy(suspect="reject")
    with monkeypatch.context() as patched:
        patched.setattr(guard.store, "claim", fail_on_the_mark)
        with pytest.raises(type(failure)):
            call(guard, pay("k1", order=None), effect, policy=policy)
    assert guard.find("pay|alice", "k1") is None
    assert call(guard, pay("k1", order=None), effect, policy=policy).how == "stored"
    assert effect.count == 1


@pytest.mark.parametrize("failure", [StoreUnavailable("down"), KeyboardInterrupt()])
def test_interrupted_search_for_twins_is_no_own_twin(guard, call, monkeypatch, failure) -> None:
    release = guard.store.release

    def fail_on_the_mark(held: Lease, *, retention: float):
        if held.operation.name == "oncemore.suspect":
            raise failure
        return (yield from release(held, retention=retention))

    effect, policy = Effect(), Policy(suspect="reject")
    with monkeypatch.context() as patched:
        patched.setattr(guard.store, "release", fail_on_the_mark)
        with pytest.raises(type(failure)):
            call(guard, request("k1"), effect, policy=policy)
    assert call(guard, request("k1"), effect, policy=policy).how == "stored"
    with pytest.raises(Suspected):
        call(guard, request("k2"), effect, policy=policy)
    assert effect.count == 1


def test_refusal_after_failure_keeps_the_keys_fingerprint(guard, call) -> None:
    """Another payload under the same key never runs, also after it failed."""
    policy = Policy(on_unique="reject")
    with pytest.raises(OSError):
        call(guard, pay("k1"), Effect([OSError("declined")]), policy=policy)
    call(guard, pay("k2"), Effect(), policy=policy)
    with pytest.raises(Duplicate):
        call(guard, pay("k1"), Effect(), policy=policy)
    other, effect = msgspec.structs.replace(pay("k1", order="order-8"), fingerprint="c1:bb"), Effect()
    with pytest.raises(PayloadMismatch):
        call(guard, other, effect, policy=policy)
    assert effect.count == 0


def test_plan_dropped_while_searching_twins_sends_nothing(guard, monkeypatch) -> None:
    """An event loop that is closed drops its plans.  A plan that went on then would raise an error of its own."""
    claim = guard.store.claim

    def claim_slowly(operation: Operation, *, lease: float, request: bytes = b""):
        if operation.name == "oncemore.suspect":
            yield Sleep(60)
        return (yield from claim(operation, lease=lease))

    monkeypatch.setattr(guard.store, "claim", claim_slowly)
    plan = guard.guarded(pay("k1", order=None), Effect(), Policy(suspect="reject"))
    assert isinstance(next(plan), Renewal)
    assert isinstance(plan.send(None), Sleep)
    plan.close()
    assert guard.find("pay|alice", "k1").state == "running"


class FailingInnerClaims(MemoryStore):
    """A store that is down for the records of `unique`."""

    fails = False

    def claim(self, operation: Operation, **settings: Any) -> Plan[Any]:
        if self.fails and operation.scope.startswith("unique|"):
            raise StoreUnavailable("down")
        return (yield from super().claim(operation, **settings))


def test_resolved_outcome_stays_in_doubt_if_unique_cannot_be_claimed() -> None:
    store, charges = FailingInnerClaims(), []
    guard = Guard(store, cache=0)
    resolver = lambda op: Resolution.settled("charged") if charges else Resolution.released()  # noqa: E731
    policy = Policy(on_unknown="resolve", resolver=resolver, lease=5.0)
    crashed = guard.new_attempt(Operation("s", "k", "f", "pay"), policy)  # before its rule had `unique`
    run(crashed.begin())
    charges.append("crashed")
    crashed.drop()
    store.shift += 60
    operation = Operation("s", "k", "f", "pay", unique="invoice-1")
    store.fails = True
    with pytest.raises(StoreUnavailable):
        guard.run(operation, charges.append, policy=policy)
    store.fails = False
    record = guard.find("s", "k")
    assert record is not None
    assert record.state == "running", "still in doubt, and not released"
    store.shift += 60
    assert guard.run(operation, charges.append, policy=policy).how == "replayed"
    assert charges == ["crashed"]
