"""A schedule for the tests of `oncemore schedule`; its ledger is named by an environment variable."""

from __future__ import annotations

import datetime
import logging
import os

from oncemore import Guard
from oncemore.jobs import Schedule, job

logging.getLogger("oncemore").addHandler(logging.FileHandler(os.devnull))  # the broken job's errors are not the test's
guard = Guard(os.environ.get("SCHEDULE_STORE", "memory://"))
nothing = object()


@job(guard, slot="{date:Europe/Berlin}:{user}", name="daily_offers")
def daily_offers(user: str, date: datetime.date) -> str:
    return user


@job(guard, slot="{date}", attempts=1)
async def broken(date: datetime.date) -> None:
    raise ConnectionError("provider down")


@job(guard, slot="{window:1s}", name="each_second")
def each_second() -> None:
    print("ran", flush=True)


schedule = Schedule(guard)
schedule.cron("0 6 * * *", daily_offers, tz="Europe/Berlin", each=["ann", "bob"])
failing = Schedule(guard)
failing.cron("0 6 * * *", broken)
busy = Schedule(guard)
busy.every("1s", each_second)
