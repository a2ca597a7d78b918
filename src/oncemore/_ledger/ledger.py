"""The ledger as an operator sees it: look, decide, delete, purge.  Each verb has an awaited form with an `a` before it."""

from __future__ import annotations

from collections.abc import Callable

from .._contract.policy import duration
from .._runtime.plan import Plan, arun, run
from ..errors import ConfigurationError
from .model import Record
from .resolution import Resolution
from .store import Filter, Page, Stats, Store

Progress = Callable[[int], object]

DAY = 86400.0


class Ledger:
    """All that can be done with records besides performing operations."""

    store: Store

    def find(self, scope: str, key: str) -> Record | None:
        """The record, or None; nothing is ever performed."""
        return run(self.store.find(scope, key))

    async def afind(self, scope: str, key: str) -> Record | None:
        return await arun(self.store.find(scope, key))

    def list(self, where: Filter | None = None, *, limit: int = 100, cursor: str | None = None) -> Page:
        """One page of records; pass its cursor for the next."""
        return run(self._listed(where, limit, cursor))

    async def alist(self, where: Filter | None = None, *, limit: int = 100, cursor: str | None = None) -> Page:
        return await arun(self._listed(where, limit, cursor))

    def _listed(self, where: Filter | None, limit: int, cursor: str | None) -> Plan[Page]:
        return self.store.list(where or Filter(), limit=some("limit", limit), cursor=cursor)

    def resolve(
        self, scope: str, key: str, resolution: Resolution, *, retention: float | str = DAY, note: str = ""
    ) -> Record:
        """Decide an unknown outcome, and for how long that is remembered; the record as it is then."""
        return run(self._resolved(scope, key, resolution, retention, note))

    async def aresolve(
        self, scope: str, key: str, resolution: Resolution, *, retention: float | str = DAY, note: str = ""
    ) -> Record:
        return await arun(self._resolved(scope, key, resolution, retention, note))

    def _resolved(
        self, scope: str, key: str, resolution: Resolution, retention: float | str, note: str
    ) -> Plan[Record]:
        if resolution.verdict == "unknown":
            raise ConfigurationError("To resolve is to decide: say Resolution.settled(...) or Resolution.released()")
        return self.store.resolve(scope, key, resolution.outcome, retention=duration(retention), note=note)

    def delete(self, scope: str, key: str) -> bool:
        """Forget the operation, so that its key runs as new; False where there was no record.  Never a running one."""
        return run(self.store.delete(scope, key))

    async def adelete(self, scope: str, key: str) -> bool:
        return await arun(self.store.delete(scope, key))

    def purge(self, *, batch: int = 1000, progress: Progress | None = None) -> int:
        """Remove all that has expired, a batch at a time; how many.  *progress* is told the running total."""
        return run(self._purged(batch, progress))

    async def apurge(self, *, batch: int = 1000, progress: Progress | None = None) -> int:
        return await arun(self._purged(batch, progress))

    def _purged(self, batch: int, progress: Progress | None) -> Plan[int]:
        total = 0
        while gone := (yield from self.store.purge(batch=some("batch", batch))):
            total += gone
            if progress is not None:
                progress(total)
        return total

    def stats(self) -> Stats:
        """How many records there are, by state."""
        return run(self.store.stats())

    async def astats(self) -> Stats:
        return await arun(self.store.stats())

    def close(self) -> None:
        """End the threads and connections of this process."""
        self.store.close()

    async def aclose(self) -> None:
        """As `close`, for what belongs to the running event loop too."""
        await self.store.aclose()


def some(name: str, count: int) -> int:
    """How many, where it is any; stores would take less than one for none, or for all."""
    if type(count) is not int or count < 1:
        raise ConfigurationError(f"{name} = {count!r} is not a number of records: write 1 or more")
    return count
