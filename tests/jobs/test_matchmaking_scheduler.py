"""The scheduler of the matchmaking requirements.  Each statement of the requirements is a test with its name."""

from __future__ import annotations

import datetime
import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from oncemore import Guard, Retry, current_operation, job
from oncemore.jobs import Schedule
from oncemore.observe.prometheus import count_events
from oncemore.testing.clock import Clock

DAY = datetime.date(2026, 2, 19)


class Matchmaking:
    """Daily offers in a table without a unique key."""

    def __init__(self, folder: Path) -> None:
        self.registry = CollectorRegistry()
        self.path = folder / "matchmaking.db"
        self.guard = Guard(f"sqlite:///{self.path}", observers=[count_events(self.registry)])
        self.query("CREATE TABLE offers (user TEXT, day TEXT, candidate TEXT)")
        self.fails = 0

        @job(self.guard, slot="{date}:{timezone}:{user}", name="generate_daily_offers", effect="transaction")
        def generate_daily_offers(user: str, date: datetime.date, timezone: str) -> list[str]:
            found = [f"candidate-{len(self.query('SELECT * FROM offers')) + n}" for n in range(3)]
            connection = current_operation().connection
            connection.executemany("INSERT INTO offers VALUES (?, ?, ?)", [(user, str(date), each) for each in found])
            if self.fails > 0:
                self.fails -= 1
                raise ConnectionError("the candidates' service is down")
            return found

        self.generate: Any = generate_daily_offers

    def query(self, text: str) -> list[Any]:
        with sqlite3.connect(self.path) as connection:
            return connection.execute(text).fetchall()

    def metric(self, name: str) -> float | None:
        return self.registry.get_sample_value(name, {"job": "generate_daily_offers"})


@pytest.fixture
def matchmaking(tmp_path: Path) -> Any:
    made = Matchmaking(tmp_path)
    yield made
    made.guard.close()


ANN = ("user-123", DAY, "America/New_York")


def test_idempotency_key_is_date_timezone_user_id(matchmaking: Matchmaking) -> None:
    matchmaking.generate(*ANN)
    assert matchmaking.guard.find("generate_daily_offers", "2026-02-19:America/New_York:user-123") is not None


def test_same_user_cannot_receive_multiple_offers_for_same_day(matchmaking: Matchmaking) -> None:
    for _ in range(5):
        matchmaking.generate(*ANN)
    assert len(matchmaking.query("SELECT * FROM offers")) == 3


def test_rerunning_job_for_same_day_returns_same_results(matchmaking: Matchmaking) -> None:
    first = matchmaking.generate(*ANN)
    matchmaking.generate("user-456", *ANN[1:])
    assert matchmaking.generate(*ANN) == first


def test_job_can_safely_retry_on_failure(matchmaking: Matchmaking) -> None:
    matchmaking.fails = 2
    for _ in range(2):
        with pytest.raises(ConnectionError):
            matchmaking.generate(*ANN)
    assert matchmaking.query("SELECT * FROM offers") == []
    matchmaking.generate(*ANN)
    assert len(matchmaking.query("SELECT * FROM offers")) == 3


def test_conflict_increments_attempt_count_unless_completed(matchmaking: Matchmaking) -> None:
    matchmaking.fails = 2
    attempts = []
    for _ in range(5):
        with suppress(ConnectionError):
            matchmaking.generate(*ANN)
        record = matchmaking.guard.find("generate_daily_offers", "2026-02-19:America/New_York:user-123")
        assert record is not None
        attempts.append((record.state, record.attempts))
    assert attempts == [("released", 1), ("released", 2), ("settled", 3), ("settled", 3), ("settled", 3)]


def test_no_rows_updated_if_job_already_completed(matchmaking: Matchmaking) -> None:
    matchmaking.generate(*ANN)
    before = matchmaking.guard.find("generate_daily_offers", "2026-02-19:America/New_York:user-123")
    matchmaking.generate(*ANN)
    after = matchmaking.guard.find("generate_daily_offers", "2026-02-19:America/New_York:user-123")
    assert before is not None
    assert after is not None
    assert (before.token, before.settled_at, before.attempts) == (after.token, after.settled_at, after.attempts)


def test_scheduled_task_is_retried_three_times_within_an_hour(matchmaking: Matchmaking) -> None:
    made = matchmaking.generate.job
    assert (made.attempts - 1, made.within) == (3, 3600.0)
    retry = Retry.scheduled_task()
    assert (retry.attempts, retry.deadline) == (made.attempts, made.within)
    matchmaking.fails = 9
    schedule = Schedule(matchmaking.guard)
    schedule.cron("0 6 * * *", matchmaking.generate, tz="America/New_York", each=["user-123"])
    six = datetime.datetime(2026, 2, 19, 11, tzinfo=datetime.UTC)
    schedule.run_once(now=six)
    for _ in range(10):
        Clock(matchmaking.guard.store).advance(300)
        schedule.run_once(now=six)
    assert 9 - matchmaking.fails == 4
    assert schedule.slots(matchmaking.generate, DAY)[0].state == "failed"


def test_scheduler_job_conflict_counts_idempotent_job_skips(matchmaking: Matchmaking) -> None:
    for _ in range(3):
        matchmaking.generate(*ANN)
    assert matchmaking.metric("scheduler_job_conflict_total") == 2
