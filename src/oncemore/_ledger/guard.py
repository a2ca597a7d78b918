"""The façade: `Guard` runs operations once, and shows the ledger to an operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from .._contract.policy import Policy, duration
from .._runtime.clock import SYSTEM, Clock
from .._runtime.plan import Plan, arun, run
from ..errors import ConfigurationError
from .attempt import LeaseAttempt, Performer
from .connect import connect
from .decisions import Answer, Resolution
from .encrypted import SealedStore, Sealing
from .events import Observer
from .ledger import Ledger
from .model import Operation, Record
from .steps_attempt import StepsAttempt
from .store import Filter, Page, Stats, Store
from .transaction_attempt import TransactionAttempt

Progress = Callable[[int], object]

DAY = 86400.0

ATTEMPTS: dict[str, type[LeaseAttempt]] = {
    "lease": LeaseAttempt,
    "transaction": TransactionAttempt,
    "steps": StepsAttempt,
}


class Guard(Ledger):
    """Lets each operation happen once.

    *store* is a URL, a store, or the user's own pool or engine; effects can then join its transactions.  *policy* is
    for callers who bring none.  With a *seal*, outcomes are encrypted in the store: see `oncemore.encryption`.
    """

    def __init__(
        self,
        store: str | Store | object,
        *,
        policy: Policy | None = None,
        observers: Sequence[Observer] = (),
        seal: Sealing | None = None,
        cache: int = 32 * 1024 * 1024,
        clock: Clock = SYSTEM,
    ) -> None:
        if not isinstance(policy, Policy | None):
            raise ConfigurationError(f"policy is a {type(policy).__name__}: make a Policy, as in Policy(ttl='7d')")
        inner = cast("Store", store) if hasattr(store, "claim") else connect(store)
        sealed = inner if seal is None else cast("Store", SealedStore(inner, seal))
        super().__init__(sealed, clock, tuple(observers), cache)
        self.policy = policy or Policy()

    def run(
        self, operation: Operation, perform: Performer, *, policy: Policy | None = None, wait: float | None = None
    ) -> Answer:
        """The operation's answer; *perform* is called only if nobody has performed it yet."""
        return run(self.attempt(operation, policy or self.policy).perform(perform, wait))

    async def arun(
        self, operation: Operation, perform: Performer, *, policy: Policy | None = None, wait: float | None = None
    ) -> Answer:
        """As `run`, for a *perform* that may be awaited."""
        return await arun(self.attempt(operation, policy or self.policy).perform(perform, wait))

    def guarded(
        self, operation: Operation, perform: Performer, policy: Policy, wait: float | None = None
    ) -> Plan[Answer]:
        """The plan behind `run` and `arun`; *wait* can only shorten the policy's own."""
        return self.attempt(operation, policy).perform(perform, wait)

    def attempt(self, operation: Operation, policy: Policy) -> LeaseAttempt:
        """One try at the operation, for callers that perform by themselves: `begin`, then `settle` or `fail`."""
        return ATTEMPTS[policy.effect](self, operation, policy)

    # The operator's verbs.  Each has an awaited form with an `a` before it.

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
        return self.store.list(where or Filter(), limit=check_positive("limit", limit), cursor=cursor)

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
        """Forget the operation, so that its key runs as new; False if there was no record.  A running one is refused."""
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
        while gone := (yield from self.store.purge(batch=check_positive("batch", batch))):
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
        self.heartbeat.close()
        self.store.close()

    async def aclose(self) -> None:
        """As `close`, for what belongs to the running event loop too."""
        self.heartbeat.close()
        await self.store.aclose()


def check_guard(guard: object) -> Guard:
    """The guard; a ConfigurationError for anything else, such as its URL."""
    if not isinstance(guard, Guard):
        raise ConfigurationError(f"guard is a {type(guard).__name__}: make a Guard, as in Guard('sqlite:///once.db')")
    return guard


def check_positive(name: str, count: int) -> int:
    """A number of records, 1 or more: some stores would take 0 for all of them."""
    if type(count) is not int or count < 1:
        raise ConfigurationError(f"{name} = {count!r} is not a number of records: write 1 or more")
    return count
