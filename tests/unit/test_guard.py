"""Claim, perform, settle, replay, wait, refuse: the guard, on the memory store."""

import asyncio
import functools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest

from oncemore import Guard, Op, Operation, Outcome, Policy
from oncemore._ledger import guard as guard_module
from oncemore._ledger.events import Event
from oncemore._ledger.model import Lease
from oncemore._runtime.plan import Call, Plan, run
from oncemore.errors import (
    ConfigurationError,
    Duplicate,
    Fenced,
    InProgress,
    InvalidKey,
    OutcomeNotKept,
    PayloadMismatch,
    ProviderDuplicate,
    StoreError,
    StoreUnavailable,
    UnknownOutcome,
)
from oncemore.testing.clock import Clock

OPERATION = Operation("POST /refunds|alice", "key-1", "c1:aa", "refunds.create")
OTHER = Operation("POST /refunds|alice", "key-1", "c1:bb", "refunds.create")
CREATED = Outcome("response", 201, (("location", "/refunds/1"),), b'{"id": 1}')


@dataclass
class Effect:
    """A performer that counts its calls, and returns the value that it is given."""

    results: list[Any] = field(default_factory=lambda: [CREATED])
    count: int = 0

    def __call__(self, op: Op) -> Any:
        self.count += 1
        result = self.results[min(self.count, len(self.results)) - 1]
        if isinstance(result, BaseException):
            raise result
        return result


def kinds(events: list[Event]) -> list[str]:
    return [event.kind for event in events]


# Twice


def test_second_call_gets_the_first_outcome(guard, call, events) -> None:
    effect = Effect()
    first, second = (call(guard, OPERATION, effect) for _ in range(2))
    assert effect.count == 1
    assert (first.how, second.how) == ("stored", "replayed")
    assert first.outcome == second.outcome == CREATED
    assert kinds(events) == ["claimed", "settled", "replayed"]


def test_a_replay_does_not_need_this_process_to_remember(guard, call) -> None:
    effect = Effect()
    call(guard, OPERATION, effect)
    other = Guard(guard.store)
    assert [call(other, OPERATION, effect).how for _ in range(2)] == ["replayed", "replayed"]
    assert effect.count == 1


def test_another_payload_never_runs_and_sees_nothing(guard, call) -> None:
    """From the cache and from the store."""
    effect = Effect()
    call(guard, OPERATION, effect)
    for each in (guard, Guard(guard.store)):
        with pytest.raises(PayloadMismatch):
            call(each, OTHER, effect)
    assert effect.count == 1
    assert guard.find(*OPERATION.id).outcome == CREATED


def test_other_payload_is_refused_while_running_and_after_failure(guard, call) -> None:
    with pytest.raises(OSError):
        call(guard, OPERATION, Effect([OSError("first")]))
    with pytest.raises(PayloadMismatch):
        call(guard, OTHER, Effect())
    lease = run(guard.store.claim(OPERATION, lease=30))
    with pytest.raises(PayloadMismatch):
        call(guard, OTHER, Effect())
    run(guard.store.renew(lease, lease=0))
    with pytest.raises(PayloadMismatch):
        call(guard, OTHER, Effect())


@pytest.mark.parametrize("refusal", [InProgress("of an operation within it"), ProviderDuplicate("the bank knows it")])
def test_refusal_raised_by_performer_keeps_the_keys_payload(guard, call, refusal) -> None:
    """The performer may have taken effect before it raised."""
    with pytest.raises(type(refusal)):
        call(guard, OPERATION, Effect([refusal]))
    effect = Effect()
    with pytest.raises(PayloadMismatch):
        call(guard, msgspec.structs.replace(OPERATION, fingerprint="c1:bb"), effect)
    assert effect.count == 0
    assert call(guard, OPERATION, effect).how == "stored"


@pytest.mark.parametrize(("scope", "key"), [("orders", 5), (7, "key-1"), ("orders", None), ("orders", b"key-1")])
def test_what_is_no_text_names_no_operation(scope: Any, key: Any) -> None:
    """A database that takes 5 for "5" does not know it again, and the operation would be performed once more."""
    with pytest.raises(InvalidKey, match="must be texts"):
        Operation(scope, key)


