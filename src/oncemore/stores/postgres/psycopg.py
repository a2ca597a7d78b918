"""How psycopg's connections carry the ledger's statements: sync ones on threads, async ones on event loops.

Where a connection comes from, and where it goes, is its *loan*: a pool of our own or the user's, an engine, Django.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from psycopg.pq import TransactionStatus

from ..._ledger.transactions import Do, at_once
from ..._runtime.plan import Plan
from .pipeline import COMMIT, ROLLBACK, adapt_values, begin_statement, exchange
from .statements import Ask, Rows
from .transactions import Misuse

T = TypeVar("T")

IDLE, UNKNOWN = int(TransactionStatus.IDLE), int(TransactionStatus.UNKNOWN)
# Seconds for a rollback on an event loop: where the network is silent, to close the connection does as well.
PATIENCE = 5.0


class Borrowed(Protocol):
    """A connection for one transaction."""

    @property
    def connection(self) -> Any: ...  # what the performer borrows
    def session(self) -> Any: ...
    def kept(self) -> bool: ...  # False where the performer has closed it: its pool may have lent it to somebody else


class ThreadLoan(Borrowed, Protocol):
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

    awaited = True  # the connection that is lent
    _begin: Callable[..., Any]  # plain on threads, to be awaited on event loops; so are the others
    _rows: Callable[..., Any]
    _commit: Callable[..., Any]
    _roll_back: Callable[..., Any]
    _end: Callable[..., Any]

    def __init__(self, loan: L) -> None:
        self.loan = loan
        self.taken: Any = None  # the driver's own connection
        self.committed = False  # also where whoever asked for it was cancelled before the answer

    @property
    def raw(self) -> Any:
        """The driver's own connection, while it is ours."""
        return self.taken if self.taken is not None and self.loan.kept() else None

    def _ours(self) -> Any:
        raw = self.raw
        if raw is None:
            raise Misuse
        return raw

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

    def query(self, ask: Ask) -> Do[Rows]:
        return self._do(lambda: self._rows(self._adapted(ask)))

    def _adapted(self, ask: Ask) -> Ask:
        """The user's statement, its values as the driver writes them."""
        return ask

    def commit(self, asks: Sequence[Ask]) -> Do[None]:
        return self._do(lambda: self._commit(asks))

    def roll_back(self) -> Do[None]:
        return self._do(self._roll_back)

    def end(self, *, healthy: bool, committed: bool) -> Plan[None]:
        yield self._do(lambda: self._end(healthy, committed or self.committed))

    def drop(self) -> None:
        at_once(self._do(lambda: self._end(False, self.committed)))


class ThreadWire(LoanWire[ThreadLoan]):
    """A sync connection of psycopg's."""

    awaited = False

    def _do(self, work: Callable[[], Any]) -> Do[Any]:
        return self.loan.do(work)

    def _begin(self, ask: Ask) -> Rows:
        raw = self.taken = self.loan.take()
        _, rows = self._sent((begin_statement(raw), ()), ask)
        raw.lent = True
        return rows

    def _sent(self, *asks: Ask) -> list[Rows]:
        raw = self._ours()
        with raw.lock:
            sent: list[Rows] = raw.wait(exchange(raw, asks))
        return sent

    def _rows(self, ask: Ask) -> Rows:
        return self._sent(ask)[0]

    def _adapted(self, ask: Ask) -> Ask:
        return ask[0], adapt_values(self._ours(), ask[1])

    def _commit(self, asks: Sequence[Ask]) -> None:
        self.loan.finish()
        raw = self._ours()
        check(raw)
        raw.lent = False
        self._sent(*asks, (COMMIT, ()))
        self.committed = True

    def _roll_back(self) -> None:
        raw = self.raw
        if raw is not None:
            raw.lent = False
            if raw.pgconn.transaction_status != IDLE:
                self._sent((ROLLBACK, ()))  # its own rollback() would have our prepared statements forgotten

    def _end(self, healthy: bool, committed: bool) -> None:
        raw, self.taken = self.raw, None
        if raw is not None and not healthy:
            self._cut(raw)
        self.loan.give(healthy=healthy, committed=committed)

    def _cut(self, raw: Any) -> None:
        raw.pgconn.finish()  # its own close() may only give it back to its pool


class LoopWire(LoanWire[LoopLoan]):
    """An async connection of psycopg's."""

    async def _begin(self, ask: Ask) -> Rows:
        raw = self.taken = await self.loan.take()
        _, rows = await self._sent((begin_statement(raw), ()), ask)
        raw.lent = True
        return rows

    async def _sent(self, *asks: Ask) -> list[Rows]:
        raw = self._ours()
        async with raw.lock:
            sent: list[Rows] = await raw.wait(exchange(raw, asks))
        return sent

    async def _rows(self, ask: Ask) -> Rows:
        return (await self._sent(ask))[0]

    def _adapted(self, ask: Ask) -> Ask:
        return ask[0], adapt_values(self._ours(), ask[1])

    async def _commit(self, asks: Sequence[Ask]) -> None:
        await self.loan.finish()
        raw = self._ours()
        check(raw)
        raw.lent = False
        await self._sent(*asks, (COMMIT, ()))
        self.committed = True

    async def _roll_back(self) -> None:
        raw = self.raw
        if raw is not None:
            raw.lent = False
            if raw.pgconn.transaction_status != IDLE:
                async with asyncio.timeout(PATIENCE):
                    await self._sent((ROLLBACK, ()))

    async def _end(self, healthy: bool, committed: bool) -> None:
        raw, self.taken = self.raw, None
        if raw is not None and not healthy:
            raw.pgconn.finish()
        await self.loan.give(healthy=healthy, committed=committed)

    def drop(self) -> None:
        if self.raw is not None:
            self.raw.pgconn.finish()
        super().drop()


def check(raw: Any) -> None:
    """Refuse to settle on a connection whose transaction is over, or that the performer has closed; the network may have, too."""
    status = raw.pgconn.transaction_status
    if status == IDLE or (status == UNKNOWN and not raw.broken):
        raise Misuse
