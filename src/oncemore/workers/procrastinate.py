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
from .task import Key, RunningTask, WorkerTask, decorator, made, task_policy

with naming_extras("oncemore.workers.procrastinate"):
    from procrastinate import BaseRetryStrategy, JobContext, RetryDecision
    from procrastinate.exceptions import JobAborted
    from procrastinate.jobs import Job
    from procrastinate.tasks import Task
    from procrastinate.testing import InMemoryConnector

__all__ = ["once_middleware", "once_task"]

P = ParamSpec("P")
T = TypeVar("T")

CURRENT: ContextVar[JobContext | None] = ContextVar("CURRENT", default=None)  # set by `once_middleware`
UNCOUNT = "UPDATE procrastinate_jobs SET attempts = attempts - 1 WHERE id = %(id)s"


def once_task(
    guard: Guard, *, key: Key = None, name: str = "", ignore: Sequence[str] = (), **settings: Any
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator, to stand below `@app.task(pass_context=True)`: the task runs once per *key*.

    Instead of `pass_context`, the worker may have `once_middleware`.  A job that another worker is running is retried
    later, and its attempts are not used up.  An abort or a cancellation leaves the outcome in doubt: `on_unknown` decides,
    as after a crash.

    Args:
        guard: Where the operations are recorded.
        key: A template over the function's parameters (`"invoice:{invoice_id}"`), or a function of the same arguments.  By
            default the job's id, which retries keep.
        name: Owns the keys; by default it is the function's own name.
        ignore: Parameters that are not compared.  The job's context never is.
        settings: Those of `Policy`, as for `once`.
    """
    return decorator(ProcrastinateTask, guard, key, name, ignore, settings)


class ProcrastinateTask(WorkerTask[P, T]):
    """A guarded function that procrastinate calls."""

    limits = (JobAborted,)
    contexts = (JobContext,)
    how_to_name = "write @app.task(pass_context=True)"

    def running_task(self, args: Sequence[Any], kwargs: dict[str, Any]) -> RunningTask | None:
        """Return the job of the context that procrastinate passes, or of the one that the middleware has."""
        context = next((each for each in args[:1] if isinstance(each, JobContext)), CURRENT.get())
        return None if context is None else FetchedJob(context, self.awaited)


class FetchedJob(RunningTask):
    """The job that a procrastinate worker has fetched."""

    def __init__(self, context: JobContext, awaited: bool) -> None:
        self.context = context
        self.awaited = awaited
        self.id = str(context.job.id)

    def later(self, seconds: float, error: OncemoreError) -> Any:
        """Fail with an error for which `LaterStrategy` decides, and take off the attempt that procrastinate will count."""
        task: Task[Any, Any, Any] = self.context.task
        if not isinstance(task.retry_strategy, LaterStrategy):
            task.retry_strategy = LaterStrategy(task.retry_strategy)
        later = JobLater(error.detail, seconds)
        connector = self.context.app.connector
        if isinstance(connector, InMemoryConnector):  # procrastinate's own, for tests: it has no SQL
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
    """The task's own strategy, and a retry for a job whose operation another worker is running."""

    def __init__(self, own: BaseRetryStrategy | None) -> None:
        self.own = own

    def get_retry_decision(self, *, exception: BaseException, job: Job) -> RetryDecision | None:
        if isinstance(exception, JobLater):
            return RetryDecision(retry_in={"milliseconds": round(exception.seconds * 1000)})
        return None if self.own is None else self.own.get_retry_decision(exception=exception, job=job)


def once_middleware(guard: Guard, **settings: Any) -> list[Any]:
    """Return task middlewares, for sync and async tasks: every job of the worker runs once, by its id.

    `app.run_worker(task_middleware=once_middleware(guard))`, with procrastinate 3.10 or later.  *settings* are those of
    `Policy`.  A task that is decorated with `once_task` is guarded by that alone, and needs no `pass_context`.
    """
    policy = task_policy(check_guard(guard).policy, ProcrastinateTask.limits, settings)
    tasks: dict[str, ProcrastinateTask[Any, Any]] = {}

    def task_of(context: JobContext) -> ProcrastinateTask[Any, Any] | None:
        """Return the guarded task; None if its function is guarded already."""
        name, function = context.task.name, context.task.func
        if hasattr(function, "once_task"):
            return None
        if name not in tasks:
            tasks[name] = made(ProcrastinateTask(guard, function, None, name, (), policy), settings)  # type: ignore[assignment]
        return tasks[name]

    def middleware(call_next: Callable[[], Any], context: JobContext, worker: Any) -> Any:
        def perform(op: Op) -> Any:
            with running(op):
                return call_next()

        with current(context):
            task = task_of(context)
            return (
                call_next() if task is None else run(task.perform(FetchedJob(context, False), *given(context), perform))
            )

    async def async_middleware(call_next: Callable[[], Awaitable[Any]], context: JobContext, worker: Any) -> Any:
        async def perform(op: Op) -> Any:
            with running(op):
                return await call_next()

        with current(context):
            task = task_of(context)
            if task is None:
                return await call_next()
            return await arun(task.perform(FetchedJob(context, True), *given(context), perform))

    return [middleware, async_middleware]


def given(context: JobContext) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with which procrastinate calls the task."""
    return ((context,) if context.task.pass_context else ()), dict(context.job.task_kwargs)


@contextmanager
def current(context: JobContext) -> Iterator[None]:
    """Tell `once_task` the job meanwhile."""
    token = CURRENT.set(context)
    try:
        yield
    finally:
        CURRENT.reset(token)
