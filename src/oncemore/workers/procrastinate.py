"""procrastinate tasks that run once; needs `pip install 'oncemore[procrastinate]'`.

@app.task(pass_context=True, retry=3)
@once_task(guard, key="invoice:{invoice_id}")
def send_invoice(context, invoice_id): ...
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

from .._ledger.connect import naming_extras
from .._ledger.context import Op, running
from .._ledger.guard import Guard, check_guard
from .._runtime.plan import arun, run
from ..errors import OncemoreError
from .task import Key, RunningTask, WorkerTask, decorator, task_policy, with_wait

with naming_extras("oncemore.workers.procrastinate"):
    from procrastinate import BaseRetryStrategy, JobContext, RetryDecision
    from procrastinate.exceptions import JobAborted
    from procrastinate.jobs import Job
    from procrastinate.tasks import Task
    from procrastinate.testing import InMemoryConnector

__all__ = ["once_middleware", "once_task"]

P = ParamSpec("P")
T = TypeVar("T")

CURRENT: ContextVar[JobContext | None] = ContextVar("CURRENT", default=None)  # the job, set by `once_middleware`
UNCOUNT = "UPDATE procrastinate_jobs SET attempts = attempts - 1 WHERE id = %(id)s"


def once_task(
    guard: Guard, *, key: Key = None, name: str = "", ignore: Sequence[str] = (), **settings: Any
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator, to stand below `@app.task(pass_context=True)`: the task runs once per *key*.

    Instead of `pass_context`, the worker may have `once_middleware`.  If another worker is running the job, it is
    retried later, and uses up no attempt.  An abort or a cancellation leaves the outcome in doubt: `on_unknown`
    decides, as after a crash.

    Args:
        guard: The guard with the ledger that records the operations.
        key: A template over the function's parameters (`"invoice:{invoice_id}"`), or a function of the arguments.  By
            default the job's id, which stays the same in retries.
        name: The name of the operations, which is in their scope; by default the function's name.
        ignore: Parameters that may differ in a duplicate.  The job's context always may.
        settings: The settings of `Policy`, as for `once`.
    """
    return decorator(ProcrastinateTask, guard, key, name, ignore, settings)


class ProcrastinateTask(WorkerTask[P, T]):
    """A guarded function that procrastinate calls."""

    limits = (JobAborted,)
    contexts = (JobContext,)
    how_to_name = "write @app.task(pass_context=True)"

    def running_task(self, args: Sequence[Any], kwargs: dict[str, Any]) -> RunningTask | None:
        """Return the job of the context that procrastinate passes, or that the middleware has set."""
        context = next((each for each in args[:1] if isinstance(each, JobContext)), CURRENT.get())
        return None if context is None else FetchedJob(context, self.awaited)


class FetchedJob(RunningTask):
    """The job that a procrastinate worker has fetched."""

    def __init__(self, context: JobContext, awaited: bool) -> None:
        self.context = context
        self.awaited = awaited
        self.id = str(context.job.id)

    def later(self, seconds: float, error: OncemoreError) -> Any:
        """Raise JobLater, from which `LaterStrategy` makes a retry.  Subtract the attempt that will be counted."""
        task: Task[Any, Any, Any] = self.context.task
        if not isinstance(task.retry_strategy, LaterStrategy):
            task.retry_strategy = LaterStrategy(task.retry_strategy)
        later = JobLater(error.detail, seconds)
        connector = self.context.app.connector
        if isinstance(connector, InMemoryConnector):  # procrastinate's connector for tests, which has no SQL
            connector.jobs[int(self.id)]["attempts"] -= 1
            raise later from error
        if not self.awaited:
            connector.get_sync_connector().execute_query(UNCOUNT, id=self.context.job.id)
            raise later from error

        async def uncount() -> Any:
            await connector.execute_query_async(UNCOUNT, id=self.context.job.id)
            raise later from error

        return uncount()


class JobLater(Exception):
    """Another worker is running the operation, so the job is run again after *seconds*."""

    def __init__(self, detail: str, seconds: float) -> None:
        super().__init__(detail)
        self.seconds = seconds


class LaterStrategy(BaseRetryStrategy):
    """Retries a job that another worker is running; otherwise the task's *own* strategy decides."""

    def __init__(self, own: BaseRetryStrategy | None) -> None:
        self.own = own

    def get_retry_decision(self, *, exception: BaseException, job: Job) -> RetryDecision | None:
        if isinstance(exception, JobLater):
            return RetryDecision(retry_in={"milliseconds": round(exception.seconds * 1000)})
        return None if self.own is None else self.own.get_retry_decision(exception=exception, job=job)


def once_middleware(guard: Guard, **settings: Any) -> list[Any]:
    """Return task middlewares for sync and async tasks: each job of the worker runs once per id.

    `app.run_worker(task_middleware=once_middleware(guard))`, with procrastinate 3.10 or later.  *settings* are those of
    `Policy`.  A task with `once_task` is not guarded twice, and needs no `pass_context`.
    """
    policy = task_policy(check_guard(guard).policy, ProcrastinateTask.limits, settings)
    tasks: dict[str, ProcrastinateTask[Any, Any]] = {}

    def task_of(context: JobContext) -> ProcrastinateTask[Any, Any] | None:
        """Return the guarded task, or None if its function has `once_task`."""
        name, function = context.task.name, context.task.func
        if hasattr(function, "once_task"):
            return None
        if name not in tasks:
            tasks[name] = with_wait(ProcrastinateTask(guard, function, None, name, (), policy), settings)  # type: ignore[assignment]
        return tasks[name]

    def middleware(call_next: Callable[[], Any], context: JobContext, worker: Any) -> Any:
        def perform(op: Op) -> Any:
            with running(op):
                return call_next()

        with set_current(context):
            task = task_of(context)
            return (
                call_next()
                if task is None
                else run(task.perform(FetchedJob(context, False), *arguments_of(context), perform))
            )

    async def async_middleware(call_next: Callable[[], Awaitable[Any]], context: JobContext, worker: Any) -> Any:
        async def perform(op: Op) -> Any:
            with running(op):
                return await call_next()

        with set_current(context):
            task = task_of(context)
            if task is None:
                return await call_next()
            return await arun(task.perform(FetchedJob(context, True), *arguments_of(context), perform))

    return [middleware, async_middleware]


def arguments_of(context: JobContext) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with which procrastinate calls the task."""
    return ((context,) if context.task.pass_context else ()), dict(context.job.task_kwargs)


@contextmanager
def set_current(context: JobContext) -> Iterator[None]:
    """Set the job that `once_task` finds inside the block."""
    token = CURRENT.set(context)
    try:
        yield
    finally:
        CURRENT.reset(token)
