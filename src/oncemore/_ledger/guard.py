"""The public interface: `Guard` runs operations once, and shows the ledger to an operator."""

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

    Args:
        store: A URL, a store, or your own pool or engine; effects can then join its transactions.
        policy: For calls that give no policy.
        observers: Called with each event.
        seal: Encrypts outcomes in the store: see `oncemore.encryption`.
        cache: The most bytes of outcomes that this process remembers.
        clock: Measures waiting; tests replace it.
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
        """Return the operation's answer; call *perform* only if nobody has performed it yet.

        Each call returns an equal value of the same type.  It may consist of built-in types, and of the classes that the
        policy's `types` or the return annotation of *perform* names.
        """
        policy = with_types(policy or self.policy, perform)
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
        """The awaited form of `run`; *perform* may be sync or async."""
        policy = with_types(policy or self.policy, perform)
        return self.valued(operation, policy, await arun(self.guarded(operation, perform, policy, wait)))

    def attempt(self, operation: Operation, *, policy: Policy | None = None, wait: float | None = None) -> GuardedBlock:
        """Return one try at the operation, for a block of code: `with guard.attempt(operation) as attempt:`.

        If `attempt.fresh` is true, the block performs and sets `attempt.result`; else `attempt.value` is the stored value.
        Use `async with` on an event loop.
        """
        policy = policy or self.policy
        return GuardedBlock(self, operation, policy, wait)

    def guarded(
        self, operation: Operation, perform: Performer, policy: Policy, wait: float | None = None
    ) -> Plan[Answer]:
        """Return the plan behind `run` and `arun`.  *wait* can only shorten the policy's own."""
        return self.new_attempt(operation, policy).perform(perform, wait)

    def new_attempt(self, operation: Operation, policy: Policy) -> LeaseAttempt:
        """Return one try at the operation, for middlewares: they call `begin`, perform, and call `settle` or `fail`."""
        return ATTEMPTS[policy.effect](self, operation, policy)

    # The operator's verbs.  Each has an awaited form with an `a` before it.

    def find(self, scope: str, key: str) -> Record | None:
        """Return the operation's record, or None.  Nothing is performed."""
        return run(self.store.find(scope, key))

    async def afind(self, scope: str, key: str) -> Record | None:
        """The awaited form of `find`."""
        return await arun(self.store.find(scope, key))

    def list(self, where: Filter | None = None, *, limit: int = 100, cursor: str | None = None) -> Page:
        """Return one page of records; pass its cursor to get the next page."""
        return run(self._list(where, limit, cursor))

    async def alist(self, where: Filter | None = None, *, limit: int = 100, cursor: str | None = None) -> Page:
        """The awaited form of `list`."""
        return await arun(self._list(where, limit, cursor))

    def _list(self, where: Filter | None, limit: int, cursor: str | None) -> Plan[Page]:
        return self.store.list(where or Filter(), limit=check_positive("limit", limit), cursor=cursor)

    def resolve(
        self, scope: str, key: str, resolution: Resolution, *, retention: float | str = DAY, note: str = ""
    ) -> Record:
        """Decide an unknown outcome, remember the decision for *retention*, and return the record."""
        return run(self._resolve(scope, key, resolution, retention, note))

    async def aresolve(
        self, scope: str, key: str, resolution: Resolution, *, retention: float | str = DAY, note: str = ""
    ) -> Record:
        """The awaited form of `resolve`."""
        return await arun(self._resolve(scope, key, resolution, retention, note))

    def _resolve(self, scope: str, key: str, resolution: Resolution, retention: float | str, note: str) -> Plan[Record]:
        if resolution.verdict == "unknown":
            raise ConfigurationError(
                "Resolution.unknown() decides nothing: write Resolution.settled(...) or Resolution.released()"
            )
        return self.store.resolve(scope, key, resolution.outcome, retention=duration(retention), note=note)

    def delete(self, scope: str, key: str) -> bool:
        """Forget the operation, so that its key runs as new.  Return False if there was no record; raise if it is running."""
        return run(self.store.delete(scope, key))

    async def adelete(self, scope: str, key: str) -> bool:
        """The awaited form of `delete`."""
        return await arun(self.store.delete(scope, key))

    def purge(self, *, batch: int = 1000, progress: Progress | None = None) -> int:
        """Remove expired records, a batch at a time, and return their number.  *progress* is called with the total so far."""
        return run(self._purge(batch, progress))

    async def apurge(self, *, batch: int = 1000, progress: Progress | None = None) -> int:
        """The awaited form of `purge`."""
        return await arun(self._purge(batch, progress))

    def _purge(self, batch: int, progress: Progress | None) -> Plan[int]:
        total = 0
        while gone := (yield from self.store.purge(batch=check_positive("batch", batch))):
            total += gone
            if progress is not None:
                progress(total)
        return total

    def stats(self) -> Stats:
        """Return the number of records by state."""
        return run(self.store.stats())

    async def astats(self) -> Stats:
        """The awaited form of `stats`."""
        return await arun(self.store.stats())

    # `with Guard(...) as guard:` closes it at the end; `async with` also closes the connections of the running event loop.

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


