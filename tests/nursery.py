"""Real processes for tests, without the second that a fresh interpreter takes to import what they all need.

A `Child` is a `subprocess.Popen` for a Python program.  Rather than by the kernel alone, it is brought up by the nursery:
one process per worker of pytest, which has imported the heavy packages, has one thread, no event loop and no
connection, and forks at each request.  What comes out is a process of its own, with its own arguments, environment,
folder and streams: SIGKILL, SIGSTOP and exit codes are as real as ever.  When its worker ends, however it ends, the
nursery ends its children and itself.

What a test proves of an interpreter's own start (a command line, a server's program) is not for the nursery.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from oncemore.testing.process import Server

ROOT = Path(__file__).resolve().parents[1]
CAN_FORK = sys.platform == "linux"  # elsewhere a child is an ordinary one, and only slower
WORD = struct.Struct("i")
LONGEST = 1 << 17  # bytes: a command line and an environment

# What children import.  None of these starts a thread, a loop or a connection when it is imported.
HEAVY = (
    "aiohttp",
    "aiosqlite",
    "asyncpg",
    "django.core.handlers.asgi",
    "django.db.backends.postgresql.base",
    "django.db.backends.sqlite3.base",
    "fastapi",
    "httpx",
    "psycopg2",
    "psycopg_pool",
    "redis.asyncio",
    "requests",
    "sqlalchemy.dialects.postgresql",
    "sqlalchemy.dialects.sqlite",
    "sqlalchemy.ext.asyncio",
    "uvicorn.lifespan.off",
    "uvicorn.loops.auto",
    "uvicorn.protocols.http.auto",
    "oncemore.client.aiohttp",
    "oncemore.client.httpx",
    "oncemore.client.keyring_ledger",
    "oncemore.client.keyring_sqlite",
    "oncemore.client.requests",
    "oncemore.client.urllib3",
    "oncemore.core.completer",
    "oncemore.stores.postgres",
    "oncemore.stores.redis",
    "oncemore.stores.sqlite",
    "oncemore.testing.crashes",
    "oncemore.testing.http_app",
    "oncemore.web.asgi",
    "tests.client.clients",
    "tests.effects.shops",
)
# Nor are the nursery and its children measured: it takes five times as long as all else that a child does, most of them
# are killed before they could tell, and what the core does in them it does in the tests' own process as well.
MEASURED = ("COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG")  # how coverage finds its way into a new process


# ── In the worker


class Child(subprocess.Popen[str]):
    """A process that runs *command*: the interpreter, then a script or `-m` and a module, then arguments."""

    def __init__(self, command: list[str], **options: Any) -> None:
        assert command[0] == sys.executable, "the nursery has nothing but Python"
        super().__init__(command, text=True, **options)

    if CAN_FORK:
        # Popen makes the pipes and reads them; how the process comes to be, and how its end is heard of, are these three.

        def _execute_child(self, args: Any, *more: Any) -> None:
            cwd, env, streams = more[4], more[5], more[9:15]
            ours = [streams[n] if streams[n] != -1 else standard for standard, n in enumerate((0, 3, 5))]
            self._news, told = os.pipe()
            try:
                request = {
                    "command": args[1:],
                    "cwd": str(cwd or Path.cwd()),
                    "env": dict(os.environ if env is None else env),
                }
                nursery().send(request, [told, *ours])
            finally:
                os.close(told)
            self.pid = self._heard()
            self._child_created = True
            self._close_pipe_fds(*streams)  # type: ignore[attr-defined]

        def _try_wait(self, wait_flags: int) -> tuple[int, int]:
            if wait_flags & os.WNOHANG and not select.select([self._news], [], [], 0)[0]:
                return 0, 0
            status = self._heard()
            os.close(self._news)
            return self.pid, status

        def _internal_poll(self, *_: Any, **__: Any) -> int | None:
            if self.returncode is None and self._child_created and self._waitpid_lock.acquire(False):  # type: ignore[attr-defined]
                try:
                    if self.returncode is None:
                        pid, status = self._try_wait(os.WNOHANG)
                        if pid:
                            self._handle_exitstatus(status)  # type: ignore[attr-defined]
                finally:
                    self._waitpid_lock.release()  # type: ignore[attr-defined]
            return self.returncode

        def _heard(self) -> int:
            word = os.read(self._news, WORD.size)
            if not word:
                raise RuntimeError("the nursery is no more")
            return int(WORD.unpack(word)[0])


def run(command: list[str], *, timeout: float = 60, **options: Any) -> subprocess.CompletedProcess[str]:
    """What came of a child, and what it said on both streams."""
    with Child(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options) as child:
        try:
            out, errors = child.communicate(timeout=timeout)
        finally:
            child.kill()
    return subprocess.CompletedProcess(command, child.returncode, out, errors)


class Raised(Server):
    """A server whose program the nursery runs; it ends with the worker by way of the nursery, and needs no keeper."""

    def _launch(self) -> None:
        with (self.folder / "log").open("a") as log:
            self._keeper = Child(  # type: ignore[assignment]
                self.command(), stdin=subprocess.PIPE, stdout=log, stderr=log, cwd=self.folder
            )
        assert self._keeper is not None
        self.pid = self._keeper.pid

    def stop(self) -> None:
        if self._keeper is not None:
            self.crash()
        super().stop()


class Nursery:
    """The process that brings up this worker's children."""

    def __init__(self) -> None:
        self.line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * LONGEST)
        environment = {name: value for name, value in os.environ.items() if name not in MEASURED}
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the worker, which ends the children when it ends
            )
        os.register_at_fork(after_in_child=self.line.close)  # a fork of the worker is not the worker
        atexit.register(self.close)

    def send(self, request: dict[str, Any], streams: list[int]) -> None:
        socket.send_fds(self.line, [json.dumps(request).encode()], streams)

    def close(self) -> None:
        self.line.close()
        self.process.wait()


