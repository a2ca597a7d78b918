"""A real server of one's own: a temporary folder, a free port, a log, and a keeper that ends it with us."""

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

KEEPER = Path(__file__).with_name("keeper.py")
START_TIMEOUT = 60.0  # seconds; generous, because crash recovery on a busy machine is slow
PORT_ATTEMPTS = 5

# Below the usual range for outgoing connections, also with the 10 000 that a Valkey cluster adds for its bus.  A port
# from that range can be taken by a client while its server is down; a client that dials on can even meet itself.
PORTS = range(10_000, 22_000)


class Server(ABC):
    """A server process on 127.0.0.1, from `start` to `stop`.  `crash` and `restart` keep its port and its data."""

    crash_signal: ClassVar[signal.Signals] = signal.SIGKILL
    polite_signal: ClassVar[signal.Signals] = signal.SIGTERM
    user: ClassVar[str] = ""  # whom to run as; empty: as ourselves

    def __init__(self) -> None:
        self.port = 0
        self.pid = 0
        self._folder: Path | None = None
        self._keeper: subprocess.Popen[bytes] | None = None

    @property
    @abstractmethod
    def url(self) -> str:
        """Where the server answers."""

    @abstractmethod
    def command(self) -> list[str]:
        """The command line that runs the server in the foreground, on `port`, with its data in `folder`."""

    @abstractmethod
    def is_ready(self) -> bool:
        """Whether this very process answers; another one may have taken the port."""

    def prepare(self) -> None:  # noqa: B027 (most servers need nothing)
        """Fill the new, empty folder."""

    @property
    def folder(self) -> Path:
        """The temporary folder that holds all of the server's files."""
        if self._folder is None:
            raise RuntimeError(f"{type(self).__name__} has not been started")
        return self._folder

    @property
    def log(self) -> str:
        """What the server has written so far."""
        return (self.folder / "log").read_text(errors="replace")

    def write(self, name: str, text: str) -> Path:
        """A file in the folder, which the server may read and nobody else."""
        path = self.folder / name
        path.touch(mode=0o600)
        if self.user:
            shutil.chown(path, self.user)
        path.write_text(text)
        return path

    def start(self) -> Self:
        """The server itself, once it answers; after a crash, with the port and the data that it had."""
        if self._keeper is not None:
            raise RuntimeError(f"{type(self).__name__} is already running")
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End the server and remove its data; harmless when it is not running."""
        if self._keeper is not None:
            assert self._keeper.stdin is not None
            self._keeper.stdin.close()
            self._ended()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = None
        self.port = 0

    def crash(self) -> None:
        """End the server at once, in mid-sentence; `start` brings it back with its data."""
        self._end(self.crash_signal)

    def restart(self, *, immediate: bool = True) -> None:
        """End the server, at once or politely, and start it again on the same port with the same data."""
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
        keeper = [sys.executable, "-I", "-S", str(KEEPER), str(self.folder), str(int(self.crash_signal)), self.user]
        with (self.folder / "log").open("ab") as log:
            self._keeper = subprocess.Popen(
                [*keeper, *self.command()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,  # Ctrl-C is for the tests, which end the server when they are done with it
            )
        assert self._keeper.stdout is not None
        with self._keeper.stdout as answer:
            self.pid = int(answer.readline() or 0)

    def _answers(self) -> bool:
        """Whether the server came up; False if it ended instead, as it does when its port was taken meanwhile."""
        assert self._keeper is not None
        deadline = time.monotonic() + START_TIMEOUT
        while self._keeper.poll() is None:
            if self.is_ready():
                return True
            if time.monotonic() > deadline:
                raise TimeoutError(f"{type(self).__name__} is not ready:\n{self.log[-4000:]}")
            time.sleep(0.02)
        self._ended()
        return False

    def _end(self, how: signal.Signals) -> None:
        if self._keeper is None:
            raise RuntimeError(f"{type(self).__name__} is not running")
        if self._keeper.poll() is None:  # a server that ended by itself may have left its number to a stranger
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, how)
        self._ended()

    def _ended(self) -> None:
        assert self._keeper is not None
        assert self._keeper.stdin is not None
        self._keeper.wait()
        self._keeper.stdin.close()
        self._keeper = None


def in_wheel(distribution: str, pattern: str) -> list[Path]:
    """The files of an installed *distribution* that match *pattern*; the package itself is not imported."""
    package = find_spec(distribution.replace("-", "_"))
    places = package.submodule_search_locations if package else None
    found = [path for place in places or () for path in sorted(Path(place).glob(pattern))]
    if not found:
        raise MissingDriver(f"{distribution} is not installed: pip install --group dev")
    return found


def new_folder(user: str = "") -> Path:
    """A new temporary folder that belongs to *user*."""
    folder = Path(tempfile.mkdtemp(prefix="oncemore-"))
    if user:
        shutil.chown(folder, user)
    return folder


def free_port() -> int:
    """A port on 127.0.0.1 that nothing listens on now."""
    while True:
        port = secrets.choice(PORTS)  # a seeded generator would offer each of a run's workers the same ports
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