def test_two_scopes_with_one_key_are_two_operations(guard, call) -> None:
    bob = Operation("POST /refunds|bob", "key-1", "c1:aa")
    bobs = Outcome("response", 201, (), b"bob")
    call(guard, OPERATION, Effect())
    assert call(guard, bob, Effect([bobs])).outcome == bobs
    assert call(guard, OPERATION, Effect()).outcome == CREATED


@pytest.mark.parametrize(
    ("on_duplicate", "outcome"), [("ok", Outcome("response", 200)), ("replay", CREATED), ("reject", Duplicate)]
)
def test_duplicate_gets_the_answer_of_on_duplicate(guard, call, on_duplicate, outcome) -> None:
    policy = Policy(on_duplicate=on_duplicate)
    call(guard, OPERATION, Effect(), policy=policy)
    if outcome is Duplicate:
        with pytest.raises(Duplicate):
            call(guard, OPERATION, Effect(), policy=policy)
    else:
        assert call(guard, OPERATION, Effect(), policy=policy).outcome == outcome


def test_a_plain_value_is_an_outcome_too(guard, call) -> None:
    first = call(guard, OPERATION, Effect([{"n": 1}]))
    assert (first.value, first.how) == ({"n": 1}, "stored")
    assert call(guard, OPERATION, Effect([0]), policy=Policy(on_duplicate="ok")).outcome.kind == "value"


def test_a_tombstone_is_not_replayed_and_not_run_again(guard, call) -> None:
    effect = Effect([Outcome("tombstone", 201)])
    call(guard, OPERATION, effect)
    with pytest.raises(OutcomeNotKept):
        call(guard, OPERATION, effect)
    assert effect.count == 1


# After a failure


def test_after_an_exception_the_next_call_performs(guard, call, events) -> None:
    effect = Effect([OSError("lost"), CREATED])
    with pytest.raises(OSError, match="lost"):
        call(guard, OPERATION, effect)
    answer = call(guard, OPERATION, effect)
    assert (answer.how, answer.attempt, effect.count) == ("stored", 2, 2)
    assert kinds(events) == ["claimed", "released", "claimed", "settled"]


def test_a_chosen_exception_is_an_outcome(guard, call) -> None:
    policy = Policy(errors=(PermissionError,))
    effect = Effect([PermissionError("declined")])
    assert call(guard, OPERATION, effect, policy=policy).outcome.kind == "error"
    assert call(guard, OPERATION, effect, policy=policy).how == "replayed"
    assert effect.count == 1


@pytest.mark.parametrize("status", [401, 403, 408, 425, 429, 500, 503])
def test_an_answer_that_is_not_final_is_not_kept(guard, call, status) -> None:
    effect = Effect([Outcome("response", status), CREATED])
    assert call(guard, OPERATION, effect).how == "released"
    assert call(guard, OPERATION, effect).how == "stored"


@pytest.mark.parametrize("status", [200, 204, 302, 400, 404, 409, 422])
def test_an_answer_that_is_final_is_kept(guard, call, status) -> None:
    effect = Effect([Outcome("response", status)])
    assert [call(guard, OPERATION, effect).how for _ in range(2)] == ["stored", "replayed"]


def test_failing_keep_function_causes_no_second_effect(guard, call) -> None:
    effect = Effect()
    policy = Policy(keep=lambda outcome: 1 / 0)
    assert [call(guard, OPERATION, effect, policy=policy).how for _ in range(2)] == ["stored", "replayed"]


# Two at once


def test_one_of_ten_concurrent_threads_performs(guard) -> None:
    """With threads."""
    effect = Effect()

    def slowly(op: Op) -> Outcome:
        time.sleep(0.05)
        return effect(op)

    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda _: guard.run(OPERATION, slowly), range(10)))
    assert effect.count == 1
    assert sorted(answer.how for answer in answers) == ["replayed"] * 9 + ["stored"]
    assert {answer.outcome for answer in answers} == {CREATED}


async def test_one_of_ten_concurrent_tasks_performs(guard) -> None:
    """With tasks."""
    effect = Effect()

    async def slowly(op: Op) -> Outcome:
        await asyncio.sleep(0.05)
        return effect(op)

    answers = await asyncio.gather(*(guard.arun(OPERATION, slowly) for _ in range(10)))
    assert effect.count == 1
    assert sorted(answer.how for answer in answers) == ["replayed"] * 9 + ["stored"]


