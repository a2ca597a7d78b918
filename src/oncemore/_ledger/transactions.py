"""Transactions that the ledger shares with the user's code: `effect = "transaction"`.

A TransactionSource opens transactions.  A Transaction has the ledger's verbs, written once for each database.  It uses a
TransactionAdapter, which runs statements on one driver's connection.  The performer uses the same connection; only the
guard commits.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, Protocol, TypeVar

from .._runtime.loops import keep_task, to_the_end
from .._runtime.plan import Plan
from ..errors import ConfigurationError, TransactionEnded
from .model import Lease, Operation, Outcome, Record

T = TypeVar("T")

ASYNC = "write 'async def' and await it, or give the guard a sync pool or engine"


class Again(Exception):
    """The transaction failed, or its COMMIT got no answer: claim again in another transaction.

    Raised after a serialization failure, a deadlock, or a COMMIT without an answer.  The next claim of the key finds the
    outcome if it was committed after all, waits if that is not yet decided, and performs if it was not committed.
    """


class Stale(Again):
    """The pooled connection was already dead, so nothing was sent.  After a server restart the pool may be full of these."""


@dataclass(frozen=True, slots=True)
class Statement:
    """SQL text with numbered parameters: `$1` on PostgreSQL, `?1` on SQLite.  A statement with a *name* may be prepared."""

    text: str
    name: bytes = b""


Query = tuple[Statement, Sequence[Any]]  # a statement and its parameters
Rows = Sequence[Sequence[Any]]


class TransactionAdapter(Protocol):
    """One transaction on a connection of one driver.  Call `begin` first, and `commit`, `rollback` or `discard` last.

    If a query fails, the driver's own error is raised, and the queries after it are not run.
    """

    @property
    def connection(self) -> Any: ...  # for the performer; None before `begin` and after the end
    @property
    def awaited(self) -> bool: ...  # whether the performer must await the connection's methods

    def begin(self, *queries: Query) -> Plan[Rows]:
        """Take a connection, start a transaction, run *queries*, and return the rows of the last one."""
        ...

    def execute(self, *queries: Query) -> Plan[Rows]:
        """Run *queries*, and return the rows of the last one."""
        ...

    def commit(self, *queries: Query) -> Plan[None]:
        """Run *queries*, commit, and return the connection to its pool.  After an error, call `rollback`.

        Raises TransactionEnded if the adapter sees that the performer has ended the transaction or closed the connection.
        """
        ...

    def rollback(self) -> Plan[None]:
        """Roll back and return the connection; close it if that fails.  Does nothing if there is no transaction."""
        ...

    def discard(self) -> None:
        """Close the connection without waiting for a rollback.  Does nothing if there is no transaction."""
        ...


class Transaction(Protocol):
    """One transaction with the ledger's verbs, which a subclass for each database writes, on the adapter of any driver.

    Call `begin` first.  `settle` and `release` are sent together with the commit.
    """

    def begin(
        self, operation: Operation, *, lease: float, wait: float, request: bytes = b""
    ) -> Plan[Lease | Record]: ...
    def claim(self, operation: Operation, *, lease: float, request: bytes = b"") -> Plan[Lease | Record]: ...
    def settle(
        self, held: Lease, outcome: Outcome, *, retention: float, audit: bool = False, note: str = ""
    ) -> Plan[None]: ...
    def release(self, held: Lease, *, retention: float) -> Plan[None]: ...
    def find(self, scope: str, key: str) -> Plan[Record | None]: ...
    def query(self, text: str, values: Sequence[Any]) -> Plan[Rows]: ...  # the user's own SQL, with $1, on any driver
    def commit(self) -> Plan[None]: ...

    _adapter: TransactionAdapter
    _open: bool
    _callbacks: list[Callable[[], object]]
    deferred: list[Query]  # sent with the commit

    def __init__(self, adapter: TransactionAdapter) -> None:
        self._adapter, self._open, self._callbacks, self.deferred = adapter, True, [], []

    @property
    def connection(self) -> Any:
        """The connection for the performer."""
        return self._opened.connection

    @property
    def awaited(self) -> bool:
        """Whether the performer must await the connection's methods."""
        return self._adapter.awaited

    def session(self, **options: Any) -> Any:
        """Return an ORM session in the transaction; raise ConfigurationError if the adapter has no sessions."""
        make = getattr(self._opened, "session", None)
        if make is None:
            raise ConfigurationError("op.session() needs SQLAlchemy: give the guard an Engine, as in Guard(engine)")
        return make(**options)

    def execute(self, *queries: Query) -> Plan[Rows]:
        """Run *queries*, with the database's own kind of parameters, and return the rows of the last one."""
        return self._opened.execute(*queries)

    @property
    def _opened(self) -> TransactionAdapter:
        if not self._open:
            raise TransactionEnded(
                "The transaction is over: it was committed before the first byte of the response was sent; use op.connection "
                "before that"
            )
        return self._adapter

    def can_defer(self) -> bool:
        """Whether queries may be `deferred` to the commit: not if a savepoint around them might be rolled back."""
        return False

    def on_commit(self, callback: Callable[[], object]) -> None:
        """Call *callback* once, after the commit."""
        if callback not in self._callbacks:
            self._callbacks.append(callback)

    def abort(self) -> Plan[None]:
        """Roll back and return the connection.  If that is interrupted, close the connection."""
        if not self._open:
            return
        try:
            yield from self._adapter.rollback()
        except BaseException:
            self.drop()
            raise
        self._end()

    def drop(self) -> None:
        """Close the connection immediately, without a ROLLBACK."""
        if self._open:
            self._adapter.discard()
            self._end()

    def _end(self) -> None:
        self._open = False


