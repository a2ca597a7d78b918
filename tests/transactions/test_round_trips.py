"""The round trips that a guard adds to a transaction, counted between each driver and the server."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from django.db import connections, transaction

from tests.support.proxy import FaultProxy

from .conftest import emptied, opened
from .shops import ON_POSTGRES, Shop
from .test_transaction import asked, refund

INSERT = "INSERT INTO refunds VALUES ('plain', 'x')"
PAGE = Path(__file__).parents[2] / "docs/howto/transactions.md"


class CountingProxy(FaultProxy):
    """Counts round trips: how often the client sends after the server has sent."""

    turns = 0
    _clients_turn = True

    async def _pass_requests(self, source: Any, target: Any) -> None:
        await super()._pass_requests(Heard(source, self._asked), target)

    async def _pass_answers(self, source: Any, target: Any) -> None:
        await super()._pass_answers(Heard(source, self._answered), target)

    def _asked(self) -> None:
        self.turns += self._clients_turn
        self._clients_turn = False

    def _answered(self) -> None:
        self._clients_turn = True


class Heard:
    """A reader that reports each read."""

    def __init__(self, source: Any, tell: Callable[[], None]) -> None:
        self.source = source
        self.tell = tell

    async def read(self, most: int) -> bytes:
        data: bytes = await self.source.read(most)
        if data:
            self.tell()
        return data


async def with_pool(shop: Any) -> None:
    def plain() -> None:
        with shop.pool.connection() as connection:
            connection.execute(INSERT)

    await asyncio.to_thread(plain)


async def with_async_pool(shop: Any) -> None:
    async with shop.pool.connection() as connection:
        await connection.execute(INSERT)


async def with_asyncpg(shop: Any) -> None:
    async with shop.pool.acquire() as connection, connection.transaction():
        await connection.execute(INSERT)


async def with_engine(shop: Any) -> None:
    def plain() -> None:
        with shop.engine.begin() as connection:
            connection.exec_driver_sql(INSERT)

    await asyncio.to_thread(plain)


async def with_async_engine(shop: Any) -> None:
    async with shop.engine.begin() as connection:
        await connection.exec_driver_sql(INSERT)


async def with_django(shop: Any) -> None:
    def plain() -> None:
        with transaction.atomic(using=shop.alias), connections[shop.alias].cursor() as cursor:
            cursor.execute(INSERT)

    await asyncio.to_thread(plain)


# Each driver, and the same effect without a guard.
FLAVOURS: dict[str, Callable[[Any], Awaitable[None]]] = {
    "pool": with_pool,
    "pool-async": with_async_pool,
    "asyncpg": with_asyncpg,
    "alchemy-psycopg": with_engine,
    "alchemy-psycopg2": with_engine,
    "alchemy-pg8000": with_engine,
    "alchemy-psycopg-async": with_async_engine,
    "alchemy-asyncpg": with_async_engine,
    "django-postgres": with_django,
}


# On psycopg the claim goes with the BEGIN and the outcome with the COMMIT.  The others send one statement at a time.
MORE = dict.fromkeys(FLAVOURS, 0) | {"asyncpg": 2, "alchemy-psycopg2": 2, "alchemy-asyncpg": 2, "alchemy-pg8000": 8}


@pytest.mark.parametrize("name", FLAVOURS)
async def test_guard_adds_the_documented_round_trips(shops_url: str, name: str) -> None:
    """The numbers are those of the table on the page about transactions."""
    url = emptied(shops_url)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))  # one thread, one connection of Django's
    with CountingProxy.before(url) as proxy:
        async for shop in opened(ON_POSTGRES[name], proxy.url(url)):
            if name == "django-postgres":
                shop.persistent = True  # type: ignore[attr-defined]
            plain, guarded = await counts(shop, proxy, FLAVOURS[name])
            if name == "django-postgres":
                await asyncio.to_thread(connections.close_all)
    assert guarded - plain <= MORE[name]
    assert re.search(rf"^\| .*<!-- {name} --> \| {plain} \| {guarded} \|$", PAGE.read_text(), re.MULTILINE), (
        f"{name}: {plain} without, {guarded} with; the page says otherwise"
    )


async def counts(shop: Shop, proxy: CountingProxy, plainly: Callable[[Any], Awaitable[None]]) -> tuple[int, int]:
    """Return the round trips without and with the guard, on open connections with prepared statements."""
    for number in range(3):
        await shop.run(asked(f"warm-{number}"), refund(shop))
    plain, guarded = [], []
    for number in range(3):
        shop.execute("DELETE FROM refunds")
        await plainly(shop)
        shop.execute("DELETE FROM refunds")
        before = proxy.turns
        await plainly(shop)
        plain.append(proxy.turns - before)
        before = proxy.turns
        await shop.run(asked(f"k{number}"), refund(shop))
        guarded.append(proxy.turns - before)
    return min(plain), min(guarded)
