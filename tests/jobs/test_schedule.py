"""Schedules: slots that are due, catching up, retries, and the verbs for operators."""

from __future__ import annotations

import asyncio
import datetime
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast
from zoneinfo import ZoneInfo

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from oncemore import Guard, Resolution, current_operation
from oncemore._ledger.encrypted import StoreWrapper
from oncemore._ledger.steps import pack_request
from oncemore._ledger.store import Store
from oncemore._runtime.backoff import Backoff
from oncemore._runtime.plan import Call, Plan, run
from oncemore.encryption import Seal
from oncemore.errors import ConfigurationError, MissingDriver, NotResolvable, StoreUnavailable
from oncemore.jobs import Schedule, Slot, job
from oncemore.jobs.runner import stopped_by_signal
from oncemore.observe.prometheus import count_events
from oncemore.testing.clock import Clock

NEW_YORK = ZoneInfo("America/New_York")
DAY = datetime.date(2026, 2, 19)
SIX = datetime.datetime(2026, 2, 19, 6, tzinfo=NEW_YORK)


class Offers:
    """A daily job for each user, and a list of its calls."""

    def __init__(self, guard: Guard, **settings: Any) -> None:
        self.calls: list[tuple[str, str]] = []
        self.fails = 0

        @job(guard, slot="{date:America/New_York}:{user}", name="daily_offers", **settings)
        def daily_offers(user: str, date: datetime.date) -> list[str]:
            self.calls.append((user, str(date)))
            if self.fails > 0:
                self.fails -= 1
                raise ConnectionError("provider down")
            return [f"{user}:{date}"]

        self.job = daily_offers

    def schedule(self, guard: Guard, **settings: Any) -> Schedule:
        schedule = Schedule(guard)
        schedule.cron("0 6 * * *", self.job, **{"tz": "America/New_York", "each": ["ann", "bob"], **settings})
        return schedule


def test_slots_run_when_they_are_due_and_once(guard: Guard) -> None:
    offers = Offers(guard)
    first, second = offers.schedule(guard), offers.schedule(guard)
    assert first.run_once(now=SIX - timedelta(seconds=1)).completed == 0
    assert first.run_once(now=SIX).completed == 2
    assert first.run_once(now=SIX).conflict == 0  # it knows
    assert second.run_once(now=SIX + timedelta(seconds=5)).completed == 0
    assert sorted(offers.calls) == [("ann", "2026-02-19"), ("bob", "2026-02-19")]
    assert {slot.state for slot in second.slots(offers.job, DAY)} == {"completed"}


async def test_async_jobs_and_items_run_once(guard: Guard) -> None:
    calls: list[str] = []

    async def users() -> list[str]:
        return ["ann", "bob"]

    @job(guard, slot="{date}:{user}", name="offers")
    async def offers(user: str, date: datetime.date) -> None:
        calls.append(user)

    schedule = Schedule(guard)
    schedule.cron("0 6 * * *", offers, tz="America/New_York", each=users)
    with pytest.raises(ConfigurationError, match="is async"):
        schedule.run_once(now=SIX)
    assert (await schedule.arun_once(now=SIX)).completed == 2
    assert (await schedule.arun_once(now=SIX)).completed == 0
    assert sorted(calls) == ["ann", "bob"]


async def test_sync_job_runs_in_a_thread_of_the_loop(guard: Guard) -> None:
    offers = Offers(guard)
    assert (await offers.schedule(guard).arun_once(now=SIX)).completed == 2


@pytest.mark.parametrize(
    ("catch_up", "days", "missed"),
    [
        ("none", ["2026-02-19", "2026-02-23"], ["2026-02-20", "2026-02-21", "2026-02-22"]),
        ("last", ["2026-02-19", "2026-02-23"], ["2026-02-20", "2026-02-21", "2026-02-22"]),
        ("all", ["2026-02-19", "2026-02-20", "2026-02-21", "2026-02-22", "2026-02-23"], []),
    ],
)
def test_catch_up_after_four_days(guard: Guard, catch_up: Any, days: list[str], missed: list[str]) -> None:
    offers = Offers(guard)
    offers.schedule(guard, catch_up=catch_up).run_once(now=SIX)
    restarted = offers.schedule(guard, catch_up=catch_up)
    counts = restarted.run_once(now=SIX + timedelta(days=4))
    assert sorted({day for _, day in offers.calls}) == days
    assert [each.slot[:10] for each in restarted.missed()] == missed
    assert counts.missed == len(missed)
    if catch_up == "all":  # in the order of their times
        assert [day for user, day in offers.calls if user == "ann"] == days