@pytest.mark.parametrize("in_flight", ["conflict", "accepted"])
def test_duplicate_without_wait_gets_retry_after(guard, call, in_flight) -> None:
    run(guard.store.claim(OPERATION, lease=30))
    with pytest.raises(InProgress) as refused:
        call(guard, OPERATION, Effect(), policy=Policy(in_flight=in_flight))
    assert refused.value.retry_after > 0


@pytest.mark.parametrize(("limit", "wait"), [(0.05, None), (10, 0.05), (0.05, 10), (10, 0)])
def test_waiting_ends_at_the_shorter_limit(guard, call, limit, wait) -> None:
    run(guard.store.claim(OPERATION, lease=30))
    effect = Effect()
    began = time.monotonic()
    with pytest.raises(InProgress):
        call(guard, OPERATION, effect, policy=Policy(wait=limit), wait=wait)
    assert time.monotonic() - began < 5
    assert effect.count == 0


def test_a_wait_that_is_no_number_is_the_rules(guard, call) -> None:
    """And not one without an end."""
    run(guard.store.claim(OPERATION, lease=30.0))
    with pytest.raises(InProgress):
        call(guard, OPERATION, Effect(), policy=Policy(wait=0.05), wait=float("nan"))


def test_a_waiter_whose_owner_failed_performs_itself(guard, call) -> None:
    lease = run(guard.store.claim(OPERATION, lease=30))
    threading.Timer(0.05, lambda: run(guard.store.release(lease, retention=60))).start()
    effect = Effect()
    assert call(guard, OPERATION, effect).how == "stored"
    assert effect.count == 1


def test_a_waiter_whose_owner_vanished_takes_over(guard, call) -> None:
    run(guard.store.claim(OPERATION, lease=0.1))
    assert call(guard, OPERATION, Effect(), policy=Policy(on_unknown="retry")).attempt == 2


def test_waiter_is_refused_when_the_operation_is_held(guard, call) -> None:
    lease = run(guard.store.claim(OPERATION, lease=30))
    threading.Timer(0.05, lambda: run(guard.store.hold(lease))).start()
    with pytest.raises(UnknownOutcome):
        call(guard, OPERATION, Effect())


# Leases


def test_a_performer_longer_than_its_lease_keeps_it(guard, events) -> None:
    """The heartbeat renews it, for threads."""
    policy = Policy(lease=0.15, on_unknown="retry", in_flight="conflict")
    inside, refused = threading.Event(), []

    def slowly(op: Op) -> Outcome:
        inside.set()
        time.sleep(0.5)
        return CREATED

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(guard.run, OPERATION, slowly, policy=policy)
        inside.wait()
        time.sleep(0.35)
        with pytest.raises(InProgress) as refused:
            guard.run(OPERATION, Effect(), policy=policy)
        assert first.result().how == "stored"
    assert refused
    assert "renewed" in kinds(events)


async def test_a_coroutine_longer_than_its_lease_keeps_it(guard, events) -> None:
    """The heartbeat renews it, for tasks."""
    policy = Policy(lease=0.15, on_unknown="retry", in_flight="conflict")

    async def slowly(op: Op) -> Outcome:
        await asyncio.sleep(0.4)
        return CREATED

    first = asyncio.create_task(guard.arun(OPERATION, slowly, policy=policy))
    await asyncio.sleep(0.3)
    with pytest.raises(InProgress):
        await guard.arun(OPERATION, Effect(), policy=policy)
    assert (await first).how == "stored"
    assert "renewed" in kinds(events)


def test_late_owner_answers_with_its_successors_outcome(guard, call, events) -> None:
    """Its own outcome is refused, and the client gets the successor's."""
    clock = Clock(guard.store)
    winner = Outcome("response", 201, (), b"winner")

    def frozen(op: Op) -> Outcome:
        clock.advance(31)
        guard.run(OPERATION, Effect([winner]), policy=Policy(on_unknown="retry"))
        return CREATED

    answer = call(guard, OPERATION, frozen, policy=Policy(on_unknown="retry"))
    assert (answer.outcome, answer.how) == (winner, "replayed")
    assert "fenced" in kinds(events)


