"""Processes that run a schedule until they are killed.  Each effect is a row in the ledger's own database."""

from __future__ import annotations

import datetime
import random
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any

import psycopg

from oncemore import Guard, current_operation
from oncemore.jobs import Schedule, job
from tests.support.processes import separate_processes


def create_effects(url: str) -> None:
    """Make the table of effects.  It has no key, so only the ledger prevents a second effect."""
    guard = Guard(url)
    guard.stats()  # makes the ledger's own tables
    guard.close()
    query(url, f"CREATE TABLE {effects_table(url)} (slot TEXT NOT NULL, result TEXT NOT NULL)")


def effects_table(url: str) -> str:
    return f"{url.rpartition('schema=')[2]}.effects" if "schema=" in url else "effects"


def query(url: str, text: str) -> list[Any]:
    if url.startswith("sqlite:///"):
        connection: Any = sqlite3.connect(url.removeprefix("sqlite:///"), timeout=60)
    else:
        base, _, schema = url.rpartition("schema=")
        connection = psycopg.connect(base.rstrip("?&"), options=f"-c search_path={schema}")
    with connection:
        cursor = connection.execute(text)
        rows = cursor.fetchall() if cursor.description else []
    connection.close()
    return list(rows)


def add_effect(url: str, result: str) -> None:
    op = current_operation()
    mark = "%s" if "schema=" in url else "?"
    op.connection.execute(f"INSERT INTO {effects_table(url)} VALUES ({mark}, {mark})", [op.key, result])


def second_schedule(guard: Guard, url: str) -> Schedule:
    """Return a schedule with a job that is due every second, and is usually in the middle of its work."""

    @job(guard, slot="{window:1s}", name="each_second", effect="transaction")
    def each_second() -> None:
        time.sleep(random.uniform(0, 0.2))
        add_effect(url, "")
        time.sleep(random.uniform(0, 0.2))

    schedule = Schedule(guard)
    schedule.cron("* * * * * *", each_second, catch_up="all")
    return schedule


def offers_schedule(guard: Guard, url: str, users: int) -> Schedule:
    """Return a schedule of daily offers.  Each attempt makes a new result, so a second attempt can be seen."""

    @job(guard, slot="{date:America/New_York}:{user}", name="daily_offers", effect="transaction")
    def daily_offers(user: str, date: datetime.date) -> list[str]:
        offers = [f"offer-{random.randrange(10**9)}" for _ in range(3)]
        add_effect(url, ",".join(offers))
        return offers

    schedule = Schedule(guard)
    schedule.cron(
        "0 6 * * *", daily_offers, tz="America/New_York", each=[f"user-{n}" for n in range(users)], concurrency=4
    )
    return schedule


def run_seconds(url: str) -> None:
    second_schedule(Guard(url), url).run()


def run_offers(url: str, users: int, day: datetime.date) -> None:
    offers_schedule(Guard(url), url, users).backfill(day, day)


@contextmanager
def started(target: Callable[..., None], *args: object) -> Iterator[BaseProcess]:
    process = start(target, *args)
    try:
        yield process
    finally:
        process.kill()
        process.join(60)


def start(target: Callable[..., None], *args: object) -> BaseProcess:
    process = separate_processes().Process(target=target, args=args, daemon=True)
    process.start()
    return process


def stop(process: BaseProcess) -> int | None:
    """Send SIGTERM, and return the exit code."""
    process.terminate()
    process.join(60)
    return process.exitcode


KILLED = -signal.SIGKILL