def test_catch_up_of_a_late_last_slot(guard: Guard) -> None:
    """If the slot is three hours late, only "last" runs it.  If it is half an hour late, "none" runs it, too."""
    ran = {}
    for catch_up, late in [("none", 3.0), ("last", 3.0), ("none", 0.5)]:
        name = f"{catch_up}-{late}"
        calls: list[datetime.date] = []

        @job(guard, slot="{date}", name=name)
        def report(date: datetime.date, calls: Any = calls) -> None:
            calls.append(date)

        schedule = Schedule(guard)
        schedule.cron("0 6 * * *", report, tz="America/New_York", catch_up=catch_up)  # type: ignore[arg-type]
        schedule.run_once(now=SIX - timedelta(hours=1))
        schedule.run_once(now=SIX + timedelta(hours=late))
        ran[name] = (len(calls), len(schedule.missed()))
    assert ran == {"none-3.0": (0, 1), "last-3.0": (1, 0), "none-0.5": (1, 0)}


def test_clock_set_back_stops_no_slots_and_no_catching_up(guard: Guard) -> None:
    """The clock has shown another month for a moment, and is right again."""
    offers = Offers(guard)
    schedule = offers.schedule(guard, each=["ann"])
    for days in (0, 30, 1, 2):
        assert schedule.run_once(now=SIX + timedelta(days=days)).completed == 1
    again = offers.schedule(guard, each=["ann"], catch_up="all")
    assert again.run_once(now=SIX + timedelta(days=5)).completed == 3


def test_slots_that_others_ran_meanwhile_are_not_missed(guard: Guard) -> None:
    """The process does not know of them, because its machine was asleep."""
    offers = Offers(guard)
    asleep, awake = (offers.schedule(guard) for _ in range(2))
    for schedule, days in ((asleep, 0), (awake, 0), (awake, 1), (awake, 2), (awake, 3)):
        schedule.run_once(now=SIX + timedelta(days=days))
    assert asleep.run_once(now=SIX + timedelta(days=3, seconds=90)).missed == 0
    assert asleep.missed() == []


def test_missed_slot_that_is_run_later_is_not_missed(guard: Guard) -> None:
    offers = Offers(guard)
    schedule = offers.schedule(guard)
    schedule.run_once(now=SIX)
    schedule.run_once(now=SIX + timedelta(days=2))
    assert [each.why for each in schedule.missed()] == ["downtime"]
    schedule.backfill(DAY, DAY + timedelta(days=2))
    assert schedule.missed() == []


def test_first_start_does_not_make_up_for_the_past(guard: Guard) -> None:
    offers = Offers(guard)
    schedule = offers.schedule(guard, catch_up="all")
    assert schedule.run_once(now=SIX + timedelta(hours=2)).completed == 0
    assert schedule.missed() == []


def test_failed_slot_is_tried_again_with_backoff_by_any_schedule(guard: Guard) -> None:
    offers = Offers(guard)
    offers.fails = 3
    one, other = offers.schedule(guard, each=["ann"]), offers.schedule(guard, each=["ann"])
    assert one.run_once(now=SIX).retrying == 1
    assert other.run_once(now=SIX).retrying == 0  # too soon
    clock = Clock(guard.store)
    for delay, schedule in [(2, other), (9, one), (65, other)]:
        assert schedule.run_once(now=SIX).completed == schedule.run_once(now=SIX).completed == 0
        clock.advance(delay)
        schedule.run_once(now=SIX)
    assert len(offers.calls) == 4
    assert other.slots(offers.job, DAY)[0].state == "completed"
    assert other.slots(offers.job, DAY)[0].attempts == 4


