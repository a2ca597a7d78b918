"""Workers in processes of their own, and the stories that are played with every runner.

`duplicate`: it is sent twice.  `retry`: its first attempt fails.  `limit`: the runner's time limit interrupts it after its
effect.  `long`: it takes longer than the broker's visibility timeout.  `killed`: its worker is killed after the effect.
`frozen`: its worker is stopped after the effect, for longer than the runner waits for it, and goes on when another worker
has had the task.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tests.workers import work

PATIENCE = 60.0  # seconds; how long something that must happen is waited for
ROOT = Path(__file__).parents[2]


@dataclass
class Figures:
    """The number of a task's effects and the results that the runner got: without and with `once_task`."""

    bare: int
    once: int
    returned: list[str]
    raised: list[str]


class Runner:
    """A runner whose workers the stories are played with."""

    title: ClassVar[str]
    app: ClassVar[str]
    stories: ClassVar[tuple[str, ...]] = ("duplicate", "retry", "limit", "killed", "frozen")
    redelivers = True  # whether a task whose worker is killed is run again
    retries_limits = True  # whether a task that has used up its time is run again

    def __init__(self, url: str) -> None:
        self.url = url

    def prepare(self) -> None:
        """Make what the runner needs before its first worker starts."""

    def command(self) -> list[str]:
        return [sys.executable, "-m", f"tests.workers.apps.{self.app}", self.url]

    def send(self, task: str, story: str, key: str) -> None:
        raise NotImplementedError

    def recover(self) -> None:
        """Make the runner notice now that a worker has vanished, instead of after minutes."""

    def nudge(self) -> None:
        """Do one periodic step that recovers tasks of vanished workers."""


class Stage:
    """The processes and the events of one runner."""

    def __init__(self, runner: Runner, folder: Path) -> None:
        self.runner = runner
        self.folder = folder
        self.workers: list[subprocess.Popen[bytes]] = []
        self._undo = ExitStack()

    def __enter__(self) -> Stage:
        self._undo.callback(lambda: os.environ.pop("ONCEMORE_TEST_FOLDER"))
        os.environ["ONCEMORE_TEST_FOLDER"] = str(self.folder)
        self.runner.prepare()
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            self.signal(worker, signal.SIGKILL)
            worker.wait()
        self._undo.close()

    def start_worker(self) -> subprocess.Popen[bytes]:
        """Start a worker as the leader of a session, with all its own processes in it."""
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "C_FORCE_ROOT": "1"}
        for name in [name for name in environment if name.startswith("COVERAGE")]:
            del environment[name]
        with (self.folder / f"worker{len(self.workers)}.log").open("wb") as log:
            worker = subprocess.Popen(
                self.runner.command(), stdout=log, stderr=log, env=environment, start_new_session=True, cwd=ROOT
            )
        self.workers.append(worker)
        return worker

    @staticmethod
    def signal(worker: subprocess.Popen[bytes], which: signal.Signals) -> None:
        """Send a signal to the worker and all its processes: they share its session, but RQ's have groups of their own."""
        for process in processes_of(worker.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, which)

    def log(self) -> str:
        """Return the output of all workers."""
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("worker*.log")))

    def send(self, story: str, times: int = 1) -> None:
        """Send the story's task without and with `once_task`."""
        tail = "_limited" if story == "limit" else ""
        for kind in ("bare", "once"):
            for _ in range(times):
                self.runner.send(f"{kind}{tail}", story, "k1")

    def state(self, story: str) -> str:
        """Return the state of the story's operation in the ledger."""
        with work.new_guard() as guard:
            record = guard.find("once:work", f"{story}:k1")
        return "" if record is None else record.state

    def wait(self, condition: Callable[[], object], what: str) -> None:
        ends = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > ends:
                raise AssertionError(f"{self.runner.title}: {what} did not happen\n{self.log()[-6000:]}")
            time.sleep(0.1)

    def effects(self, kind: str, story: str) -> int:
        return len(work.events("effect", kind, story))

    def returned(self, kind: str, story: str) -> int:
        return len(work.events("returned", kind, story))

    def play(self) -> dict[str, Figures]:
        """Play all stories, and return their figures."""
        first = self.start_worker()
        if "long" in self.runner.stories:
            self.send("long")
        for story in ("duplicate", "retry", "limit"):
            self.send(story, times=2 if story == "duplicate" else 1)
        self.wait(
            lambda: self.returned("once", "duplicate") >= 2 and self.returned("bare", "duplicate") >= 2, "two results"
        )
        self.wait(lambda: self.returned("once", "retry") and self.returned("bare", "retry"), "the retry's result")
        if "limit" in self.runner.stories:
            runs = 2 if self.runner.retries_limits else 1
            self.wait(lambda: self.effects("bare", "limit") >= runs, "the run after the time limit")
            self.wait(lambda: len(work.events("raised", "once", "limit")) >= runs, "the time limit")
        if "long" in self.runner.stories:
            self.wait(
                lambda: self.returned("once", "long") and self.effects("bare", "long") >= 2, "the long task's result"
            )
        self.send("killed")
        self.wait(lambda: self.effects("bare", "killed") and self.effects("once", "killed"), "the effects")
        self.signal(first, signal.SIGKILL)
        self.wait(lambda: not processes_of(first.pid), "the end of the killed worker")
        second = self.start_worker()
        self.wait_for_second_run("killed")
        if "frozen" in self.runner.stories:
            self.send("frozen")
            self.wait(lambda: self.effects("bare", "frozen") and self.effects("once", "frozen"), "the effects")
            self.signal(second, signal.SIGSTOP)
            self.start_worker()
            self.wait_for_second_run("frozen")
            (self.folder / "thawed").touch()
            self.signal(second, signal.SIGCONT)
            self.wait(lambda: len(self.ends("once", "frozen")) >= 2, "the end of the frozen task")
        return {story: self.figures(story) for story in self.runner.stories}

    def wait_for_second_run(self, story: str) -> None:
        """Wait until another worker has had both tasks; a runner that has lost them gets them again."""
        if not self.runner.redelivers:
            self.send(story)

        self.runner.recover()

        def is_done() -> bool:
            self.runner.nudge()
            return bool(self.returned("once", story)) and self.effects("bare", story) >= 2

        self.wait(is_done, f"the second run of {story}")

    def ends(self, kind: str, story: str) -> list[str]:
        return [*work.events("returned", kind, story), *work.events("raised", kind, story)]

    def figures(self, story: str) -> Figures:
        returned, raised = work.events("returned", "once", story), work.events("raised", "once", story)
        return Figures(self.effects("bare", story), self.effects("once", story), returned, raised)


