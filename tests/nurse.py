"""The nursery's own process: it has imported what the tests' children need, and forks them; see nursery.py.

Called as `python nurse.py LINE`, the number of an inherited socket.  Each request is a program's command line, folder and
environment, with four streams: where its news go, and its standard three.  The news are its process id, and then how it
ended.  When the other end of the line is closed, which it is however the worker ends, all is over.
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
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WORD = struct.Struct("i")
LONGEST = 1 << 17  # bytes: a command line and an environment

# What children import.  None of these starts a thread, a loop or a connection when it is imported.
HEAVY = (
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
    "oncemore.client.aiohttp",
    "oncemore.client.httpx",
    "oncemore.client.keyring.ledger",
    "oncemore.client.keyring.sqlite",
    "oncemore.client.requests",
    "oncemore.client.urllib3",
    "oncemore._ledger.completer",
    "oncemore.stores.postgres",
    "oncemore.stores.redis",
    "oncemore.stores.sqlite",
    "oncemore.testing.crashes",
    "oncemore.testing.http_app",
    "oncemore.web.asgi",
    "tests.client.clients",
    "tests.effects.shops",
)

# How coverage finds its way into a new process: not into these.  To be measured takes five times as long as all else that
# a child does; most are killed before they could tell; and what the core does in them it does in the tests' own process too.
MEASURED = ("COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG")


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
    """The exit code of the program, or less than nothing if it was interrupted."""
    try:
        become(command, cwd, env)
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return (leaving.code or 0) & 0xFF
        print(leaving.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.excepthook(*sys.exc_info())
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def end(code: int) -> None:
    """End as the interpreter does, but for taking apart all that was ever imported, which takes longer than most tests."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def become(command: list[str], cwd: str, env: dict[str, str]) -> None:
    """Run the program as the interpreter would."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update({name: value for name, value in env.items() if name not in MEASURED})
    time.tzset()
    sys.path[:0] = [place for place in env.get("PYTHONPATH", "").split(os.pathsep) if place and place not in sys.path]
    if command[0] == "-m":
        sys.argv = command[1:]
        sys.path.insert(0, cwd)
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
        if request is not None:
            line.detach()  # its number is another's by now, or nobody's
    if request is not None:
        end(ran(**request))


if __name__ == "__main__":
    main()
