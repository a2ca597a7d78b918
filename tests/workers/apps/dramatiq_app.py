"""A Dramatiq broker, and its worker: `python -m tests.workers.apps.dramatiq_app BROKER`."""

import sys
import time
from typing import Any

import dramatiq
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.brokers.redis import RedisBroker
from dramatiq.worker import Worker

from oncemore.workers.dramatiq import OnceMiddleware, once_task
from tests.workers.work import all_tasks, new_guard


def make(url: str) -> tuple[dramatiq.Broker, dict[str, Any]]:
    broker: dramatiq.Broker
    if url.startswith("redis"):
        broker = RedisBroker(url=url, heartbeat_timeout=2000, maintenance_chance=1_000_000)
    else:
        broker = RabbitmqBroker(url=f"{url}/?heartbeat=4")
    broker.add_middleware(OnceMiddleware(new_guard()))
    tasks = {}
    for name, function in all_tasks(once_task).items():
        limit = {"time_limit": 2000} if name.endswith("limited") else {}
        declare = dramatiq.actor(broker=broker, actor_name=name, max_retries=2, min_backoff=200, **limit)
        tasks[name] = declare(function)
    return broker, tasks


if __name__ == "__main__":
    broker, _ = make(sys.argv[1])
    broker.emit_after("process_boot")
    Worker(broker, worker_threads=4, worker_timeout=200).start()
    while True:
        time.sleep(1)
