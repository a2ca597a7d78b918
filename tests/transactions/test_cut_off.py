"""If a caller is cut off in a transaction, its connection goes back, other connections stay, and nothing is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import anyio
import psycopg
import pytest
from asgiref.sync import sync_to_async
from django.db import transaction

from oncemore import Guard
from oncemore._ledger.context import Op
from oncemore._ledger.transactions import Do
from oncemore.errors import PayloadMismatch, StoreTimeout
from tests.support.proxy import FaultProxy

from .conftest import emptied, opened
from .shops import ON_POSTGRES, POLICY, OnDjango, Performer, Shop
from .test_transaction import Entered, Performing, asked, refund, slow

pytestmark = pytest.mark.server

AWAITED = ["psycopg-async", "pool-async", "asyncpg", "alchemy-psycopg-async", "alchemy-asyncpg"]
IN_THREADS = ["pool-under-a-loop", "alchemy-under-a-loop", "django-postgres-async"]

STUCK = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in transaction%'"
ASLEEP = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep'"
ALL_ENDED = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()
"""

# A trigger that sleeps as long as the table `brake` has a row.
BRAKE = """
CREATE TABLE brake (on_ bool);
CREATE FUNCTION braked() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(2) FROM brake; RETURN NEW; END $$;
"""
CLAIMS = "CREATE TRIGGER braked BEFORE INSERT OR UPDATE ON oncemore_records FOR EACH ROW EXECUTE FUNCTION braked()"
COMMITS = """CREATE CONSTRAINT TRIGGER braked AFTER INSERT ON refunds DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION braked()"""


async def until(shop: Shop, question: str, *, some: bool) -> None:
    """Return when the query has *some* rows, or none."""
    async with asyncio.timeout(10):
        while bool(shop.execute(question)) is not some:
            await asyncio.sleep(0.02)


def lent(shop: Shop) -> int:
    """Return how many connections are taken from the user's pool or engine, if there is one."""
    if hasattr(shop, "engine"):
        return int(shop.engine.pool.checkedout())
    pool: Any = getattr(shop, "pool", None)
    if hasattr(pool, "get_idle_size"):
        return int(pool.get_size() - pool.get_idle_size())
    stats = pool.get_stats() if pool is not None else {}
    return int(stats.get("pool_size", 0) - stats.get("pool_available", 0))


@pytest.mark.parametrize("shop", [*AWAITED, *IN_THREADS], indirect=True)
async def test_repeatedly_cancelled_caller_returns_its_connection(shop: Shop) -> None:
    """A cancel scope of anyio also cancels each await of the clean-up."""
    entered = Entered()
    first = asyncio.create_task(shop.run(asked(), slow(shop, entered, 4)))
    await entered.seen()
    asyncio.get_running_loop().call_later(0.4, entered.left.set)
    with anyio.move_on_after(0.2) as scope:
        await shop.run(asked(), refund(shop))
    assert scope.cancelled_caught
    assert (await first).how == "stored"
    await until(shop, STUCK, some=False)
    async with asyncio.timeout(5):
        while lent(shop):
            await asyncio.sleep(0.02)
    assert (await shop.run(asked("k2"), refund(shop))).how == "stored"


@pytest.mark.parametrize("shop", AWAITED, indirect=True)
async def test_cancel_while_releasing_leaves_no_open_transaction(shop: Shop) -> None:
    """Otherwise the key would be refused as in progress until the process ends."""
    await shop.run(asked("first"), refund(shop))
    shop.execute(BRAKE + CLAIMS)

    def perform(op: Op) -> Performing:
        yield shop.insert(op, op.key)
        shop.execute("INSERT INTO brake VALUES (true)")
        raise LookupError

    task = asyncio.create_task(shop.run(asked(), perform))
    await until(shop, ASLEEP, some=True)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    shop.execute("DELETE FROM brake")
    await until(shop, STUCK, some=False)
    assert (await shop.run(asked(), refund(shop), wait=0.5)).how == "stored"


@pytest.mark.parametrize(
    "shop", ["psycopg", "psycopg-async", "asyncpg", "alchemy-psycopg2", "alchemy-asyncpg"], indirect=True
)
async def test_commit_cut_off_by_the_server_is_looked_up(shop: Shop) -> None:
    shop.execute(BRAKE + COMMITS)
    shop.execute("INSERT INTO brake VALUES (true)")
    task = asyncio.create_task(shop.run(asked(), refund(shop)))
    await until(shop, ASLEEP, some=True)
    shop.execute("DELETE FROM brake")
    assert shop.execute(ASLEEP.replace("SELECT pid", "SELECT pg_terminate_backend(pid)"))
    assert (await task).how == "stored"
    assert shop.refunds() == ["k"]