def test_a_late_owner_is_fenced_while_the_other_runs(guard, call) -> None:
    clock = Clock(guard.store)

    def frozen(op: Op) -> Outcome:
        clock.advance(31)
        run(guard.store.claim(OPERATION, lease=30))
        return CREATED

    with pytest.raises(Fenced):
        call(guard, OPERATION, frozen)


def test_a_late_owner_that_fails_disturbs_nobody(guard, call, events) -> None:
    clock = Clock(guard.store)

    def frozen(op: Op) -> Outcome:
        clock.advance(31)
        run(guard.store.claim(OPERATION, lease=30))
        raise OSError("too late")

    with pytest.raises(OSError, match="too late"):
        call(guard, OPERATION, frozen)
    assert guard.find(*OPERATION.id).state == "running"
    assert events[-1].kind == "failed"


def test_a_lost_lease_is_noticed_by_the_heartbeat(guard, events) -> None:
    def slowly(op: Op) -> Outcome:
        run(guard.store.hold(op.lease))
        time.sleep(0.3)
        return CREATED

    with pytest.raises(Fenced):
        guard.run(OPERATION, slowly, policy=Policy(lease=0.3))
    assert "fenced" in kinds(events)


def test_renewal_that_meets_its_own_settle_emits_no_fenced(guard, events) -> None:
    """It was under way when the performer ended, and came second."""
    sent, settled, plain = threading.Event(), threading.Event(), guard.store.renew

    def slowly(held: Lease, *, lease: float) -> Plan[Lease]:
        sent.set()
        yield Call(lambda: settled.wait(20))
        return (yield from plain(held, lease=lease))

    def perform(op: Op) -> Outcome:
        assert sent.wait(20)
        return CREATED

    guard.store.renew = slowly
    guard.run(OPERATION, perform, policy=Policy(lease=0.3))
    settled.set()
    guard.heartbeat.close()  # which waits for the renewal
    assert kinds(events) == ["claimed", "settled"]


# Two clocks


def test_an_expired_outcome_runs_as_new(guard, call) -> None:
    effect = Effect()
    policy = Policy(ttl=60)
    call(guard, OPERATION, effect, policy=policy)
    Clock(guard.store).advance(61)
    guard.cache.drop(OPERATION.id)
    assert call(guard, OPERATION, effect, policy=policy).how == "stored"
    assert effect.count == 2


def test_a_retention_from_the_last_access_moves_with_it(guard, call) -> None:
    effect = Effect()
    policy = Policy(ttl=60, ttl_from="access")
    for _ in range(4):
        call(guard, OPERATION, effect, policy=policy)
        Clock(guard.store).advance(50)
    assert effect.count == 1


def test_an_expired_outcome_may_be_kept_for_the_audit(guard, call) -> None:
    policy = Policy(ttl=60, expired="keep")
    call(guard, OPERATION, Effect(), policy=policy)
    Clock(guard.store).advance(61)
    assert guard.purge() == 1
    assert guard.stats().archived == 1


def test_a_fingerprint_of_an_older_algorithm_is_the_same_request(guard, call) -> None:
    upgraded = Operation(*OPERATION.id, "c2:zz", matches=lambda stored: stored == "c1:aa")
    with pytest.raises(OSError):
        call(guard, OPERATION, Effect([OSError()]))
    effect = Effect()
    assert call(guard, upgraded, effect).attempt == 2
    assert call(guard, upgraded, effect).how == "replayed"
    assert call(guard, OPERATION, effect).how == "replayed"


