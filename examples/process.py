"""A server process for tests and the demo: with a temporary folder, a free port, a log, and a supervisor that ends it."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar, Self

from oncemore.errors import MissingDriver

SUPERVISOR = Path(__file__).with_name("supervisor.py")
START_TIMEOUT = 60.0  # seconds; generous, because crash recovery on a busy machine is slow
PORT_ATTEMPTS = 5

# Below the usual range of outgoing connections, even after the 10 000 that a Valkey cluster adds for its bus.  A port of
# that range could be taken by a client while its server is down; a client that reconnects could even connect to itself.
PORTS = range(10_000, 22_000)


class Server(ABC):
    """A server process on 127.0.0.1.  `crash` and `restart` keep its port and its data; `stop` removes the data."""

    crash_signal: ClassVar[signal.Signals] = signal.SIGKILL
    polite_signal: ClassVar[signal.Signals] = signal.SIGTERM
    user: ClassVar[str] = ""  # the user to run as; empty: the current one

    def __init__(self) -> None:
        self.port = 0
        self.pid = 0
        self._folder: Path | None = None
        self._supervisor: subprocess.Popen[bytes] | None = None

    @property
    @abstractmethod
    def url(self) -> str:
        """The URL at which the server answers."""

    @abstractmethod
    def command(self) -> list[str]:
        """Return the command line that runs the server in the foreground, on `port`, with its data in `folder`."""

    @abstractmethod
    def is_ready(self) -> bool:
        """Return whether this process answers, and not another one that has taken the port."""

    def prepare(self) -> None:  # noqa: B027 (most servers need nothing)
        """Write files into the new, empty folder before the first start."""

    @property
    def folder(self) -> Path:
        """The temporary folder that holds all of the server's files."""
        if self._folder is None:
            raise RuntimeError(f"{type(self).__name__} has not been started")
        return self._folder

    @property
    def log(self) -> str:
        """The output of the server so far."""
        return (self.folder / "log").read_text(errors="replace")

    def write(self, name: str, text: str) -> Path:
        """Write a file in the folder that only the server may read, and return its path."""
        path = self.folder / name
        path.touch(mode=0o600)
        if self.user:
            shutil.chown(path, self.user)
        path.write_text(text)
        return path

    def start(self) -> Self:
        """Start the server, wait until it answers, and return it; after a crash it has its former port and data."""
        if self._supervisor is not None:
            raise RuntimeError(f"{type(self).__name__} is already running")
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End the server and remove its data.  Do nothing if it is not running."""
        if self._supervisor is not None:
            assert self._supervisor.stdin is not None
            self._supervisor.stdin.close()
            self._ended()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = None
        self.port = 0

    def crash(self) -> None:
        """Kill the server.  `start` starts it again with its data."""
        self._end(self.crash_signal)

    def restart(self, *, immediate: bool = True) -> None:
        """End the server, by `crash_signal` or `polite_signal`, and start it again with the same port and data."""
        self._end(self.crash_signal if immediate else self.polite_signal)
        self.start()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self) -> None:
        if self._folder is None:
            self._folder = new_folder(self.user)
            self.prepare()
        ports = [self.port] if self.port else [free_port() for _ in range(PORT_ATTEMPTS)]
        for self.port in ports:
            self._launch()
            if self._answers():
                return
        raise RuntimeError(f"{type(self).__name__} did not start:\n{self.log[-4000:]}")

    def _launch(self) -> None:
        supervisor = [
            sys.executable,
            "-I",
            "-S",
            str(SUPERVISOR),
            str(self.folder),
            str(int(self.crash_signal)),
            self.user,
        ]
        with (self.folder / "log").open("ab") as log:
            self._supervisor = subprocess.Popen(
                [*supervisor, *self.command()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,  # Ctrl-C must not end the server before the tests have ended
            )
        assert self._supervisor.stdout is not None
        with self._supervisor.stdout as answer:
            self.pid = int(answer.readline() or 0)

    def _answers(self) -> bool:
        """Wait until the server is ready; return False if it ended, for instance because its port was taken."""
        assert self._supervisor is not None
        deadline = time.monotonic() + START_TIMEOUT
        while self._supervisor.poll() is None:
            if self.is_ready():
                return True
            if time.monotonic() > deadline:
                raise TimeoutError(f"{type(self).__name__} is not ready:\n{self.log[-4000:]}")
            time.sleep(0.02)
        self._ended()
        return False

    def _end(self, how: signal.Signals) -> None:
        if self._supervisor is None:
            raise RuntimeError(f"{type(self).__name__} is not running")
        if self._supervisor.poll() is None:  # otherwise another process may have the server's id by now
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, how)
        self._ended()

    def _ended(self) -> None:
        assert self._supervisor is not None
        assert self._supervisor.stdin is not None
        self._supervisor.wait()
        self._supervisor.stdin.close()
        self._supervisor = None


def in_wheel(distribution: str, pattern: str) -> list[Path]:
    """Return the files of an installed *distribution* that match *pattern*, without importing it."""
    package = find_spec(distribution.replace("-", "_"))
    places = package.submodule_search_locations if package else None
    found = [path for place in places or () for path in sorted(Path(place).glob(pattern))]
    if not found:
        raise MissingDriver(f"{distribution} is not installed: pip install --group dev")
    return found


def new_folder(user: str = "") -> Path:
    """Create a temporary folder that belongs to *user*."""
    folder = Path(tempfile.mkdtemp(prefix="oncemore-"))
    if user:
        shutil.chown(folder, user)
    return folder


def free_port() -> int:
    """Return a port on 127.0.0.1 on which nothing listens now."""
    while True:
        port = secrets.choice(PORTS)  # not `random`: pytest plugins seed it, and all workers would try the same ports
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
