"""How psycopg's connections carry the ledger's statements: sync ones on threads, async ones on event loops.

Where a connection comes from, and where it goes, is its *loan*: a pool of our own or the user's, an engine, Django.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from ..core.lending import Do
from .postgres_transaction import Ask, Misuse, Rows

T = TypeVar("T")


class Loan(Protocol):
    """A connection for one transaction, on threads."""

    @property
    def connection(self) -> Any: ...  # what the performer borrows
    def session(self) -> Any: ...
    def do(self, work: Callable[[], T]) -> Do[T]: ...  # on whatever thread the connection can be used
    def take(self) -> Any: ...  # the driver's own connection
    def finish(self) -> None: ...  # before the outcome is written: what the performer left open is ended
    def give(self, *, healthy: bool, committed: bool) -> None: ...


class LoopLoan(Protocol):
    """A connection for one transaction, on an event loop."""

    @property
    def connection(self) -> Any: ...
    def session(self) -> Any: ...
    async def take(self) -> Any: ...
    async def finish(self) -> None: ...
    async def give(self, *, healthy: bool, committed: bool) -> None: ...


class ThreadWire:
    """A sync connection of psycopg's."""

    def __init__(self, loan: Loan) -> None:
        self.loan = loan
        self.raw: Any = None

    @property
    def connection(self) -> Any:
        return self.loan.connection

    def session(self) -> Any:
        return self.loan.session()

    def begin(self, ask: Ask) -> Do[Rows]:
        return self.loan.do(lambda: self._begin(ask))

    def _begin(self, ask: Ask) -> Rows:
        raw = self.raw = self.loan.take()
        with raw.pipeline():
            if raw.autocommit:
                raw.execute(begin_of(raw))
            cursor = self._sent(ask)
        rows: Rows = cursor.fetchall()  # not before: to look for them within the pipeline is a round trip more
        raw.lent = True
        return rows

    def _sent(self, ask: Ask) -> Any:
        statement, values = ask
        cursor = psycopg.RawCursor(self.raw, row_factory=tuple_row)
        return cursor.execute(statement.text, values, prepare=prepares(self.raw), binary=True)

    def rows(self, ask: Ask) -> Do[Rows]:
        return self.loan.do(lambda: self._rows(ask))

    def _rows(self, ask: Ask) -> Rows:
        cursor = self._sent(ask)
        return cursor.fetchall() if cursor.description else ()

    def commit(self, asks: Sequence[Ask]) -> Do[None]:
        return self.loan.do(lambda: self._commit(asks))

    def _commit(self, asks: Sequence[Ask]) -> None:
        self.loan.finish()
        raw = self.raw
        check(raw)
        raw.lent = False
        with raw.pipeline():
            for ask in asks:
                self._sent(ask)
            raw.execute("COMMIT")  # its own commit() would wait for what is before it

    def roll_back(self) -> Do[None]:
        return self.loan.do(self._roll_back)

    def _roll_back(self) -> None:
        if self.raw is not None:
            self.raw.lent = False
            self.raw.rollback()

    def end(self, *, healthy: bool, committed: bool) -> Do[None]:
        return self.loan.do(lambda: self._end(healthy, committed))

    def _end(self, healthy: bool, committed: bool) -> None:
        if self.raw is not None and not healthy:
            self.raw.close()
        self.raw = None
        self.loan.give(healthy=healthy, committed=committed)

    def drop(self) -> None:
        with suppress(Exception):
            self._end(False, False)


class LoopWire:
    """An async connection of psycopg's."""

    def __init__(self, loan: LoopLoan) -> None:
        self.loan = loan
        self.raw: Any = None

    @property
    def connection(self) -> Any:
        return self.loan.connection

    def session(self) -> Any:
        return self.loan.session()

    def begin(self, ask: Ask) -> Do[Rows]:
        return Do(None, lambda: self._begin(ask))

    async def _begin(self, ask: Ask) -> Rows:
        raw = self.raw = await self.loan.take()
        async with raw.pipeline():
            if raw.autocommit:
                await raw.execute(begin_of(raw))
            cursor = await self._sent(ask)
        rows: Rows = await cursor.fetchall()
        raw.lent = True
        return rows

    async def _sent(self, ask: Ask) -> Any:
        statement, values = ask
        cursor = psycopg.AsyncRawCursor(self.raw, row_factory=tuple_row)
        return await cursor.execute(statement.text, values, prepare=prepares(self.raw), binary=True)

    def rows(self, ask: Ask) -> Do[Rows]:
        return Do(None, lambda: self._rows(ask))

    async def _rows(self, ask: Ask) -> Rows:
        cursor = await self._sent(ask)
        return await cursor.fetchall() if cursor.description else ()

    def commit(self, asks: Sequence[Ask]) -> Do[None]:
        return Do(None, lambda: self._commit(asks))

    async def _commit(self, asks: Sequence[Ask]) -> None:
        await self.loan.finish()
        raw = self.raw
        check(raw)
        raw.lent = False
        async with raw.pipeline():
            for ask in asks:
                await self._sent(ask)
            await raw.execute("COMMIT")

    def roll_back(self) -> Do[None]:
        return Do(None, self._roll_back)

    async def _roll_back(self) -> None:
        if self.raw is not None:
            self.raw.lent = False
            await self.raw.rollback()

    def end(self, *, healthy: bool, committed: bool) -> Do[None]:
        return Do(None, lambda: self._end(healthy, committed))

    async def _end(self, healthy: bool, committed: bool) -> None:
        raw, self.raw = self.raw, None
        if raw is not None and not healthy:
            await raw.close()
        await self.loan.give(healthy=healthy, committed=committed)

    def drop(self) -> None:
        if self.raw is not None:
            self.raw.pgconn.finish()
            later(self._end(False, False))


# The loop's own references to tasks are weak.
TASKS: set[asyncio.Task[None]] = set()


def later(work: Coroutine[Any, Any, None]) -> None:
    """Have it done by the running loop; without one there is nothing that the connection could go back to."""
    try:
        task = asyncio.get_running_loop().create_task(work)
    except RuntimeError:
        work.close()
        return
    TASKS.add(task)
    task.add_done_callback(TASKS.discard)


def begin_of(raw: Any) -> str:
    """The BEGIN of a connection that leaves it to others, with what was set on it."""
    words = ["BEGIN"]
    if raw.isolation_level is not None:
        words.append(f"ISOLATION LEVEL {raw.isolation_level.name.replace('_', ' ')}")
    if raw.read_only is not None:
        words.append("READ ONLY" if raw.read_only else "READ WRITE")
    if raw.deferrable is not None:
        words.append("DEFERRABLE" if raw.deferrable else "NOT DEFERRABLE")
    return " ".join(words)


def prepares(raw: Any) -> bool | None:
    """Whether our statements are prepared at once: not where the pool says that nothing is."""
    return True if raw.prepare_threshold is not None else None


def check(raw: Any) -> None:
    """Refuse to settle on a connection whose transaction is over."""
    if raw.info.transaction_status == TransactionStatus.IDLE:
        raise Misuse
