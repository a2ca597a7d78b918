"""The private parts of other libraries that the stores use, and the versions that each is known to work with.

No other module touches them.  A test in `tests/stores/test_compat.py` fails for each part that an upgrade moves.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from .._ledger.transactions import commit_forbidden
from ..errors import MissingDriver

if TYPE_CHECKING:
    import aiosqlite

T = TypeVar("T")


# aiosqlite 0.22.1


def check_aiosqlite() -> None:
    """Raise MissingDriver unless aiosqlite has `Connection.stop`, which closes a connection and so frees its locks."""
    try:
        from aiosqlite import Connection
    except ModuleNotFoundError:
        found = False
    else:
        found = hasattr(Connection, "stop")
    if not found:
        raise MissingDriver(
            "effect = 'transaction' on sqlite:/// from an event loop needs aiosqlite 0.22.1 or newer; install it with: "
            "pip install 'oncemore[aiosqlite]'"
        )


async def open_aiosqlite(path: str, **settings: Any) -> aiosqlite.Connection:
    """Open a connection.  Its thread does not keep the process from ending."""
    check_aiosqlite()
    import aiosqlite

    connection = aiosqlite.connect(path, **settings)
    connection._thread.daemon = True
    return await connection


async def run_in_aiosqlite(connection: aiosqlite.Connection, work: Callable[[sqlite3.Connection], T]) -> T:
    """Call *work* with the sqlite3 connection on its thread: many statements cost only one change of threads."""
    try:
        raw = connection._conn
    except ValueError as error:  # the performer has closed it
        raise commit_forbidden() from error
    return await connection._execute(work, raw)  # type: ignore[no-any-return, no-untyped-call]


def stop_aiosqlite(connection: aiosqlite.Connection) -> None:
    """End the connection and its thread.  Call this on a thread without an event loop, so that aiosqlite uses none."""
    connection.stop()
    connection._thread.join(5)


# asyncpg 0.29 to 0.32


def asyncpg_connection(lent: Any) -> Any:
    """Return the connection behind the proxy that a pool lends, or None if it was released or lost."""
    return getattr(lent, "_con", lent)


def asyncpg_address(pool: Any) -> tuple[Any, dict[str, Any], Any]:
    """Return the DSN and the keyword arguments that a pool connects with, and the function that it calls to connect."""
    args = getattr(pool, "_connect_args", None)
    return (args[0] if args else None), getattr(pool, "_connect_kwargs", {}), getattr(pool, "_connect", None)


# psycopg_pool 3.2 and 3.3


def pool_of(connection: Any) -> Any:
    """Return the psycopg_pool of a connection below an engine, or None if close() does not give the connection back."""
    pool = getattr(connection, "_pool", None)
    return pool if getattr(pool, "close_returns", False) else None
