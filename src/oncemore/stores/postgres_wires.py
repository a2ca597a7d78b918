"""How psycopg's connections carry the ledger's statements: sync ones on threads, async ones on event loops.

Where a connection comes from, and where it goes, is its *loan*: a pool of our own or the user's, an engine, Django.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar

from psycopg.pq import TransactionStatus

from ..core.lending import Do
from .postgres_sql import Ask, Rows
from .postgres_transaction import Misuse
from .postgres_trip import COMMIT, ROLLBACK, begin, trip

T = TypeVar("T")

IDLE = int(TransactionStatus.IDLE)


class Borrowed(Protocol):
    """A connection for one transaction."""

    @property
    def connection(self) -> Any: ...  # what the performer borrows
    def session(self) -> Any: ...


class Loan(Borrowed, Protocol):
    """As that, on threads."""

    def do(self, work: Callable[[], T]) -> Do[T]: ...  # on whatever thread the connection can be used
    def take(self) -> Any: ...  # the driver's own connection
    def finish(self) -> None: ...  # before the outcome is written: what the performer left open is ended
    def give(self, *, healthy: bool, committed: bool) -> None: ...


class LoopLoan(Borrowed, Protocol):
    """As that, on an event loop."""

    async def take(self) -> Any: ...
    async def finish(self) -> None: ...
    async def give(self, *, healthy: bool, committed: bool) -> None: ...


L = TypeVar("L", bound=Borrowed)


class LoanWire(Generic[L]):
    """What all wires have in common: the effects, each of which a driver carries out in its own way."""

    _begin: Callable[..., Any]  # plain on threads, to be awaited on event loops; so are the others
    _rows: Callable[..., Any]
    _commit: Callable[..., Any]
    _roll_back: Callable[..., Any]
    _end: Callable[..., Any]

    def __init__(self, loan: L) -> None:
        self.loan = loan
        self.raw: Any = None  # the driver's own connection, while there is one

    @property
    def connection(self) -> Any:
        return self.loan.connection

    def session(self) -> Any:
        return self.loan.session()

    def _do(self, work: Callable[[], Any]) -> Do[Any]:
        return Do(None, work)

    def begin(self, ask: Ask) -> Do[Rows]:
        return self._do(lambda: self._begin(ask))

    def rows(self, ask: Ask) -> Do[Rows]:
        return self._do(lambda: self._rows(ask))

    def commit(self, asks: Sequence[Ask]) -> Do[None]:
        return self._do(lambda: self._commit(asks))

    def roll_back(self) -> Do[None]:
        return self._do(self._roll_back)

    def end(self, *, healthy: bool, committed: bool) -> Do[None]:
        return self._do(lambda: self._end(healthy, committed))


class ThreadWire(LoanWire[Loan]):
    """A sync connection of psycopg's."""

    def _do(self, work: Callable[[], Any]) -> Do[Any]:
        return self.loan.do(work)

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

    def _rows(self, ask: Ask) -> Rows:
        return self._sent(ask)[0]

    def _commit(self, asks: Sequence[Ask]) -> None:
        self.loan.finish()
        raw = self.raw
        check(raw)
        raw.lent = False
        self._sent(*asks, (COMMIT, ()), wanted=False)

    def _roll_back(self) -> None:
        if self.raw is not None:
            self.raw.lent = False
            if self.raw.pgconn.transaction_status != IDLE:
                self._sent((ROLLBACK, ()))  # its own rollback() would have our prepared statements forgotten

    def _end(self, healthy: bool, committed: bool) -> None:
        if self.raw is not None and not healthy:
            self.raw.close()
        self.raw = None
        self.loan.give(healthy=healthy, committed=committed)

    def drop(self) -> None:
        with suppress(Exception):
            self._end(False, False)


class LoopWire(LoanWire[LoopLoan]):
    """An async connection of psycopg's."""

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

    async def _rows(self, ask: Ask) -> Rows:
        return (await self._sent(ask))[0]

    async def _commit(self, asks: Sequence[Ask]) -> None:
        await self.loan.finish()
        raw = self.raw
        check(raw)
        raw.lent = False
        await self._sent(*asks, (COMMIT, ()), wanted=False)

    async def _roll_back(self) -> None:
        if self.raw is not None:
            self.raw.lent = False
            if self.raw.pgconn.transaction_status != IDLE:
                await self._sent((ROLLBACK, ()))

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
