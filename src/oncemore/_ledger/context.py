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
    """How often a step is tried: the errors that are retried, and the delays between attempts.  See `oncemore.Retry`."""

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
    """The running operation: its key, its attempt, and stable keys for providers.  (`Operation` is only its name.)"""

    lease: Lease
    transaction: Transaction | None = field(default=None, kw_only=True)
    steps: StepPlans | None = field(default=None, kw_only=True)
    deadline: float | None = field(default=None, kw_only=True)  # when the caller stops waiting, in seconds since 1970
    lent: bool = field(default=False, init=False)  # whether the performer has asked for an async connection
    note: str = field(default="", init=False)  # stored in the record, for an operator to read
    counts: dict[str, int] | None = field(default=None, init=False, repr=False)  # calls of `derive_next` by name

    @property
    def operation(self) -> Operation:
        return self.lease.operation

    @property
    def key(self) -> str:
        return self.lease.operation.key

    @property
    def attempt(self) -> int:
        """The number of this attempt: 1 for the first one; it grows with every claim of the same operation."""
        return self.lease.attempt

    @property
    def connection(self) -> Any:
        """The driver's connection.  Statements on it commit together with the outcome, or not at all."""
        return self._usable("op.connection").connection

    def session(self, **options: Any) -> Any:
        """Return a SQLAlchemy session in the same transaction; its own commit() only ends a savepoint.

        *options* are those of `Session` or `AsyncSession`, such as `expire_on_commit=False`.
        """
        return self._usable("op.session()").session(**options)

    def _usable(self, what: str) -> Transaction:
        """Return the transaction.  Raises on a thread if its driver is async, because nothing could be awaited there."""
        transaction = self.borrowed(what)
        if transaction.awaited:
            if asyncio._get_running_loop() is None:  # get_running_loop() raises instead
                raise unawaitable()
            self.lent = True
        return transaction

    def borrowed(self, what: str) -> Transaction:
        """Return the transaction, or raise ConfigurationError that names *what* needs it."""
        if self.transaction is None:
            raise ConfigurationError(f"{what} needs a transaction: write effect = 'transaction' in the rule or policy")
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
        """Call *function* and store its value as a checkpoint, so that no later attempt calls it.  Await this on an event loop.

        If the function takes a `connection` or `session`, its effect commits together with its checkpoint.  If it takes a
        `key`, it gets a key for the provider that is the same on every attempt.

        Args:
            name: The step's name in the ledger; steps must have the same names, in the same order, on every attempt.
            function: Performs the step.
            undo: Called with the step's value if the whole operation fails for good.
            retry: How often the step is tried: by default 3 times, a database step once.
            effect: "lease" or "transaction"; by default it follows from the function's parameters.
            on_unknown: The decision if an earlier attempt crashed in this step, or left it in doubt: by default "retry",
                or "hold" if *doubt* is given.
            resolver: Called with the step's key; asks the provider whether the step took effect.
            doubt: The exceptions after which the outcome is unknown, such as time-outs; by default those of the policy.
        """
        decided = "resolve" if resolver else on_unknown or ("hold" if doubt else "retry")
        settings = {"on_unknown": decided, "resolver": resolver, "doubt": doubt}
        steps = self._stepping("op.step()")
        return run_here(steps.step(name, function, undo, retry=retry, effect=effect, **settings))

    def sleep(self, name: str, seconds: float | str) -> Any:
        """Wait *seconds* as a step: a later attempt waits only for the time that is left.  Await this on an event loop."""
        return run_here(self._stepping("op.sleep()").sleep(name, seconds))

    def _stepping(self, what: str) -> StepPlans:
        if self.steps is None:
            raise ConfigurationError(f"{what} needs steps: write effect = 'steps' in the rule or policy")
        return self.steps

    def derive(self, name: str) -> str:
        """Return a key for the provider: the same on every attempt of this operation, and never the caller's own key."""
        return derive(self.lease.operation, name)

    def derive_next(self, name: str) -> str:
        """Return a key for the provider, with a number: each call with the same *name* gives the next one."""
        if self.counts is None:
            self.counts = {}
        number = self.counts[name] = self.counts.get(name, 0) + 1
        return self.derive(f"{name}\n{number}")


def derive(operation: Operation, name: str) -> str:
    """Return the key for *name* within *operation*.  It is stable, and as hard to guess as the operation's own key."""
    digest = hashlib.sha256()
    for part in (operation.scope, operation.key, name):
        data = part.encode("utf-8", "surrogatepass")
        digest.update(b"%d:" % len(data) + data)
    return "om_" + digest.hexdigest()[:40]


CURRENT: ContextVar[Op | None] = ContextVar("oncemore_operation", default=None)


def current_operation() -> Op:
    """Return the running operation: its key, its attempt, its steps, and stable keys for providers."""
    op = CURRENT.get()
    if op is None:
        raise ConfigurationError(
            "No operation is running here: the request is not guarded, or came without a key; "
            "make the key required in the contract, and check that the middleware is installed"
        )
    return op


@contextmanager
def running(op: Op) -> Iterator[None]:
    """Make *op* the current operation until the block ends."""
    token = CURRENT.set(op)
    try:
        yield
    finally:
        CURRENT.reset(token)
