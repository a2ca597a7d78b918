"""The user's own transactions on each driver, with the connections and sessions that a message can be added to."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiosqlite
import asyncpg
import psycopg
from asgiref.sync import sync_to_async
from django.db import connections, transaction
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from oncemore._runtime.plan import Plan, arun, run
from tests.transactions.shops import Aiosqlite, Asyncpg, AsyncPool, AsyncPostgres, OnDjango, OnEngine, Shop, Sqlite

Work = Callable[[Any], Plan[Any]]


class RolledBack(Exception):
    """Raised in a transaction to roll it back."""


async def in_own_transaction(shop: Shop, work: Work, *, kind: str = "connection", fails: bool = False) -> Any:
    """Run *work* in a transaction, on the user's connection or another *kind* of place.  Roll back if it *fails*."""
    try:
        if isinstance(shop, OnDjango):
            return await on_django(shop, work, fails)
        if not isinstance(shop, OnEngine) and not shop.sync and not is_under_loop(shop):
            async with opened_async(shop) as place:
                result = await arun(work(place))
                if fails:
                    raise RolledBack
                return result
        if isinstance(shop, OnEngine) and not shop.sync:
            return await on_async_engine(shop, work, kind, fails)
        return await asyncio.to_thread(on_thread, shop, work, kind, fails)
    except RolledBack:
        return None


def is_under_loop(shop: Shop) -> bool:
    return not isinstance(shop, Aiosqlite | Asyncpg | AsyncPool | AsyncPostgres)


@asynccontextmanager
async def opened_async(shop: Shop) -> AsyncIterator[Any]:
    if isinstance(shop, Aiosqlite):
        async with aiosqlite.connect(shop.url.removeprefix("sqlite:///")) as connection:
            await connection.execute("BEGIN")
            yield connection
            await connection.commit()
    elif isinstance(shop, Asyncpg):
        one = await asyncpg.connect(shop.url)
        try:
            async with one.transaction():
                yield one
        finally:
            await one.close()
    else:
        async with await psycopg.AsyncConnection.connect(shop.url) as another:
            yield another


async def on_async_engine(shop: OnEngine, work: Work, kind: str, fails: bool) -> Any:
    if kind == "session":
        async with AsyncSession(shop.engine) as session, session.begin():
            result = await arun(work(session))
            if fails:
                raise RolledBack
            return result
    async with shop.engine.begin() as connection:
        result = await arun(work(connection))
        if fails:
            raise RolledBack
        return result


def on_thread(shop: Shop, work: Work, kind: str, fails: bool) -> Any:
    if isinstance(shop, OnEngine):
        place: Any = Session(shop.engine) if kind == "session" else shop.engine.connect()
        with place, place.begin():
            result = run(work(place))
            if fails:
                raise RolledBack
            return result
    if isinstance(shop, Sqlite):
        connection: Any = sqlite3.connect(shop.url.removeprefix("sqlite:///"))
    else:
        connection = psycopg.connect(shop.url)
    try:
        with connection:
            result = run(work(connection))
            if fails:
                raise RolledBack
            return result
    finally:
        connection.close()


async def on_django(shop: OnDjango, work: Work, fails: bool) -> Any:
    def plain() -> Any:
        try:
            with transaction.atomic(using=shop.alias):
                result = run(work(shop.alias))
                if fails:
                    raise RolledBack
                return result
        finally:
            connections[shop.alias].close()

    return await asyncio.to_thread(plain) if shop.sync else await sync_to_async(plain)()
