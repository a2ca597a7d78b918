"""The plan of a transaction that is interrupted between two effects; on SQLite, because it needs no server."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from oncemore import Guard, Op, Operation, Outcome, Policy, Resolution, Rule, connect
from oncemore._ledger.store import Store
from oncemore._ledger.transactions import Again, Do, Stale
from oncemore._runtime.plan import Plan, run
from oncemore.encryption import Seal
from oncemore.errors import ConfigurationError, PayloadMismatch, StoreUnavailable, TransactionEnded

POLICY = Policy(effect="transaction", reruns=1)
ASKED = Operation("customer-1", "k", "same", "refunds.create")


@pytest.fixture
def guard(tmp_path: Path) -> Any:
    guard = Guard(f"sqlite:///{tmp_path}/once.db", policy=POLICY)
    yield guard
    guard.close()


def failing(op: Op) -> None:
    raise RuntimeError("no luck")


@pytest.mark.parametrize("perform", [lambda op: "done", failing], ids=["performs", "fails"])
@pytest.mark.parametrize("effects", range(14))
def test_abandoned_plan_leaves_the_key_free(guard: Guard, perform: Callable[[Op], Any], effects: int) -> None:
    """A loop that was shut down drops its plans wherever they are."""
    plan = guard.guarded(ASKED, perform, POLICY)
    try:
        effect = next(plan)
        for _ in range(effects):
            try:
                result = effect.run()
            except RuntimeError as error:
                effect = plan.throw(error)
            else:
                effect = plan.send(result)
    except (StopIteration, RuntimeError):
        pass
    plan.close()
    assert guard.run(ASKED, lambda op: "done").outcome.kind == "value"


def test_final_refusal_leaves_the_unique_name_free(guard: Guard) -> None:
    first = Operation("customer-1", "k1", unique="order-1")
    assert guard.run(first, lambda op: Outcome("response", 404)).how == "stored"
    assert guard.run(Operation("customer-1", "k2", unique="order-1"), lambda op: "done").value == "done"


def test_error_outcome_leaves_the_unique_name_free(guard: Guard) -> None:
    policy = dataclasses.replace(POLICY, errors=(RuntimeError,))
    first = guard.run(Operation("customer-1", "k1", unique="order-1"), failing, policy=policy)
    assert (first.how, first.outcome.kind) == ("stored", "error")
    assert guard.run(Operation("customer-1", "k2", unique="order-1"), lambda op: "done").value == "done"


def test_performers_error_is_raised_though_release_fails(guard: Guard) -> None:
    """The ledger's own trouble must not take its place."""

    lender: Any = guard.store.lender
    opens = lender.open

    def closed() -> Plan[Any]:
        raise ConfigurationError("closed")
        yield

    def last(op: Op) -> None:
        lender.open = closed
        raise RuntimeError("no luck")

    with pytest.raises(RuntimeError, match="no luck"):
        guard.run(ASKED, last)
    lender.open = opens
    assert guard.run(ASKED, lambda op: "done").how == "stored"


def test_failure_under_older_fingerprint_is_taken_over(guard: Guard) -> None:
    with pytest.raises(RuntimeError):
        guard.run(Operation("customer-1", "k", "old"), failing)
    newer = Operation("customer-1", "k", "new", matches=lambda stored: stored == "old")
    assert guard.run(newer, lambda op: "done").how == "stored"


class Meanwhile:
    """A store to which something happens just before it is asked for a lapsed record."""

    def __init__(self, inner: Store, happens: Callable[[], object]) -> None:
        self.inner = inner
        self.happens = happens

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def claim(self, operation: Operation, *, lease: float, **options: Any) -> Any:
        self.happens()
        return self.inner.claim(operation, lease=lease, **options)


@pytest.mark.parametrize(
    ("resolution", "how"), [(Resolution.settled("it happened"), "replayed"), (Resolution.released(), "stored")]
)
def test_a_doubt_that_someone_else_resolves_meanwhile_is_none(guard: Guard, resolution: Resolution, how: str) -> None:
    run(guard.store.claim(ASKED, lease=0.0))
    store = guard.store
    guard.store = cast(
        "Store", Meanwhile(store, lambda: run(store.resolve(*ASKED.id, resolution.outcome, retention=60.0)))
    )
    assert guard.run(ASKED, lambda op: "done").how == how


