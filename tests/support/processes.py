"""Processes for tests, without the seconds that a new interpreter needs to import packages.

They come from multiprocessing's forkserver, which imports the heavy packages once (`PRELOAD`) and forks at each request.
A process from it inherits nothing else from the test, and SIGKILL, SIGSTOP and exit codes work as for any process.
Use `Program` for a program with arguments and streams, and `separate_processes()` for functions, pools and barriers.

To test how an interpreter itself starts, use subprocess.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import random
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import IO, Any, Self
from weakref import WeakSet

from examples.process import Server

# Imported once, by the forkserver.  None of these starts a thread, a loop or a connection when it is imported.
PRELOAD = [
    "aiohttp",
    "aiosqlite",
    "asyncpg",
    "click",
    "django.core.handlers.asgi",
    "django.db.backends.postgresql.base",
    "django.db.backends.sqlite3.base",
    "fastapi",
    "httpx",
    "psycopg2",
    "psycopg_pool",
    "redis.asyncio",
    "requests",
    "rich.console",
    "rich.table",
    "sqlalchemy.dialects.postgresql",
    "sqlalchemy.dialects.sqlite",
    "sqlalchemy.ext.asyncio",
    "uvicorn.lifespan.off",
    "uvicorn.loops.auto",
    "uvicorn.protocols.http.auto",
    "oncemore",
    "oncemore.client.aiohttp",
    "oncemore.client.httpx",
    "oncemore.client.requests",
    "oncemore.client.urllib3",
    "oncemore.stores.postgres",
    "oncemore.stores.redis",
    "oncemore.stores.sqlite",
    "oncemore.testing.crashes",
    "oncemore.web.asgi",
    "tests.client.clients",
    "tests.doors.app",
    "tests.transactions.shops",
]

# These start coverage in a new process.  They are removed, because coverage makes such a process five times as slow, and
# most of them are killed before they could write their data.
COVERAGE = ("COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG")


def separate_processes() -> ForkServerContext:
    """A multiprocessing context whose processes inherit nothing from this one, like unrelated services."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    measured = {name: os.environ.pop(name) for name in COVERAGE if name in os.environ}
    try:
        forkserver.ensure_running()  # now, without coverage; it ends with this process
    finally:
        os.environ.update(measured)
    return context


RUNNING: WeakSet[Program] = WeakSet()


@atexit.register
def kill_running() -> None:
    """At its end, multiprocessing waits for its processes.  They are not daemons, because those may have no children."""
    for program in tuple(RUNNING):
        program.kill()


class Program:
    """A Python program in a process of its own, used like a `subprocess.Popen` in text mode.

    *command* is the interpreter, then a script or `-m` and a module, then arguments.  The process ends with the test run,
    also if that is killed.
    """

    def __init__(
        self,
        command: list[str],
        *,
        stdin: int | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        assert command[0] == sys.executable, "the forkserver has nothing but Python"
        context = separate_processes()
        theirs: list[Connection] = []

        def pipe(wanted: int | IO[Any] | None, standard: int, *, reads: bool) -> IO[str] | None:
            """Return the parent's end of a pipe, if one is wanted, and the stream for the process."""
            if wanted != subprocess.PIPE:
                number = standard if wanted is None else wanted if isinstance(wanted, int) else wanted.fileno()
                if wanted is None and standard == 0:
                    number = os.open(os.devnull, os.O_RDONLY)
                    theirs.append(Connection(number, writable=False))
                else:
                    theirs.append(Connection(os.dup(number), readable=False))
                return None
            read, write = os.pipe()
            if reads:
                theirs.append(Connection(write, readable=False))
                return os.fdopen(read, encoding="utf-8", errors="replace")
            theirs.append(Connection(read, writable=False))
            return os.fdopen(write, "w", encoding="utf-8")

        self.args = command
        self.stdin = pipe(stdin, 0, reads=False)
        self.stdout = pipe(stdout, 1, reads=True)
        self.stderr = pipe(stderr, 2, reads=True)
        environment = dict(os.environ if env is None else env)
        self.process = context.Process(
            target=run_program, args=(command[1:], str(cwd or Path.cwd()), environment, theirs)
        )
        RUNNING.add(self)
        self.process.start()
        self.pid: int = self.process.pid or 0
        for end in theirs:
            end.close()

    @property
    def returncode(self) -> int | None:
        """Return the exit code, minus the number of the signal that ended the process, or None while it runs."""
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.process.exitcode

    def communicate(self, said: str = "", timeout: float | None = None) -> tuple[str, str]:
        """Write *said*, then read both streams to their ends and wait for the process."""
        found = {"stdout": "", "stderr": ""}

        def read(name: str, stream: IO[str]) -> None:
            found[name] = stream.read()

        streams = {name: stream for name in found if (stream := getattr(self, name)) is not None}
        readers = [threading.Thread(target=read, args=each, daemon=True) for each in streams.items()]
        for reader in readers:
            reader.start()
        if self.stdin is not None:
            with suppress(OSError, ValueError):  # the process has ended, or its input is closed
                self.stdin.write(said)
                self.stdin.close()
        self.wait(timeout)
        for reader in readers:
            reader.join()
        return found["stdout"], found["stderr"]

    def send_signal(self, which: int) -> None:
        if self.process.exitcode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, which)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                with suppress(OSError, ValueError):
                    stream.close()
        self.process.join()


def run_program(command: list[str], cwd: str, environment: dict[str, str], streams: list[Connection]) -> None:
    """Run the program in the new process."""
    for standard, stream in enumerate(streams):
        os.dup2(stream.fileno(), standard)
        stream.close()
    # It ends with its parent by the thread below, so it need not count as a daemon, which may have no children: granian has.
    threading.Thread(target=end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    random.seed()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update({name: value for name, value in environment.items() if name not in COVERAGE})
    time.tzset()
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    sys.path[:0] = [each for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each not in sys.path]
    if command[0] == "-m":
        sys.argv = command[1:]
        sys.path.insert(0, cwd)
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        sys.path.insert(0, str(Path(command[0]).parent))
        runpy.run_path(command[0], run_name="__main__")


def end_with_parent() -> None:
    """End this process when the test run ends, even if it is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def without_coverage(**more: str) -> dict[str, str]:
    """Return the environment for a process without coverage."""
    return {**{name: value for name, value in os.environ.items() if name not in COVERAGE}, **more}


def run_to_end(
    command: list[str], *, said: str = "", timeout: float = 60, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program with *said* as its input, and return its exit code and output."""
    pipe = subprocess.PIPE
    with Program(command, stdin=pipe, stdout=pipe, stderr=pipe, **options) as program:
        try:
            out, errors = program.communicate(said, timeout)
        finally:
            program.kill()
    return subprocess.CompletedProcess(command, program.returncode or 0, out, errors)


class ForkedServer(Server):
    """A server from the forkserver; it ends with the test run, and needs no supervisor."""

    def _launch(self) -> None:
        command, environment = self.command(), without_coverage()
        if command[0] == "env":
            start = command.index(sys.executable)
            environment.update(part.split("=", 1) for part in command[:start] if "=" in part)  # type: ignore[arg-type]
            del command[:start]
        with (self.folder / "log").open("a") as log:
            program = Program(command, stdin=subprocess.PIPE, stdout=log, stderr=log, cwd=self.folder, env=environment)
        self._supervisor, self.pid = program, program.pid  # type: ignore[assignment]

    def stop(self) -> None:
        if self._supervisor is not None:
            self.crash()
        super().stop()
