"""`once_task` in the runners' test modes: names of operations, compared arguments, warnings."""

from __future__ import annotations

import asyncio
import logging
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import dramatiq
import pytest
from celery import Celery
from celery.exceptions import SoftTimeLimitExceeded
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import AsyncIO
from huey import MemoryHuey
from procrastinate import App, JobContext
from procrastinate.testing import InMemoryConnector
from redis import Redis
from rq import Queue, Retry, SimpleWorker
from taskiq import Context, InMemoryBroker, TaskiqDepends, TaskiqMessage
from taskiq.acks import AckController
from taskiq_redis import RedisStreamBroker

from oncemore import Guard, current_operation
from oncemore._runtime.plan import arun
from oncemore.errors import (
    ConfigurationError,
    CorruptRecord,
    Fenced,
    InProgress,
    MissingDriver,
    PayloadMismatch,
    StoreUnavailable,
    UnknownOutcome,
)
from oncemore.workers import celery, huey, procrastinate, rq, taskiq
from oncemore.workers import dramatiq as dramatiq_workers
from oncemore.workers.celery import CurrentTask, OnceTask, install
from oncemore.workers.task import is_temporary
from tests.workers.stage import ROOT, ArqRunner, Stage

CALLS: list[Any] = []


@pytest.fixture(autouse=True)
def calls() -> list[Any]:
    CALLS.clear()
    return CALLS


@pytest.fixture
def guard() -> Iterator[Guard]:
    with Guard("memory://") as guard:
        yield guard


def test_error_before_performing_is_later_else_runner_decides() -> None:
    assert is_temporary(InProgress(), begun=True)
    assert is_temporary(Fenced(), begun=True)
    assert is_temporary(StoreUnavailable(), begun=False)
    assert is_temporary(UnknownOutcome(retry_after=5), begun=False)
    assert not is_temporary(StoreUnavailable(), begun=True)
    assert not is_temporary(UnknownOutcome(), begun=False)
    assert not is_temporary(CorruptRecord(), begun=False)


# Celery


def nothing() -> None:
    """A task that does nothing."""


def eager_app() -> Celery:
    app = Celery("tests", set_as_current=False)
    app.conf.update(task_ignore_result=True)
    return app


def test_celery_task_id_names_the_operation(guard: Guard) -> None:
    @eager_app().task
    @celery.once_task(guard)
    def send(number: int) -> int:
        CALLS.append(number)
        return number * 2

    first = send.apply((7,), task_id="t1")
    assert (first.result, send.apply((7,), task_id="t1").result, send.apply((7,), task_id="t2").result) == (14, 14, 14)
    assert CALLS == [7, 7]


def test_call_without_task_or_key_is_refused(guard: Guard) -> None:
    @eager_app().task
    @celery.once_task(guard)
    def send(number: int) -> None:
        CALLS.append(number)

    with pytest.raises(ConfigurationError, match=r"send was not called by a worker .* key="):
        send(7)
    assert CALLS == []


def test_celery_bound_task_compares_arguments_but_not_itself(guard: Guard) -> None:
    @eager_app().task(bind=True)
    @celery.once_task(guard, key="{order}")
    def send(self: Any, order: int, amount: int) -> str:
        CALLS.append(self.name)
        return f"{order}: {amount}"

    assert send.apply((1, 5)).result == send.apply((1,), {"amount": 5}).result == send(1, 5) == "1: 5"
    assert len(CALLS) == 1
    assert isinstance(send.apply((1, 6)).result, PayloadMismatch)


def test_celery_retry_with_other_arguments_keeps_its_id(guard: Guard) -> None:
    @eager_app().task(bind=True, max_retries=2)
    @celery.once_task(guard)
    def send(self: Any, number: int) -> int:
        CALLS.append(number)
        if number < 3:
            raise self.retry(args=(number + 1,), countdown=0)
        return number

    assert send.apply((1,), task_id="t1").result == 3
    assert CALLS == [1, 2, 3]
    assert send.apply((1,), task_id="t1").result == 3
    assert CALLS == [1, 2, 3]


def test_celery_installed_app_guards_every_task(guard: Guard) -> None:
    app = eager_app()
    install(app, guard, ttl="7d")

    @app.task
    def by_id(number: int) -> None:
        CALLS.append("by_id")

    @app.task(once="order:{number}")
    def by_key(number: int) -> None:
        CALLS.append("by_key")

    @app.task(once={"key": "order:{number}", "errors": (ValueError,)}, bind=True)
    def refused(self: Any, number: int) -> None:
        CALLS.append("refused")
        raise ValueError(number)

    @app.task(once=False)
    def unguarded(number: int) -> None:
        CALLS.append("unguarded")

    for task in (by_id, by_key, refused, unguarded):
        for _ in range(2):
            task.apply((7,), task_id="t1")
    assert CALLS == ["by_id", "by_key", "refused", "unguarded", "unguarded"]
    assert (by_id.acks_late, by_id.reject_on_worker_lost) == (True, True)


