"""The ASGI middleware under each server: websockets, lifespans, pipelining and files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import aiohttp
import httpx
import pytest

from . import apps
from .contract import Caller
from .raw_http import head
from .servers import AsgiServer


@pytest.fixture(scope="module", params=["uvicorn", "hypercorn", "granian"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    with AsgiServer(request.param) as server:
        yield server.url


@pytest.fixture
def caller(url: str) -> Iterator[Caller]:
    with Caller(url) as caller:
        yield caller


async def test_a_websocket_is_untouched(url: str) -> None:
    named = {"Idempotency-Key": "k"}
    async with aiohttp.ClientSession() as session, session.ws_connect(f"{url}/ws", headers=named) as socket:
        await socket.send_str("hello")
        assert await socket.receive_str() == "hello"


def test_pipelined_request_does_not_see_the_previous_operation(caller: Caller) -> None:
    """Servers start it in the previous request's context: its handler would derive the provider's key from another operation."""
    lengths = ("Content-Length", "2")
    with caller.connection() as connection:
        requests = [
            head("POST", caller.target("/default/create"), caller.fields(("Idempotency-Key", caller.key), lengths)),
            head("POST", caller.target("/default/create"), caller.fields(lengths)),
            head("POST", caller.target("/default/create"), caller.fields(("Idempotency-Key", "other"), lengths)),
        ]
        connection.send(b"{}".join([*requests, b""]))
        assert [json.loads(connection.response().body)["key"] for _ in requests] == [caller.key, None, "other"]


def test_connection_stays_in_step_after_a_too_large_body(caller: Caller) -> None:
    """The rest of the body must not be read as the next request."""
    with caller.connection() as connection:
        named, much = ("Idempotency-Key", caller.key), b"POST /default/create HTTP/1.1\r\n" * 10_000
        fields = caller.fields(named, ("Content-Length", str(len(much))))
        connection.send(head("POST", caller.target("/small/create"), fields))
        with suppress(OSError):
            connection.send(much)
        assert connection.response().status == 413
        with suppress(ConnectionError):
            connection.send(head("GET", "/alive", [("Host", caller.connection_host)]))
            assert connection.response("GET").status == 200
    assert caller.runs == 0


def test_a_lifespan_is_untouched(url: str) -> None:
    assert httpx.get(f"{url}/alive").json() == "yes"


def test_a_file_is_kept_like_any_response(caller: Caller) -> None:
    """A file comes in pieces; without the middleware, some servers send it themselves."""
    first, second = caller.ask("/default/file"), caller.ask("/default/file")
    assert first.content == second.content == Path(apps.__file__).read_bytes()
    assert (first.headers["idempotency-status"], second.headers["idempotency-status"]) == ("stored", "replayed")
    assert first.headers["last-modified"] == second.headers["last-modified"]


def test_a_file_over_the_limit_is_delivered_and_not_repeated(caller: Caller) -> None:
    first, second = caller.ask("/small/file"), caller.ask("/small/file")
    assert first.content == Path(apps.__file__).read_bytes()
    assert (first.headers["idempotency-status"], second.status_code) == ("unstored", 409)
