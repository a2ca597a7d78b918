"""The private parts of other libraries that the stores use are where `stores/_compat.py` expects them."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from pathlib import Path
from typing import Any

import aiosqlite
import asyncpg
import psycopg
import pytest
from psycopg_pool import ConnectionPool

from oncemore.errors import MissingDriver, TransactionEnded
from oncemore.stores import _compat


async def test_aiosqlite_runs_a_function_on_its_thread(tmp_path: Path) -> None:
    connection = await _compat.open_aiosqlite(str(tmp_path / "file.db"))

    def work(raw: sqlite3.Connection) -> tuple[Any, threading.Thread]:
        return raw.execute("SELECT 7").fetchone(), threading.current_thread()

    row, thread = await _compat.run_in_aiosqlite(connection, work)
    assert (row, thread) == ((7,), connection._thread)
    assert thread.daemon
    await asyncio.to_thread(_compat.stop_aiosqlite, connection)
    assert not thread.is_alive()


async def test_aiosqlite_that_cannot_be_stopped_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 0.22.1: a transaction that is dropped would keep the file locked for ever."""
    monkeypatch.delattr(aiosqlite.Connection, "stop")
    with pytest.raises(MissingDriver, match=r"aiosqlite 0\.22\.1 or newer"):
        await _compat.open_aiosqlite(str(tmp_path / "file.db"))


async def test_aiosqlite_closed_connection_is_refused(tmp_path: Path) -> None:
    connection = await aiosqlite.connect(tmp_path / "file.db")
    await connection.close()
    with pytest.raises(TransactionEnded):
        await _compat.run_in_aiosqlite(connection, lambda raw: None)


@pytest.mark.server
async def test_asyncpg_released_connection_is_none(postgres_url: str) -> None:
    async with asyncpg.create_pool(postgres_url, min_size=0, max_size=1) as pool:
        lent = await pool.acquire()
        raw = _compat.asyncpg_connection(lent)
        assert isinstance(raw, asyncpg.Connection)
        await pool.release(lent)
        assert _compat.asyncpg_connection(lent) is None
        assert not raw.is_closed()


async def test_asyncpg_pool_tells_its_address() -> None:
    pool = asyncpg.create_pool("postgresql://h/d", user="u", min_size=0)
    dsn, settings, connect = _compat.asyncpg_address(pool)
    assert (dsn, settings["user"]) == ("postgresql://h/d", "u")
    assert connect in (asyncpg.connect, asyncpg.connection.connect)


@pytest.mark.server
def test_psycopg_pool_connection_knows_its_pool(postgres_url: str) -> None:
    with ConnectionPool(postgres_url, min_size=0, max_size=1, close_returns=True) as pool:
        connection = pool.getconn()
        assert _compat.pool_of(connection) is pool
        pool.putconn(connection)
    with psycopg.connect(postgres_url) as other:
        assert _compat.pool_of(other) is None
