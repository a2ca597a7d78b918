"""The operator's view: every verb, blocking and awaited, does the same to the ledger and never performs anything."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from oncemore import Guard, Operation, Outcome, Resolution
from oncemore._ledger.store import Filter, Store
from oncemore._runtime.plan import run
from oncemore.errors import ConfigurationError, InProgress, NotFound, NotResolvable
from oncemore.stores.memory import MemoryStore
from oncemore.testing.clock import Clock

Verb = Callable[..., Awaitable[Any]]


@pytest.fixture
def guard() -> Guard:
    return Guard(MemoryStore())


@pytest.fixture(params=["", "a"], ids=["blocking", "awaited"])
def verb(request: pytest.FixtureRequest, guard: Guard) -> Verb:
    """Calls a verb of the ledger by name."""

    async def call(name: str, *args: Any, **options: Any) -> Any:
        result = getattr(guard, request.param + name)(*args, **options)
        return await result if request.param else result

    return call


def perform(guard: Guard, key: str, value: Any = "done") -> None:
    guard.run(Operation("s", key, name="jobs.run"), lambda op: value)


def hold(guard: Guard, key: str) -> None:
    """An operation whose outcome is unknown."""
    lease = run(guard.store.claim(Operation("s", key), lease=30.0))
    run(guard.store.hold(lease, note="power cut"))  # type: ignore[arg-type]


async def test_a_record_is_found_and_a_stranger_is_not(guard: Guard, verb: Verb) -> None:
    perform(guard, "k")
    record = await verb("find", "s", "k")
    assert (record.key, record.state, record.name) == ("k", "settled", "jobs.run")
    assert await verb("find", "s", "stranger") is None
    assert await verb("find", "another scope", "k") is None


async def test_records_are_listed_page_by_page(guard: Guard, verb: Verb) -> None:
    for number in range(5):
        perform(guard, str(number))
    hold(guard, "held")
    pages, cursor = [], None
    while not pages or cursor:
        page = await verb("list", Filter(state="settled"), limit=2, cursor=cursor)
        pages.append([record.key for record in page.records])
        cursor = page.cursor
    assert pages == [["0", "1"], ["2", "3"], ["4"]]
    assert len((await verb("list")).records) == 6


@pytest.mark.parametrize("state", ["hold", "lapsed", ""])
def test_unknown_state_in_filter_is_refused(state: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=r"choose one of 'running', 'settled', 'released', 'held', or lapsed=True"
    ):
        Filter(state=state)


async def test_what_happened_is_settled_and_replayed_from_then_on(guard: Guard, verb: Verb) -> None:
    hold(guard, "k")
    record = await verb("resolve", "s", "k", Resolution.settled({"id": 1}), retention=60.0, note="seen at the bank")
    assert (record.state, record.note) == ("settled", "seen at the bank")
    answer = guard.run(Operation("s", "k"), lambda op: pytest.fail("performed again"))
    assert answer.how == "replayed"


async def test_what_did_not_happen_is_released_and_performed(guard: Guard, verb: Verb) -> None:
    hold(guard, "k")
    assert (await verb("resolve", "s", "k", Resolution.released())).state == "released"
    assert guard.run(Operation("s", "k"), lambda op: Outcome()).how == "stored"


async def test_to_resolve_is_to_decide(guard: Guard, verb: Verb) -> None:
    hold(guard, "k")
    with pytest.raises(ConfigurationError, match="decides nothing"):
        await verb("resolve", "s", "k", Resolution.unknown())
    assert (await verb("find", "s", "k")).state == "held"


@pytest.mark.parametrize(("key", "refusal"), [("done", NotResolvable), ("stranger", NotFound)])
async def test_only_an_unknown_outcome_is_resolved(
    guard: Guard, verb: Verb, key: str, refusal: type[Exception]
) -> None:
    perform(guard, "done")
    with pytest.raises(refusal):
        await verb("resolve", "s", key, Resolution.released())


async def test_delete_frees_a_key_and_refuses_a_running_one(guard: Guard, verb: Verb) -> None:
    perform(guard, "k", "first")
    assert await verb("delete", "s", "k") is True
    assert await verb("delete", "s", "k") is False
    assert guard.run(Operation("s", "k"), lambda op: "second").value == "second"
    run(guard.store.claim(Operation("s", "running"), lease=30.0))
    with pytest.raises(InProgress):
        await verb("delete", "s", "running")


async def test_purge_deletes_expired_in_batches_and_reports_totals(guard: Guard, verb: Verb) -> None:
    for number in range(7):
        perform(guard, str(number))
    hold(guard, "held")
    run(guard.store.claim(Operation("s", "running"), lease=30.0))
    assert await verb("purge") == 0
    Clock(guard.store).advance(guard.policy.ttl + 1)
    perform(guard, "fresh")
    totals: list[int] = []
    assert await verb("purge", batch=3, progress=totals.append) == 7
    assert totals == [3, 6, 7]
    assert {record.key for record in (await verb("list")).records} == {"held", "running", "fresh"}


async def test_purge_needs_nobody_to_watch(guard: Guard, verb: Verb) -> None:
    perform(guard, "k")
    Clock(guard.store).advance(guard.policy.ttl + 1)
    assert [await verb("purge"), await verb("purge")] == [1, 0]


async def test_stats_count_records_by_state(guard: Guard, verb: Verb) -> None:
    perform(guard, "a")
    perform(guard, "b")
    hold(guard, "c")
    stats = await verb("stats")
    assert (stats.settled, stats.held, stats.running) == (2, 1, 0)


async def test_close_closes_the_store(monkeypatch: pytest.MonkeyPatch, guard: Guard, verb: Verb) -> None:
    closed: list[str] = []

    async def aclose() -> None:
        closed.append("store")

    monkeypatch.setattr(guard.store, "close", lambda: closed.append("store"))
    monkeypatch.setattr(guard.store, "aclose", aclose)
    await verb("close")
    assert closed == ["store"]


def test_a_guard_and_its_ledger_share_the_store() -> None:
    store: Store = MemoryStore()
    assert Guard(store).store is store


@pytest.mark.parametrize("retention", [-1.0, float("nan"), float("inf"), "soon"])
async def test_resolve_with_invalid_retention_is_refused(guard: Guard, verb: Verb, retention: Any) -> None:
    """An outcome that expires at once would let the operation be performed again."""
    hold(guard, "k")
    with pytest.raises(ConfigurationError, match="is not a duration"):
        await verb("resolve", "s", "k", Resolution.settled("paid"), retention=retention)
    assert (await verb("find", "s", "k")).state == "held"
    record = await verb("resolve", "s", "k", Resolution.settled("paid"), retention="1h")
    assert record.remaining == pytest.approx(3600)


@pytest.mark.parametrize("count", [0, -1, -7, 5.0, "5", True])
async def test_a_number_of_records_that_is_none_is_refused(guard: Guard, verb: Verb, count: Any) -> None:
    with pytest.raises(ConfigurationError, match="limit"):
        await verb("list", limit=count)
    with pytest.raises(ConfigurationError, match="batch"):
        await verb("purge", batch=count)