@pytest.mark.parametrize("effect", ["lease", "steps"])
def test_slot_that_fails_elsewhere_is_tried_again_after_its_pause(tmp_path: Path, effect: str) -> None:
    """This process has found the slot running elsewhere, and checks it again."""
    guard = Guard(f"sqlite:///{tmp_path}/once.db")
    calls, begun, fail = [], threading.Event(), threading.Event()

    @job(guard, slot="{tick}", effect=effect, backoff=Backoff(base=500.0, cap=500.0, jitter="none"))
    def report() -> None:
        calls.append("report")
        if effect == "steps":
            current_operation().step("first", lambda: None)
        begun.set()
        fail.wait(60)
        raise ConnectionError

    first, second = Schedule(guard), Schedule(guard)
    for schedule in (first, second):
        schedule.cron("0 6 * * *", report, tz="America/New_York")
    thread = threading.Thread(target=first.run_once, args=(SIX,))
    thread.start()
    assert begun.wait(60)
    assert second.run_once(now=SIX).conflict == 1
    fail.set()
    thread.join()
    for seconds, count in ((10, 1), (20, 1), (600, 2)):
        second.run_once(now=SIX + timedelta(seconds=seconds))
        assert len(calls) == count
    guard.close()


def test_later_tick_of_a_failed_slot_waits_for_its_pause(guard: Guard) -> None:
    offers = Offers(guard, backoff=Backoff(base=500.0, cap=500.0, jitter="none"))
    offers.fails = 10
    schedules = [offers.schedule(guard, each=["ann"]) for _ in range(5)]  # each as in a process of its own
    for seconds, calls in ((-30, 0), (0, 1), (10, 1), (501, 2)):
        for schedule in schedules:
            schedule.run_once(now=SIX + timedelta(seconds=seconds))
        assert len(offers.calls) == calls


def test_pause_of_a_failed_slot_begins_at_its_end() -> None:
    guard = Guard("memory://")
    times: list[float] = []

    @job(guard, slot="{tick}", attempts=2, backoff=Backoff(base=1.0, jitter="none"))
    def report() -> None:
        times.append(time.monotonic())
        time.sleep(1.5)
        times.append(time.monotonic())
        raise ConnectionError

    schedule, stop = Schedule(guard), threading.Event()
    schedule.every("1d", report, catch_up="last")
    schedule.entries[0].seen = time.time() // 86400 * 86400 - 1  # due now
    thread = threading.Thread(target=schedule.run, args=(stop,))
    thread.start()
    deadline = time.monotonic() + 60
    while len(times) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    stop.set()
    thread.join()
    assert times[2] - times[1] > 0.99


def test_slot_failing_too_often_is_listed_and_retried_by_hand(guard: Guard) -> None:
    offers = Offers(guard, attempts=2)
    offers.fails = 3
    schedule, clock = offers.schedule(guard, each=["ann"]), Clock(guard.store)
    schedule.run_once(now=SIX)
    clock.advance(10)
    assert schedule.run_once(now=SIX).failed == 1
    clock.advance(3600)
    assert schedule.run_once(now=SIX + timedelta(hours=1)).failed == 0
    (slot,) = schedule.slots(offers.job, DAY)
    assert (slot.state, slot.attempts) == ("failed", 2)
    assert "ConnectionError('provider down')" in slot.note
    assert schedule.failed() == [slot_like(slot, schedule.failed()[0].at)]
    assert schedule.retry(offers.job, slot.slot).failed == 1  # by hand: it fails for the third time
    assert schedule.backfill(DAY, DAY).completed == 1
    assert schedule.failed() == []
    with pytest.raises(NotResolvable, match="is settled"):
        schedule.retry("daily_offers", slot.slot)
    assert len(offers.calls) == 4


def slot_like(slot: Slot, at: datetime.datetime) -> Slot:
    return msgspec.structs.replace(slot, at=at)


def test_slot_failed_by_hand_is_retried_by_a_schedule(guard: Guard) -> None:
    offers = Offers(guard)
    offers.fails = 1
    with pytest.raises(ConnectionError):
        offers.job("carl", DAY)  # type: ignore[operator]
    schedule = offers.schedule(guard)
    Clock(guard.store).advance(2)
    assert schedule.run_once(now=SIX - timedelta(hours=1)).completed == 1
    assert offers.calls == [("carl", "2026-02-19")] * 2