def processes_of(session: int) -> list[int]:
    """Return the processes of a session that have not ended."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, _, its_session, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(its_session) == session and state != "Z":
                found.append(int(folder.name))
    return found


class CeleryRunner(Runner):
    app = "celery_app"

    def __init__(self, url: str) -> None:
        super().__init__(url)
        if url.startswith("redis"):  # RabbitMQ has no visibility timeout
            self.stories = (*self.stories, "long")  # type: ignore[misc]

    @property
    def title(self) -> str:  # type: ignore[override]
        return f"Celery on {'Redis' if self.url.startswith('redis') else 'RabbitMQ'}"

    def prepare(self) -> None:
        from tests.workers.apps.celery_app import make

        self.celery, self.tasks = make(self.url)

    def send(self, task: str, story: str, key: str) -> None:
        self.tasks[task].delay(story, key)


class DramatiqRunner(Runner):
    app = "dramatiq_app"

    @property
    def title(self) -> str:  # type: ignore[override]
        return f"Dramatiq on {'Redis' if self.url.startswith('redis') else 'RabbitMQ'}"

    def prepare(self) -> None:
        from tests.workers.apps.dramatiq_app import make

        self.broker, self.tasks = make(self.url)

    def send(self, task: str, story: str, key: str) -> None:
        self.tasks[task].send(story, key)


class RqRunner(Runner):
    title = "RQ"
    app = "rq_app"

    def command(self) -> list[str]:  # a worker runs one job at a time
        return [sys.executable, "-c", TWO_WORKERS, self.url]

    def send(self, task: str, story: str, key: str) -> None:
        from tests.workers.apps.rq_app import send

        send(self.url, task, story, key)

    def recover(self) -> None:
        """Look for abandoned jobs as if ten minutes had passed."""
        from redis import Redis
        from rq import Queue

        with Redis.from_url(self.url) as connection:
            Queue(connection=connection).started_job_registry.cleanup(timestamp=time.time() + 600)


# As many as there are tasks to be frozen: Redis would hand the next job to a worker that is stopped while it waits for one.
TWO_WORKERS = """
import subprocess, sys
workers = [subprocess.Popen([sys.executable, "-m", "tests.workers.apps.rq_app", sys.argv[1]]) for _ in range(2)]
for worker in workers:
    worker.wait()
"""


class HueyRunner(Runner):
    title = "Huey"
    app = "huey_app"
    stories = (
        "duplicate",
        "retry",
        "limit",
        "killed",
    )  # a task is taken from the queue before it runs: none comes twice
    redelivers = False

    def prepare(self) -> None:
        from tests.workers.apps.huey_app import make

        self.huey, self.tasks = make(self.url)

    def send(self, task: str, story: str, key: str) -> None:
        self.tasks[task](story, key)


class TaskiqRunner(Runner):
    title = "taskiq on Redis streams"
    app = "taskiq_app"

    def send(self, task: str, story: str, key: str) -> None:
        from tests.workers.apps.taskiq_app import make

        async def kick() -> None:
            broker, tasks = make(self.url)
            await broker.startup()
            await tasks[task].kiq(story, key)
            await broker.shutdown()

        asyncio.run(kick())

    def nudge(self) -> None:
        """Send a message, because the broker looks for tasks of vanished workers only after a message."""
        self.send("bare", "nudge", "k1")


class ProcrastinateRunner(Runner):
    title = "procrastinate"
    app = "procrastinate_app"
    stories = ("duplicate", "retry", "killed", "frozen")  # it has no time limits

    def prepare(self) -> None:
        from tests.workers.apps.procrastinate_app import make

        self.procrastinate, self.tasks = make(self.url)
        with self.procrastinate.open():
            self.procrastinate.schema_manager.apply_schema()

    def send(self, task: str, story: str, key: str) -> None:
        with self.procrastinate.open():
            self.tasks[task].defer(story=story, key=key)

    def nudge(self) -> None:
        """Retry stalled jobs, as its documentation does in a periodic task."""

        async def retry() -> None:
            async with self.procrastinate.open_async():
                for job in await self.procrastinate.job_manager.get_stalled_jobs(seconds_since_heartbeat=2):
                    await self.procrastinate.job_manager.retry_job(job)

        asyncio.run(retry())


class ArqRunner(Runner):
    title = "arq"
    app = "arq_app"
    retries_limits = False
    python = ""

    def command(self) -> list[str]:
        return [self.python, "-m", "tests.workers.apps.arq_app", self.url]

    def send(self, task: str, story: str, key: str) -> None:
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
        subprocess.run([*self.command(), task, story, key], check=True, env=environment, cwd=ROOT)
