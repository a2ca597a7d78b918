"""taskiq tasks that run once; needs `pip install 'oncemore[taskiq]'`.

@broker.task
@once_task(guard, key="invoice:{invoice_id}")
async def send_invoice(invoice_id: int): ...
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

from .._contract.policy import Policy
from .._ledger.connect import naming_extras
from .._ledger.guard import Guard
from .._ledger.steps import VARIADIC
from ..errors import OncemoreError
from .task import Key, RunningTask, WorkerTask, decorator

with naming_extras("oncemore.workers.taskiq"):
    from taskiq import Context, TaskiqDepends
    from taskiq_dependencies.dependency import Dependency

__all__ = ["once_task"]

P = ParamSpec("P")
T = TypeVar("T")

RECEIVED = "oncemore_received"  # the name of the parameter in which taskiq passes the task


def once_task(
    guard: Guard, *, key: Key = None, name: str = "", ignore: Sequence[str] = (), **settings: Any
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator, to stand below `@broker.task`: the task runs once per *key*, however often it is delivered.

    If another worker is running the task, this one waits (at most `wait`), is then sent again, and uses up no retry.
    A timeout or a cancellation leaves the outcome in doubt: `on_unknown` decides, as after a crash.

    Args:
        guard: The guard with the ledger that records the operations.
        key: A template over the function's parameters (`"invoice:{invoice_id}"`), or a function of the arguments.  By
            default the task's id, which stays the same in redeliveries and taskiq's retries.
        name: The name of the operations, which is in their scope; by default the function's name.
        ignore: Parameters that may differ in a duplicate.  Those that taskiq fills in (`TaskiqDepends`) always may.
        settings: The settings of `Policy`, as for `once`.
    """
    return decorator(TaskiqTask, guard, key, name, ignore, settings)


class TaskiqTask(WorkerTask[P, T]):
    """A guarded function that taskiq calls.  Its timeouts cancel the task, so the outcome is in doubt anyway."""

    has_delay = False  # taskiq sends a task again immediately

    def __init__(
        self, guard: Guard, function: Callable[P, T], key: Key, name: str, ignore: Sequence[str], policy: Policy
    ) -> None:
        super().__init__(guard, function, key, name, ignore, policy)
        try:
            self.shown = inspect.signature(function, eval_str=True)
        except NameError:  # an annotation names a class that is defined below the function
            self.shown = self.signature
        injected = [name for name, parameter in self.shown.parameters.items() if is_injected(parameter)]
        self.compared = tuple(each for each in self.compared if each not in injected)

    def wrapped(self) -> Callable[P, T]:
        """Return the function to call instead.  It has one more parameter, in which taskiq passes the task."""
        guarded: Any = super().wrapped()
        parameters = list(self.shown.parameters.values())
        end = len(parameters) - sum(each.kind is VARIADIC[-1] for each in parameters[-1:])
        received = inspect.Parameter(RECEIVED, inspect.Parameter.KEYWORD_ONLY, default=TaskiqDepends(received_task))
        guarded.__signature__ = self.shown.replace(parameters=[*parameters[:end], received, *parameters[end:]])
        return guarded  # type: ignore[no-any-return]

    def running_task(self, args: Sequence[Any], kwargs: dict[str, Any]) -> RunningTask | None:
        """Return the task that taskiq has passed."""
        received = kwargs.pop(RECEIVED, None)
        return received if isinstance(received, ReceivedTask) else None


def is_injected(parameter: inspect.Parameter) -> bool:
    """Whether taskiq fills the parameter in."""
    return any(
        isinstance(each, Dependency) for each in (parameter.default, *getattr(parameter.annotation, "__metadata__", ()))
    )


class ReceivedTask(RunningTask):
    """The task that a taskiq worker has received.  A sync task runs on a thread beside the worker's event loop."""

    def __init__(self, context: Context, loop: asyncio.AbstractEventLoop) -> None:
        self.context = context
        self.loop = loop
        self.id = str(context.message.task_id)

    def later(self, seconds: float, error: OncemoreError) -> Any:
        """Send the same task again.  taskiq then stores no result for this run."""
        requeued = self.context.requeue()
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run_coroutine_threadsafe(requeued, self.loop).result()
        assert running is self.loop, "taskiq runs async tasks on the worker's loop"
        return requeued

    def hazards(self, policy: Policy) -> Iterator[str]:
        """Yield a warning if the task's acknowledgement or the broker's time for redelivery is unsafe."""
        if not getattr(self.context, "is_ackable", True):
            yield "the broker has no acknowledgements, so the task is lost when its worker is killed"
        if str(self.context.message.labels.get("ack_type", "")).lower().endswith("when_received"):
            yield "ack_type is when_received, so the task is lost when its worker is killed. Use when_saved"
        idle = getattr(self.context.broker, "idle_timeout", None)  # of Redis streams, in milliseconds
        if isinstance(idle, int) and idle / 1000 < policy.lease:
            yield (
                f"idle_timeout is {idle / 1000:g} s, shorter than the lease of {policy.lease:g} s: the broker delivers a "
                "killed task again before another worker may run it. Set a shorter lease="
            )


async def received_task(context: Context = TaskiqDepends()) -> ReceivedTask:  # noqa: B008
    """Return the task that is about to run.  taskiq calls this, and passes the result to the task."""
    return ReceivedTask(context, asyncio.get_running_loop())