@pytest.mark.parametrize("shop", ON_POSTGRES, indirect=True)
async def test_stale_pooled_connections_are_replaced(shop: Shop) -> None:
    """After a restart or a failover of the server, all pooled connections are dead."""
    await asyncio.gather(*(shop.run(asked(f"a{n}"), refund(shop, seconds=0.2)) for n in range(8)))
    shop.execute(ALL_ENDED)
    for number in range(5):
        assert (await shop.run(asked(f"b{number}"), refund(shop))).how == "stored"


@pytest.mark.parametrize("shop", ["psycopg", "asyncpg", "alchemy-psycopg2"], indirect=True)
async def test_failure_during_server_restart_keeps_the_fingerprint(shop: Shop) -> None:
    """The failure is noted on another connection of the pool, and all of them have died."""
    await asyncio.gather(*(shop.run(asked(f"a{n}"), refund(shop, seconds=0.2)) for n in range(8)))

    def perform(op: Op) -> Performing:
        yield shop.insert(op, op.key)
        shop.execute(ALL_ENDED)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        await shop.run(asked(), perform)
    with pytest.raises(PayloadMismatch):
        await shop.run(asked(fingerprint="another"), refund(shop))


@pytest.mark.parametrize("shop", ["psycopg", "asyncpg", "alchemy-psycopg2"], indirect=True)
async def test_statement_timeout_of_the_server_is_a_store_timeout(shop: Shop) -> None:
    entered = Entered()
    first = asyncio.create_task(shop.run(asked(), slow(shop, entered, 4)))
    await entered.seen()
    shop.execute("ALTER DATABASE oncemore_effects SET statement_timeout = '200ms'")
    try:
        with pytest.raises(StoreTimeout, match="too long"):
            await shop.run(asked(), refund(shop))
    finally:
        shop.execute("ALTER DATABASE oncemore_effects RESET statement_timeout")
    entered.left.set()
    assert (await first).how == "stored"


@pytest.mark.chaos
@pytest.mark.parametrize("name", ["psycopg-async", "asyncpg"])
async def test_large_commit_on_silent_network_can_be_cancelled(name: str, shops_url: str) -> None:
    emptied(shops_url)
    with FaultProxy.before(shops_url) as proxy:
        async for shop in opened(ON_POSTGRES[name], proxy.url(shops_url)):
            begun = asyncio.Event()
            task = asyncio.create_task(shop.run(asked(), large(shop, proxy, begun)))
            await begun.wait()
            await asyncio.sleep(0.5)
            task.cancel()
            done, _ = await asyncio.wait([task], timeout=25)
            proxy.heal()
            assert done
            assert task.cancelled()


def large(shop: Shop, proxy: FaultProxy, begun: asyncio.Event) -> Performer:
    def perform(op: Op) -> Performing:
        yield shop.sql(op, "SELECT 1")
        proxy.stall()
        begun.set()
        return "x" * 30_000_000

    return perform


def test_ended_event_loops_leave_no_connections(shops_url: str) -> None:
    """A worker may call asyncio.run for each job."""
    guard = Guard(emptied(shops_url), policy=POLICY)

    async def once(key: str) -> None:
        async def perform(op: Op) -> None:
            await op.connection.execute("SELECT 1")

        await guard.arun(asked(key), perform)

    for number in range(8):
        asyncio.run(once(f"k{number}"))
    with psycopg.connect(shops_url) as connection:
        there = connection.execute("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()")
        assert there.fetchone()[0] < 8  # type: ignore[index]
    guard.close()


@pytest.mark.parametrize("shop", ["django-postgres-async"], indirect=True)
async def test_django_on_commit_runs_after_cancel_in_the_commit(shop: Shop) -> None:
    told: list[str] = []
    assert isinstance(shop, OnDjango)
    shop.execute(BRAKE + COMMITS)
    shop.execute("INSERT INTO brake VALUES (true)")
    task = asyncio.create_task(shop.run(asked(), hooked(shop, lambda: told.append("committed"))))
    await until(shop, ASLEEP, some=True)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (shop.refunds(), told) == (["k"], ["committed"])


def hooked(shop: OnDjango, hook: Callable[[], None]) -> Performer:
    def perform(op: Op) -> Performing:
        def leave() -> None:
            transaction.on_commit(hook, using=shop.alias)

        yield shop.insert(op, op.key)
        yield Do(leave, sync_to_async(leave))
        return "done"

    return perform


@pytest.mark.parametrize("shop", ["django-postgres", "django-postgres-async"], indirect=True)
async def test_failing_django_on_commit_hook_is_logged(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise ConnectionError("the broker is gone")

    assert isinstance(shop, OnDjango)
    with caplog.at_level(logging.ERROR, "oncemore"):
        assert (await shop.run(asked(), hooked(shop, fail))).how == "stored"
    assert "the broker is gone" in caplog.text
    assert shop.refunds() == ["k"]
