"""The other processes of the SQLite tests.  This file is also a program that runs one of its functions by name.

A child prints lines, and reads lines from its standard input.  It shares nothing with the test's process.
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
    """A process that runs one of the functions below."""

    def __init__(self, function: Callable[..., None], *args: object) -> None:
        command = [sys.executable, "-m", __name__, function.__name__, *map(str, args)]
        super().__init__(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def says(self) -> str:
        """Return the child's next line, or "" after its end."""
        assert self.stdout is not None
        return self.stdout.readline().rstrip("\n")

    def tell(self, line: str = "go on") -> None:
        assert self.stdin is not None
        self.stdin.write(line + "\n")
        self.stdin.flush()


@contextmanager
def child(function: Callable[..., None], *args: object) -> Iterator[Child]:
    """Start a child, and kill it at the end of the block."""
    process = Child(function, *args)
    try:
        with process:
            yield process
            process.kill()
    finally:
        process.kill()


def together(count: int, function: Callable[..., None], *args: object) -> list[list[str]]:
    """Run *count* children that start at the same moment, and return the lines of each."""
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
    """Call *ask*, and return its error as text, or "done"."""
    try:
        ask()
    except OncemoreError as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def claim(number: str, url: str, key: str) -> None:
    """Claim *key*, and print whether this process won and the token that it saw."""
    say("ready")
    input()
    found = run(connect(url).claim(Operation("race", key), lease=HOUR))
    say(f"{type(found).__name__} {found.token}")


def work(number: str, url: str, operations: str) -> None:
    """Claim and settle *operations* keys, half of them shared by all children, and print the errors."""
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
    """Print each key when it is claimed and when it is settled."""
    store = connect(url)
    for n in range(1_000_000):
        lease = run(store.claim(Operation("victim", str(n)), lease=HOUR))
        assert isinstance(lease, Lease)
        say(f"claimed {n}")
        run(store.settle(lease, DONE, retention=HOUR))
        say(f"settled {n}")


def hold_then_write(url: str, verb: str) -> None:
    """Claim, print a line, wait for one, and then use the lease."""
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
    """Claim, let the disk fail, settle, claim another key, and then wait for a line."""
    store = connect(url)
    lease = run(store.claim(Operation("disk", "key"), lease=HOUR))
    assert isinstance(lease, Lease)
    fail(calls.split(), getattr(errno, error))
    say(told(lambda: run(store.settle(lease, DONE, retention=HOUR))))
    say(told(lambda: run(store.claim(Operation("disk", "other"), lease=HOUR))))
    input()


def claim_as_nobody(url: str) -> None:
    """Claim as a user without the right to write the file, and print the result."""
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
    """Make the system calls with these names fail with the error *number*, in this thread and those that it starts."""
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
