"""RQ jobs, and a worker: `python -m tests.workers.apps.rq_app BROKER`."""

import sys
from typing import Any

from redis import Redis
from rq import Queue, Retry, Worker

from oncemore.workers.rq import once_task
from tests.workers.work import all_tasks

globals().update(all_tasks(once_task))


def send(url: str, task: str, *args: Any) -> None:
    with Redis.from_url(url) as connection:
        timeout = 2 if task.endswith("limited") else 300
        Queue(connection=connection).enqueue(f"{__name__}.{task}", *args, retry=Retry(max=2), job_timeout=timeout)


if __name__ == "__main__":
    with Redis.from_url(sys.argv[1]) as connection:
        Worker([Queue(connection=connection)], connection=connection).work()
