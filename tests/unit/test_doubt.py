"""`doubt`: after a time-out the outcome is unknown, so it is handled as after a crash."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oncemore import Guard, Op, Operation, Outcome, Policy, Resolution, once
from oncemore._contract.contract import Contract
from oncemore._contract.rule import Rule
from oncemore._ledger.events import Event
from oncemore._runtime.plan import run
from oncemore.errors import ConfigurationError, Fenced, InProgress, StoreUnavailable, UnknownOutcome
from oncemore.testing.clock import Clock

from .test_guard import Failing, kinds

ASKED = Operation("customer-1", "k", "same", "payments.create")
BAD_GATEWAY = Outcome("response", 502, (), b"upstream closed the connection")


class Provider:
    """Charges each time that it is asked, and then raises *error*."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.charges = 0

    def __call__(self, op: Op) -> Any:
        self.charges += 1
        if self.error is not None:
            raise self.error
        return "receipt"


def test_timeout_in_doubt_is_held_and_its_caller_gets_it(guard: Guard, call: Any, events: list[Event]) -> None:
    provider, policy = Provider(TimeoutError("read")), Policy(doubt=(TimeoutError,))
    with pytest.raises(TimeoutError, match="read"):
        call(guard, ASKED, provider, policy=policy)
    for _ in range(2):
        with pytest.raises(UnknownOutcome, match=r"broke off \(in doubt after TimeoutError\)"):
            call(guard, ASKED, provider, policy=policy)
    assert provider.charges == 1
    assert guard.find(*ASKED.id).state == "held"
    assert "held" in kinds(events)


@pytest.mark.parametrize(("on_unknown", "answers"), [("retry", 2), ("resolve", 1)])
def test_doubt_is_decided_by_on_unknown(guard: Guard, call: Any, on_unknown: Any, answers: int) -> None:
    policy = Policy(doubt=(TimeoutError,), on_unknown=on_unknown, resolver=lambda op: Resolution.settled("receipt"))
    provider = Provider(TimeoutError())
    with pytest.raises(TimeoutError):
        call(guard, ASKED, provider, policy=policy)
    provider.error = None
    assert call(guard, ASKED, provider, policy=policy).outcome.body == b"\xa7receipt"
    assert provider.charges == answers


def test_unknown_outcome_raised_by_the_performer_is_in_doubt(guard: Guard, call: Any) -> None:
    provider = Provider(UnknownOutcome("The bank did not answer"))
    with pytest.raises(UnknownOutcome, match="did not answer"):
        call(guard, ASKED, provider)
    with pytest.raises(UnknownOutcome, match="in doubt after UnknownOutcome"):
        call(guard, ASKED, provider)
    assert provider.charges == 1


def test_exception_that_is_not_in_doubt_frees_the_key(guard: Guard, call: Any) -> None:
    provider, policy = Provider(ValueError()), Policy(doubt=(TimeoutError, 502))
    for _ in range(2):
        with pytest.raises(ValueError):
            call(guard, ASKED, provider, policy=policy)
    assert provider.charges == 2


async def test_once_takes_doubt_beside_errors(guard: Guard) -> None:
    """The nearest class counts: TimeoutError is an OSError, and ConnectionError is one as well."""
    raised: list[Exception] = []

    @once(guard, key="{order}", errors=(OSError,), doubt=(TimeoutError,))
    async def charge(order: str) -> None:
        raise raised[-1]

    raised.append(ConnectionRefusedError("declined"))
    for _ in range(2):
        with pytest.raises(ConnectionRefusedError, match="declined"):
            await charge("A-1")
        raised.append(AssertionError("not called again"))
    raised.append(TimeoutError("read"))
    with pytest.raises(TimeoutError, match="read"):
        await charge("A-2")
    with pytest.raises(UnknownOutcome):
        await charge("A-2")

    @once(guard, key="{order}", errors=(TimeoutError,), doubt=(Exception,))
    def refund(order: str) -> None:
        raise TimeoutError("an outcome here")

    for _ in range(2):
        with pytest.raises(TimeoutError, match="an outcome here"):
            refund("A-1")


