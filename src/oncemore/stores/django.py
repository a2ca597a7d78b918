"""The ledger in a database of Django's, whose connections are the ones that are lent: `Guard("django:default")`.

The operation runs in `transaction.atomic(using=alias, durable=True)`: the ORM's writes are part of it, `on_commit` hooks run
after it, and blocks of the view's own (`ATOMIC_REQUESTS` too) are savepoints.  Under an event loop all of that is done where
the ORM's own async methods do their work, on the request's thread (`sync_to_async`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from asgiref.sync import sync_to_async
from django.db import connections, transaction  # type: ignore[import-untyped]
from django.utils.connection import ConnectionDoesNotExist  # type: ignore[import-untyped]

from .._ledger.connect import DJANGO
from .._ledger.store import Store
from .._ledger.transactions import Do, Loan, ended, to_the_end
from ..errors import ConfigurationError, TransactionEnded

T = TypeVar("T")


def enlist(source: str, options: Mapping[str, str]) -> Store:
    """The ledger in the database with the alias that *source* names; *options* are those of the store's URL."""
    alias = source.removeprefix(DJANGO)
    try:
        database = connections[alias]
    except ConnectionDoesNotExist as error:
        raise ConfigurationError(f"{source!r} names no database of settings.DATABASES: {error}") from error
    if database.vendor == "postgresql":
        from .django_postgres import store_of as on_postgres

        return on_postgres(alias, database, options)
    if database.vendor == "sqlite":
        from .django_sqlite import store_of as on_sqlite

        return on_sqlite(alias, database, options)
    raise ConfigurationError(f"{source!r} is on {database.vendor}, which has no ledger: PostgreSQL and SQLite have")


class RolledBack(Exception):
    """Told to Django where the transaction came to nothing, so that it runs no hooks."""


class AtomicLoan(Loan):
    """A connection of Django's for one transaction: that of the thread."""

    def __init__(self, alias: str) -> None:
        self.alias = alias
        self._atomic: Any = None

    def kept(self) -> bool:
        return self.connection is not None and not self.connection.closed_in_transaction

    def do(self, work: Callable[[], T]) -> Do[T]:
        return do(work)

    def take(self) -> Any:
        """The driver's own connection, within an atomic block."""
        connection = connections[self.alias]
        if connection.in_atomic_block or not connection.get_autocommit():
            raise ConfigurationError(
                f"The connection {self.alias!r} is in a transaction already, and effect = 'transaction' must be the outermost: "
                "put the door outside of atomic(); in tests, use TransactionTestCase; on an event loop without a request, give "
                "each operation its own thread with asgiref's ThreadSensitiveContext"
            )
        atomic = transaction.atomic(using=self.alias, durable=True)
        atomic.__enter__()
        self.connection, self._atomic = connection, atomic
        return self.raw

    @property
    def raw(self) -> Any:
        return self.connection.connection

    def finish(self) -> None:
        if not self.kept():
            raise ended()
        if self.connection.needs_rollback:
            raise TransactionEnded(
                "A database error, or set_rollback(True), has marked the transaction for rollback, and the code went on; let the "
                "error out, or put what may fail into an atomic() block of its own"
            )

    def give(self, *, healthy: bool, committed: bool) -> None:
        """The driver has ended the transaction; Django hears of it here, sends nothing more, and runs its hooks."""
        atomic, self._atomic, self.connection = self._atomic, None, None
        if atomic is not None:
            error = None if committed else RolledBack()
            atomic.__exit__(type(error) if error is not None else None, error, None)


def do(work: Callable[[], T]) -> Do[T]:
    """The effect of *work* on this thread; or, on an event loop, on the thread that Django's ORM uses there."""
    return Do(work, lambda: in_orm_thread(work))


async def in_orm_thread(work: Callable[[], T]) -> T:
    return await to_the_end(asyncio.ensure_future(sync_to_async(work, thread_sensitive=True)()))
