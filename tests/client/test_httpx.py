"""Tests of httpx alone: streams, other transports, certificates, names that do not resolve, interrupts."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from oncemore.client.deadlines import no_sleeping
from oncemore.client.errors import RetriesExhausted
from oncemore.client.httpx import AsyncRetryTransport, BoundedBackend, RetryTransport
from oncemore.client.retry import Retry
from oncemore.errors import ConfigurationError

from .server import Server, Visit, answer, raw, reset, response, trickle

RETRY = Retry(base=0.005, cap=0.01, deadline=5, budget=None)
CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def client(retry: Retry = RETRY, **options: Any) -> httpx.Client:
    return httpx.Client(transport=RetryTransport(retry, **options), timeout=30)


def slow_stream(kind: bytes) -> Any:
    return raw(CHUNKED % kind, trickle_chunks)


def trickle_chunks(visit: Visit) -> None:
    for number in range(6):
        visit.send(chunk(b"data: %d\n\n" % number))
        time.sleep(0.5)
    visit.send(b"0\r\n\r\n")


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_event_stream_outlives_the_deadline(method: str) -> None:
    with Server(slow_stream(b"text/event-stream")) as server, client(Retry(deadline=1.5)) as http:
        arrived = []
        with http.stream(method, server.url) as stream:
            for part in stream.iter_bytes():
                arrived.append((time.monotonic(), part))
    assert len(arrived) == 6
    assert arrived[-1][0] - arrived[0][0] > 1.5


async def test_an_event_stream_is_passed_on_live_to_async_clients() -> None:
    transport = AsyncRetryTransport(Retry(deadline=1.5))
    with Server(slow_stream(b"text/event-stream")) as server:
        async with httpx.AsyncClient(transport=transport) as http, http.stream("POST", server.url) as stream:
            arrived = [time.monotonic() async for _ in stream.aiter_bytes()]
    assert len(arrived) == 6
    assert arrived[-1] - arrived[0] > 1.5


async def test_async_event_stream_may_be_silent_past_deadline() -> None:
    def silent(visit: Visit) -> None:
        visit.send(chunk(b"data: 0\n\n"))
        time.sleep(2.5)
        visit.send(chunk(b"data: 1\n\n") + b"0\r\n\r\n")

    transport = AsyncRetryTransport(Retry(deadline=1.5))
    with Server(raw(CHUNKED % b"text/event-stream", silent)) as server:
        async with httpx.AsyncClient(transport=transport, timeout=5) as http, http.stream("POST", server.url) as stream:
            assert [part async for part in stream.aiter_bytes()] == [b"data: 0\n\n", b"data: 1\n\n"]


def test_download_streams_until_the_deadline() -> None:
    with Server(slow_stream(b"application/octet-stream")) as server, client(Retry(deadline=1.5)) as http:
        with http.stream("GET", server.url) as stream:
            parts = stream.iter_bytes()
            assert next(parts) == b"data: 0\n\n"
            with pytest.raises(httpx.ReadTimeout):
                list(parts)


async def test_async_download_streams_until_the_deadline() -> None:
    transport = AsyncRetryTransport(Retry(deadline=1.5))
    with Server(slow_stream(b"application/octet-stream")) as server:
        async with httpx.AsyncClient(transport=transport) as http, http.stream("GET", server.url) as stream:
            parts = stream.aiter_bytes()
            assert await anext(parts) == b"data: 0\n\n"
            with pytest.raises(httpx.ReadTimeout):
                async for _ in parts:
                    pass


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_large_answer_arrives_whole(method: str) -> None:
    body = os.urandom(3 * 1024 * 1024)
    with Server(answer(200, body)) as server, client() as http:
        assert http.request(method, server.url).content == body


async def test_a_large_answer_arrives_whole_at_async_clients() -> None:
    body = os.urandom(3 * 1024 * 1024)
    with Server(answer(200, body)) as server:
        async with httpx.AsyncClient(transport=AsyncRetryTransport(RETRY)) as http:
            assert (await http.post(server.url)).content == body


def test_compressed_answers_are_understood_and_passed_on() -> None:
    import gzip

    body = gzip.compress(b'{"error_code": "TRANSIENT.x"}')
    wait = answer(400, body, content_type="application/problem+json", content_encoding="gzip")
    broken = answer(400, b"no gzip", content_type="application/json", content_encoding="gzip")
    with Server(wait, default=answer(200, gzip.compress(b"fine"), content_encoding="gzip")) as server, client() as http:
        assert http.post(server.url).text == "fine"
        server.script.append(broken)
        with pytest.raises(httpx.DecodingError):
            http.post(server.url)
    assert len(server.visits) == 3


def test_a_connection_is_used_again_after_each_kind_of_answer() -> None:
    with Server(answer(503), answer(404), answer(200, b"x" * 1000)) as server, client() as http:
        for _ in range(3):
            http.post(server.url)
    assert server.connections == 1


def test_a_request_brings_its_own_policy() -> None:
    with Server(default=answer(503)) as server, client() as http, no_sleeping():
        http.post(server.url, extensions={"retry": Retry(attempts=2, budget=None)})
    assert len(server.visits) == 2


def test_request_with_a_policy_of_another_type_is_refused() -> None:
    with Server() as server, client() as http, pytest.raises(ConfigurationError, match="give a Retry"):
        http.post(server.url, extensions={"retry": 3})
    assert not server.visits


def test_a_transport_without_sockets_works_too() -> None:
    seen = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers["Idempotency-Key"])
        if len(seen) == 1:
            raise httpx.ReadTimeout("slow")
        return httpx.Response(503 if len(seen) == 2 else 201, content=b"x")

    with client(transport=httpx.MockTransport(handler)) as http, no_sleeping():
        assert http.post("http://x/").status_code == 201
    assert len(seen) == 3
    assert len(set(seen)) == 1


def test_sockets_of_the_callers_own_transport_are_bounded_too() -> None:
    """Fails if httpx renames its private parts."""
    inner = httpx.HTTPTransport(retries=1)
    RetryTransport(transport=inner)
    RetryTransport(transport=inner)
    backend = inner._pool._network_backend
    assert isinstance(backend, BoundedBackend)
    assert not isinstance(backend._backend, BoundedBackend)


def test_a_name_that_does_not_resolve_in_time_is_cut(monkeypatch: pytest.MonkeyPatch, library: Any) -> None:
    """No resolver can be interrupted; it is left behind."""
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: time.sleep(3) or [])
    with pytest.raises(RetriesExhausted) as caught:
        library(Retry(deadline=0.3, budget=None)).request("POST", "http://name.invalid/")
    assert caught.value.story is not None
    assert caught.value.story.reason == "deadline"
    assert caught.value.story.attempts[0].took < 2


def test_a_connection_that_comes_too_late_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = socket.create_connection
    late: list[socket.socket] = []

    def slowly(*args: Any, **options: Any) -> socket.socket:
        time.sleep(0.4)
        late.append(connect(*args, **options))
        return late[-1]

    monkeypatch.setattr(socket, "create_connection", slowly)
    with Server() as server, client(Retry(deadline=0.2)) as http:
        with pytest.raises(RetriesExhausted):
            http.post(server.url)
        time.sleep(0.6)
        assert [one.fileno() for one in late] == [-1]
    assert not server.visits


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls")
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -keyout key.pem -out cert.pem"
    san = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*command.split(), *san], cwd=folder, check=True, capture_output=True)
    return folder


class TlsServer(Server):
    """A `Server` behind TLS."""

    def __init__(self, folder: Path, *script: Any, **options: Any) -> None:
        super().__init__(*script, **options)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
        self._listener = context.wrap_socket(self._listener, server_side=True)
        self.url = self.url.replace("http:", "https:")


def test_an_untrusted_certificate_is_not_asked_again(certificate: Path, library: Any) -> None:
    with TlsServer(certificate) as server, no_sleeping() as slept:
        with pytest.raises(Exception, match=r"(?i)certificate"):
            library(RETRY).request("POST", server.url)
    assert slept == []
    assert not server.visits


@pytest.mark.parametrize("slow", ["headers", "body"])
def test_the_deadline_cuts_a_trickle_through_tls(certificate: Path, slow: str) -> None:
    whole = response(200, {}, b"x" * 100)
    act = trickle(whole) if slow == "headers" else raw(whole[:-100], trickle(whole[-100:]))
    trusted = httpx.HTTPTransport(verify=ssl.create_default_context(cafile=str(certificate / "cert.pem")))
    begun = time.monotonic()
    with TlsServer(certificate, default=act) as server, client(Retry(deadline=0.5), transport=trusted) as http:
        with pytest.raises(RetriesExhausted):
            http.post(server.url)
    assert time.monotonic() - begun < 3


def test_a_handshake_that_hangs_is_cut(library: Any) -> None:
    begun = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(RetriesExhausted):
        library(Retry(deadline=0.4, budget=None)).request("POST", f"https://127.0.0.1:{silent.getsockname()[1]}/")
    assert time.monotonic() - begun < 3


@pytest.mark.parametrize("hangs", [True, False], ids=["in an attempt", "in a pause"])
def test_an_interrupt_ends_it_at_once(hangs: bool) -> None:

    def act(visit: Visit) -> None:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        if hangs:
            time.sleep(3)
        else:
            answer(503)(visit)

    begun = time.monotonic()
    with Server(default=act) as server, client(Retry(base=20, cap=20, deadline=60, budget=None)) as http:
        with pytest.raises(KeyboardInterrupt):
            http.post(server.url)
    assert time.monotonic() - begun < 2


async def test_cancelling_a_pause_ends_it_at_once() -> None:
    with Server(default=answer(503)) as server:
        async with httpx.AsyncClient(transport=AsyncRetryTransport(Retry(base=20, cap=20, deadline=60))) as http:
            task = asyncio.create_task(http.post(server.url))
            while not server.visits:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(task, 2)
    assert len(server.visits) == 1


def test_resuming_goes_through_the_client_with_its_credentials(tmp_path: Path) -> None:
    transport = RetryTransport(RETRY, f"sqlite:///{tmp_path}/keys.db", remember=["Stripe-Version"])
    with Server(*[reset] * 5) as server, httpx.Client(transport=transport, auth=("me", "secret")) as http:
        with no_sleeping(), pytest.raises(RetriesExhausted):
            http.post(server.url, json={"amount": 100}, headers={"Stripe-Version": "2026-01-01"})
        [result] = transport.resume(http, opened=True)
    assert result.response.status_code == 201
    assert result.entry.key == server.visits[-1].key
    assert server.visits[-1].headers["authorization"] == server.visits[0].headers["authorization"]
    assert server.visits[-1].headers["stripe-version"] == "2026-01-01"


def test_resume_failure_does_not_stop_other_entries(tmp_path: Path) -> None:
    transport = RetryTransport(Retry(attempts=1, budget=None), f"sqlite:///{tmp_path}/keys.db")
    with Server(*[reset] * 4) as server, httpx.Client(transport=transport) as http:
        for number in range(3):
            with pytest.raises(RetriesExhausted):
                http.post(f"{server.url}/{number}", content=b"x")
        results = transport.resume(opened=True)
    assert [type(result.error).__name__ for result in results] == ["RequestExhausted", "NoneType", "NoneType"]


def test_it_reads_as_the_design_has_it(tmp_path: Path) -> None:
    transport = RetryTransport(retry=Retry.user_facing(), keyring=f"sqlite:///{tmp_path}/keys.db")
    with Server(answer(503)) as server, httpx.Client(base_url=server.url, transport=transport) as http:
        assert http.post("/refunds", json={"amount": 100}).status_code == 201
    assert len(server.visits) == 2
