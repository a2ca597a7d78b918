"""Huey tasks that run once; needs `pip install 'oncemore[huey]'`.

@huey.task(context=True, retries=3)
@once_task(guard, key="invoice:{invoice_id}")
def send_invoice(invoice_id): ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

from .._ledger.connect import naming_extras
from .._ledger.guard import Guard
from ..errors import OncemoreError
from .task import Key, RunningTask, WorkerTask, decorator

with naming_extras("oncemore.workers.huey"):
    from huey.api import Task  # type: ignore[import-untyped]
    from huey.exceptions import RetryTask, TaskTimeout  # type: ignore[import-untyped]

__all__ = ["once_task"]

P = ParamSpec("P")
T = TypeVar("T")


def once_task(
    guard: Guard, *, key: Key = None, name: str = "", ignore: Sequence[str] = (), **settings: Any
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator, to stand below `@huey.task(context=True)`: the task runs once per *key*.

    With `context=True` Huey passes its task; the function need not have a parameter for it.  If another consumer is
    running the task, it is scheduled for later, and uses up no retry.  A timeout leaves the outcome in doubt:
    `on_unknown` decides, as after a crash.

    Args:
        guard: The guard with the ledger that records the operations.
        key: A template over the function's parameters (`"invoice:{invoice_id}"`), or a function of the arguments.  By
            default the task's id, which stays the same in Huey's retries.
        name: The name of the operations, which is in their scope; by default the function's name.
        ignore: Parameters that may differ in a duplicate.
        settings: The settings of `Policy`, as for `once`.
    """
    return decorator(HueyTask, guard, key, name, ignore, settings)


class HueyTask(WorkerTask[P, T]):
    """A guarded function that Huey calls."""

    limits = (TaskTimeout,)
    contexts = (Task,)
    how_to_name = "write @huey.task(context=True)"

    def running_task(self, args: Sequence[Any], kwargs: dict[str, Any]) -> RunningTask | None:
        """Return the task that Huey passes with `context=True`."""
        task = kwargs.get("task")
        if not isinstance(task, Task):
            return None
        if "task" not in self.signature.parameters:
            del kwargs["task"]
        return ExecutedTask(task)


class ExecutedTask(RunningTask):
    """The task that a consumer is executing."""

    def __init__(self, task: Any) -> None:
        self.id = str(task.id)

    def later(self, seconds: float, error: OncemoreError) -> Any:
        """Ask for a retry after a delay.  Huey does not count it."""
        raise RetryTask(error.detail, delay=seconds) from error
