"""Real processes for tests, without the seconds that a fresh interpreter takes to import what they all need.

A `Child` is a `subprocess.Popen` for a Python program.  Rather than by the kernel alone, it is brought up by the nursery:
one process per worker of pytest, which has imported the heavy packages, has one thread, no event loop and no
connection, and forks at each request (nurse.py).  What comes out is a process of its own, with its own arguments,
environment, folder and streams: SIGKILL, SIGSTOP and exit codes are as real as ever.  When its worker ends, however it
ends, the nursery ends its children and itself.

What a test proves of an interpreter's own start (a command line, a server's program) is not for the nursery.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from oncemore.testing.process import Server

from .nurse import LONGEST, MEASURED, ROOT, WORD

NURSE = Path(__file__).with_name("nurse.py")
CAN_FORK = sys.platform == "linux"  # elsewhere a child is an ordinary one, and only slower


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


def unmeasured(**more: str) -> dict[str, str]:
    """The environment for a process that coverage is not wanted in: it is killed in the end, or no part of the core."""
    return {**{name: value for name, value in os.environ.items() if name not in MEASURED}, **more}


def run(command: list[str], *, said: str = "", timeout: float = 60, **options: Any) -> subprocess.CompletedProcess[str]:
    """What came of a child that was told what is *said*, and what it said itself."""
    pipe = subprocess.PIPE
    with Child(command, stdin=pipe, stdout=pipe, stderr=pipe, **options) as child:
        try:
            out, errors = child.communicate(said, timeout=timeout)
        finally:
            child.kill()
    return subprocess.CompletedProcess(command, child.returncode, out, errors)


class Raised(Server):
    """A server whose program the nursery runs; it ends with the worker by way of the nursery, and needs no keeper."""

    def _launch(self) -> None:
        command, environment = self.command(), unmeasured()
        if command[0] == "env":
            start = command.index(sys.executable)
            environment.update(part.split("=", 1) for part in command[:start] if "=" in part)  # type: ignore[arg-type]
            del command[:start]
        with (self.folder / "log").open("a") as log:
            streams = {"stdin": subprocess.PIPE, "stdout": log, "stderr": log}
            child = Child(command, cwd=self.folder, env=environment, **streams)
        self._keeper, self.pid = child, child.pid  # type: ignore[assignment]

    def stop(self) -> None:
        if self._keeper is not None:
            self.crash()
        super().stop()


class Nursery:
    """The process that brings up this worker's children."""

    def __init__(self) -> None:
        self.line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * LONGEST)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, str(NURSE), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
                env=unmeasured(),
                start_new_session=True,  # Ctrl-C is for the worker, which ends the children when it ends
            )
        os.register_at_fork(after_in_child=self.line.close)  # a fork of the worker's may outlive it
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