def test_celery_autoretry_does_not_turn_a_time_limit_into_failure(guard: Guard) -> None:
    app = eager_app()
    install(app, guard)

    @app.task(autoretry_for=(Exception,), max_retries=1, retry_kwargs={"countdown": 0})
    def send(number: int) -> None:
        CALLS.append(number)
        raise SoftTimeLimitExceeded

    assert isinstance(send.apply((7,), task_id="t1").result, UnknownOutcome)
    assert CALLS == [7]


def test_celery_once_task_without_guard_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"send has no guard: call install"):
        eager_app().task(base=OnceTask, name="send", lazy=False)(nothing)


def test_celery_unsafe_settings_are_named(guard: Guard) -> None:
    app = eager_app()
    app.conf.broker_transport_options = {"visibility_timeout": 10}

    def hazards(**options: Any) -> list[str]:
        task = app.task(name=repr(options), lazy=False, **options)(nothing)
        return [each.partition(" ")[0] for each in CurrentTask(task).hazards(guard.policy)]

    assert hazards() == ["acks_late", "visibility_timeout"]
    assert hazards(acks_late=True) == ["reject_on_worker_lost", "visibility_timeout"]
    app.conf.broker_transport_options = {"visibility_timeout": 3600}
    assert hazards(acks_late=True, reject_on_worker_lost=True) == []


def test_celery_task_commits_in_the_operations_transaction(tmp_path: Path) -> None:
    with Guard(f"sqlite:///{tmp_path / 'shop.db'}") as guard:

        @eager_app().task
        @celery.once_task(guard, key="{number}", effect="transaction")
        def send(number: int, fails: bool = False) -> int:
            connection = current_operation().connection
            connection.execute("CREATE TABLE IF NOT EXISTS sent (number INTEGER)")
            connection.execute("INSERT INTO sent VALUES (?)", (number,))
            if not CALLS:
                CALLS.append("failed")
                raise SoftTimeLimitExceeded
            return int(connection.execute("SELECT count(*) FROM sent").fetchone()[0])

        assert isinstance(send.apply((7,)).result, SoftTimeLimitExceeded)  # rolled back, so there is no doubt
        assert [send.apply((7,)).result for _ in range(2)] == [1, 1]


def test_unsafe_settings_are_logged_once(guard: Guard, caplog: pytest.LogCaptureFixture) -> None:
    @eager_app().task
    @celery.once_task(guard)
    def send() -> None: ...

    with caplog.at_level(logging.WARNING, logger="oncemore"):
        for _ in range(2):
            send.apply()
    assert caplog.text.count("acks_late is off, so Celery forgets the task when its worker is killed") == 1
    assert caplog.text.count("its ledger is in the memory of this process") == 1


# Dramatiq


def test_dramatiq_middleware_guards_actors_with_the_option(guard: Guard) -> None:
    broker = StubBroker()
    broker.emit_after("process_boot")
    broker.add_middleware(dramatiq_workers.OnceMiddleware(guard, ttl="7d"))

    @dramatiq.actor(broker=broker, once="order:{number}")
    def by_key(number: int) -> None:
        CALLS.append("by_key")

    @dramatiq.actor(broker=broker, once=True)
    def by_id(number: int) -> None:
        CALLS.append("by_id")

    @dramatiq.actor(broker=broker)
    def unguarded(number: int) -> None:
        CALLS.append("unguarded")

    worker = dramatiq.Worker(broker, worker_timeout=100, worker_threads=1)
    worker.start()
    try:
        for actor in (by_key, by_id, unguarded):
            message = actor.message(7)
            broker.enqueue(message)
            broker.enqueue(message)
            broker.join(actor.queue_name, timeout=60_000)
    finally:
        worker.stop()
    assert CALLS == ["by_key", "by_id", "unguarded", "unguarded"]


def test_dramatiq_async_actor_is_guarded_either_way(guard: Guard) -> None:
    broker = StubBroker()
    broker.add_middleware(AsyncIO())
    broker.add_middleware(dramatiq_workers.OnceMiddleware(guard))

    @dramatiq.actor(broker=broker, once=True)
    async def by_option(number: int) -> None:
        CALLS.append("by_option")

    @dramatiq.actor(broker=broker)
    @dramatiq_workers.once_task(guard)
    async def by_decorator(number: int) -> None:
        CALLS.append("by_decorator")

    worker = dramatiq.Worker(broker, worker_timeout=100, worker_threads=1)
    worker.start()
    try:
        for actor in (by_option, by_decorator):
            message = actor.message(7)
            broker.enqueue(message)
            broker.enqueue(message)
            broker.join(actor.queue_name, timeout=60_000, fail_fast=True)
    finally:
        worker.stop()
    assert CALLS == ["by_option", "by_decorator"]


