"""arq jobs: `python arq_app.py REDIS` is a worker, and `python arq_app.py REDIS TASK STORY KEY` enqueues one."""

import asyncio
import sys
from typing import Any

from arq import Retry, create_pool, func
from arq.connections import RedisSettings
from arq.worker import Worker

from oncemore.workers.arq import once_task
from tests.workers import work


def make() -> list[Any]:
    unknown: dict[str, Any] = {"on_unknown": "resolve", "resolver": work.look_up}

    async def bare(ctx: dict[str, Any], story: str, key: str) -> str:
        return await retried(work.abare(story, key))

    async def once(ctx: dict[str, Any], story: str, key: str) -> str:
        return await retried(work.abare(story, key, "once"))

    guard = work.new_guard()
    resolved = once_task(guard, key="{story}:{key}", name="work", lease=work.LEASE, **unknown)(once)
    held = once_task(guard, key="{story}:{key}", name="work", lease=work.LEASE)(once)
    limited = {"timeout": 2, "max_tries": 3}
    return [
        func(work.noted(bare, "bare", "bare"), name="bare", timeout=4, max_tries=3),
        func(work.noted(resolved, "once", "once"), name="once", timeout=4, max_tries=3),
        func(work.noted(bare, "bare", "bare_limited"), name="bare_limited", **limited),
        func(work.noted(held, "once", "once_limited"), name="once_limited", **limited),
    ]


async def retried(work: Any) -> Any:
    """Await *work*, and ask for a retry if it fails: arq gives up other failed jobs."""
    try:
        return await work
    except RuntimeError as error:
        raise Retry(defer=0.2) from error


async def send(url: str, task: str, *args: str) -> None:
    pool = await create_pool(RedisSettings.from_dsn(url))
    await pool.enqueue_job(task, *args)
    await pool.aclose()


if __name__ == "__main__":
    url, *rest = sys.argv[1:]
    if rest:
        asyncio.run(send(url, *rest))
    else:
        Worker(make(), redis_settings=RedisSettings.from_dsn(url), poll_delay=0.1, max_jobs=10).run()
