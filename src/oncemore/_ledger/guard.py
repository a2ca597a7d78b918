"""The façade: `Guard` runs operations once, and shows the ledger to an operator."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Awaitable, Callable, Sequence
from types import FunctionType, TracebackType
from typing import Any, Self, TypeVar, cast, overload

from .._contract.policy import Policy, duration
from .._runtime.clock import SYSTEM, TimeSource
from .._runtime.plan import Plan, arun, run
from ..errors import ConfigurationError
from .attempt import LeaseAttempt, Performer
from .classes import BUILT_IN, annotated, annotated_classes
from .connect import connect
from .context import Op
from .decisions import Answer, Resolution
from .encrypted import SealedStore, Sealing
from .events import Observer
from .ledger import Ledger
from .model import Operation, Record
from .steps_attempt import StepsAttempt
from .store import Filter, Page, Stats, Store
from .transaction_attempt import TransactionAttempt

T = TypeVar("T")

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
    for callers that bring none.  With a *seal*, outcomes are encrypted in the store: see `oncemore.encryption`.
    """

    def __init__(
        self,
        store: str | Store | object,
        *,
        policy: Policy | None = None,
        observers: Sequence[Observer] = (),
        seal: Sealing | None = None,
        cache: int = 32 * 1024 * 1024,
        clock: TimeSource = SYSTEM,
    ) -> None:
        if not isinstance(policy, Policy | None):
            raise ConfigurationError(f"policy is a {type(policy).__name__}: make a Policy, as in Policy(ttl='7d')")
        inner = cast("Store", store) if hasattr(store, "claim") else connect(store)
        sealed = inner if seal is None else cast("Store", SealedStore(inner, seal))
        super().__init__(sealed, clock, tuple(observers), cache)
        self.policy = policy or Policy()

    def run(
        self,
        operation: Operation,
        perform: Callable[[Op], T],
        *,
        policy: Policy | None = None,
        wait: float | None = None,
    ) -> Answer[T]:
        """The operation's answer; *perform* is called only if nobody has performed it yet.

        Its value is an equal one of the same type each time: of built-in types, and of the classes that the policy's
        `types` or the return annotation of *perform* names.
        """
        policy = naming(policy or self.policy, perform)
        return self.valued(operation, policy, run(self.guarded(operation, perform, policy, wait)))

    @overload
    async def arun(
        self,
        operation: Operation,
        perform: Callable[[Op], Awaitable[T]],
        *,
        policy: Policy | None = None,
        wait: float | None = None,
    ) -> Answer[T]: ...

    @overload
    async def arun(
        self,
        operation: Operation,
        perform: Callable[[Op], T],
        *,
        policy: Policy | None = None,
        wait: float | None = None,
    ) -> Answer[T]: ...

    async def arun(
        self, operation: Operation, perform: Performer, *, policy: Policy | None = None, wait: float | None = None
    ) -> Answer[Any]:
        """The awaited form of `run`, also for a *perform* that is awaited."""
        policy = naming(policy or self.policy, perform)
        return self.valued(operation, policy, await arun(self.guarded(operation, perform, policy, wait)))

    def attempt(self, operation: Operation, *, policy: Policy | None = None, wait: float | None = None) -> GuardedBlock:
        """One try at the operation, for code that is no function: `with guard.attempt(operation) as attempt:`.

        If `attempt.fresh` is true, the block performs it and sets `attempt.result`; else `attempt.value` is the stored one.
        Use `async with` on an event loop.
        """
        policy = policy or self.policy
        return GuardedBlock(self, operation, policy, wait)

    def guarded(
        self, operation: Operation, perform: Performer, policy: Policy, wait: float | None = None
    ) -> Plan[Answer]:
        """The plan behind `run` and `arun`; *wait* can only shorten the policy's own."""
        return self.new_attempt(operation, policy).perform(perform, wait)

    def new_attempt(self, operation: Operation, policy: Policy) -> LeaseAttempt:
        """One try at the operation, for middlewares, which perform by themselves: `begin`, then `settle` or `fail`."""
        return ATTEMPTS[policy.effect](self, operation, policy)

    # The operator's verbs.  Each has an awaited form with an `a` before it.

    def find(self, scope: str, key: str) -> Record | None:
        """The record, or None; nothing is ever performed."""
        return run(self.store.find(scope, key))

    async def afind(self, scope: str, key: str) -> Record | None:
        """The awaited form of `find`."""
        return await arun(self.store.find(scope, key))

    def list(self, where: Filter | None = None, *, limit: int = 100, cursor: str | None = None) -> Page:
        """One page of records; pass its cursor for the next."""
        return run(self._listed(where, limit, cursor))

    async def alist(self, where: Filter | None = None, *, limit: int = 100, cursor: str | None = None) -> Page:
        """The awaited form of `list`."""
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
        """The awaited form of `resolve`."""
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
        """The awaited form of `delete`."""
        return await arun(self.store.delete(scope, key))

    def purge(self, *, batch: int = 1000, progress: Progress | None = None) -> int:
        """Remove all that has expired, a batch at a time; how many.  *progress* is told the running total."""
        return run(self._purged(batch, progress))

    async def apurge(self, *, batch: int = 1000, progress: Progress | None = None) -> int:
        """The awaited form of `purge`."""
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
        """The awaited form of `stats`."""
        return await arun(self.store.stats())

    # `with Guard(...) as guard:` closes it at the end; `async with` also what belongs to the running event loop.

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def close(self) -> None:
        """End the threads and connections of this process."""
        self.heartbeat.close()
        self.store.close()

    async def aclose(self) -> None:
        """End the threads and connections of this process, and the connections of the running event loop."""
        self.heartbeat.close()
        await self.store.aclose()


