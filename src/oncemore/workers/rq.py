"""RQ jobs that run once; needs `pip install 'oncemore[rq]'`.

@once_task(guard, key="invoice:{invoice_id}")
def send_invoice(invoice_id): ...

queue.enqueue(send_invoice, 7, retry=Retry(max=3))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

from .._ledger.connect import naming_extras
from .._ledger.context import Op
from .._ledger.guard import Guard
from .._runtime.plan import Plan
from ..errors import OncemoreError
from .task import Key, RunningTask, WorkerTask, decorator

with naming_extras("oncemore.workers.rq"):
    from rq import Retry, get_current_job
    from rq.job import Job
    from rq.timeouts import BaseTimeoutException

__all__ = ["once_task"]

P = ParamSpec("P")
T = TypeVar("T")


def once_task(
    guard: Guard, *, key: Key = None, name: str = "", ignore: Sequence[str] = (), **settings: Any
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator: the job runs once per *key*, however often it is enqueued or tried again.

    If another worker is running the job, this one waits (at most `wait`), then goes to the end of its queue, and uses
    up no retry.  A job timeout leaves the outcome in doubt: `on_unknown` decides, as after a crash.

    Args:
        guard: The guard with the ledger that records the operations.
        key: A template over the function's parameters (`"invoice:{invoice_id}"`), or a function of the arguments.  By
            default the job's id, which stays the same in retries.
        name: The name of the operations, which is in their scope; by default the function's name.
        ignore: Parameters that may differ in a duplicate.
        settings: The settings of `Policy`, as for `once`.
    """
    return decorator(RqTask, guard, key, name, ignore, settings)


class RqTask(WorkerTask[P, T]):
    """A guarded function that RQ calls."""

    limits = (BaseTimeoutException,)
    has_delay = False  # RQ runs retries with a delay only if a worker has its scheduler

    def running_task(self, args: Sequence[Any], kwargs: dict[str, Any]) -> RunningTask | None:
        """Return the job of this work horse."""
        job = get_current_job()
        return None if job is None else CurrentJob(job)

    def performer(self, *args: Any, **kwargs: Any) -> Callable[[Op], Any]:
        """Return a function that calls the guarded one, and raises ReturnedRetry if that returns a `Retry`."""
        perform = super().performer(*args, **kwargs)

        async def aperform(op: Op) -> Any:
            return raise_retry(await perform(op))

        return aperform if self.awaited else lambda op: raise_retry(perform(op))

    def called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan[Any]:
        """Return the plan of a call.  Its result is the function's value, or a `Retry`."""
        try:
            return (yield from super().called(args, kwargs))
        except ReturnedRetry as returned:
            return returned.retry


class CurrentJob(RunningTask):
    """The job that this work horse is running."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.id = str(job.id)

    def later(self, seconds: float, error: OncemoreError) -> Any:
        """Return a `Retry`, so that RQ enqueues the job again.  RQ does not count it as a retry of a failure."""
        return Retry(max=(self.job.number_of_retries or 0) + 1)


class ReturnedRetry(Exception):
    """The function has returned a `Retry`: the job must run again, and there is no result to keep."""

    def __init__(self, retry: Retry) -> None:
        super().__init__(repr(retry))
        self.retry = retry


def raise_retry(value: Any) -> Any:
    """Return the value, or raise ReturnedRetry if it is a `Retry`."""
    if isinstance(value, Retry):
        raise ReturnedRetry(value)
    return value
