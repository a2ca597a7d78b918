"""How psycopg's connections carry the ledger's statements: sync ones on threads, async ones on event loops.

Where a connection comes from, and where it goes, is its *loan*: a pool of our own or the user's, an engine, Django.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from psycopg.pq import TransactionStatus

from ..core.lending import Do
from .postgres_sql import Ask, Rows
from .postgres_transaction import Misuse
from .postgres_trip import COMMIT, ROLLBACK, begin, trip

T = TypeVar("T")

IDLE = int(TransactionStatus.IDLE)


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
        _, rows = self._sent((begin(raw), ()), ask)
        raw.lent = True
        return rows

    def _sent(self, *asks: Ask, wanted: bool = True) -> list[Rows]:
        raw = self.raw
        with raw.lock:
            sent: list[Rows] = raw.wait(trip(raw, asks, wanted=wanted))
        return sent

    def rows(self, ask: Ask) -> Do[Rows]:
        return self.loan.do(lambda: self._sent(ask)[0])

    def commit(self, asks: Sequence[Ask]) -> Do[None]:
        return self.loan.do(lambda: self._commit(asks))

    def _commit(self, asks: Sequence[Ask]) -> None:
        self.loan.finish()
        raw = self.raw
        check(raw)
        raw.lent = False
        self._sent(*asks, (COMMIT, ()), wanted=False)

    def roll_back(self) -> Do[None]:
        return self.loan.do(self._roll_back)

    def _roll_back(self) -> None:
        if self.raw is not None:
            self.raw.lent = False
            if self.raw.pgconn.transaction_status != IDLE:
                self._sent((ROLLBACK, ()))  # its own rollback() would have our prepared statements forgotten

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
        _, rows = await self._sent((begin(raw), ()), ask)
        raw.lent = True
        return rows

    async def _sent(self, *asks: Ask, wanted: bool = True) -> list[Rows]:
        raw = self.raw
        async with raw.lock:
            sent: list[Rows] = await raw.wait(trip(raw, asks, wanted=wanted))
        return sent

    def rows(self, ask: Ask) -> Do[Rows]:
        return Do(None, lambda: self._rows(ask))

    async def _rows(self, ask: Ask) -> Rows:
        return (await self._sent(ask))[0]

    def commit(self, asks: Sequence[Ask]) -> Do[None]:
        return Do(None, lambda: self._commit(asks))

    async def _commit(self, asks: Sequence[Ask]) -> None:
        await self.loan.finish()
        raw = self.raw
        check(raw)
        raw.lent = False
        await self._sent(*asks, (COMMIT, ()), wanted=False)

    def roll_back(self) -> Do[None]:
        return Do(None, self._roll_back)

    async def _roll_back(self) -> None:
        if self.raw is not None:
            self.raw.lent = False
            if self.raw.pgconn.transaction_status != IDLE:
                await self._sent((ROLLBACK, ()))

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


def check(raw: Any) -> None:
    """Refuse to settle on a connection whose transaction is over."""
    if raw.pgconn.transaction_status == IDLE:
        raise Misuse
