"""The parts that all runners share: the guarded task, and the protocol by which a runner runs a task again later."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import monotonic
from typing import Any, ClassVar, ParamSpec, TypeVar, cast

from .._contract.policy import Policy
from .._ledger.context import Op
from .._ledger.events import log
from .._ledger.guard import Guard, check_guard
from .._ledger.model import Operation
from .._ledger.once import Once
from .._runtime.plan import Call, Plan, Sleep, arun, run
from ..errors import (
    ConfigurationError,
    Fenced,
    InProgress,
    OncemoreError,
    StoreTimeout,
    StoreUnavailable,
    UnknownOutcome,
)
from ..stores.memory import MemoryStore

P = ParamSpec("P")
T = TypeVar("T")

Key = str | Callable[..., str] | None  # None: the runner's id of the task


class RunningTask(ABC):
    """The task that a worker is running now.

    Attributes:
        id: The runner's own id of the task.  It stays the same if the task is delivered or tried again.
    """

    id: str

    @abstractmethod
    def later(self, seconds: float, error: OncemoreError) -> Any:
        """Make the runner run the task again, after *seconds* if it can wait, without counting a failed attempt.

        Raise the exception with which the runner does that, or return a value that the task must return.
        """

    def hazards(self, policy: Policy) -> Iterator[str]:
        """Yield a warning for each setting of the runner by which the task may be lost, or run needlessly often."""
        yield from ()


class WorkerTask(Once[P, T]):
    """A guarded function that a runner calls.  Each runner has a subclass."""

    decorator = "once_task"
    # Exceptions that the runner raises in a task whose time is up; the outcome is then in doubt.
    limits: ClassVar[tuple[type[Exception], ...]] = ()
    contexts: ClassVar[tuple[type, ...]] = ()  # arguments of these classes come from the runner, and are not compared
    has_delay: ClassVar[bool] = True  # whether `later` has a delay; if not, the worker sleeps before it calls `later`
    waits = False  # whether a duplicate waits in its worker, for the policy's `wait`, before it is run later
    how_to_name = ""  # for errors: another way than key= to name the operation

    def __init__(
        self, guard: Guard, function: Callable[P, T], key: Key, name: str, ignore: Sequence[str], policy: Policy
    ) -> None:
        super().__init__(guard, function, self._without_task if key is None else key, name, ignore, policy)
        self.has_own_id = key is None
        if self.has_own_id and not self.keeps_request:
            self.compared = ()  # the runner's retry may pass other arguments under the same id
        self._unchecked = True

    def running_task(self, args: Sequence[Any], kwargs: dict[str, Any]) -> RunningTask | None:
        """Return the task that this call is part of, or None if the function was called directly.

        Remove arguments from *kwargs* that the runner has added.
        """
        raise NotImplementedError

    def named(self, key: str, arguments: Mapping[str, Any]) -> Operation:
        """Return the operation with this key, for a call with these arguments."""
        own = {name: None if isinstance(value, self.contexts) else value for name, value in arguments.items()}
        return super().named(key, own)

    def wrapped(self) -> Callable[P, T]:
        """Return the function to call instead."""

        @functools.wraps(self.function)
        async def acall(*args: P.args, **kwargs: P.kwargs) -> Any:
            return await arun(self.called(args, kwargs))

        @functools.wraps(self.function)
        def call(*args: P.args, **kwargs: P.kwargs) -> Any:
            return run(self.called(args, kwargs))

        guarded: Any = acall if self.awaited else call
        guarded.operation, guarded.drive, guarded.types, guarded.once_task = (
            self.operation,
            self.drive,
            self.types,
            self,
        )
        return cast("Callable[P, T]", guarded)

    def called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan[Any]:
        """Return the plan of a call.  Its result is the function's value, or that of `RunningTask.later`."""
        running = self.running_task(args, kwargs)
        return self.perform(running, args, kwargs, self.performer(*args, **kwargs))

    def perform(
        self,
        running: RunningTask | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        perform: Callable[[Op], Any],
    ) -> Plan[Any]:
        """Perform the operation of a call once."""
        operation = self._operation(running, args, kwargs)
        if running is None:
            return self.result(operation, (yield from self.guarded(operation, perform)))
        if self._unchecked:
            self._unchecked = False
            for hazard in (*self._store_hazards(), *running.hazards(self.policy)):
                log.warning("%s: %s", self.name, hazard)
        begun: list[Op] = []

        @functools.wraps(self.function)
        def performing(op: Op) -> Any:
            begun.append(op)
            return perform(op)

        attempt = self.guard.new_attempt(operation, self.policy)
        wait = None if self.waits or not self.has_delay else 0.0
        started = monotonic()
        try:
            return self.result(operation, (yield from attempt.perform(performing, wait)))
        except OncemoreError as error:
            if not is_temporary(error, begun=bool(begun)):
                raise
            seconds = error.retry_after if isinstance(error, UnknownOutcome) and error.retry_after else self.delay
            log.info("%s %r will run again in %.3g s: %s", self.name, operation.key, seconds, error.detail)
            if not self.has_delay:
                yield Sleep(max(started + seconds - monotonic(), 0.0))
            return (yield Call(running.later, seconds, error))

    def _store_hazards(self) -> Iterator[str]:
        if isinstance(self.guard.store, MemoryStore):
            yield "its ledger is in the memory of this process, so another worker repeats the task. Use a shared store"

    @property
    def delay(self) -> float:
        """The seconds after which a task is run again if another worker is running it: a third of a lease."""
        return max(self.policy.lease / 3, 0.1)

    def _operation(self, running: RunningTask | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Operation:
        if running is None or not self.has_own_id:
            return self.operation(*args, **kwargs)
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return self.named(running.id, bound.arguments)

    def _without_task(self, *_: Any, **__: Any) -> str:
        hint = f", or {self.how_to_name}" if self.how_to_name else ""
        raise ConfigurationError(
            f"{self.name} was not called by a worker that passes its task, so nothing names the operation: "
            f"pass once_task a key such as key='invoice:{{invoice_id}}'{hint}"
        )


def is_temporary(error: OncemoreError, *, begun: bool) -> bool:
    """Whether the task must be run again later, because this worker may not perform it now, and it has not failed.

    If the store fails before the function was called, nothing has happened.  Afterwards, the runner handles the error
    like any error of the function.
    """
    if isinstance(error, UnknownOutcome):  # with retry_after, if the resolver does not know yet
        return error.retry_after is not None
    if isinstance(error, StoreUnavailable | StoreTimeout):
        return not begun
    return isinstance(error, InProgress | Fenced)


def decorator(
    kind: type[WorkerTask[Any, Any]],
    guard: Guard,
    key: Key,
    name: str,
    ignore: Sequence[str],
    settings: Mapping[str, Any],
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return the decorator that makes a function a guarded task of this *kind*."""
    policy = task_policy(check_guard(guard).policy, kind.limits, settings)

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        task: WorkerTask[P, T] = kind(guard, function, key, name, ignore, policy)
        return with_wait(task, settings).wrapped()

    return decorate


def with_wait(task: WorkerTask[P, T], settings: Mapping[str, Any]) -> WorkerTask[P, T]:
    """Return the task.  If *settings* has `wait`, its duplicates wait that long in their workers."""
    task.waits = "wait" in settings
    return task


def task_policy(policy: Policy, limits: tuple[type[Exception], ...], settings: Mapping[str, Any]) -> Policy:
    """Return the guard's policy with the settings.

    The runner's time limits are added to `doubt`.  If there is a resolver, `on_unknown` is "resolve" instead of "hold".
    """
    asks = {"on_unknown": "resolve"} if settings.get("resolver") and policy.on_unknown == "hold" else {}
    chosen = policy.but(**{**asks, **settings})
    return chosen.but(doubt=(*chosen.doubt, *(limit for limit in limits if limit not in chosen.doubt)))
