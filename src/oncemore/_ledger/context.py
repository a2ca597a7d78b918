"""The running operation, as the code that performs it sees it."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from .._runtime.plan import Plan, run_here
from ..errors import ConfigurationError
from .model import Lease, Operation
from .transactions import Transaction, unawaitable

StepEffect = Literal["lease", "transaction"]
OnUnknownStep = Literal["retry", "hold", "resolve"]


class Retrying(Protocol):
    """How often a step is tried: which errors deserve it, and the delays in between.  `oncemore.Retry` is one."""

    def wants(self, error: Exception, /) -> bool: ...
    def delays(self) -> Iterator[float]: ...


class StepPlans(Protocol):
    """The plans behind `Op.step` and `Op.sleep`."""

    def step(
        self, name: str, function: Callable[..., Any], undo: Callable[..., Any] | None, **settings: Any
    ) -> Plan[Any]: ...
    def sleep(self, name: str, seconds: float | str) -> Plan[None]: ...


@dataclass(slots=True, eq=False)
class Op:
    """The running operation (not to be confused with `Operation`, its name): key, attempt, and stable keys for providers."""

    lease: Lease
    transaction: Transaction | None = field(default=None, kw_only=True)
    steps: StepPlans | None = field(default=None, kw_only=True)
    deadline: float | None = field(default=None, kw_only=True)  # when the caller stops waiting, in seconds since 1970
    lent: bool = field(default=False, init=False)  # whether the performer has used a connection that must be awaited
    note: str = field(default="", init=False)  # kept in the record, for an operator to read
    counts: dict[str, int] | None = field(default=None, init=False, repr=False)  # of the names in `derive_next`

    @property
    def operation(self) -> Operation:
        return self.lease.operation

    @property
    def key(self) -> str:
        return self.lease.operation.key

    @property
    def attempt(self) -> int:
        """1 for the first attempt; it grows with every claim of the same operation."""
        return self.lease.attempt

    @property
    def connection(self) -> Any:
        """The driver's own connection: statements on it commit with the outcome, or not at all."""
        return self._usable("op.connection").connection

    def session(self, **options: Any) -> Any:
        """A SQLAlchemy session within the same transaction; its own commit() only ends a savepoint.

        *options* are those of `Session` or `AsyncSession`, such as `expire_on_commit=False`.
        """
        return self._usable("op.session()").session(**options)

    def _usable(self, what: str) -> Transaction:
        """The transaction.  Refused on a thread if its driver is async: statements would never be sent unless awaited."""
        transaction = self.borrowed(what)
        if transaction.awaited:
            if asyncio._get_running_loop() is None:  # get_running_loop() raises instead
                raise unawaitable()
            self.lent = True
        return transaction

    def borrowed(self, what: str) -> Transaction:
        """The transaction that *what* needs."""
        if self.transaction is None:
            raise ConfigurationError(f"{what} is there with effect = 'transaction' only; say so in the rule or policy")
        return self.transaction

    def step(
        self,
        name: str,
        function: Callable[..., Any],
        *,
        undo: Callable[..., Any] | None = None,
        retry: Retrying | int | None = None,
        effect: StepEffect | None = None,
        on_unknown: OnUnknownStep | None = None,
        resolver: Callable[..., Any] | None = None,
        doubt: tuple[type[Exception], ...] | None = None,
    ) -> Any:
        """Call *function* and store its value: once that is done, no later attempt calls it again.  Await it on an event loop.

        If the function takes a `connection` or `session`, its effect commits together with its checkpoint.  If it takes a
        `key`, it gets one for the provider that is the same on every attempt.

        Args:
            name: The step's name in the ledger; steps must have the same names, in the same order, on every attempt.
            function: Performs the step.
            undo: Is called with the step's value if the whole operation fails for good.
            retry: How often the step is tried: 3 times by default, a database step once.
            effect: "lease" or "transaction", if it does not follow from the parameters.
            on_unknown: What to do if an earlier attempt crashed in this very step, or left it in doubt: by default "retry",
                or "hold" if *doubt* is given.
            resolver: Is given the step's key, and asks the provider whether it took effect.
            doubt: The exceptions after which nobody knows whether it took effect, such as time-outs; those of the policy
                unless given.
        """
        decided = "resolve" if resolver else on_unknown or ("hold" if doubt else "retry")
        settings = {"on_unknown": decided, "resolver": resolver, "doubt": doubt}
        steps = self._stepping("op.step()")
        return run_here(steps.step(name, function, undo, retry=retry, effect=effect, **settings))

    def sleep(self, name: str, seconds: float | str) -> Any:
        """Let *seconds* pass, as a step: a later attempt waits for the rest of them.  Await it on an event loop."""
        return run_here(self._stepping("op.sleep()").sleep(name, seconds))

    def _stepping(self, what: str) -> StepPlans:
        if self.steps is None:
            raise ConfigurationError(f"{what} is there with effect = 'steps' only; say so in the rule or policy")
        return self.steps

    def derive(self, name: str) -> str:
        """A key for the provider: the same on every attempt of this operation, and never the caller's own."""
        return derive(self.lease.operation, name)

    def derive_next(self, name: str) -> str:
        """A key for the provider, and another one at each call with the same name: the first, the second, and so on."""
        if self.counts is None:
            self.counts = {}
        number = self.counts[name] = self.counts.get(name, 0) + 1
        return self.derive(f"{name}\n{number}")


def derive(operation: Operation, name: str) -> str:
    """The key for *name* within *operation*: stable, unguessable only as far as the operation's own key is."""
    digest = hashlib.sha256()
    for part in (operation.scope, operation.key, name):
        data = part.encode("utf-8", "surrogatepass")
        digest.update(b"%d:" % len(data) + data)
    return "om_" + digest.hexdigest()[:40]


CURRENT: ContextVar[Op | None] = ContextVar("oncemore_operation", default=None)


def current_operation() -> Op:
    """The running operation: its key, its attempt, its steps, and stable keys for providers."""
    op = CURRENT.get()
    if op is None:
        raise ConfigurationError(
            "No operation is running here: the request is not guarded, or came without a key; "
            "make the key required in the contract, and check that the middleware is installed"
        )
    return op


@contextmanager
def running(op: Op) -> Iterator[None]:
    """While this lasts, *op* is the current operation."""
    token = CURRENT.set(op)
    try:
        yield
    finally:
        CURRENT.reset(token)
