"""The ASGI door under each server: what only a server does, websockets, lifespans and files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import aiohttp
import httpx
import pytest

from oncemore.testing.door_contract import Caller

from . import apps
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
    """CASES 5."""
    named = {"Idempotency-Key": "k"}
    async with aiohttp.ClientSession() as session, session.ws_connect(f"{url}/ws", headers=named) as socket:
        await socket.send_str("hello")
        assert await socket.receive_str() == "hello"


def test_a_lifespan_is_untouched(url: str) -> None:
    """CASES 5."""
    assert httpx.get(f"{url}/alive").json() == "yes"


def test_a_file_is_kept_like_any_response(caller: Caller) -> None:
    """CASES 19, 21: it comes in pieces, or would be sent by the server itself."""
    first, second = caller.ask("/default/file"), caller.ask("/default/file")
    assert first.content == second.content == Path(apps.__file__).read_bytes()
    assert (first.headers["idempotency-status"], second.headers["idempotency-status"]) == ("stored", "replayed")
    assert first.headers["last-modified"] == second.headers["last-modified"]


def test_a_file_over_the_limit_is_delivered_and_not_repeated(caller: Caller) -> None:
    """CASES 22."""
    first, second = caller.ask("/small/file"), caller.ask("/small/file")
    assert first.content == Path(apps.__file__).read_bytes()
    assert (first.headers["idempotency-status"], second.status_code) == ("unstored", 409)