class Refusing:
    """A lender whose database refuses whatever comes after the first transaction."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.opened = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def open(self) -> Plan[Any]:
        self.opened += 1
        transaction = yield from self.inner.open()
        if self.opened > 1:
            transaction.begin = refused
        return transaction


def refused(*_: object, **__: object) -> Plan[None]:
    raise Again("a deadlock")
    yield


def test_a_failure_that_cannot_be_noted_is_still_told(guard: Guard) -> None:
    lender = Refusing(guard.store.lender)
    guard.store.lender = lender  # type: ignore[misc]
    with pytest.raises(RuntimeError, match="no luck"):
        guard.run(ASKED, failing)
    assert lender.opened == 3  # the operation, and two tries to note it


class Dead:
    """A lender whose first connections, from the *first* on, have died with their server; each takes *seconds* to say so."""

    def __init__(self, inner: Any, clock: FakeClock, *, first: int = 0, dead: int = 1000, seconds: float = 0.0) -> None:
        self.inner = inner
        self.clock = clock
        self.dead = range(first, first + dead)
        self.seconds = seconds
        self.opened = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def open(self) -> Plan[Any]:
        transaction = yield from self.inner.open()
        if self.opened in self.dead:
            transaction.begin = self.begin
        self.opened += 1
        return transaction

    def begin(self, *_: object, **__: object) -> Plan[None]:
        self.clock.now += self.seconds
        raise Stale("the connection was stale")
        yield


class FakeClock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def time(self) -> float:
        return self.now

    monotonic = time


@pytest.fixture
def clock(guard: Guard) -> FakeClock:
    guard.clock = clock = FakeClock()  # type: ignore[assignment]
    return clock


@pytest.mark.parametrize(("seconds", "wait", "tried"), [(0.0, None, 65), (0.5, None, 8), (0.5, 1.0, 3)])
def test_server_is_given_up_if_every_connection_dies(
    guard: Guard, clock: FakeClock, seconds: float, wait: float | None, tried: int
) -> None:
    """It is no pool that is emptied, where that has no end, takes long, or longer than the caller waits."""
    lender = guard.store.lender = Dead(guard.store.lender, clock, seconds=seconds)  # type: ignore[misc]
    with pytest.raises(StoreUnavailable, match="2 times: the connection was stale"):
        guard.run(ASKED, lambda op: "done", wait=wait)
    assert lender.opened == tried


def test_failure_is_noted_after_all_connections_died(guard: Guard, clock: FakeClock) -> None:
    """Else another payload could have the key."""
    guard.store.lender = Dead(guard.store.lender, clock, first=1, dead=9)  # type: ignore[misc]
    with pytest.raises(RuntimeError, match="no luck"):
        guard.run(ASKED, failing)
    with pytest.raises(PayloadMismatch):
        guard.run(Operation("customer-1", "k", "another"), lambda op: "done")


def test_without_a_transaction_there_is_no_session() -> None:
    with pytest.raises(ConfigurationError, match=r"op\.session\(\)"):
        Guard("memory://").run(ASKED, lambda op: op.session())


def test_a_driver_that_can_only_be_awaited_says_so() -> None:
    async def awaited() -> None: ...

    with pytest.raises(ConfigurationError, match="await the call"):
        Do(None, awaited).run()


async def test_cancelled_caller_waits_for_its_connections_thread() -> None:
    done: list[str] = []

    def work() -> None:
        time.sleep(0.2)
        done.append("work")

    task = asyncio.ensure_future(Do(work, None).arun())
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == ["work"]


def test_what_is_no_ledger_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="is no ledger"):
        connect(object())


@pytest.mark.parametrize("reruns", [-1, 1.5, True])
def test_reruns_are_a_number_of_times(reruns: Any) -> None:
    with pytest.raises(ConfigurationError, match="not a number of times"):
        Policy(reruns=reruns)


def test_rule_sets_reruns_and_refuses_streams() -> None:
    assert Rule("POST /refunds", effect="steps", reruns=0).policy.reruns == 0
    with pytest.raises(ConfigurationError, match="not a number of times"):
        Rule("POST /refunds", reruns=-1)
    with pytest.raises(ConfigurationError, match="streams"):
        Rule("POST /refunds", effect="transaction", streams="release")


def test_a_failure_in_a_sealed_ledger_is_noted_as_well(tmp_path: Path) -> None:
    guard = Guard(f"sqlite:///{tmp_path}/once.db", policy=POLICY, seal=Seal([b"k" * 32]))
    with pytest.raises(RuntimeError, match="no luck"):
        guard.run(ASKED, failing)
    found = guard.find(*ASKED.id)
    assert found is not None
    assert found.state == "released"
    guard.close()


def test_connection_is_gone_after_the_commit(guard: Guard) -> None:
    kept: list[Op] = []
    guard.run(ASKED, lambda op: kept.append(op))
    with pytest.raises(TransactionEnded):
        _ = kept[0].connection
    with pytest.raises(TransactionEnded):
        run(kept[0].borrowed("the outbox").execute())
