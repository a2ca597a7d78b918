"""What the nursery's own tests run in a child: `python -m tests.nursed TASK ...`."""

from __future__ import annotations

import atexit
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable

from .nursery import Child


def tell(*words: object) -> None:
    print(*words, flush=True)


def is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def about() -> None:
    """All that should be this process's own."""
    own = {
        "argv": sys.argv[1:],
        "cwd": os.getcwd(),
        "environment": dict(os.environ),
        "name": __name__,
        "main": sys.modules["__main__"].__dict__.get("about") is about,
        "pid": os.getpid(),
        "threads": threading.active_count(),
        "random": random.random(),
        "streams": [number for number in range(256) if is_open(number)],
        "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "children": signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL,
        "zone": time.timezone,
        "measured": sys.gettrace() is not None,
    }
    tell(json.dumps(own))


def echo() -> None:
    for line in sys.stdin:
        tell(line.strip()[::-1])
    print("over", file=sys.stderr)


def fail() -> None:
    raise LookupError("lost")


def leave() -> None:
    """End with a code, after a thread and what was left for the end."""
    atexit.register(print, "last words")
    threading.Thread(target=lambda: (time.sleep(0.1), print("a thread"))).start()
    sys.exit(7)


def sleep() -> None:
    tell("asleep")
    time.sleep(60)


def count() -> None:
    for number in range(1_000_000):
        tell(number)
        time.sleep(0.01)


def work() -> None:
    """A worker with a nursery, a child and a fork of its own, which waits to be killed."""
    child = Child([sys.executable, "-m", "tests.nursed", "sleep"])
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    from .nursery import nursery

    tell(nursery().process.pid, child.pid)
    time.sleep(60)


TASKS: dict[str, Callable[[], None]] = {task.__name__: task for task in (about, echo, fail, leave, sleep, count, work)}

if __name__ == "__main__":
    TASKS[sys.argv[1]]()