def test_dramatiq_without_middleware_says_what_is_missing(guard: Guard) -> None:
    @dramatiq_workers.once_task(guard)
    def send(number: int) -> None: ...

    with pytest.raises(ConfigurationError, match=r"add OnceMiddleware\(guard\) to the broker"):
        send(7)


# RQ


@rq.once_task(Guard("memory://"))
def ask_for_a_retry() -> Any:
    CALLS.append("asked")
    return "done" if len(CALLS) == 2 else Retry(max=3)


@rq.once_task(Guard("redis://127.0.0.1:1/0?timeout=100ms"), lease="300ms")
def use_a_store_that_is_down() -> None:
    CALLS.append("ran")


@pytest.mark.server
def test_rq_returned_retry_is_no_result(redis_broker: str) -> None:
    with Redis.from_url(redis_broker) as connection:
        queue = Queue(connection=connection)
        job = queue.enqueue(ask_for_a_retry)
        SimpleWorker([queue], connection=connection).work(burst=True)
        assert (job.return_value(), CALLS) == ("done", ["asked", "asked"])


@pytest.mark.server
def test_rq_job_is_enqueued_again_while_the_store_is_down(redis_broker: str) -> None:
    with Redis.from_url(redis_broker) as connection:
        queue = Queue(connection=connection)
        job = queue.enqueue(use_a_store_that_is_down)
        SimpleWorker([queue], connection=connection).work(burst=True, max_jobs=3)
        job.refresh()
        assert (job.get_status().value, job.number_of_retries, CALLS) == ("queued", 3, [])


# Huey


def test_huey_passes_its_task_which_is_not_compared(guard: Guard) -> None:
    app = MemoryHuey(immediate=True)

    @app.task(context=True)
    @huey.once_task(guard)
    def by_id(number: int) -> int:
        CALLS.append(number)
        return number

    @app.task(context=True)
    @huey.once_task(guard, key="{number}")
    def by_key(number: int, task: Any = None) -> str:
        CALLS.append(task.id)
        return str(task.id)

    first = by_id(7)
    app.enqueue(first.task)
    assert (first(), CALLS) == (7, [7])
    assert by_key(8)() == by_key(8)()
    assert len(CALLS) == 2


# taskiq


@dataclass
class Session:
    """A dependency that taskiq passes to a task."""

    number: int


def new_session() -> Session:
    CALLS.append("session")
    return Session(len(CALLS))


async def test_taskiq_dependencies_are_passed_and_not_compared(guard: Guard) -> None:
    broker = InMemoryBroker()

    @broker.task
    @taskiq.once_task(guard, key="{number}")
    async def send(
        number: int,
        session: Annotated[Session, TaskiqDepends(new_session)],
        context: Annotated[Context, TaskiqDepends()],
    ) -> int:
        CALLS.append(context.message.task_id)
        return session.number

    results = [await (await send.kiq(7)).wait_result() for _ in range(2)]
    assert [each.return_value for each in results] == [1, 1]
    assert len(CALLS) == 3
    await broker.shutdown()


async def test_taskiq_sync_task_is_named_by_its_id(guard: Guard, caplog: pytest.LogCaptureFixture) -> None:
    broker = InMemoryBroker()

    @broker.task
    @taskiq.once_task(guard)
    def send(number: int, **others: int) -> int:
        CALLS.append(number)
        return number

    with caplog.at_level(logging.WARNING, logger="oncemore"):
        for _ in range(2):
            kicked = await send.kicker().with_task_id("t1").kiq(7, more=1)
            assert (await kicked.wait_result()).return_value == 7
    assert CALLS == [7]
    assert "the broker has no acknowledgements" in caplog.text
    await broker.shutdown()


async def test_taskiq_sync_task_is_sent_again_while_another_runs(guard: Guard) -> None:
    broker = InMemoryBroker()

    @broker.task
    @taskiq.once_task(guard, key="{number}", wait="10ms", lease="300ms")
    def send(number: int) -> int:
        CALLS.append(number)
        return number

    operation = send.original_func.operation(7)
    async with guard.attempt(operation) as attempt:
        kicked = await send.kiq(7)
        await asyncio.sleep(0.5)
        attempt.result = 49
    result = await kicked.wait_result(timeout=60)
    assert (result.return_value, CALLS) == (49, [])
    assert int(result.labels["X-Taskiq-requeue"]) >= 1
    await broker.shutdown()


