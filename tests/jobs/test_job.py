"""Jobs that are called by hand run once per slot: results, failures, kills, transactions."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import signal
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from oncemore import Guard, Resolution, current_operation, job
from oncemore.errors import ConfigurationError, InProgress, OutcomeNotKept, PayloadMismatch, UnknownOutcome
from oncemore.testing.clock import Clock

DAY = datetime.date(2026, 2, 19)


def test_completed_slot_returns_its_stored_result(guard: Guard) -> None:
    ran: list[str] = []

    @job(guard, slot="{date:America/New_York}:{user}", name="daily_offers")
    def offers(user: str, date: datetime.date) -> list[str]:
        ran.append(user)
        return [f"{user}-{date}-{len(ran)}"]

    first = offers("user-123", date=DAY)
    Clock(guard.store).advance(300 * 86400)
    assert offers("user-123", DAY) == first == ["user-123-2026-02-19-1"]
    assert offers("user-123", date=DAY + datetime.timedelta(days=1)) == ["user-123-2026-02-20-2"]
    assert ran == ["user-123", "user-123"]
    record = guard.find("daily_offers", "2026-02-19:America/New_York:user-123")
    assert record is not None
    assert (record.state, record.attempts, record.request) == ("settled", 1, b"")


async def test_async_job_runs_once_per_slot(guard: Guard) -> None:
    ran: list[str] = []

    @job(guard, slot="{date}:{user}", name="offers")
    async def offers(user: str, date: datetime.date) -> int:
        ran.append(user)
        return len(ran)

    assert [await offers("ann", DAY), await offers("ann", date=DAY), await offers("bob", DAY)] == [1, 1, 2]


def test_date_and_window_are_those_of_now_by_hand(guard: Guard) -> None:
    @job(guard, slot="{date:Asia/Tokyo}:{window:1h}", name="report")
    def report() -> int:
        return 1

    key = report.operation().key  # type: ignore[attr-defined]
    Clock(guard.store).advance(86400)
    assert report.operation().key != key  # type: ignore[attr-defined]
    day, zone, _ = key.split(":")
    assert zone == "Asia/Tokyo"
    assert datetime.date.fromisoformat(day)


def test_missing_date_becomes_the_date_of_the_slot(guard: Guard) -> None:
    given: list[datetime.date | None] = []

    @job(guard, slot="{date:America/New_York}", name="report")
    def report(date: datetime.date | None = None) -> None:
        given.append(date)

    report()
    (day,) = given
    assert day is not None
    assert guard.find("report", f"{day}:America/New_York") is not None
    report(day)  # the same slot with the same arguments
    assert given == [day]


def test_same_slot_with_other_arguments_is_refused(guard: Guard) -> None:
    @job(guard, slot="{date}", name="report")
    def report(date: datetime.date, size: int) -> int:
        return size

    report(DAY, 1)
    with pytest.raises(PayloadMismatch):
        report(DAY, 2)


def failing_job(guard: Guard, fails: int, **settings: Any) -> tuple[Callable[[str], str], list[int]]:
    tried: list[int] = []

    @job(guard, slot="{date}:{user}", name="flaky", **settings)
    def flaky(user: str, date: datetime.date = DAY) -> str:
        tried.append(current_operation().attempt)
        if len(tried) <= fails:
            raise ConnectionError("provider down")
        return "done"

    return flaky, tried


def state_of(guard: Guard, key: str = "2026-02-19:ann", scope: str = "flaky") -> tuple[str, str]:
    record = guard.find(scope, key)
    assert record is not None
    return record.state, record.note


def test_failed_slot_runs_again_and_counts_its_attempts(guard: Guard) -> None:
    flaky, tried = failing_job(guard, fails=2)
    for _ in range(2):
        with pytest.raises(ConnectionError):
            flaky("ann")  # a call by hand tries once
    assert state_of(guard) == ("released", "")
    assert flaky("ann") == flaky("ann") == "done"
    assert tried == [1, 2, 3]


def test_slot_without_attempts_left_is_listed_as_failed(guard: Guard) -> None:
    flaky, tried = failing_job(guard, fails=3, attempts=2)
    for _ in range(2):
        with pytest.raises(ConnectionError):
            flaky("ann")
    assert state_of(guard) == ("held", "failed after 2 attempts: ConnectionError('provider down')")
    with pytest.raises(ConnectionError):
        flaky("ann")  # it can be tried again by hand
    assert state_of(guard)[0] == "held"
    assert flaky("ann") == "done"
    assert len(tried) == 4


def test_slot_without_time_left_is_listed_as_failed(guard: Guard) -> None:
    flaky, _ = failing_job(guard, fails=9, within="1h")
    with pytest.raises(ConnectionError):
        flaky("ann")
    Clock(guard.store).advance(3601)
    with pytest.raises(ConnectionError):
        flaky("ann")
    assert state_of(guard)[0] == "held"


def test_failed_slot_keeps_its_arguments_at_each_level(database: str) -> None:
    for effect in ("lease", "transaction", "steps"):
        guard = Guard(database)
        flaky, _ = failing_job(guard, fails=1, effect=effect)
        with pytest.raises(ConnectionError):
            flaky(effect)
        record = guard.find("flaky", f"2026-02-19:{effect}")
        assert record is not None
        assert effect.encode() in record.request
        assert record.attempts == 1
        guard.close()


def test_one_of_many_callers_runs_the_slot(guard: Guard) -> None:
    ran: list[int] = []

    @job(guard, slot="{date}", name="report")
    def report(date: datetime.date) -> int:
        ran.append(1)
        return len(ran)

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda _: report(DAY), range(40))) == [1] * 40
    assert ran == [1]


def test_error_that_is_an_outcome_is_raised_again(guard: Guard) -> None:
    ran: list[int] = []

    @job(guard, slot="{date}", name="report", errors=(LookupError,))
    def report(date: datetime.date) -> int:
        ran.append(1)
        raise LookupError("no data for this day")

    for _ in range(2):
        with pytest.raises(LookupError, match="no data for this day"):
            report(DAY)
    assert ran == [1]


def test_effect_commits_with_its_slot(tmp_path: Any) -> None:
    guard = Guard(f"sqlite:///{tmp_path}/shop.db")
    sqlite3.connect(tmp_path / "shop.db").execute("CREATE TABLE offers (user TEXT)").connection.commit()
    fails = [True]

    @job(guard, slot="{date}:{user}", name="offers", effect="transaction")
    def offers(user: str, date: datetime.date) -> str:
        current_operation().connection.execute("INSERT INTO offers VALUES (?)", [user])
        if fails.pop() if fails else False:
            raise ConnectionError("after the insert")
        return user

    with pytest.raises(ConnectionError):
        offers("ann", DAY)
    assert offers("ann", DAY) == offers("ann", DAY) == "ann"
    assert sqlite3.connect(tmp_path / "shop.db").execute("SELECT * FROM offers").fetchall() == [("ann",)]
    guard.close()


# ── Killed ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def killed_in_slot(url: str, settings: dict[str, Any]) -> None:
    guard = Guard(url)

    @job(guard, slot="{date}", name="killed", **settings)
    def report(date: datetime.date) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    report(DAY)


def kill_in_slot(url: str, **settings: Any) -> None:
    process = multiprocessing.get_context("spawn").Process(target=killed_in_slot, args=(url, settings))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "ran"),  # at least once: that is what a scheduled job usually needs
        ({"effect": "transaction"}, "ran"),  # rolled back with the dead connection
        ({"on_unknown": "hold"}, "held"),
        ({"resolver": lambda op: Resolution.settled("found")}, "found"),
        ({"resolver": lambda op: Resolution.released()}, "ran"),
    ],
)
def test_killed_slot_is_taken_over_after_its_lease(tmp_path: Any, settings: dict[str, Any], expected: str) -> None:
    url = f"sqlite:///{tmp_path}/once.db"
    kill_in_slot(url, **{name: value for name, value in settings.items() if name != "resolver"})
    guard = Guard(url)
    now = {"in_flight": "conflict"}

    @job(guard, slot="{date}", name="killed", **settings, **now)
    def report(date: datetime.date) -> str:
        return "ran"

    if settings.get("effect") != "transaction":
        with pytest.raises(InProgress):
            report(DAY)
    Clock(guard.store).advance(31)
    if expected == "held":
        with pytest.raises(UnknownOutcome):
            report(DAY)
        assert state_of(guard, "2026-02-19", "killed")[0] == "held"
    else:
        assert report(DAY) == expected
    guard.close()


# ── Mistakes ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Size:
    width: int


def test_arguments_of_named_classes_are_kept(guard: Guard) -> None:
    @job(guard, slot="{date}", name="report", ignore=["session"])
    def report(date: datetime.date, size: Size, session: object = None) -> Size:
        raise ConnectionError

    with pytest.raises(ConnectionError):
        report(DAY, Size(3), session=object())
    record = guard.find("report", "2026-02-19")
    assert record is not None
    assert b"width" in record.request


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attempts": 0}, "tried once at least"),
        ({"slot": "{nobody}"}, "unknown field"),
        ({"ttl": "1h"}, "make ttl as long as the window"),
        ({"within": "soon"}, "not a duration"),
        ({"on_unknwon": "hold"}, "on_unknown"),
    ],
)
def test_wrong_settings_are_refused_when_decorating(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):

        @job(Guard("memory://"), **{"slot": "{window:2h}", "name": "report", **settings})
        def report() -> None: ...


def test_result_that_cannot_be_kept_still_runs_once() -> None:
    guard = Guard("memory://")
    ran: list[int] = []

    @job(guard, slot="{date}", name="report")
    def report(date: datetime.date) -> Any:
        ran.append(1)
        return object()

    report(DAY)
    with pytest.raises(OutcomeNotKept):
        report(DAY)
    assert ran == [1]