def test_key_reused_between_two_claims_is_checked_again(guard, call, monkeypatch) -> None:
    """Rule 6: freed, deleted and used for something else just before it is taken over under its old fingerprint."""
    with pytest.raises(OSError):
        call(guard, OPERATION, Effect([OSError()]))
    upgraded = msgspec.structs.replace(OPERATION, fingerprint="c2:bb", matches=lambda stored: stored == "c1:aa")
    stolen = msgspec.structs.replace(OPERATION, fingerprint="c1:other")
    claim, looks = guard.store.claim, []

    def claim_late(operation: Operation, *, lease: float, request: bytes = b""):
        looks.append(operation.fingerprint)
        if len(looks) == 2:
            run(guard.store.delete(*OPERATION.id))
            lease_of_another = run(claim(stolen, lease=lease))
            run(guard.store.settle(lease_of_another, Outcome("response", 200, (), b"another's"), retention=60.0))
        return (yield from claim(operation, lease=lease))

    monkeypatch.setattr(guard.store, "claim", claim_late)
    effect = Effect()
    with pytest.raises(PayloadMismatch):
        call(guard, upgraded, effect)
    assert looks == ["c2:bb", "c1:aa"]
    assert effect.count == 0


# The store fails


class Failing:
    """The memory store, with verbs that fail."""

    def __init__(self, store: Any, *verbs: str, error: Exception | None = None) -> None:
        self._store = store
        self._verbs = verbs
        self._error = error or StoreUnavailable("down")

    def __getattr__(self, name: str) -> Any:
        if name in self._verbs:
            return self._fail
        return getattr(self._store, name)

    def _fail(self, *args: Any, **options: Any) -> Any:
        raise self._error
        yield


def test_a_store_that_is_down_lets_nothing_run(guard, call, events) -> None:
    effect = Effect()
    guard.store = Failing(guard.store, "claim")
    with pytest.raises(StoreError):
        call(guard, OPERATION, effect)
    assert effect.count == 0
    assert events[-1].kind == "failed"


REFUSED_LOGIN = ConfigurationError("the server refuses the login")


@pytest.mark.parametrize("error", [None, REFUSED_LOGIN])
def test_store_failure_at_settle_still_answers_the_caller(guard, call, events, error) -> None:
    """The response is given, marked unstored, and the record stays running."""
    real = guard.store
    guard.store = Failing(real, "settle", error=error)
    answer = call(guard, OPERATION, Effect())
    assert (answer.how, answer.outcome) == ("unstored", CREATED)
    assert run(real.find(*OPERATION.id)).state == "running"
    assert events[-1].kind == "unstored"


@pytest.mark.parametrize("error", [None, REFUSED_LOGIN])
def test_store_failure_at_release_does_not_hide_the_error(guard, call, events, error) -> None:
    guard.store = Failing(guard.store, "release", error=error)
    with pytest.raises(OSError, match="mine"):
        call(guard, OPERATION, Effect([OSError("mine")]))
    assert events[-1].kind == "failed"


def test_a_store_that_fails_at_renewing_is_asked_again(guard, events) -> None:
    guard.store = Failing(guard.store, "renew")

    def slowly(op: Op) -> Outcome:
        time.sleep(0.25)
        return CREATED

    assert guard.run(OPERATION, slowly, policy=Policy(lease=0.3)).how == "stored"
    assert kinds(events).count("failed") >= 2


def test_a_settled_record_without_an_outcome_is_a_tombstone(guard, call) -> None:
    """A record that says less than it should has a defined answer."""
    call(guard, OPERATION, Effect())
    guard.store._records[OPERATION.id] = msgspec.structs.replace(guard.find(*OPERATION.id), outcome=None)
    guard.cache.drop(OPERATION.id)
    with pytest.raises(OutcomeNotKept):
        call(guard, OPERATION, Effect())


async def test_closing_ends_the_heartbeat() -> None:
    before = set(threading.enumerate())  # other guards' threads may still be about
    guard = Guard("memory://")
    await asyncio.to_thread(guard.run, OPERATION, Effect())
    await guard.aclose()
    assert not [each for each in set(threading.enumerate()) - before if each.name == "oncemore-heartbeat"]


def test_unsupported_effect_level_is_refused(guard, call) -> None:
    performed = Effect()
    with pytest.raises(ConfigurationError, match="transaction"):
        call(guard, OPERATION, performed, policy=Policy(effect="transaction"))
    assert performed.count == 0


# What cannot be written down


