"""Schedules in real processes that are really killed.  FULL=1 runs them for longer."""

from __future__ import annotations

import datetime
import os
import random
import signal
import time
from collections import Counter

import pytest

from oncemore import Guard
from tests.jobs import fleet

FULL = os.environ.get("FULL") == "1"
DAY = datetime.date(2026, 2, 19)


def names(first: float, last: float) -> list[str]:
    """Return the names of the slots of the seconds from *first* to *last*."""
    moments = (datetime.datetime.fromtimestamp(at, datetime.UTC) for at in range(int(first), int(last) + 1))
    return [f"{moment:%Y%m%dT%H%M%SZ}" for moment in moments]


@pytest.mark.timeout(300)
def test_five_schedulers_with_random_kills_run_each_slot_once(database: str) -> None:
    fleet.create_effects(database)
    lasts = 60 if FULL else 12
    processes = [fleet.start(fleet.run_seconds, database) for _ in range(5)]
    kills = 0
    try:
        first = wait_for_a_slot(database)
        ends = time.time() + lasts
        while time.time() < ends:
            time.sleep(random.uniform(0.1, 0.7))
            n = random.randrange(5)
            processes[n].kill()
            processes[n].join(60)
            kills += 1
            processes[n] = fleet.start(fleet.run_seconds, database)
        expected = names(first, time.time() - 1)
        patience = time.time() + 60
        while not set(expected) <= {slot for (slot,) in fleet.query(database, "SELECT slot FROM effects")}:
            assert time.time() < patience, "some slots were never run"
            time.sleep(0.2)
        # The newest process may get the signal before it has set its handler.
        assert {fleet.stop(process) for process in processes} <= {0, -signal.SIGTERM}
    finally:
        for process in processes:
            process.kill()
    effects = Counter(slot for (slot,) in fleet.query(database, "SELECT slot FROM effects"))
    assert [slot for slot, times in effects.items() if times != 1] == []
    assert set(expected) <= set(effects)
    assert kills > lasts / 2


def wait_for_a_slot(url: str) -> float:
    """Wait until a slot was run, and return the time of the first."""
    patience = time.time() + 60
    while not (found := fleet.query(url, "SELECT min(slot) FROM effects")[0][0]):
        assert time.time() < patience
        time.sleep(0.1)
    return datetime.datetime.strptime(found, "%Y%m%dT%H%M%SZ").replace(tzinfo=datetime.UTC).timestamp()


@pytest.mark.timeout(600)
def test_daily_offers_killed_three_times_are_one_each(database: str) -> None:
    users = 10_000 if FULL else 600
    fleet.create_effects(database)
    for n in range(1, 4):
        with fleet.started(fleet.run_offers, database, users, DAY) as process:
            patience = time.time() + 300
            while count(database) < n * users // 5 and process.is_alive():
                assert time.time() < patience
                time.sleep(0.01)
            process.kill()
            process.join(60)
            assert process.exitcode == fleet.KILLED
    assert count(database) < users
    guard = Guard(database)
    schedule = fleet.offers_schedule(guard, database, users)
    schedule.backfill(DAY, DAY)
    before = dict(fleet.query(database, "SELECT slot, result FROM effects"))
    again = schedule.backfill(DAY, DAY)
    assert (again.completed, again.conflict) == (0, users)
    effects = fleet.query(database, "SELECT slot, result FROM effects")
    assert len(effects) == len(dict(effects)) == users
    assert dict(effects) == before
    daily_offers = schedule.entries[0].job.wrapped()
    for user in random.sample(range(users), 50):
        assert ",".join(daily_offers(f"user-{user}", DAY)) == before[f"{DAY}:America/New_York:user-{user}"]
    guard.close()


def count(url: str) -> int:
    found: int = fleet.query(url, "SELECT count(*) FROM effects")[0][0]
    return found


def test_sigterm_finishes_the_running_slot(tmp_path: object) -> None:
    url = f"sqlite:///{tmp_path}/once.db"
    fleet.create_effects(url)
    process = fleet.start(fleet.run_seconds, url)
    wait_for_a_slot(url)
    assert fleet.stop(process) == 0
    guard = Guard(url)
    assert {record.state for record in guard.list().records if record.scope == "each_second"} == {"settled"}
    guard.close()
