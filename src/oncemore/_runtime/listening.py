"""A background thread that listens for a server's messages: connect, listen, and after an error connect again."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

from ..errors import ConfigurationError
from .forks import reset_in_child

log = logging.getLogger("oncemore")

RECEIVE_SECONDS = 0.25  # the seconds that one `receive` may block, and that a closed listener takes to end
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0


class Closable(Protocol):
    def close(self) -> object: ...


Connection = TypeVar("Connection", bound=Closable)


class CannotListen(Exception):
    """Raised by `Listener.connect`: messages can never arrive this way, so the listener stops for good."""


class Listener(Generic[Connection]):
    """Keeps a connection open on a thread of its own, from `listen` to `close`, and handles the messages that arrive.

    A subclass writes two methods, which are called on that thread alone:

        connect()                     open a connection and subscribe; raise CannotListen if no messages can ever arrive
        receive(connection, seconds)  wait at most *seconds* for messages, and handle all that have arrived

    If either raises ConfigurationError, the thread ends, and the next `listen` starts another one.  After any other error,
    the connection is closed, and a new one is opened after a pause that grows to five seconds.  Messages sent meanwhile are
    lost: after each `connect`, a subclass must assume that anything has changed.  A forked child has no thread until it
    calls `listen`.
    """

    name = "oncemore-listener"  # the name of the thread, also in the log

    def __init__(self, *, unavailable: bool = False) -> None:
        self.unavailable = unavailable  # whether no messages can arrive, so that waiters must ask the store
        self._reset()
        reset_in_child(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def connect(self) -> Connection:
        raise NotImplementedError

    def receive(self, connection: Connection, seconds: float) -> None:
        raise NotImplementedError

    def listen(self) -> None:
        """Start the thread, unless it is running or the listener is unavailable.  Cheap enough to be called every time."""
        if self._thread is not None or self.unavailable:
            return
        with self._lock, suppress(RuntimeError):  # an interpreter that is about to exit starts no more threads
            if self._thread is None:
                stop = threading.Event()
                thread = threading.Thread(target=self._run, args=(stop,), name=self.name, daemon=True)
                thread.start()
                self._thread, self._stop = thread, stop

    def close(self) -> None:
        """Tell the thread to close its connection and end.  Unless it is connecting, that takes a quarter of a second.

        Does not wait for the end, so it may be called on an event loop.  `listen` starts a new thread.
        """
        with self._lock:
            self._thread = None
            self._stop.set()

    def _end(self, stop: threading.Event) -> None:
        with self._lock:
            # If the listener was closed meanwhile, `_thread` may be a newer one.
            self._thread = None if self._stop is stop else self._thread

    def _run(self, stop: threading.Event) -> None:
        pause = FIRST_PAUSE
        while not stop.is_set():
            try:
                connection = self.connect()
                try:
                    pause = FIRST_PAUSE
                    while not stop.is_set():
                        self.receive(connection, RECEIVE_SECONDS)
                finally:
                    connection.close()
            except CannotListen as error:
                log.info("%s: %s; waiters ask the store at intervals instead", self.name, error)
                self.unavailable = True
                return
            except ConfigurationError as error:  # trying again would fail too; the next `listen` tries again
                log.warning("%s: no messages arrive until this is corrected: %s", self.name, error)
                self._end(stop)
                return
            except Exception as error:
                log.info("%s: no messages arrive for now; connecting again in %g s: %s", self.name, pause, error)
                stop.wait(pause)
                pause = min(pause * 2, LONGEST_PAUSE)
