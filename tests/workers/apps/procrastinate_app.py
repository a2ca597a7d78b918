"""A procrastinate app, and its worker: `python -m tests.workers.apps.procrastinate_app POSTGRES`."""

import sys
from typing import Any

import procrastinate

from oncemore.workers.procrastinate import once_middleware, once_task
from tests.workers.work import all_tasks, new_guard


def make(url: str) -> tuple[procrastinate.App, dict[str, Any]]:
    app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=url))
    tasks = {}
    for name, function in all_tasks(once_task).items():
        tasks[name] = app.task(name=name, retry=procrastinate.RetryStrategy(max_attempts=2, wait=0))(function)
    return app, tasks


GUARDED, _ = once_middleware(new_guard())


def middleware(call_next: Any, context: procrastinate.JobContext, worker: Any) -> Any:
    """Leave tasks without `once_task` unguarded."""
    return GUARDED(call_next, context, worker) if context.job.task_name.startswith("once") else call_next()


if __name__ == "__main__":
    app, _ = make(sys.argv[1])
    app.run_worker(
        concurrency=8,
        fetch_job_polling_interval=0.2,
        update_heartbeat_interval=0.5,
        stalled_worker_timeout=2,
        task_middleware=[middleware],
    )
