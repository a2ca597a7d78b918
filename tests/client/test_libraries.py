"""Tests of single libraries: proxies, streams, files, and the verbs of the keyring."""

from __future__ import annotations

import array
import io
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
import requests
import urllib3

from oncemore.client.aiohttp import RetryMiddleware
from oncemore.client.bodies import SentBody
from oncemore.client.deadlines import no_sleeping
from oncemore.client.errors import RetriesExhausted
from oncemore.client.httpx import AsyncRetryTransport, RetryTransport
from oncemore.client.requests import RetryAdapter
from oncemore.client.retry import Retry
from oncemore.client.urllib3 import FAULTS, RetryPoolManager, deadlines
from oncemore.client.verdict import find_fault

from .clients import Httpx, Requests, Urllib3
from .server import Server, Visit, answer, raw, reset

RETRY = Retry(base=0.005, cap=0.01, deadline=5, budget=None)
SHORT = Retry(deadline=1.5, budget=None)
EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def events(visit: Visit) -> None:
    for number in range(6):
        visit.send(b"9\r\ndata: %d\n\n\r\n" % number)
        time.sleep(0.5)
    visit.send(b"0\r\n\r\n")


def session(retry: Retry, **options: Any) -> requests.Session:
    made = requests.Session()
    made.mount("http://", RetryAdapter(retry, **options))
    return made


def test_requests_passes_an_event_stream_on_beyond_the_deadline() -> None:
    with Server(raw(EVENTS, events)) as server, session(SHORT) as http:
        response = http.post(server.url, stream=True)
        assert len(list(response.iter_content(None))) == 6


def test_urllib3_passes_an_event_stream_on_beyond_the_deadline() -> None:
    with Server(raw(EVENTS, events)) as server:
        response = RetryPoolManager(SHORT).request("POST", server.url, preload_content=False)
        assert len(list(response.stream())) == 6


async def test_aiohttp_passes_an_event_stream_on_beyond_the_deadline() -> None:
    with Server(raw(EVENTS, events)) as server:
        async with aiohttp.ClientSession(middlewares=[RetryMiddleware(SHORT)]) as http:
            response = await http.post(server.url)
            assert len([part async for part in response.content.iter_any()]) == 6


