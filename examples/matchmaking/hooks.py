"""The hooks of tests (MATCHMAKING_TEST_HOOKS=on): users and offers at will, the clock, and the effects that were committed."""

from __future__ import annotations

import asyncio
import datetime
from zoneinfo import ZoneInfo

from fastapi import APIRouter
from pydantic import BaseModel, Field

from examples.sql import Row, rows, transaction
from oncemore.errors import InProgress
from oncemore.testing.clock import Clock

from . import matching, people
from .daily import NAME, DailyOffers, Run, users_with_zones
from .fields import Text, TimeZone
from .problems import Invalid, Missing
from .work import Service, Work, iso

SIDE_BY_SIDE = 8  # slots at a time


class NewUser(BaseModel):
    id: Text
    timezone: TimeZone = "UTC"


class Pair(BaseModel):
    users: list[str] = Field(min_length=2, max_length=2)


class Day(BaseModel):
    date: datetime.date
    delayMs: float = 0.0


class Time(BaseModel):
    advance: float | None = None
    at: datetime.datetime | None = None


def hooks_router(service: Service, daily_offers: DailyOffers) -> APIRouter:
    """Return the routes of the hooks."""
    router = APIRouter(prefix="/_test", include_in_schema=False)
    database = service.settings.database

    @router.post("/users", status_code=201)
    async def make_user(body: NewUser) -> Row:
        async with transaction(database) as connection:
            work = Work(connection, body.id, service.now())
            insert = "INSERT INTO users (id, timezone) VALUES (?, ?) ON CONFLICT (id) DO NOTHING"
            await work.rows(insert, body.id, body.timezone)
            return {"id": body.id, **await people.issue_tokens(work, body.id, reports=False)}

    @router.post("/offers", status_code=201)
    async def make_offers(body: Pair) -> Row:
        made: dict[str, str] = {}
        async with transaction(database) as connection:
            for user, candidate in (body.users, reversed(body.users)):
                found = await rows(connection, "SELECT timezone FROM users WHERE id = ?", user)
                if not found:
                    raise Missing(f"There is no user {user}")
                zone = ZoneInfo(found[0]["timezone"])
                today = datetime.datetime.fromtimestamp(service.now(), zone).date()
                made[user] = await matching.make_offer(connection, user, candidate, today.isoformat())
        return {"offers": made}

    @router.get("/otp")
    async def show_code(phone: str) -> Row:
        async with service.read() as connection:
            select = "SELECT request_id, code FROM codes WHERE phone = ? ORDER BY number DESC LIMIT 1"
            found = await rows(connection, select, phone)
        if not found:
            raise Missing(f"No code was sent to {phone}")
        return {"requestId": found[0]["request_id"], "code": found[0]["code"]}

    @router.post("/jobs/daily-offers")
    async def run_daily_offers(body: Day) -> Row:
        turns = asyncio.Semaphore(SIDE_BY_SIDE)

        async def run_slot(user: str, timezone: str) -> Row | None:
            slot, run = f"{body.date}:{timezone}:{user}", Run(body.delayMs / 1000)
            async with turns:
                if database.startswith("sqlite") and await service.database.afind(NAME, slot) is None:
                    await asyncio.sleep(run.delay)  # before the transaction, because SQLite has one writer at a time
                    run.delay = 0.0
                try:
                    offers = await daily_offers(user, timezone, body.date, run)
                except InProgress:  # another process has the slot, or has died with it
                    return None
            return {"slot": slot, "offers": offers, "ran": run.began}

        users = await users_with_zones(service)
        slots = await asyncio.gather(*(run_slot(row["id"], row["timezone"]) for row in users))
        return {"slots": [slot for slot in slots if slot is not None]}

    @router.post("/clock")
    async def move_clock(body: Time) -> Row:
        if (body.advance is None) == (body.at is None):
            raise Invalid("Send either `advance`, in seconds, or `at`, a time")
        await deliveries_end(service)
        seconds = body.advance if body.at is None else body.at.timestamp() - service.now()
        for store in {id(guard.store): guard.store for guard in (service.guard, service.database)}.values():
            Clock(store).advance(seconds or 0.0)
        return {"now": iso(service.now())}

    @router.get("/effects")
    async def list_effects() -> Row:
        async with service.read() as connection:
            found = await rows(connection, "SELECT kind, user_id, ref FROM effects ORDER BY number")
        return {"effects": [{"kind": row["kind"], "user": row["user_id"], "ref": row["ref"]} for row in found]}

    return router


async def deliveries_end(service: Service) -> None:
    """Wait for webhooks that are being sent: if their leases ended now, they would be sent again.

    Wait for one second at most, because a process that was killed leaves unfinished deliveries.
    """
    for _ in range(20):
        async with service.read() as connection:
            if not await rows(connection, "SELECT 1 FROM oncemore_webhook_deliveries WHERE token IS NOT NULL LIMIT 1"):
                return
        await asyncio.sleep(0.05)
