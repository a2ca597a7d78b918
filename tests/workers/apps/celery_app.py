"""A Celery app, and its worker: `python -m tests.workers.apps.celery_app BROKER`."""

import sys
from typing import Any

from celery import Celery

from oncemore.workers.celery import once_task
from tests.workers.work import all_tasks

VISIBLE = 3  # seconds


def make(broker: str) -> tuple[Celery, dict[str, Any]]:
    app = Celery("tests", broker=broker)
    options: dict[str, Any] = {}
    if broker.startswith("redis"):
        # kombu looks for unacknowledged messages each interval x throttle seconds; by default that is each 100
        options = {"visibility_timeout": VISIBLE, "unacked_restore_interval": 1, "unacked_restore_throttle": 1}
    app.conf.update(
        broker_transport_options=options,
        broker_heartbeat=2,
        worker_prefetch_multiplier=1,
        task_ignore_result=True,
        worker_enable_remote_control=False,
        task_default_retry_delay=0,
        broker_connection_retry_on_startup=True,
    )
    tasks = {}
    for name, function in all_tasks(once_task).items():
        limit = {"soft_time_limit": 2} if name.endswith("limited") else {}
        declare = app.task(
            name=name,
            acks_late=True,
            reject_on_worker_lost=True,
            autoretry_for=(Exception,),
            max_retries=2,
            **limit,
            retry_backoff=False,
            retry_kwargs={"countdown": 0.2},
        )
        tasks[name] = declare(function)
    return app, tasks


if __name__ == "__main__":
    app, _ = make(sys.argv[1])
    app.worker_main(["worker", "--concurrency=8", "--loglevel=INFO", "--without-gossip", "--without-mingle"])