LONG = 2 * 1024 * 1024


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("size", [0, 1000, 200_000, LONG])
@pytest.mark.parametrize("kind", ["application/json", "text/csv"])
async def test_aiohttp_streams_what_was_read_ahead_too(method: str, size: int, kind: str) -> None:
    """A reader of `response.content` gets the body, as without the middleware."""
    body = bytes(range(256)) * (size // 256)
    async with aiohttp.ClientSession(middlewares=[RetryMiddleware(RETRY)]) as http:
        with Server(default=answer(200, body, content_type=kind)) as server:
            async with http.request(method, server.url) as response:
                assert b"".join([chunk async for chunk in response.content.iter_chunked(1000)]) == body
            async with http.request(method, server.url) as response:
                assert await response.content.read() == body
            async with http.request(method, server.url) as response:
                assert await response.read() == body


async def test_aiohttp_does_not_keep_a_long_answer_in_memory() -> None:
    """It says that it is long, so it is the caller's to read, until the deadline."""
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % LONG

    opened, was_opened = threading.Event(), []

    def send_when_opened(visit: Visit) -> None:
        was_opened.append(opened.wait(4))
        visit.send(b"x" * LONG)

    retry = Retry(deadline=10, attempt_timeout=5, budget=None)
    async with aiohttp.ClientSession(middlewares=[RetryMiddleware(retry)]) as http:
        with Server(raw(head, send_when_opened)) as server:
            async with http.post(server.url) as response:
                opened.set()
                assert len(await response.read()) == LONG
    assert was_opened == [True], "the caller has the response before its body is sent"


@pytest.mark.parametrize("location", ["http://[", "http://h:99999999/"])
async def test_aiohttp_returns_a_redirect_to_nowhere(location: str) -> None:
    async with aiohttp.ClientSession(middlewares=[RetryMiddleware(RETRY)]) as http:
        with Server(answer(307, Location=location)) as server:
            response = await http.post(server.url, allow_redirects=False)
            assert response.status == 307


async def test_aiohttp_new_request_to_redirect_target_gets_own_key() -> None:
    """The caller who does not follow redirects posts something else there."""
    async with aiohttp.ClientSession(middlewares=[RetryMiddleware(RETRY)]) as http:
        with Server(answer(307, Location="/new")) as server:
            await http.post(f"{server.url}/old", data=b"first", allow_redirects=False)
            await http.post(f"{server.url}/new", data=b"second")
    assert len({visit.key for visit in server.visits}) == 2


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_urllib3_redirect_does_not_leak_pool_credentials(method: str) -> None:
    manager = RetryPoolManager(RETRY, pool={"headers": {"Authorization": "Bearer secret"}})
    with Server() as other, Server(answer(307, Location=other.url)) as server:
        assert manager.request(method, server.url).status == 201
    assert server.visits[0].headers["authorization"] == "Bearer secret"
    assert "authorization" not in other.visits[0].headers


def test_urllib3_sends_no_more_headers_than_the_caller_gave() -> None:
    manager = RetryPoolManager(RETRY, pool={"headers": {"Authorization": "Bearer secret"}})
    with Server() as server:
        manager.request("GET", server.url, headers={})
    assert "authorization" not in server.visits[0].headers


@pytest.mark.parametrize("body", [bytearray(b"abc"), memoryview(b"abc"), array.array("b", b"abc")], ids=type)
@pytest.mark.parametrize("library", [Requests, Urllib3])
def test_whatever_is_like_bytes_is_sent_and_sent_again(library: Any, body: Any, tmp_path: Path) -> None:
    with Server(reset) as server:
        library(RETRY, f"sqlite:///{tmp_path}/keys.db").request("POST", server.url, body)
    assert [visit.body for visit in server.visits] == [b"abc"] * 2


@pytest.mark.parametrize("size", [10, LONG])
@pytest.mark.parametrize("begin", [0, 3])
@pytest.mark.parametrize("ring", [None, "memory://"])
@pytest.mark.parametrize("library", [Requests, Urllib3])
def test_a_file_is_sent_whole_to_where_it_is_redirected(library: Any, size: int, begin: int, ring: str | None) -> None:
    """Urllib3 itself sends nothing there, for the file was read to its end."""
    file = io.BytesIO(b"0123456789" * (size // 10))
    file.seek(begin)
    with Server(answer(307, location="/there"), reset) as server:
        assert library(RETRY, ring).request("POST", server.url, file).status == 201
    assert len({visit.key for visit in server.visits}) == 1
    assert [visit.body for visit in server.visits] == [file.getvalue()[begin:]] * 3


@pytest.mark.parametrize("library", [Requests, Urllib3])
def test_a_body_that_is_used_up_is_not_redirected(library: Any) -> None:
    """Nothing of it is left, and under the same key nothing would be performed in its place."""
    with Server(answer(307, location="/there")) as server:
        with pytest.raises(
            (requests.RequestException, urllib3.exceptions.HTTPError), match="cannot follow the redirect"
        ):
            library(RETRY).request("POST", server.url, (part for part in (b"ab", b"c")))
    assert [(visit.path, visit.body) for visit in server.visits] == [("/", b"abc")]


@pytest.mark.parametrize("size", [10, LONG])
@pytest.mark.parametrize("library", [Requests, Urllib3])
def test_file_with_short_reads_is_sent_whole(library: Any, size: int) -> None:
    """Raw files, and files on a network, may return less than they are asked for."""

    class Piecemeal(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            return super().read(3 if len(whole) == 10 else 100_000)

    whole = bytes(range(256)) * (size // 256) or b"0123456789"
    with Server(reset) as server:
        library(RETRY).request("POST", server.url, Piecemeal(whole))
    assert [visit.body for visit in server.visits] == [whole] * 2


def test_requests_cuts_a_streamed_download_at_the_deadline() -> None:
    plain = EVENTS.replace(b"text/event-stream", b"application/octet-stream")
    with Server(raw(plain, events)) as server, session(SHORT) as http:
        response = http.get(server.url, stream=True)
        with pytest.raises(requests.ConnectionError, match=r"deadline|timed out"):
            list(response.iter_content(None))


def test_requests_reads_a_short_complaint_even_when_streaming() -> None:
    busy = answer(409, b'{"error_code": "CONFLICT.idempotency.in_progress"}', content_type="application/json")
    with Server(busy) as server, session(RETRY) as http:
        assert http.post(server.url, stream=True).status_code == 201


@pytest.mark.parametrize("library", ["httpx", "requests"])
def test_a_proxy_is_used_and_bounded(library: str) -> None:
    with Server(answer(503)) as proxy:
        if library == "httpx":
            inner = httpx.HTTPTransport(proxy=proxy.url)
            with httpx.Client(transport=RetryTransport(RETRY, transport=inner)) as http:
                http.post("http://name.invalid/refunds")
        else:
            with session(RETRY) as made:
                made.post("http://name.invalid/refunds", proxies={"http": proxy.url})
    assert [visit.path for visit in proxy.visits] == ["http://name.invalid/refunds"] * 2


def test_a_caller_s_own_timeouts_hold_within_the_deadline() -> None:
    with Server(default=lambda visit: time.sleep(5)) as server, session(RETRY) as http:
        begun = time.monotonic()
        with pytest.raises(RetriesExhausted) as caught:
            http.post(server.url, timeout=(1, 0.1))
        assert time.monotonic() - begun < 4
    assert len(caught.value.story.attempts) == 5
    assert [float(limit) for limit in deadlines(None, 3)] == [3, 3]
    assert [float(limit) for limit in deadlines(2, 3)] == [2, 2]
    assert [float(limit) for limit in deadlines(urllib3.Timeout(connect=1, read=9), 3)] == [1, 3]


@pytest.mark.parametrize("url", ["http://", "nonsense://x/", "http://[::1"])
def test_what_cannot_be_sent_at_all_is_not_tried_again(library: Any, url: str) -> None:
    with no_sleeping() as slept, pytest.raises(Exception):  # noqa: B017  (each library has its own)
        library(RETRY).request("POST", url)
    assert slept == []


def test_error_outside_the_network_is_not_retried() -> None:
    assert find_fault(ZeroDivisionError(), FAULTS).fatal
    assert Httpx(RETRY).transport.engine.policy == RETRY

    class Broken(httpx.BaseTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            raise ZeroDivisionError

    with httpx.Client(transport=RetryTransport(RETRY, transport=Broken())) as http, pytest.raises(ZeroDivisionError):
        http.post("http://x/")


@pytest.mark.parametrize("length", [b"\xb2", b"9" * 5000, b"-5"], ids=["no digit", "too long", "negative"])
def test_senseless_content_length_is_no_error_of_ours(library: Any, length: bytes) -> None:
    """Each library takes the answer for what it is, or for a connection that failed."""
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %s\r\nConnection: close\r\n\r\n" % length
    with Server(default=raw(head + b"hello")) as server, no_sleeping():
        with suppress(RetriesExhausted):
            reply = library(RETRY).request("POST", server.url, b"x")
            assert (reply.status, reply.body) == (200, b"hello")


def test_a_pending_operation_can_be_forgotten(tmp_path: Path) -> None:
    adapter = RetryAdapter(Retry(attempts=1), f"sqlite:///{tmp_path}/a.db")
    manager = RetryPoolManager(Retry(attempts=1), f"sqlite:///{tmp_path}/m.db")
    http = requests.Session()
    http.mount("http://", adapter)
    with Server(default=reset) as server:
        for send in (http.post, lambda url: manager.request("POST", url)):
            with pytest.raises(RetriesExhausted):
                send(server.url)
    for holder in (adapter, manager):
        [entry] = holder.pending()
        holder.forget(entry)
        assert holder.pending() == []
    adapter.close()


async def test_a_pending_operation_can_be_forgotten_by_async_clients(tmp_path: Path) -> None:
    middleware = RetryMiddleware(Retry(attempts=1), f"sqlite:///{tmp_path}/a.db")
    transport = AsyncRetryTransport(Retry(attempts=1), f"sqlite:///{tmp_path}/h.db")
    with Server(reset, reset) as server:
        async with aiohttp.ClientSession(middlewares=[middleware]) as http:
            with pytest.raises(RetriesExhausted):
                await http.post(server.url, data=b"x")
        async with httpx.AsyncClient(transport=transport) as client:
            with pytest.raises(RetriesExhausted):
                await client.post(server.url, content=b"x")
        [entry] = await middleware.pending()
        await middleware.forget(entry)
        assert await middleware.pending() == []
        [result] = await transport.resume(opened=True)
        assert result.response.status_code == 201
        assert await transport.pending() == []
    middleware.close()


def test_a_file_is_read_from_where_it_stood() -> None:
    file = io.BytesIO(b"skipped" + b"rest")
    file.seek(7)
    assert SentBody(file).data() == b"rest"
    large = io.BytesIO(b"x" * (2 * 1024 * 1024))
    large.seek(5)
    body = SentBody(large)
    assert body.data() is None
    large.read()
    body.rewind()
    assert large.tell() == 5
    assert body.resendable()
    assert SentBody("text").data() == b"text"
    assert SentBody(None).data() == b""
    text = SentBody(io.StringIO("text"))
    assert text.data() is None
    assert text.resendable()


async def test_what_aiohttp_compresses_is_retried_but_not_written_down(tmp_path: Path) -> None:
    middleware = RetryMiddleware(RETRY, f"sqlite:///{tmp_path}/a.db")
    with Server(answer(503), *[reset] * 4) as server:
        async with aiohttp.ClientSession(middlewares=[middleware]) as http:
            with pytest.raises(RetriesExhausted):
                await http.post(server.url, data=b"x" * 1000, compress="deflate")
        assert [entry.body for entry in await middleware.pending()] == [None]
    assert len({visit.body for visit in server.visits}) == 1
    assert len(server.visits) == 5


def test_all_libraries_mean_the_same_host(library: Any) -> None:
    with Server() as server:
        assert library(RETRY).request("POST", server.url).story.name == f"127.0.0.1:{server.port}"


def test_requests_takes_keys_in_bytes() -> None:
    with Server() as server, session(RETRY) as http:
        http.post(server.url, headers={"Idempotency-Key": b"order-17"})
    assert server.visits[0].key == "order-17"