def test_time_that_is_over_lists_a_slot_as_failed(guard: Guard) -> None:
    offers = Offers(guard, within="10m")
    offers.fails = 1
    schedule = offers.schedule(guard, each=["ann"])
    schedule.run_once(now=SIX)
    Clock(guard.store).advance(601)
    assert schedule.run_once(now=SIX + timedelta(seconds=601)).failed == 1
    assert schedule.slots(offers.job, DAY)[0].state == "failed"


def test_killed_slot_of_another_process_is_taken_over(guard: Guard) -> None:
    """Its process is gone.  The lease is not renewed, and only the record is left."""
    offers = Offers(guard)
    made = offers.job.job  # type: ignore[attr-defined]
    operation = made.operation("ann", DAY)
    run(guard.store.claim(operation, lease=30.0, request=pack_request(operation, None, ())))
    schedule = offers.schedule(guard)
    assert schedule.run_once(now=SIX - timedelta(hours=1)).completed == 0
    Clock(guard.store).advance(31)
    assert schedule.run_once(now=SIX - timedelta(hours=1)).completed == 1
    assert offers.calls == [("ann", "2026-02-19")]


def test_same_item_in_another_zone_has_one_slot_a_day(guard: Guard) -> None:
    """Ann moves from New York to Berlin after her offers of the day."""
    calls: list[tuple[str, str, str]] = []
    zones = {"ann": "America/New_York", "bob": "Europe/Berlin"}

    @job(guard, slot="{date}:{timezone}:{user}", name="offers")
    def offers(user: str, date: datetime.date, timezone: str) -> str:
        calls.append((user, str(date), timezone))
        return timezone

    schedule = Schedule(guard)
    schedule.cron("0 6 * * *", offers, tz=lambda user: zones[user], each=lambda: list(zones), catch_up="all")
    start = datetime.datetime(2026, 2, 19, 0, 0, tzinfo=UTC)
    schedule.run_once(now=start)
    schedule.run_once(now=start + timedelta(hours=12))
    assert sorted(calls) == [("ann", "2026-02-19", "America/New_York"), ("bob", "2026-02-19", "Europe/Berlin")]
    assert guard.find("offers", "2026-02-19:America/New_York:ann") is not None
    zones["ann"] = "Pacific/Honolulu"  # there it is not yet six
    schedule.run_once(now=start + timedelta(hours=17))
    assert len(calls) == 2
    schedule.run_once(now=start + timedelta(days=1, hours=17))
    assert sorted(calls)[1] == ("ann", "2026-02-20", "Pacific/Honolulu")
    assert len(calls) == 4


def test_scheduled_time_names_the_slot_and_fills_the_parameters(guard: Guard) -> None:
    calls: list[Any] = []

    @job(guard, name="default")
    def default(user: str, date: datetime.date, timezone: str) -> None:
        calls.append((user, date, timezone))

    @job(guard, slot="{window:1h}", name="hourly")
    def hourly() -> None:
        calls.append("hour")

    schedule = Schedule(guard)
    schedule.cron("0 6 * * *", default, tz="America/New_York", each=["ann"])
    schedule.cron("@hourly", hourly, tz="America/New_York")
    schedule.run_once(now=SIX + timedelta(seconds=30))
    assert guard.find("default", "2026-02-19T0600:America/New_York:ann") is not None
    assert guard.find("hourly", "20260219T110000Z") is not None
    assert ("ann", DAY, "America/New_York") in calls


def test_paused_job_is_not_run_by_any_schedule(guard: Guard) -> None:
    offers = Offers(guard)
    one, other = offers.schedule(guard, catch_up="last"), offers.schedule(guard, catch_up="last")
    one.run_once(now=SIX - timedelta(minutes=1))
    one.pause(offers.job)
    one.pause()
    assert other.run_once(now=SIX).completed == one.run_once(now=SIX).completed == 0
    other.resume("daily_offers")
    assert one.run_once(now=SIX + timedelta(minutes=5)).completed == 2


