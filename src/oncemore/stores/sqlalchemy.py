"""The ledger in the database of a SQLAlchemy 2 engine, whose connections are the ones that are lent: `Guard(engine)`.

`op.connection` is a Connection or AsyncConnection, and `op.session()` a Session or AsyncSession that joins its transaction
by savepoints.  Engines on PostgreSQL and SQLite, sync and async, with the drivers named in `sqlalchemy_postgres` and
`sqlalchemy_sqlite`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy.engine import Engine
from sqlalchemy.ext.asyncio import AsyncEngine

from .._ledger.store import Store
from ..errors import ConfigurationError


def enlist(engine: Any, options: Mapping[str, str]) -> Store:
    """The ledger in the engine's database; *options* are those of the store's URL."""
    if not isinstance(engine, Engine | AsyncEngine):
        raise ConfigurationError(f"{type(engine).__name__} is no engine: hand the guard what create_engine returns")
    dialect = engine.dialect.name
    if dialect == "postgresql":
        from .sqlalchemy_postgres import store_of as on_postgres

        return on_postgres(engine, options)
    if dialect == "sqlite":
        from .sqlalchemy_sqlite import store_of as on_sqlite

        return on_sqlite(engine, options)
    raise ConfigurationError(f"An engine on {dialect} has no ledger: PostgreSQL and SQLite have")