@pytest.mark.parametrize(
    ("on_unknown", "how", "state"),
    [("hold", "unknown", "held"), ("retry", "released", "released"), ("resolve", "unknown", "running")],
)
def test_status_in_doubt_is_given_to_its_caller_only(guard: Guard, on_unknown: Any, how: str, state: str) -> None:
    policy = Policy(doubt=(502,), keep="all", on_unknown=on_unknown, resolver=lambda op: Resolution.unknown())
    answer = guard.run(ASKED, lambda op: BAD_GATEWAY, policy=policy)
    assert (answer.how, answer.outcome) == (how, BAD_GATEWAY)
    record = guard.find(*ASKED.id)
    assert record is not None
    assert record.state == state
    assert record.note == ("in doubt after status 502" if state == "held" else "")


def test_error_behind_a_response_is_in_doubt(guard: Guard) -> None:
    attempt = guard.new_attempt(ASKED, Policy(doubt=(TimeoutError,)))
    run(attempt.begin())
    answer = run(attempt.settle(Outcome("response", 500), TimeoutError()))
    assert (answer.how, answer.outcome.status) == ("unknown", 500)
    assert run(attempt.fail(TimeoutError())) is None
    assert guard.find(*ASKED.id).note == "in doubt after TimeoutError"  # type: ignore[union-attr]


def test_unique_operation_in_doubt_is_so_under_every_key(guard: Guard) -> None:
    policy, provider = Policy(doubt=(TimeoutError,)), Provider(TimeoutError())
    with pytest.raises(TimeoutError):
        guard.run(Operation("s", "k1", name="pay", unique="order-7"), provider, policy=policy)
    for key in ("k1", "k2"):
        with pytest.raises(UnknownOutcome):
            guard.run(Operation("s", key, name="pay", unique="order-7"), provider, policy=policy)
    assert provider.charges == 1


def test_doubt_of_a_late_owner_changes_nothing(guard: Guard) -> None:
    policy = Policy(doubt=(TimeoutError,))
    attempt = guard.new_attempt(ASKED, policy)
    run(attempt.begin())
    Clock(guard.store).advance(31)
    assert guard.run(ASKED, Provider(), policy=Policy(on_unknown="retry")).how == "stored"
    attempt.renewal.lost = True
    run(attempt.fail(TimeoutError()))
    assert guard.run(ASKED, Provider(), policy=policy).how == "replayed"


def test_doubt_that_cannot_be_recorded_lapses(guard: Guard, events: list[Event]) -> None:
    store = guard.store
    guard.store = Failing(store, "hold")
    with pytest.raises(TimeoutError):
        guard.run(ASKED, Provider(TimeoutError()), policy=Policy(doubt=(TimeoutError,)))
    assert (events[-1].kind, events[-1].code) == ("failed", StoreUnavailable.code)
    guard.store = store
    with pytest.raises(InProgress):
        guard.run(ASKED, Provider(), policy=Policy(in_flight="conflict"))
    Clock(store).advance(31)
    with pytest.raises(UnknownOutcome):
        guard.run(ASKED, Provider(), policy=Policy(in_flight="conflict"))


def test_transaction_is_rolled_back_and_never_in_doubt(tmp_path: Path) -> None:
    guard, policy = Guard(f"sqlite:///{tmp_path}/once.db"), Policy(effect="transaction", doubt=(TimeoutError, 502))
    for error in (TimeoutError("read"), UnknownOutcome("The bank did not answer")):
        with pytest.raises(type(error)):
            guard.run(ASKED, Provider(error), policy=policy)
    assert guard.run(ASKED, lambda op: BAD_GATEWAY, policy=policy).how == "released"
    kept = policy.but(errors=(TimeoutError,))
    assert isinstance(guard.run(ASKED, Provider(TimeoutError("read")), policy=kept).value, TimeoutError)
    assert guard.run(ASKED, Provider(), policy=kept).how == "replayed"
    guard.close()


# Steps


def paying(charge: Callable[[str], Any], **settings: Any) -> Callable[[Op], Any]:
    return lambda op: op.step("charge", charge, retry=3, **settings)


class KeyedProvider(Provider):
    """A provider that is called with a key."""

    def __call__(self, key: Any) -> Any:
        return super().__call__(key)


def test_step_in_doubt_is_held_and_not_retried(guard: Guard) -> None:
    charge, policy = KeyedProvider(TimeoutError("read")), Policy(effect="steps")
    perform = paying(charge, doubt=(TimeoutError,))
    with pytest.raises(TimeoutError, match="read"):
        guard.run(ASKED, perform, policy=policy)
    with pytest.raises(UnknownOutcome):
        guard.run(ASKED, perform, policy=policy)
    assert charge.charges == 1
    assert guard.find(*ASKED.id).state == "running", "unfinished: it goes on when its step is resolved"  # type: ignore[union-attr]