class TransactionSource(Protocol):
    """Opens transactions on the database that the ledger is in."""

    def open(self) -> Plan[Transaction]: ...
    def again(self, error: BaseException) -> bool: ...  # whether a second run of the transaction may succeed
    def close(self) -> None: ...
    async def aclose(self) -> None: ...


class Do(Generic[T]):
    """Effect: `run` calls *plain*; `arun` awaits *awaited*, or calls *plain* in a thread if that is None."""

    __slots__ = ("awaited", "plain")

    def __init__(self, plain: Callable[[], T] | None, awaited: Callable[[], Coroutine[Any, Any, T]] | None) -> None:
        self.plain = plain
        self.awaited = awaited

    def run(self) -> T:
        if self.plain is None:
            raise ConfigurationError(
                "This guard's database driver is async: await the call, or give the guard a sync pool or engine"
            )
        return self.plain()

    def arun(self) -> Awaitable[T]:
        if self.awaited is not None:
            return self.awaited()
        assert self.plain is not None, "an effect has one form at least"
        return in_thread(self.plain)


def commit_forbidden() -> TransactionEnded:
    """Return the error for a performer that has ended the transaction itself."""
    return TransactionEnded(
        "The guard's transaction was committed or rolled back by the code that uses it; leave both to the guard: it commits "
        "when the code returns, and rolls back when it raises"
    )


def unawaitable() -> ConfigurationError:
    """Return the error for a performer in a thread that asks for an async connection, which it could not await."""
    return ConfigurationError(
        f"The guard's connection must be awaited, and this code runs in a thread, where it cannot be; {ASYNC}"
    )


def unawaited(performer: object) -> ConfigurationError:
    """Return the error for a performer that has awaited nothing, so its statements were never sent."""
    return ConfigurationError(f"{performer!r} used a connection that must be awaited, and has awaited nothing; {ASYNC}")


async def in_thread(function: Callable[[], T]) -> T:
    """Call *function* in a thread, and return its result.  A cancelled caller waits for it, because it uses the connection."""
    context = contextvars.copy_context()
    return await to_the_end(asyncio.get_running_loop().run_in_executor(threads(), context.run, function))


def at_once(effect: Do[None]) -> None:
    """Carry out *effect* without waiting for it: in a task if a loop runs here, else on this thread if it has a sync form."""

    async def quietly() -> None:
        with suppress(Exception):
            await effect.arun()

    if asyncio._get_running_loop() is not None:  # get_running_loop() raises instead
        keep_task(quietly())
    elif effect.plain is not None:
        with suppress(Exception):
            effect.plain()


# Practically unlimited: callers that wait for a row must not use up the threads, because its owner needs one to commit.
MOST_THREADS = 10_000


@lru_cache(maxsize=1)
def threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="oncemore-transactions")


os.register_at_fork(after_in_child=threads.cache_clear)
