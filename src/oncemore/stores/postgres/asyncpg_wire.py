"""How asyncpg's connections carry the ledger's statements, from a pool or under SQLAlchemy.

asyncpg sends one statement at a time, and BEGIN is one.  But a script may end with its own COMMIT: the outcome goes with
it, its values written into the text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from .literals import inline
from .psycopg import PATIENCE, Borrowed, LoanWire
from .statements import Ask, Rows
from .transactions import Misuse


class AsyncpgLoan(Borrowed, Protocol):
    """A connection for one transaction."""

    async def begin(self, ask: Ask) -> tuple[Any, Rows]: ...  # the driver's own connection, and the first rows
    async def finish(self) -> None: ...  # before the outcome is written: what the performer left open is ended
    async def commit(self) -> None: ...  # the driver's own way, where it does not let us
    def committed(self) -> None: ...  # tell the library that its transaction has been committed for it
    async def roll_back(self) -> None: ...
    async def give(self, *, healthy: bool, committed: bool) -> None: ...


class AsyncpgWire(LoanWire[AsyncpgLoan]):
    """A connection of asyncpg's."""

    async def _begin(self, ask: Ask) -> Rows:
        self.taken, rows = await self.loan.begin(ask)
        return rows

    async def _rows(self, ask: Ask) -> Rows:
        statement, values = ask
        if statement.name:
            rows: Rows = await self._ours().fetch(statement.text, *values)
            return rows
        await self._ours().execute(inline(statement, values))  # whatever codec the user has set for JSON
        return ()

    async def _commit(self, asks: Sequence[Ask]) -> None:
        await self.loan.finish()
        raw = self._ours()
        if not raw.is_in_transaction():
            raise Misuse
        script = [inline(*ask) for ask in asks]
        if not hasattr(raw, "_top_xact"):  # another asyncpg than those we know: a round trip more
            await raw.execute(";\n".join(script))
            await self.loan.commit()
            return
        await raw.execute(";\n".join([*script, "COMMIT"]))
        raw._top_xact = None  # as its own commit does
        self.loan.committed()

    async def _roll_back(self) -> None:
        async with asyncio.timeout(PATIENCE):
            await self.loan.roll_back()

    async def _end(self, healthy: bool, committed: bool) -> None:
        raw, self.taken = self.raw, None
        if raw is not None and not healthy:
            raw.terminate()
        await self.loan.give(healthy=healthy, committed=committed)

    def drop(self) -> None:
        if self.raw is not None:
            self.raw.terminate()
        super().drop()