PLAIN = {*(kind.__name__ for kind in BUILT_IN), "Any", "None", "Outcome"}  # annotations that name no class to store


# The policies of `naming`: evaluating an annotation takes longer than a replay.  Each has the namespace of the function beside
# it, because the same text may name another class elsewhere.
NAMED: dict[tuple[Policy, Any, int], tuple[Any, Policy]] = {}
MOST_NAMED = 256


def naming(policy: Policy, perform: Performer) -> Policy:
    """The policy, with the classes that the return annotation of *perform* names."""
    if type(perform) is not FunctionType:
        perform = annotated(perform)
    annotation = getattr(perform, "__annotations__", {}).get("return")
    if annotation is None or getattr(annotation, "__name__", annotation) in PLAIN:  # nearly always
        return policy
    namespace = getattr(inspect.unwrap(perform), "__globals__", None)
    key = (policy, annotation, id(namespace))
    try:
        known = NAMED.get(key)
    except TypeError:  # an annotation that cannot be a key
        return add_types(policy, perform)
    if known is None or known[0] is not namespace:
        if len(NAMED) >= MOST_NAMED:
            NAMED.clear()
        known = NAMED[key] = (namespace, add_types(policy, perform))
    return known[1]


def add_types(policy: Policy, perform: Performer) -> Policy:
    new = tuple(kind for kind in annotated_classes(perform, "return") if kind not in policy.types)
    return dataclasses.replace(policy, types=(*policy.types, *new)) if new else policy


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


# `with guard.attempt(operation) as attempt`: a block of code, rather than a function, that happens once.


class GuardedBlock:
    """One try at an operation, as a block of code under `with` or `async with`.

    If *fresh* is true, the block performs the operation, and sets *result* if there is one to be kept.  Otherwise the
    operation was performed before, and *value* is its stored result; after the block it is so in either case.

    Leaving the block in any way but by an exception settles *result*, which is None unless it was set.  An exception ends the
    attempt as that of a function does: it is the outcome if the policy's `errors` name it, in doubt if `doubt` names it, and
    frees the key otherwise.  It is raised in any case.  If the stored outcome is an exception, entering raises it.
    """

    fresh = False
    answer: Answer | None = None  # once it is known
    _attempt: LeaseAttempt
    _result: Any = None

    def __init__(self, guard: Guard, operation: Operation, policy: Policy, wait: float | None) -> None:
        self._guard = guard
        self._operation = operation
        self._policy = policy
        self._wait = wait

    @property
    def op(self) -> Op:
        """The running operation: its connection, its steps, its keys for providers."""
        self._check_fresh("op")
        return self._attempt.op

    @property
    def value(self) -> Any:
        """The operation's value: the stored one, or the result of this block."""
        return self._result if self.answer is None else self.answer.value

    @property
    def result(self) -> Any:
        """The value to be kept, set by a fresh block; an Outcome is kept as it is."""
        return self._result

    @result.setter
    def result(self, value: Any) -> None:
        self._check_fresh("result")
        self._result = value

    def _check_fresh(self, name: str) -> None:
        if not self.fresh:
            raise ConfigurationError(
                f"{self._operation.key!r} is not performed by this block, so it has no {name}: it was performed before, or the "
                "block has not been entered. Ask `if attempt.fresh:` first"
            )

    def __enter__(self) -> Self:
        run(self._begin())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        run(self._end(error))

    async def __aenter__(self) -> Self:
        await arun(self._begin())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await arun(self._end(error))

    def _begin(self) -> Plan[None]:
        self._attempt = self._guard.new_attempt(self._operation, self._policy)
        self.fresh, self._result, self.answer = False, None, None
        answer = yield from self._attempt.begin(self._wait)
        self.fresh = answer is None
        if answer is not None:
            self._keep(answer)

    def _end(self, error: BaseException | None) -> Plan[None]:
        if not self.fresh:
            return
        try:
            if error is None:
                self._keep((yield from self._attempt.returned(self._result)))
            else:
                yield from self._attempt.raised(error)
        finally:
            self._attempt.drop()  # also if interrupted: the lease must not be renewed for ever

    def _keep(self, answer: Answer) -> None:
        """Keep the answer with its value, or raise the exception that it is."""
        self.answer = self._guard.valued(self._operation, self._policy, answer)
        if answer.outcome.kind == "error":
            raise self.answer.value
