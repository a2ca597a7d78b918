"""The daily offers: a job with one slot for each user and local date, run at 06:00 of each user's own time."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from examples.sql import Row, rows
from oncemore import current_operation, job
from oncemore.jobs import Schedule

from . import matching
from .work import Service, Work

NAME = "daily_offers"
HOUR = "0 6 * * *"
RETRIES, WITHIN = 3, "1h"


@dataclass
class Run:
    """A test's options for one slot: each attempt takes *delay* seconds longer, and sets *began*."""

    delay: float = 0.0
    began: bool = False


DailyOffers = Callable[[str, str, datetime.date, Run | None], Awaitable[list[str]]]


def make_job(service: Service) -> DailyOffers:
    """Return the job.  Its slot, its offers and its result commit together, so a killed run leaves nothing behind."""

    @job(
        service.database,
        name=NAME,
        slot="{date}:{timezone}:{user}",
        effect="transaction",
        attempts=1 + RETRIES,
        within=WITHIN,
        ignore=["run"],
    )
    async def daily_offers(user: str, timezone: str, date: datetime.date, run: Run | None = None) -> list[str]:
        op = current_operation()
        if run is not None:
            run.began = True
            await asyncio.sleep(run.delay)
        work = Work(op.connection, user, service.now(), op)
        found: list[str] = await service.change(
            work, lambda work: matching.generate_offers(work, date.isoformat(), op.key)
        )
        return found

    return daily_offers


def make_schedule(service: Service, daily_offers: DailyOffers) -> Schedule:
    """Return the schedule, which any number of processes may run."""
    zones: dict[str, str] = {}

    async def list_users() -> list[str]:
        zones.update({row["id"]: row["timezone"] for row in await users_with_zones(service)})
        return list(zones)

    schedule = Schedule(service.database)
    schedule.cron(HOUR, daily_offers, each=list_users, tz=lambda user: zones[user])
    return schedule


async def users_with_zones(service: Service) -> list[Row]:
    async with service.read() as connection:
        return await rows(connection, "SELECT id, timezone FROM users ORDER BY id")