def test_step_in_doubt_asks_its_resolver(guard: Guard) -> None:
    charge = KeyedProvider(TimeoutError("read"))
    perform = paying(charge, doubt=(TimeoutError,), resolver=lambda key: Resolution.settled("receipt"))
    assert guard.run(ASKED, perform, policy=Policy(effect="steps")).value == "receipt"
    assert charge.charges == 1


def test_steps_take_the_doubt_of_their_policy(guard: Guard) -> None:
    """Its errors are no outcome either, so that nothing is undone while a step is in doubt."""
    charge, undone = KeyedProvider(TimeoutError("read")), list[str]()
    policy = Policy(effect="steps", doubt=(TimeoutError,), errors=(OSError,))

    def pay(op: Op) -> Any:
        op.step("reserve", lambda: "book", undo=undone.append)
        return op.step("charge", charge, on_unknown="hold")

    with pytest.raises(TimeoutError):
        guard.run(ASKED, pay, policy=policy)
    with pytest.raises(UnknownOutcome):
        guard.run(ASKED, pay, policy=policy)
    assert (charge.charges, undone) == (1, [])


def test_step_in_doubt_is_sent_again_with_on_unknown_retry(guard: Guard) -> None:
    charge = KeyedProvider(TimeoutError("read"))
    perform = paying(charge, doubt=(TimeoutError,), on_unknown="retry")
    with pytest.raises(TimeoutError):
        guard.run(ASKED, perform, policy=Policy(effect="steps"))
    assert charge.charges == 3


def test_database_step_is_rolled_back_and_never_in_doubt(tmp_path: Path) -> None:
    guard, errors = Guard(f"sqlite:///{tmp_path}/once.db"), [TimeoutError("read")]

    def book(connection: Any) -> str:
        if errors:
            raise errors.pop()
        return "booked"

    def perform(op: Op) -> Any:
        return op.step("book", book, doubt=(TimeoutError,))

    with pytest.raises(TimeoutError):
        guard.run(ASKED, perform, policy=Policy(effect="steps"))
    assert guard.run(ASKED, perform, policy=Policy(effect="steps")).value == "booked"
    guard.close()


def test_response_in_doubt_leaves_steps_unfinished(guard: Guard) -> None:
    policy, undone = Policy(effect="steps", doubt=(502,), keep="all"), list[str]()
    replies = [BAD_GATEWAY, Outcome("response", 201)]

    def pay(op: Op) -> Outcome:
        op.step("reserve", lambda: "book", undo=undone.append)
        return replies.pop(0)

    assert guard.run(ASKED, pay, policy=policy).how == "released"
    assert guard.run(ASKED, pay, policy=policy).outcome.status == 201
    assert undone == []


# Settings


@pytest.mark.parametrize("doubt", [TimeoutError, [TimeoutError], (KeyboardInterrupt,), (200,), (True,), ("504",)])
def test_doubt_that_is_no_exception_or_status_is_refused(doubt: Any) -> None:
    with pytest.raises(ConfigurationError, match="is not a tuple of exceptions and statuses"):
        Policy(doubt=doubt)


def test_contract_names_statuses_and_classes_in_doubt(tmp_path: Path) -> None:
    file = tmp_path / "oncemore.toml"
    file.write_text('[[rule]]\nmatch = "POST /pay"\ndoubt = [502, 504, "builtins:TimeoutError"]\n')
    rule = Contract.load(file).rules[0]
    assert rule.policy.doubt == (502, 504, TimeoutError)
    assert rule.row()["doubt"] == [502, 504, "builtins:TimeoutError"]
    assert Rule("POST /pay", doubt=(Fenced, 503)).policy.doubt == (Fenced, 503)
    assert Rule("POST /pay").policy.doubt == ()


@pytest.mark.parametrize(
    ("written", "problem"),
    [(502, "not a list"), (["oncemore:Guard"], "neither a status"), ([700], "neither a status"), (["no:such"], "no")],
)
def test_contract_refuses_doubt_that_it_cannot_read(written: Any, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=f"doubt: .*{problem}"):
        Rule("POST /pay", doubt=written)
