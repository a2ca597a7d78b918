"""What a database lends: a transaction of the user's own driver, with the ledger's verbs inside it.

A *lender* opens transactions; each is one small adapter over a driver (a connection flavour), and the statements are
the store's.  The performer borrows the connection; only the guard ends the transaction.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from typing import Any, Generic, Protocol, TypeVar

from .._runtime.plan import Plan
from ..errors import ConfigurationError, TransactionEnded
from .events import log
from .model import Lease, Operation, Outcome, Record

T = TypeVar("T")


ASYNC = "write 'async def' and await it, or hand the guard a sync pool or engine"


class Again(Exception):
    """The whole transaction came to nothing, or may have: open another, and see.

    A serialization failure, a deadlock, a commit whose answer was lost: whoever claims the key next finds the outcome if
    it was committed after all, waits if that is not yet decided, and performs if it was not.
    """


class Stale(Again):
    """As that, where the connection had died before anything was asked on it: a restart of the server leaves a pool of them."""


class Transaction(Protocol):
    """One open transaction.  `begin` comes first; what is settled or released in it is written with the commit."""

    @property
    def connection(self) -> Any: ...  # what the performer borrows
    @property
    def awaited(self) -> bool: ...  # whether what is lent is of an async driver
    def session(self) -> Any: ...
    def begin(
        self, operation: Operation, *, lease: float, wait: float, request: bytes = b""
    ) -> Plan[Lease | Record]: ...
    def claim(self, operation: Operation, *, lease: float, request: bytes = b"") -> Plan[Lease | Record]: ...
    def settle(
        self, held: Lease, outcome: Outcome, *, retention: float, audit: bool = False, note: str = ""
    ) -> Plan[None]: ...
    def release(self, held: Lease, *, retention: float) -> Plan[None]: ...
    def find(self, scope: str, key: str) -> Plan[Record | None]: ...
    def query(self, text: str, values: Sequence[Any]) -> Plan[Sequence[Sequence[Any]]]: ...  # with $1, on any driver
    def commit(self) -> Plan[None]: ...
    def abort(self) -> Plan[None]: ...  # roll back and give the connection back; it never fails
    def drop(self) -> None: ...  # the same at once, without a word to the server


class Lender(Protocol):
    """Opens transactions on the database that the ledger is in."""

    def open(self) -> Plan[Transaction]: ...
    def again(
        self, error: BaseException
    ) -> bool: ...  # whether a driver's error means that the same may work next time
    def close(self) -> None: ...
    async def aclose(self) -> None: ...


class Do(Generic[T]):
    """The effect of one function or another: *plain* when run, *awaited* when awaited; where there is only one, it says so."""

    __slots__ = ("awaited", "plain")

    def __init__(self, plain: Callable[[], T] | None, awaited: Callable[[], Coroutine[Any, Any, T]] | None) -> None:
        self.plain = plain
        self.awaited = awaited

    def run(self) -> T:
        if self.plain is None:
            raise ConfigurationError("This guard's database driver is async: await it, or hand the guard a sync one")
        return self.plain()

    def arun(self) -> Awaitable[T]:
        if self.awaited is not None:
            return self.awaited()
        assert self.plain is not None, "an effect can be had in one way at least"
        return in_thread(self.plain)


def ended() -> TransactionEnded:
    """The error for a borrower that has ended the transaction itself."""
    return TransactionEnded(
        "The transaction that the guard lent was committed or rolled back by the code that borrowed it; leave both to the "
        "guard: it commits when the code returns, and rolls back when it raises"
    )


def over() -> TransactionEnded:
    """The error for a borrower that comes back for the connection too late."""
    return TransactionEnded(
        "The transaction is over: its outcome was committed before the first byte of the response was sent; do on "
        "op.connection what must be done before that"
    )


def unawaitable() -> ConfigurationError:
    """The error for a borrower on a thread, where all that it could do with an async connection is to forget about it."""
    return ConfigurationError(
        f"The connection that is lent here must be awaited, and this code runs in a thread, where it cannot be; {ASYNC}"
    )


def unawaited(performer: object) -> ConfigurationError:
    """The error for a borrower that has awaited nothing."""
    return ConfigurationError(
        f"{performer!r} was lent a connection that must be awaited, and has awaited nothing; {ASYNC}"
    )


def no_session() -> ConfigurationError:
    return ConfigurationError("op.session() needs SQLAlchemy: hand the guard an Engine, as in Guard(engine)")


class Loan:
    """A connection for one transaction, of a driver that has no sessions."""

    connection: Any = None  # what the performer borrows

    def session(self) -> Any:
        raise no_session()

    def kept(self) -> bool:
        """Whether it is still ours: a performer may have closed it, and then its pool has lent it to somebody else."""
        return self.connection is not None


class Returned(Protocol):
    """What ends with a transaction: the use of a connection."""

    def end(self, *, healthy: bool, committed: bool) -> Plan[None]: ...  # give the connection back, once
    def drop(self) -> None: ...


def give_back(wire: Returned, *, healthy: bool, committed: bool) -> Plan[None]:
    """Give the connection back; whoever is cut off meanwhile drops it, for it must not stay anyone's.

    What fails then (a hook of Django's that runs after the commit, say) changes nothing any more, but must not go unheard.
    """
    try:
        yield from wire.end(healthy=healthy, committed=committed)
    except Exception:
        if committed:
            log.exception("The transaction was committed; what was to be done after it has failed")
    except BaseException:
        wire.drop()
        raise


async def in_thread(function: Callable[[], T]) -> T:
    """What the function returns, from a thread."""
    context = contextvars.copy_context()
    return await to_the_end(asyncio.get_running_loop().run_in_executor(threads(), context.run, function))


async def to_the_end(work: asyncio.Future[T]) -> T:
    """What the work gives; a caller that is cancelled waits for it, however often that is: the connection is in use."""
    work.add_done_callback(lambda done: done.cancelled() or done.exception())  # or asyncio complains that nobody asked
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return work.result()


def at_once(effect: Do[None]) -> None:
    """Have it done though nobody can wait for it: here, or by a task where a loop runs, or not at all without one."""
    try:
        task = asyncio.get_running_loop().create_task(quietly(effect))
    except RuntimeError:
        if effect.plain is not None:
            with suppress(Exception):
                effect.plain()
        return
    TASKS.add(task)
    task.add_done_callback(TASKS.discard)


async def quietly(effect: Do[None]) -> None:
    with suppress(Exception):
        await effect.arun()


TASKS: set[asyncio.Task[None]] = set()  # the loop's own references to tasks are weak


# As many as there is work: those who wait for a row must never keep its owner from the thread that it commits on.
MOST = 10_000


@lru_cache(maxsize=1)
def threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MOST, thread_name_prefix="oncemore-lending")


os.register_at_fork(after_in_child=threads.cache_clear)
