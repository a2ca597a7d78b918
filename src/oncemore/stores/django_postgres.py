"""Django's PostgreSQL connections: psycopg's, which Django prefers to psycopg2 and which the ledger needs anyway."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from psycopg.pq import Conninfo

from .._ledger.store import Store
from .django import AtomicLoan
from .postgres import PostgresStore, url_of
from .postgres.psycopg import ThreadWire
from .postgres.transactions import Enlisted

NAMES = {"NAME": "dbname", "USER": "user", "PASSWORD": "password", "HOST": "host", "PORT": "port"}


def store_of(alias: str, database: Any, options: Mapping[str, str]) -> Store:
    """The ledger in the database with this alias."""
    store = PostgresStore(url_of(settings_of(database.settings_dict), options))
    store.lender = Enlisted(store, lambda: ThreadWire(AtomicLoan(alias)))
    return store


def settings_of(said: Mapping[str, Any]) -> dict[str, Any]:
    """libpq's settings for what settings.DATABASES says."""
    known = {option.keyword.decode() for option in Conninfo.get_defaults()}
    found = {name: value for name, value in said.get("OPTIONS", {}).items() if name in known}
    found |= {name: said[ours] for ours, name in NAMES.items() if said.get(ours)}
    if said.get("NAME", "") is None:
        found["dbname"] = "postgres"  # as Django does
    return found