_only: Nursery | None = None
_lock = threading.Lock()


def nursery() -> Nursery:
    """This worker's, which is there from the first use on."""
    global _only
    with _lock:
        if _only is None:
            _only = Nursery()
        return _only


# ── In the nursery


def serve(line: socket.socket) -> dict[str, Any] | None:
    """Bring up what is asked for until the worker has gone.  In a new process it returns what that is to be."""
    news: dict[int, int] = {}  # of each child, where its worker hears of its end
    wakes, wakened = os.pipe()
    os.set_blocking(wakened, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakened, warn_on_full_buffer=False)
    while True:
        ready, _, _ = select.select([line, wakes], [], [])
        if wakes in ready:
            os.read(wakes, 4096)
            tell_of_the_dead(news)
        if line not in ready:
            continue
        data, streams, _, _ = socket.recv_fds(line, LONGEST, 4)
        if not data:
            for pid in news:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return None
        worker, parent = streams[0], os.getpid()
        if (pid := os.fork()) == 0:
            begin(streams[1:], parent)
            request: dict[str, Any] = json.loads(data)
            return request
        news[pid] = worker
        with suppress(BrokenPipeError):
            os.write(worker, WORD.pack(pid))
        for stream in streams[1:]:
            os.close(stream)


def tell_of_the_dead(news: dict[int, int]) -> None:
    """Reap those who have ended, and say how."""
    for pid in list(news):
        reaped, status = os.waitpid(pid, os.WNOHANG)
        if reaped:
            worker = news.pop(pid)
            with suppress(BrokenPipeError):  # the worker no longer wants to know
                os.write(worker, WORD.pack(status))
            os.close(worker)


def begin(streams: list[int], parent: int) -> None:
    """Leave behind, in the new process, what was the nursery's."""
    die_with_parent(parent)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for standard, stream in enumerate(streams):
        os.dup2(stream, standard)
    os.closerange(3, 1024)  # the line, and the news of others
    random.seed()


def die_with_parent(parent: int) -> None:
    """Be killed when the process that forked us has ended, also where it was killed itself."""
    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def ran(command: list[str], cwd: str, env: dict[str, str]) -> int:
    """The exit code of the program, which is run as the interpreter would run it."""
    try:
        become(command, cwd, env)
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return leaving.code or 0
        print(leaving.code, file=sys.stderr)
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def end(code: int) -> None:
    """End as the interpreter does, but for taking apart all that was ever imported, which takes longer than most tests."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def become(command: list[str], cwd: str, env: dict[str, str]) -> None:
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update({name: value for name, value in env.items() if name not in MEASURED})
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        sys.path.insert(0, str(Path(command[0]).parent))
        runpy.run_path(command[0], run_name="__main__")


def main() -> None:
    sys.path[0] = str(ROOT)
    for name in HEAVY:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so that a child's collections leave the shared pages alone
    with socket.socket(fileno=int(sys.argv[1])) as line:
        request = serve(line)
        line.detach() if request else None
    if request is not None:
        end(ran(**request))


if __name__ == "__main__":
    main()