@pytest.mark.server
async def test_taskiq_unsafe_settings_are_named(guard: Guard, redis_broker: str) -> None:
    broker = RedisStreamBroker(redis_broker, idle_timeout=10_000)
    message = TaskiqMessage(task_id="t1", task_name="send", labels={"ack_type": "when_received"}, args=[], kwargs={})

    async def acknowledge() -> None: ...

    received = taskiq.ReceivedTask(Context(message, broker, AckController(acknowledge)), asyncio.get_running_loop())
    assert [each.partition(" ")[0] for each in received.hazards(guard.policy)] == ["ack_type", "idle_timeout"]


# procrastinate


async def test_procrastinate_middleware_guards_each_job_by_its_id(guard: Guard) -> None:
    app = App(connector=InMemoryConnector())

    @app.task
    async def send(number: int) -> None:
        CALLS.append(number)

    @app.task
    def send_sync(number: int) -> None:
        CALLS.append(number)

    @app.task(pass_context=True)
    @procrastinate.once_task(guard, key="{number}")
    async def send_by_key(context: JobContext, number: int) -> None:
        CALLS.append(number)

    async with app.open_async():
        first = await send.defer_async(number=1)
        second = await send_sync.defer_async(number=2)
        for _ in range(2):
            await send_by_key.defer_async(number=3)
        middleware = procrastinate.once_middleware(guard)
        for _ in range(2):
            await app.run_worker_async(wait=False, install_signal_handlers=False, task_middleware=middleware)
            for number in (first, second):  # as if its worker had vanished
                app.connector.jobs[number]["status"] = "todo"  # type: ignore[attr-defined]
    assert sorted(CALLS) == [1, 2, 3]


@pytest.mark.parametrize("awaited", [False, True])
async def test_procrastinate_job_in_progress_uses_no_attempt(guard: Guard, awaited: bool) -> None:
    app = App(connector=InMemoryConnector())
    connector: Any = app.connector

    async def send(context: JobContext, number: int) -> None:
        CALLS.append(number)

    def send_sync(context: JobContext, number: int) -> None:
        CALLS.append(number)

    guarded: Any = procrastinate.once_task(guard, key="{number}", name="send", lease="0.3s")(
        send if awaited else send_sync  # type: ignore[arg-type]
    )
    task = app.task(guarded, name="send", pass_context=True, retry=1)
    await arun(guard.store.claim(guarded.operation(None, 1), lease=60.0))  # another worker's
    async with app.open_async():
        id = await task.defer_async(number=1)
        await app.run_worker_async(wait=False, install_signal_handlers=False)
        assert (connector.jobs[id]["status"], connector.jobs[id]["attempts"]) == ("todo", 0)
    assert CALLS == []


# arq


def test_missing_runner_names_the_extra() -> None:
    with pytest.raises(MissingDriver, match=r"pip install 'oncemore\[arq\]'"):
        from oncemore.workers import arq  # noqa: F401


def test_arq_task_that_is_held_at_deployments_warns(arq_python: str) -> None:
    program = """
from oncemore import Guard, Resolution
from oncemore.workers.arq import once_task
guard = Guard("memory://")
async def held(ctx, number): ...
async def resolved(ctx, number): ...
once_task(guard)(held)
once_task(guard, on_unknown="resolve", resolver=lambda op: Resolution.unknown())(resolved)
once_task(guard, resolver=lambda op: Resolution.unknown())(resolved)
once_task(guard, effect="transaction")(resolved)
try:
    once_task(guard)(lambda: None)
except Exception as error:
    print(error)
"""
    done = subprocess.run(
        [arq_python, "-W", "always", "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(ROOT / "src")},
    )
    assert done.stderr.count("arq cancels running jobs at each deployment") == 1
    assert "held: arq cancels" in done.stderr
    assert "give it one by name=" in done.stdout or "is not an arq job" in done.stdout


@pytest.mark.server
@pytest.mark.chaos
def test_arq_job_cancelled_at_deployment_is_resolved(tmp_path: Path, redis_broker: str, arq_python: str) -> None:
    runner = ArqRunner(redis_broker)
    runner.python = arq_python
    with Stage(runner, tmp_path) as stage:
        first = stage.start_worker()
        stage.send("stopped")
        stage.wait(lambda: stage.effects("bare", "stopped") and stage.effects("once", "stopped"), "the effects")
        first.terminate()
        first.wait()
        stage.start_worker()
        stage.wait(lambda: stage.returned("bare", "stopped") and stage.returned("once", "stopped"), "the second run")
        assert (stage.effects("bare", "stopped"), stage.effects("once", "stopped")) == (2, 1)
