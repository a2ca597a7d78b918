"""Helpers that the PostgreSQL tests share."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psycopg

from oncemore.stores.postgres import PostgresStore


def same(store: PostgresStore) -> str:
    """Return a URL for the same ledger."""
    settings = psycopg.conninfo.conninfo_to_dict(store.database.conninfo)
    place = f"{settings['user']}:{settings['password']}@{settings['host']}:{settings['port']}/{settings['dbname']}"
    return f"postgresql://{place}?schema={store.database.names['schema'].strip(chr(34))}"


def connections(server: psycopg.Connection[Any], name: str) -> int:
    row = server.execute("SELECT count(*) FROM pg_stat_activity WHERE application_name = %s", [name]).fetchone()
    assert row is not None
    return int(row[0])


def until(condition: Callable[[], bool]) -> bool:
    """Whether the condition is met before long."""
    deadline = time.monotonic() + 30
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return met
