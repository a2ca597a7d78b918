"""The listener's thread connects, receives, backs off after a failure, and ends when it is closed."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

import pytest

from oncemore._runtime import listening
from oncemore._runtime.listening import CannotListen, Listener
from oncemore.errors import ConfigurationError


class Connection:
    def __init__(self) -> None:
        self.closed = threading.Event()

    def close(self) -> None:
        self.closed.set()


class Numbers(Listener[Connection]):
    """Receives from a queue; an exception in it is raised, as if the connection had failed."""

    def __init__(self, *, failures: int = 0) -> None:
        super().__init__()
        self.failures = failures
        self.messages: queue.Queue[object] = queue.Queue()
        self.received: list[object] = []
        self.connections: list[Connection] = []

    def connect(self) -> Connection:
        if self.failures:
            self.failures -= 1
            raise OSError("refused")
        self.connections.append(Connection())
        return self.connections[-1]

    def receive(self, connection: Connection, seconds: float) -> None:
        try:
            message = self.messages.get(timeout=seconds)
        except queue.Empty:
            return
        if isinstance(message, Exception):
            raise message
        self.received.append(message)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(listening, "RECEIVE_SECONDS", 0.01)


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.002)
    return met


def test_listener_receives_until_closed() -> None:
    listener = Numbers()
    listener.listen()
    thread = listener._thread
    listener.listen()
    assert thread is not None
    assert listener._thread is thread
    listener.messages.put(1)
    assert eventually(lambda: listener.received == [1])
    listener.close()
    assert listener.connections[0].closed.wait(20)
    thread.join(20)
    assert not thread.is_alive()
    listener.close()


def test_listener_listens_again_after_close() -> None:
    listener = Numbers()
    listener.listen()
    assert eventually(lambda: len(listener.connections) == 1)
    listener.close()
    listener.listen()
    assert eventually(lambda: len(listener.connections) == 2)
    listener.messages.put(2)
    assert eventually(lambda: listener.received == [2])
    listener.close()


def test_listener_connects_again_after_failures() -> None:
    listener = Numbers(failures=3)
    listener.listen()
    assert eventually(lambda: len(listener.connections) == 1)
    listener.messages.put(ConnectionResetError())
    listener.messages.put("later")
    assert eventually(lambda: listener.received == ["later"])
    assert listener.connections[0].closed.is_set()
    assert not listener.unavailable
    listener.close()


def test_listener_pause_between_attempts_ends_with_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "FIRST_PAUSE", 60.0)
    listener = Numbers(failures=1)
    listener.listen()
    thread = listener._thread
    assert thread is not None
    assert eventually(lambda: listener.failures == 0)
    listener.close()
    thread.join(20)
    assert not thread.is_alive()


def test_listener_that_cannot_listen_is_unavailable_for_good() -> None:
    class Pooled(Numbers):
        def connect(self) -> Connection:
            raise CannotListen("a pooler is in between")

    listener = Pooled()
    listener.listen()
    assert eventually(lambda: listener.unavailable)
    listener.close()
    listener.listen()
    assert listener._thread is None


def test_listener_close_while_connecting_closes_the_connection() -> None:
    class Slow(Numbers):
        def connect(self) -> Connection:
            begun.set()
            proceed.wait(20)
            return super().connect()

    begun, proceed = threading.Event(), threading.Event()
    listener = Slow()
    listener.listen()
    assert begun.wait(20)
    listener.close()
    proceed.set()
    assert eventually(lambda: bool(listener.connections))
    assert listener.connections[0].closed.wait(20)


def test_listener_without_threads_at_interpreter_exit_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    listener = Numbers()
    monkeypatch.setattr(threading.Thread, "start", start)
    listener.listen()
    assert listener._thread is None


def test_concurrent_listens_share_a_thread() -> None:
    listener = Numbers()
    with listener._lock:
        second = threading.Thread(target=listener.listen)
        second.start()  # finds no thread, and waits for the lock
        time.sleep(0.1)
        first = listener._thread = threading.Thread()
    second.join()
    assert listener._thread is first
    assert listener.connections == []


def test_listener_in_forked_child_has_no_thread() -> None:
    listener = Numbers()
    listener.listen()
    parents = listener._stop
    assert eventually(lambda: len(listener.connections) == 1)
    listener._reset()  # as `forks` does in a child
    assert listener._thread is None
    listener.listen()
    assert eventually(lambda: len(listener.connections) == 2)
    listener.close()
    parents.set()


def test_listener_methods_are_the_subclasss() -> None:
    bare: Listener[Connection] = Listener()
    with pytest.raises(NotImplementedError):
        bare.connect()
    with pytest.raises(NotImplementedError):
        bare.receive(Connection(), 1.0)


def test_wrong_configuration_ends_the_thread_until_next_listen() -> None:
    listener = Numbers()
    listener.messages.put(ConfigurationError("wrong password"))
    listener.listen()
    assert eventually(lambda: listener._thread is None)
    assert listener.connections[0].closed.is_set()
    assert not listener.unavailable
    listener.listen()
    listener.messages.put(1)
    assert eventually(lambda: listener.received == [1])
    listener.close()