class SlowJob:
    """A job that sets an event when it begins, and waits for another event before it returns."""

    def __init__(self, guard: Guard, name: str) -> None:
        self.entered, self.leave = threading.Event(), threading.Event()

        @job(guard, name=name)
        def slow() -> None:
            self.entered.set()
            assert self.leave.wait(60)

        self.job = slow


@pytest.mark.parametrize(("overlap", "expected"), [("skip", (1, ["overlap"], 0)), ("queue", (0, [], 1))])
def test_overlap_skips_a_slot_or_runs_it_afterwards(guard: Guard, overlap: Any, expected: Any) -> None:
    slow = SlowJob(guard, "slow")
    here, elsewhere = Schedule(guard), Schedule(guard)
    for schedule in (here, elsewhere):
        schedule.cron("* * * * *", slow.job, overlap=overlap)
    first = threading.Thread(target=elsewhere.run_once, args=(SIX,))
    first.start()
    assert slow.entered.wait(60)
    here.run_once(now=SIX)  # it runs elsewhere
    missed = here.run_once(now=SIX + timedelta(minutes=1)).missed
    slow.leave.set()
    first.join()
    last = here.run_once(now=SIX + timedelta(seconds=80))
    assert (missed, [each.why for each in here.missed()], last.completed) == expected


def test_trigger_runs_now_and_completed_slots_stay(guard: Guard) -> None:
    offers = Offers(guard)
    schedule = offers.schedule(guard)
    assert schedule.trigger(offers.job, now=SIX + timedelta(hours=5)).completed == 2
    assert schedule.trigger("daily_offers", now=SIX + timedelta(hours=6)).conflict == 2
    schedule.run_once(now=SIX - timedelta(minutes=1))
    assert schedule.run_once(now=SIX).conflict == 2  # the slot of the day is done
    assert len(offers.calls) == 2


def test_backfill_runs_each_day_once_and_can_be_resumed(guard: Guard) -> None:
    offers = Offers(guard)
    schedule = offers.schedule(guard)
    offers.job("ann", DAY)  # type: ignore[operator]
    seen: list[tuple[int, int]] = []

    def interrupted(done: int, total: int) -> None:
        seen.append((done, total))
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        schedule.backfill(DAY, DAY + timedelta(days=29), progress=interrupted)
    assert seen == [(0, 60), (32, 60)]
    counts = schedule.backfill(DAY, DAY + timedelta(days=29), progress=lambda done, total: seen.append((done, total)))
    assert (counts.completed, counts.conflict) == (28, 32)
    assert seen[-1] == (60, 60)
    assert len(offers.calls) == len(set(offers.calls)) == 60


def test_backfill_counts_slots_as_failed_if_the_store_fails(guard: Guard) -> None:
    offers = Offers(guard)
    schedule, store = offers.schedule(guard), guard.store

    class Down(StoreWrapper):
        def claim(self, *args: Any, **settings: Any) -> Plan[Any]:
            raise StoreUnavailable("the store is down")

    guard.store = cast("Store", Down(store))
    counts = schedule.backfill(DAY, DAY)
    assert (counts.failed, counts.conflict, counts.completed) == (2, 0, 0)
    guard.store = store
    assert schedule.backfill(DAY, DAY).completed == 2


def test_backfill_leaves_the_future_alone(guard: Guard) -> None:
    offers = Offers(guard)
    schedule = offers.schedule(guard, tz="UTC")
    today = datetime.datetime.now(UTC).date()
    counts = schedule.backfill(today + timedelta(days=2), today + timedelta(days=9))
    assert counts.completed == 0
    with pytest.raises(ConfigurationError, match="before the first"):
        schedule.backfill(DAY, DAY - timedelta(days=1))


def test_jitter_delays_each_slot_by_its_own_time(guard: Guard) -> None:
    offers = Offers(guard)
    users = [f"user-{n}" for n in range(40)]
    schedule = offers.schedule(guard, jitter="10s", each=users)
    first = schedule.run_once(now=SIX + timedelta(seconds=5)).completed
    assert 0 < first < 40
    assert first + schedule.run_once(now=SIX + timedelta(seconds=10)).completed == 40