class Marked(str):
    """A text that is more than one, as a template engine has them."""

    __slots__ = ()


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome("response", 201, (("location", Marked("/refunds/1")),)),
        Outcome("response", 201, (("location", "\ud800"),)),
        Outcome("response", 201, body="no bytes"),  # type: ignore[arg-type]
    ],
)
def test_unwritable_outcome_is_not_performed_again(call, tmp_path, outcome: Outcome) -> None:
    """The effect has happened: its caller gets the outcome, and a duplicate is told that it was not kept."""
    guard = Guard(f"sqlite:///{tmp_path}/once.db", policy=Policy(on_unknown="retry"))
    effect = Effect([outcome])
    first = call(guard, OPERATION, effect)
    assert (first.outcome, first.how) == (outcome, "unstored")
    guard.store.shift = 3600.0  # any lease is over
    for each in (guard, Guard(guard.store)):
        with pytest.raises(OutcomeNotKept) as refused:
            call(each, OPERATION, effect)
        assert "Error" not in refused.value.detail, "the reason is in the log, not in a client's answer"
    assert effect.count == 1


def test_late_owner_with_unwritable_outcome_answers_with_the_stored(call, tmp_path) -> None:
    guard = Guard(f"sqlite:///{tmp_path}/once.db", policy=Policy(on_unknown="retry"))

    def late(op: Op) -> Outcome:
        guard.store.shift += 3600.0
        run(Guard(guard.store).guarded(OPERATION, lambda op: CREATED, guard.policy))
        return Outcome("response", 201, (("location", Marked("/refunds/2")),))

    answer = call(guard, OPERATION, late)
    assert (answer.outcome, answer.how) == (CREATED, "replayed")


def test_store_that_refuses_the_tombstone_is_reported(guard, call, monkeypatch) -> None:
    def settle(*args: Any, **kwargs: Any) -> Plan[None]:
        raise RuntimeError("broken")

    monkeypatch.setattr(guard.store, "settle", settle)
    with pytest.raises(RuntimeError, match="broken"):
        call(guard, OPERATION, Effect())


def test_settings_in_the_policys_place_are_told() -> None:
    """The rules of a middleware have their own policies, so the mistake would go unnoticed."""
    with pytest.raises(ConfigurationError, match="policy is a dict: make a Policy"):
        Guard("memory://", policy={"ttl": "7d"})  # type: ignore[arg-type]


async def test_guard_is_a_context_manager_for_threads_and_loops(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/context.db?thread=always"
    with Guard(url) as guard:
        assert guard.run(Operation("s", "k"), lambda op: 1).value == 1
    async with Guard(url) as again:
        assert (await again.arun(Operation("s", "k"), lambda op: 2)).how == "replayed"
    assert [thread.name for thread in threading.enumerate() if "context.db" in thread.name] == []


def new_performer(wrap: Any = lambda kind: kind) -> tuple[type, Any]:
    """A class, and a performer whose return annotation names it; both are new, and called as the last ones."""

    @dataclass
    class Order:
        number: int

    def perform(op: Op) -> wrap(Order):
        return Order(7)

    return Order, perform


def test_return_annotation_is_evaluated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated: list[Any] = []
    evaluate = guard_module.annotated_classes
    monkeypatch.setattr(guard_module, "annotated_classes", lambda *names: evaluated.append(names) or evaluate(*names))
    kind, perform = new_performer()
    with Guard("memory://") as guard:
        for _ in range(3):
            assert guard.run(Operation("s", "k"), perform).value == kind(7)
    assert len(evaluated) == 1


@pytest.mark.parametrize("wrap", [lambda kind: kind, lambda kind: list[kind] | kind, lambda kind: Annotated[kind, []]])
def test_return_annotations_of_equal_names_are_kept_apart(wrap: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard_module, "MOST_WITH_TYPES", 2)
    with Guard("memory://", cache=0) as guard:
        for number in range(4):
            kind, perform = new_performer(wrap)
            values = [guard.run(Operation("s", str(number)), perform).value for _ in range(2)]
            assert [type(value) for value in values] == [kind, kind]


def test_classes_are_named_by_partials_and_callable_objects() -> None:
    kind, perform = new_performer()

    class Performer:
        __call__ = staticmethod(perform)

    with Guard("memory://", cache=0) as guard:
        for number, each in enumerate([functools.partial(perform), Performer()]):
            values = [guard.run(Operation("s", str(number)), each).value for _ in range(2)]
            assert values == [kind(7), kind(7)]