# The results of `with_types`, because evaluating an annotation takes longer than a replay.  The namespace of the function is
# part of the key and stored with the policy, because the same annotation may name another class elsewhere.
WITH_TYPES: dict[tuple[Policy, Any, int], tuple[Any, Policy]] = {}
MOST_WITH_TYPES = 256


def with_types(policy: Policy, perform: Performer) -> Policy:
    """Return the policy, with the classes that the return annotation of *perform* names."""
    if type(perform) is not FunctionType:
        perform = annotated(perform)
    annotation = getattr(perform, "__annotations__", {}).get("return")
    if annotation is None or getattr(annotation, "__name__", annotation) in PLAIN:  # nearly always
        return policy
    namespace = getattr(inspect.unwrap(perform), "__globals__", None)
    key = (policy, annotation, id(namespace))
    try:
        known = WITH_TYPES.get(key)
    except TypeError:  # the annotation is not hashable
        return add_types(policy, perform)
    if known is None or known[0] is not namespace:
        if len(WITH_TYPES) >= MOST_WITH_TYPES:
            WITH_TYPES.clear()
        known = WITH_TYPES[key] = (namespace, add_types(policy, perform))
    return known[1]


def add_types(policy: Policy, perform: Performer) -> Policy:
    new = tuple(kind for kind in annotated_classes(perform, "return") if kind not in policy.types)
    return dataclasses.replace(policy, types=(*policy.types, *new)) if new else policy


def check_guard(guard: object) -> Guard:
    """Return *guard*, or raise ConfigurationError if it is something else, such as a URL."""
    if not isinstance(guard, Guard):
        raise ConfigurationError(f"guard is a {type(guard).__name__}: make a Guard, as in Guard('sqlite:///once.db')")
    return guard


def check_positive(name: str, count: int) -> int:
    """Return *count*, or raise ConfigurationError if it is below 1: some stores would take 0 for all records."""
    if type(count) is not int or count < 1:
        raise ConfigurationError(f"{name} = {count!r} is not a number of records: write 1 or more")
    return count


class GuardedBlock:
    """One try at an operation, as a block of code under `with` or `async with`.

    If *fresh* is true, the block performs the operation, and may set *result*.  Otherwise the operation was performed before,
    and *value* is its stored result.  After the block, *value* is the result in either case.

    Leaving the block without an exception settles *result*, which is None by default.  An exception is always raised.  It is
    the outcome if the policy's `errors` name it, leaves the outcome unknown if `doubt` names it, and otherwise frees the key.
    If the stored outcome is an exception, entering the block raises it.
    """

    fresh = False
    answer: Answer | None = None  # None until it is known
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
        """The operation's value: the stored value, or the result of this block."""
        return self._result if self.answer is None else self.answer.value

    @property
    def result(self) -> Any:
        """The value to store, which a fresh block sets; an Outcome is stored as it is."""
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
                self._keep((yield from self._attempt.settle_value(self._result)))
            else:
                yield from self._attempt.settle_or_fail(error)
        finally:
            self._attempt.drop()  # also after an interrupt: the lease must not be renewed for ever

    def _keep(self, answer: Answer) -> None:
        """Set the answer with its value.  If its outcome is an exception, raise it."""
        self.answer = self._guard.valued(self._operation, self._policy, answer)
        if answer.outcome.kind == "error":
            raise self.answer.value
