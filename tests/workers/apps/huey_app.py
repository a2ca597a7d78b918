"""A Huey instance, and its consumer: `python -m tests.workers.apps.huey_app BROKER`."""

import sys
from typing import Any

from huey import RedisHuey
from huey.consumer import Consumer

from oncemore.workers.huey import once_task
from tests.workers.work import all_tasks


def make(url: str) -> tuple[Any, dict[str, Any]]:
    huey = RedisHuey("tests", url=url)
    tasks = {}
    for name, function in all_tasks(once_task).items():
        limit = {"timeout": 2} if name.endswith("limited") else {}
        context = name.startswith("once")
        tasks[name] = huey.task(name=name, context=context, retries=2, retry_delay=0, **limit)(function)
    return huey, tasks


if __name__ == "__main__":
    huey, _ = make(sys.argv[1])
    Consumer(huey, workers=4, worker_type="process", scheduler_interval=1, backoff=1, max_delay=0.2).run()
