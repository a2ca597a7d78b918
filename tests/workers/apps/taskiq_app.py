"""A taskiq broker, and its worker: `python -m tests.workers.apps.taskiq_app BROKER`."""

import asyncio
import sys
from typing import Any

from taskiq import SimpleRetryMiddleware
from taskiq.api import run_receiver_task
from taskiq_redis import RedisStreamBroker

from oncemore.workers.taskiq import once_task
from tests.workers.work import all_tasks


def make(url: str) -> tuple[RedisStreamBroker, dict[str, Any]]:
    broker = RedisStreamBroker(url, idle_timeout=3000, unacknowledged_lock_timeout=1, xread_block=200, consumer_id="0")
    broker.add_middlewares(SimpleRetryMiddleware(default_retry_count=3))
    tasks = {}
    for name, function in all_tasks(once_task, is_async=True).items():
        limit = {"timeout": 2} if name.endswith("limited") else {}
        tasks[name] = broker.task(task_name=name, retry_on_error=True, **limit)(function)
    return broker, tasks


async def work(url: str) -> None:
    broker, _ = make(url)
    broker.is_worker_process = True
    await broker.startup()
    await run_receiver_task(broker, max_async_tasks=20)


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1]))