def test_metrics_count_slots_conflicts_misses_and_delay() -> None:
    registry = CollectorRegistry()
    guard = Guard("memory://", observers=[count_events(registry)])
    offers = Offers(guard, attempts=1)
    schedule = offers.schedule(guard)
    schedule.run_once(now=SIX + timedelta(seconds=3))
    offers.schedule(guard).run_once(now=SIX + timedelta(days=2))
    offers.job("ann", DAY)  # type: ignore[operator]
    offers.fails = 1
    with pytest.raises(ConnectionError):
        offers.job("carl", DAY)  # type: ignore[operator]

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"job": "daily_offers", **labels})

    assert value("scheduler_slots_total", outcome="completed") == 4
    assert value("scheduler_slots_total", outcome="failed") == 1
    assert value("scheduler_job_conflict_total") == value("scheduler_slots_total", outcome="conflict") == 1
    assert value("scheduler_missed_total") == 1
    assert value("scheduler_slot_delay_seconds_sum") == pytest.approx(6.0)


def test_sealed_arguments_are_opened_for_a_retry(tmp_path: Path) -> None:
    guard = Guard(f"sqlite:///{tmp_path}/once.db", seal=Seal([bytes(32)]))
    offers = Offers(guard)
    offers.fails = 1
    schedule = offers.schedule(guard, each=["ann"])
    schedule.run_once(now=SIX)
    Clock(guard.store).advance(5)
    assert offers.schedule(guard, each=["ann"]).run_once(now=SIX).completed == 1
    guard.close()


@pytest.mark.parametrize("effect", ["transaction", "steps"])
def test_failed_slot_is_tried_again_at_each_level(database: str, effect: str) -> None:
    guard = Guard(database)
    steps: list[str] = []
    fails = [True]

    @job(guard, slot="{date}:{user}", name="offers", effect=effect)
    def offers(user: str, date: datetime.date) -> str:
        op = current_operation()
        if effect == "steps":
            op.step("reserve", lambda key: steps.append(key))
        else:
            assert op.connection is not None
        if fails and fails.pop():
            raise ConnectionError("provider down")
        return user

    schedule = Schedule(guard)
    schedule.cron("0 6 * * *", offers, tz="America/New_York", each=["ann"])
    assert schedule.run_once(now=SIX).retrying == 1
    Clock(guard.store).advance(2)
    assert schedule.run_once(now=SIX).completed == 1
    assert len(steps) == (effect == "steps")
    guard.close()


# ── Running ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def counting(guard: Guard) -> tuple[Schedule, list[float], Callable[[int], None]]:
    calls: list[float] = []

    @job(guard, slot="{window:1s}", name="each_second")
    def each_second() -> None:
        calls.append(time.monotonic())

    schedule = Schedule(guard)
    schedule.every("1s", each_second)

    def wait_for(count: int) -> None:
        ends = time.monotonic() + 60
        while len(calls) < count:
            assert time.monotonic() < ends
            time.sleep(0.05)

    return schedule, calls, wait_for


def test_run_until_stopped(counting: Any) -> None:
    schedule, calls, wait_for = counting
    stop = threading.Event()
    thread = threading.Thread(target=schedule.run, args=(stop,))
    thread.start()
    wait_for(2)
    stop.set()
    thread.join(60)
    assert not thread.is_alive()
    assert len(calls) >= 2


def test_sigterm_that_meets_the_lock_of_the_event_stops() -> None:
    lock, stopped = threading.Lock(), threading.Event()

    class Stop(threading.Event):
        def set(self) -> None:
            if lock.acquire(timeout=5):
                stopped.set()

    with stopped_by_signal(Stop()):
        with lock:
            signal.raise_signal(signal.SIGTERM)
        assert stopped.wait(10)


