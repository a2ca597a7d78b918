"""What the SQLite tests do in other processes: this file is also a program, which is told a function's name.

A child speaks by printing lines and listens to its standard input; it is a stranger to the test's own process.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from oncemore._ledger.model import Lease, Operation
from oncemore._runtime.plan import run
from oncemore.errors import OncemoreError
from oncemore.stores.sqlite import connect
from tests.support import processes

from ..parts import DONE, HOUR

# ── In the test's process


class Child(processes.Program):
    """A process that does one of the functions below."""

    def __init__(self, function: Callable[..., None], *args: object) -> None:
        command = [sys.executable, "-m", __name__, function.__name__, *map(str, args)]
        super().__init__(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def says(self) -> str:
        """Its next line; nothing once it is over."""
        assert self.stdout is not None
        return self.stdout.readline().rstrip("\n")

    def tell(self, line: str = "go on") -> None:
        assert self.stdin is not None
        self.stdin.write(line + "\n")
        self.stdin.flush()


@contextmanager
def child(function: Callable[..., None], *args: object) -> Iterator[Child]:
    """A child that does not outlive the block."""
    process = Child(function, *args)
    try:
        with process:
            yield process
            process.kill()
    finally:
        process.kill()


def together(count: int, function: Callable[..., None], *args: object) -> list[list[str]]:
    """All that each of *count* children said, who began at the same moment."""
    children = [Child(function, number, *args) for number in range(count)]
    try:
        assert [each.says() for each in children] == ["ready"] * count
        for each in children:
            each.tell()
        return [each.communicate()[0].splitlines() for each in children]
    finally:
        for each in children:
            each.kill()


# ── In the child


def say(line: object) -> None:
    print(line, flush=True)


def told(ask: Callable[[], Any]) -> str:
    """The error, or "done"."""
    try:
        ask()
    except OncemoreError as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def claim(number: str, url: str, key: str) -> None:
    """Say whether this process won, and the token it saw."""
    say("ready")
    input()
    found = run(connect(url).claim(Operation("race", key), lease=HOUR))
    say(f"{type(found).__name__} {found.token}")


def work(number: str, url: str, operations: str) -> None:
    """Say the errors among so many claims and settles; half of the keys are this process's own, half are everyone's."""
    store = connect(url)
    say("ready")
    input()
    for n in range(int(operations)):
        operation = Operation("load", f"all-{n}" if n % 2 else f"{number}-{n}")
        try:
            found = run(store.claim(operation, lease=HOUR))
            if isinstance(found, Lease):
                run(store.settle(found, DONE, retention=HOUR))
        except OncemoreError as error:
            say(repr(error))


def settle_for_ever(url: str) -> None:
    """Say each key when it is claimed and when it is settled."""
    store = connect(url)
    for n in range(1_000_000):
        lease = run(store.claim(Operation("victim", str(n)), lease=HOUR))
        assert isinstance(lease, Lease)
        say(f"claimed {n}")
        run(store.settle(lease, DONE, retention=HOUR))
        say(f"settled {n}")


def hold_then_write(url: str, verb: str) -> None:
    """Claim, say so, wait to be told, and then use the lease."""
    store = connect(url)
    lease = run(store.claim(Operation("frozen", verb), lease=0.3))
    assert isinstance(lease, Lease)
    verbs: dict[str, Callable[[], Any]] = {
        "renew": lambda: store.renew(lease, lease=HOUR),
        "settle": lambda: store.settle(lease, DONE, retention=HOUR),
        "release": lambda: store.release(lease, retention=HOUR),
        "hold": lambda: store.hold(lease),
    }
    say(lease.token)
    input()
    say(told(lambda: run(verbs[verb]())))


def settle_on_a_failing_disk(url: str, calls: str, error: str) -> None:
    """Claim; then let the disk fail; settle, and claim another; then wait to be told to end."""
    store = connect(url)
    lease = run(store.claim(Operation("disk", "key"), lease=HOUR))
    assert isinstance(lease, Lease)
    fail(calls.split(), getattr(errno, error))
    say(told(lambda: run(store.settle(lease, DONE, retention=HOUR))))
    say(told(lambda: run(store.claim(Operation("disk", "other"), lease=HOUR))))
    input()


def claim_as_nobody(url: str) -> None:
    """Say what comes of a claim by someone who may not write everything."""
    if os.geteuid() == 0:
        os.setuid(65534)
    say(told(lambda: run(connect(url).claim(Operation("disk", "other"), lease=HOUR))))


# ── Faults: a filter in the kernel, which a process can never take off again

CALLS = {
    "x86_64": {"fsync": 74, "fdatasync": 75, "pwrite64": 18, "ftruncate": 77, "fallocate": 285},
    "aarch64": {"fsync": 82, "fdatasync": 83, "pwrite64": 68, "ftruncate": 46, "fallocate": 47},
}
CAN_FAIL = platform.system() == "Linux" and platform.machine() in CALLS

NO_NEW_PRIVILEGES, SET_SECCOMP, FILTER = 38, 22, 2
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, ERRNO = 0x7FFF0000, 0x00050000


class Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("value", ctypes.c_uint32))


class Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("filter", ctypes.POINTER(Instruction)))


def fail(calls: list[str], number: int) -> None:
    """Let the system calls of these names fail with the error *number*, in this thread and those it starts."""
    numbers = [CALLS[platform.machine()][name] for name in calls]
    steps = [Instruction(LOAD, 0, 0, 0)]
    steps += [Instruction(JUMP_IF_EQUAL, len(numbers) - n, 0, each) for n, each in enumerate(numbers)]
    steps += [Instruction(RETURN, 0, 0, ALLOW), Instruction(RETURN, 0, 0, ERRNO | number)]
    program = Program(len(steps), (Instruction * len(steps))(*steps))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) == 0
    assert libc.prctl(SET_SECCOMP, FILTER, ctypes.byref(program), 0, 0) == 0, "the kernel has no seccomp filters"


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
