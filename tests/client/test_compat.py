"""Private parts of HTTP libraries that the client needs: each test fails by name if an upgrade moves one."""

from __future__ import annotations

from typing import Any

import aiohttp
import httpcore
import httpx
import pytest
from urllib3.connection import HTTPConnection, HTTPSConnection
from yarl import URL

from oncemore.client._compat import base_url
from oncemore.client.httpx import BoundedBackend, RetryTransport
from oncemore.client.urllib3 import BoundedHTTPConnection


def test_httpx_transport_keeps_backend_where_it_is_wrapped() -> None:
    transport: Any = httpx.HTTPTransport()
    assert isinstance(transport._pool, httpcore.ConnectionPool)
    assert isinstance(transport._pool._network_backend, httpcore.NetworkBackend)
    RetryTransport(transport=transport)
    assert isinstance(transport._pool._network_backend, BoundedBackend)


async def test_aiohttp_session_keeps_its_base_url() -> None:
    for url in (None, URL("http://h/")):
        async with aiohttp.ClientSession(url) as session:
            assert base_url(session) == url


@pytest.mark.parametrize("kind", [HTTPConnection, HTTPSConnection])
def test_urllib3_connects_in_new_conn(kind: Any) -> None:
    assert callable(kind._new_conn)


def test_urllib3_connect_uses_open_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []

    def open_socket(self: Any, connect: Any) -> Any:
        opened.append(connect)
        raise OSError("not in this test")

    monkeypatch.setattr(BoundedHTTPConnection, "open_socket", open_socket)
    with pytest.raises(OSError, match="not in this test"):
        BoundedHTTPConnection("127.0.0.1", 9).connect()
    assert len(opened) == 1