async def test_arun_until_cancelled(counting: Any) -> None:
    schedule, _, wait_for = counting
    task = asyncio.create_task(schedule.arun())
    await asyncio.to_thread(wait_for, 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_cancelled_schedule_finishes_or_releases_its_slots(guard: Guard) -> None:
    entered = asyncio.Event()
    ended: list[str] = []

    @job(guard, slot="{window:1d}:{how}", name="slow")
    async def slow(how: str) -> None:
        entered.set()
        await asyncio.sleep(0.3 if how == "short" else 600)
        ended.append(how)

    schedule = Schedule(guard, grace=2.0)
    schedule.every("1s", slow, each=["short", "long"])
    task = asyncio.create_task(schedule.arun())
    await asyncio.wait_for(entered.wait(), 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["short"]
    assert {record.state for record in guard.list().records if record.scope == "slow"} == {"settled", "released"}


def test_store_that_is_down_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guard = Guard("memory://")
    calls: list[int] = []

    @job(guard, slot="{window:1s}", name="each_second")
    def each_second() -> None:
        calls.append(1)

    schedule = Schedule(guard)
    schedule.every("1s", each_second)
    real, down = guard.store.find, [True, True]

    def find(scope: str, key: str) -> Any:
        if down:
            down.pop()
            raise StoreUnavailable("the store is down")
        return real(scope, key)

    monkeypatch.setattr(guard.store, "find", find)
    stop = threading.Event()
    thread = threading.Thread(target=schedule.run, args=(stop,))
    thread.start()
    ends = time.monotonic() + 60
    while not calls and time.monotonic() < ends:
        time.sleep(0.05)
    stop.set()
    thread.join(60)
    assert calls


# ── Mistakes ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_mistakes_are_refused_when_the_schedule_is_made() -> None:
    guard = Guard("memory://")
    offers = Offers(guard).job

    @job(guard, slot="{user}", name="timeless")
    def timeless(user: str) -> None: ...

    schedule = Schedule(guard)
    schedule.cron("0 6 * * *", offers)
    mistakes: list[tuple[str, Callable[[], None]]] = [
        ("is no job", lambda: schedule.cron("0 6 * * *", print)),
        ("never again", lambda: schedule.cron("0 6 * * *", timeless, each=["ann"])),
        ("twice", lambda: schedule.cron("0 6 * * *", offers)),
        ("another guard", lambda: Schedule(Guard("memory://")).cron("0 6 * * *", offers)),
        ("time zone 'Mars' is unknown", lambda: schedule.cron("0 7 * * *", offers, tz="Mars")),
        ("no items", lambda: schedule.cron("0 7 * * *", offers, tz=lambda user: "UTC")),
        ("is one text", lambda: schedule.cron("0 7 * * *", offers, each="ann")),
        ("concurrency", lambda: schedule.cron("0 7 * * *", offers, concurrency=0)),
        ("gap = 'before'", lambda: schedule.cron("0 7 * * *", offers, gap="before")),  # type: ignore[arg-type]
        ("catch_up = 'some'", lambda: schedule.every("1h", offers, catch_up="some")),  # type: ignore[arg-type]
        ("not in the schedule", lambda: schedule.pause("nothing")),
        ("has no time zone", lambda: schedule.run_once(now=datetime.datetime(2026, 2, 19)) and None),
    ]
    for message, mistake in mistakes:
        with pytest.raises(ConfigurationError, match=message):
            mistake()


def test_missing_cron_parser_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = Guard("memory://")
    schedule, offers = Schedule(guard), Offers(guard).job
    monkeypatch.delitem(sys.modules, "oncemore.jobs.cron")
    monkeypatch.setitem(sys.modules, "cronsim", None)
    with pytest.raises(MissingDriver, match=r"pip install 'oncemore\[jobs\]'"):
        schedule.cron("0 6 * * *", offers)
    schedule.every("1h", offers, each=["ann"])


def test_one_wrong_item_does_not_stop_the_others(guard: Guard) -> None:
    offers = Offers(guard)
    schedule = offers.schedule(guard, each=["ann", "", "bob"])
    counts = schedule.run_once(now=SIX)
    assert (counts.completed, counts.failed) == (2, 1)


def test_items_that_cannot_be_found_do_not_stop_other_jobs(guard: Guard) -> None:
    offers = Offers(guard)
    broken = [True]

    def users() -> list[str]:
        if broken.pop() if broken else False:
            raise ConnectionError("the users' database is down")
        return ["ann"]

    @job(guard, slot="{date}", name="report")
    def report(date: datetime.date) -> None: ...

    schedule = offers.schedule(guard, each=users)
    schedule.cron("0 6 * * *", report, tz="America/New_York")
    counts = schedule.run_once(now=SIX)
    assert (counts.completed, counts.failed) == (1, 1)
    assert schedule.run_once(now=SIX + timedelta(seconds=10)).completed == 1


def test_thousands_of_missed_slots_are_all_made_up_for(tmp_path: Path) -> None:
    guard = Guard("memory://")
    ran: list[str] = []

    @job(guard, slot="{window:1s}", name="each_second")
    def each_second() -> None:
        ran.append(current_operation().key)

    schedule = Schedule(guard)
    schedule.every("1s", each_second, catch_up="all")
    schedule.run_once(now=SIX)
    assert schedule.run_once(now=SIX + timedelta(seconds=2500)).completed == 2500
    assert ran == sorted(set(ran))
    assert len(ran) == 2501


@pytest.mark.parametrize(("verdict", "expected"), [("settled", "conflict"), ("released", "completed")])
def test_resolver_decides_about_a_killed_slot_also_late(guard: Guard, verdict: str, expected: str) -> None:
    """The resolver is asked even long after the last attempt."""
    decision = Resolution.settled(["found"]) if verdict == "settled" else Resolution.released()
    offers = Offers(guard, resolver=lambda op: decision, attempts=1)
    operation = offers.job.operation("ann", DAY)  # type: ignore[attr-defined]
    run(guard.store.claim(operation, lease=30.0, request=pack_request(operation, None, ())))
    Clock(guard.store).advance(7200)
    counts = offers.schedule(guard).run_once(now=SIX - timedelta(hours=1))
    assert getattr(counts, expected) == 1


def test_slot_killing_its_process_too_often_is_listed_as_failed(guard: Guard) -> None:
    offers = Offers(guard, attempts=3)
    operation = offers.job.operation("ann", DAY)  # type: ignore[attr-defined]
    schedule = offers.schedule(guard, each=["ann"])
    for _ in range(3):
        run(guard.store.claim(operation, lease=1.0, request=pack_request(operation, None, ())))
        Clock(guard.store).advance(2)
    assert schedule.run_once(now=SIX - timedelta(hours=1)).failed == 1
    assert schedule.slots(offers.job, DAY)[0].state == "failed"
    assert offers.calls == []


def test_job_is_found_by_its_name_without_the_module(guard: Guard) -> None:
    @job(guard, slot="{date}", name="shop.reports.daily")
    def daily() -> None: ...

    schedule = Schedule(guard)
    schedule.cron("0 6 * * *", daily)
    day = datetime.date(2026, 2, 19)
    assert schedule.slots("daily", day) == schedule.slots("shop.reports.daily", day) == schedule.slots(daily, day)
    with pytest.raises(ConfigurationError, match="reports is not in the schedule"):
        schedule.slots("reports", day)


@pytest.fixture
def slow_list(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A store that takes long to list records, like Redis with many records."""
    end, listed = threading.Event(), guard.store.list

    def slow(*args: Any, **settings: Any) -> Any:
        yield Call(partial(end.wait, 60))
        return (yield from listed(*args, **settings))

    monkeypatch.setattr(guard.store, "list", slow)
    timer = threading.Timer(5, end.set)
    timer.start()
    yield
    timer.cancel()
    end.set()


@pytest.mark.usefixtures("slow_list")
def test_ticks_do_not_wait_for_a_slow_scan(counting: Any) -> None:
    schedule, calls, wait_for = counting
    stop = threading.Event()
    thread = threading.Thread(target=schedule.run, args=(stop,))
    began = time.monotonic()
    thread.start()
    wait_for(3)
    stop.set()
    thread.join(60)
    assert calls[2] - began < 4.5


def test_slot_that_failed_here_is_tried_again_without_a_scan(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    offers = Offers(guard)
    offers.fails = 1
    schedule = offers.schedule(guard, each=["ann"])
    assert schedule.run_once(now=SIX).retrying == 1
    monkeypatch.setattr(schedule, "_find_unfinished", lambda entries, now: iter(()))
    assert schedule.run_once(now=SIX + timedelta(seconds=0.5)).completed == 0
    assert schedule.run_once(now=SIX + timedelta(seconds=1.5)).completed == 1
    assert len(offers.calls) == 2
