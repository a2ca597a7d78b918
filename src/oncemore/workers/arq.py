"""arq jobs that run once; needs `pip install 'oncemore[arq]'`.

@once_task(guard, key="invoice:{invoice_id}", effect="transaction")
async def send_invoice(ctx, invoice_id): ...
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

from .._contract.policy import Policy
from .._ledger.connect import naming_extras
from .._ledger.guard import Guard
from ..errors import ConfigurationError, OncemoreError
from .task import Key, RunningTask, WorkerTask, decorator

with naming_extras("oncemore.workers.arq"):
    from arq import Retry  # type: ignore[import-not-found,unused-ignore]
    from arq.constants import retry_key_prefix  # type: ignore[import-not-found,unused-ignore]

__all__ = ["once_task"]

P = ParamSpec("P")
T = TypeVar("T")


def once_task(
    guard: Guard, *, key: Key = None, name: str = "", ignore: Sequence[str] = (), **settings: Any
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator for arq's coroutine functions: the job runs once per *key*, however often arq starts it.

    arq cancels the running jobs at each deployment (SIGTERM) and at a job's timeout.  Nobody knows then whether the
    effect happened, so give the task a `resolver`, or `effect="transaction"` or `"steps"`.  If another worker is
    running the job, it is deferred, and uses up no try.

    Args:
        guard: The guard with the ledger that records the operations.
        key: A template over the function's parameters (`"invoice:{invoice_id}"`), or a function of the arguments.  By
            default the job's id, which stays the same in retries.
        name: The name of the operations, which is in their scope; by default the function's name.
        ignore: Parameters that may differ in a duplicate.  `ctx`, the first one, always may.
        settings: The settings of `Policy`, as for `once`.
    """
    return decorator(ArqTask, guard, key, name, ignore, settings)


class ArqTask(WorkerTask[P, T]):
    """A guarded coroutine function that arq calls."""

    def __init__(
        self, guard: Guard, function: Callable[P, T], key: Key, name: str, ignore: Sequence[str], policy: Policy
    ) -> None:
        super().__init__(guard, function, key, name, ignore, policy)
        context = next(iter(self.signature.parameters), None)
        if not self.awaited or context is None:
            raise ConfigurationError(f"{self.name} is not an arq job: write async def {function.__name__}(ctx, ...)")
        self.compared = tuple(each for each in self.compared if each != context)
        if policy.effect == "lease" and policy.on_unknown == "hold":
            warnings.warn(
                f"{self.name}: arq cancels running jobs at each deployment, and nobody knows then whether the effect "
                "happened, so the job is held until an operator decides. Pass once_task a resolver=, "
                'or effect="transaction"',
                stacklevel=4,
            )

    def running_task(self, args: Sequence[Any], kwargs: dict[str, Any]) -> RunningTask | None:
        """Return the job that arq describes in its context."""
        context = args[0] if args else None
        return StartedJob(context) if isinstance(context, dict) and "job_id" in context else None


class StartedJob(RunningTask):
    """The job that an arq worker has started."""

    def __init__(self, context: dict[str, Any]) -> None:
        self.context = context
        self.id = str(context["job_id"])

    async def later(self, seconds: float, error: OncemoreError) -> Any:
        """Ask for a retry after a delay.  Subtract this try, because arq counts tries when they start."""
        await self.context["redis"].decr(retry_key_prefix + self.id)
        raise Retry(defer=seconds) from error
