"""The proxy's faults, each with its effect on the client."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.support.proxy import FaultProxy

SILENCE = 0.3  # seconds after which an answer counts as lost


class Echo:
    """An echo server that stores the bytes it received."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        self.received = b""
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                threading.Thread(target=self.answer, args=(connection,), daemon=True).start()

    def answer(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            while data := connection.recv(65_536):
                self.received += data
                connection.sendall(data)


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo()
    yield server
    server.listener.close()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[FaultProxy]:
    with FaultProxy(port=echo.port) as proxy:
        yield proxy


def dial(proxy: FaultProxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=10)


def ask(client: socket.socket, words: bytes) -> bytes:
    """Send *words*, and return the complete answer."""
    client.sendall(words)
    answer = b""
    while len(answer) < len(words):
        answer += client.recv(65_536)
    return answer


def is_silent(client: socket.socket) -> bool:
    client.settimeout(SILENCE)
    try:
        client.recv(1)
    except TimeoutError:
        return True
    finally:
        client.settimeout(10)
    return False


def test_proxy_forwards_without_faults(proxy: FaultProxy) -> None:
    with dial(proxy) as client:
        assert ask(client, b"hello") == b"hello"
        assert ask(client, b"x" * 1_000_000) == b"x" * 1_000_000
    assert proxy.accepted == 1


def test_half_close_is_forwarded(proxy: FaultProxy) -> None:
    with dial(proxy) as client:
        client.sendall(b"last words")
        client.shutdown(socket.SHUT_WR)
        with client.makefile("rb") as answers:
            assert answers.read() == b"last words"


def test_stall_holds_bytes_until_heal(proxy: FaultProxy, echo: Echo) -> None:
    with dial(proxy) as client:
        assert ask(client, b"before ") == b"before "
        proxy.stall()
        client.sendall(b"during")
        assert is_silent(client)
        assert echo.received == b"before "
        proxy.heal()
        assert client.recv(100) == b"during"


def test_stall_applies_to_new_connections(proxy: FaultProxy, echo: Echo) -> None:
    proxy.stall()
    with dial(proxy) as client:
        client.sendall(b"hello")
        assert is_silent(client)
    assert echo.received == b""


def test_dropped_answers_are_lost_and_requests_arrive(proxy: FaultProxy, echo: Echo) -> None:
    with dial(proxy) as client:
        proxy.drop_answers()
        client.sendall(b"lost")
        assert is_silent(client)
        assert echo.received == b"lost"
        proxy.heal()
        assert ask(client, b"found") == b"found"


@pytest.mark.parametrize("after", [0, 3])
def test_cut_answer_resets_the_connection(proxy: FaultProxy, echo: Echo, after: int) -> None:
    with dial(proxy) as client:
        proxy.cut_answers(after=after)
        client.sendall(b"commit")
        if after:
            assert client.recv(100) == b"commit"[:after]
        with pytest.raises(ConnectionResetError):
            client.recv(100)
        assert echo.received == b"commit"


def test_refuse_resets_open_and_refuses_new_connections(proxy: FaultProxy) -> None:
    with dial(proxy) as client:
        assert ask(client, b"hello") == b"hello"
        proxy.refuse()
        with pytest.raises(ConnectionResetError):
            client.recv(1)
    with pytest.raises(ConnectionRefusedError):
        dial(proxy)
    proxy.heal()
    with dial(proxy) as client:
        assert ask(client, b"again") == b"again"


def test_cut_resets_open_and_accepts_new_connections(proxy: FaultProxy) -> None:
    with dial(proxy) as first, dial(proxy) as second:
        assert ask(first, b"one") == b"one"
        assert ask(second, b"two") == b"two"
        proxy.cut()
        for client in (first, second):
            with pytest.raises(ConnectionResetError):
                client.recv(1)
    with dial(proxy) as client:
        assert ask(client, b"again") == b"again"


def test_client_is_reset_if_the_server_is_down(proxy: FaultProxy, echo: Echo) -> None:
    echo.listener.shutdown(socket.SHUT_RDWR)
    echo.listener.close()
    with pytest.raises(ConnectionResetError), dial(proxy) as client:
        client.recv(1)


def test_url_keeps_login_path_and_query(proxy: FaultProxy) -> None:
    upstream = "postgresql://me:p%40ss@db.example:5432/ledger?sslmode=disable"
    assert proxy.url(upstream) == f"postgresql://me:p%40ss@127.0.0.1:{proxy.port}/ledger?sslmode=disable"
    assert FaultProxy.before(upstream)._upstream == ("db.example", 5432)
