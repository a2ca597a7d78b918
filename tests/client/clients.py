"""Each library's client, behind one call, so that every test runs on all of them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, ClassVar

import aiohttp
import httpx
import requests

from oncemore.client.aiohttp import RetryMiddleware
from oncemore.client.httpx import AsyncRetryTransport, RetryTransport
from oncemore.client.keyring.entry import Entry, Resumed
from oncemore.client.requests import RetryAdapter
from oncemore.client.story import Story
from oncemore.client.urllib3 import RetryPoolManager


@dataclass
class Answer:
    status: int
    body: bytes
    story: Story


class Httpx:
    headers: ClassVar[dict[str, str]] = {}  # added to what is resumed: the keyring keeps no credentials

    def __init__(self, *args: Any, **options: Any) -> None:
        self.transport = RetryTransport(*args, **options)

    def request(self, method: str, url: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        with httpx.Client(transport=_Kept(self.transport), timeout=30, follow_redirects=True) as client:
            response = client.request(method, url, content=body, headers=headers)
        return Answer(response.status_code, response.content, response.extensions["oncemore"])

    def pending(self) -> list[Entry]:
        return self.transport.pending()

    def resume(self, **options: Any) -> list[Resumed]:
        if not self.headers:
            return self.transport.resume(**options)
        with httpx.Client(transport=_Kept(self.transport), timeout=30, headers=self.headers) as client:
            return self.transport.resume(client, **options)


class _Kept(httpx.BaseTransport):
    """A transport that outlives its client."""

    def __init__(self, transport: RetryTransport) -> None:
        self.handle_request = transport.handle_request  # type: ignore[method-assign]


class AsyncHttpx:
    headers: ClassVar[dict[str, str]] = {}

    def __init__(self, *args: Any, **options: Any) -> None:
        self.make = lambda: AsyncRetryTransport(*args, **options)

    def request(self, method: str, url: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        async def go() -> Answer:
            async with httpx.AsyncClient(transport=self.make(), timeout=30, follow_redirects=True) as client:
                content = _awaited(body) if hasattr(body, "__next__") else body
                response = await client.request(method, url, content=content, headers=headers)
            return Answer(response.status_code, response.content, response.extensions["oncemore"])

        return asyncio.run(go())

    def pending(self) -> list[Entry]:
        return asyncio.run(self.make().pending())

    def resume(self, **options: Any) -> list[Resumed]:
        async def go() -> list[Resumed]:
            async with httpx.AsyncClient(transport=self.make(), timeout=30, headers=self.headers) as client:
                return await client._transport.resume(client, **options)  # type: ignore[attr-defined, no-any-return]

        return asyncio.run(go())


async def _awaited(body: Any) -> Any:
    for part in body:
        yield part


class Requests:
    headers: ClassVar[dict[str, str]] = {}

    def __init__(self, *args: Any, **options: Any) -> None:
        self.adapter = RetryAdapter(*args, **options)
        self.session = requests.Session()
        self.session.mount("http://", self.adapter)
        self.session.mount("https://", self.adapter)

    def request(self, method: str, url: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        response: Any = self.session.request(method, url, data=body, headers=headers)
        return Answer(response.status_code, response.content, response.oncemore)

    def pending(self) -> list[Entry]:
        return self.adapter.pending()

    def resume(self, **options: Any) -> list[Resumed]:
        self.session.headers.update(self.headers)
        return self.adapter.resume(self.session, **options)


class Urllib3:
    headers: ClassVar[dict[str, str]] = {}

    def __init__(self, *args: Any, **options: Any) -> None:
        self.manager = RetryPoolManager(*args, **options)

    def request(self, method: str, url: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        response: Any = self.manager.request(method, url, body=body, headers=headers)
        return Answer(response.status, response.data, response.oncemore)

    def pending(self) -> list[Entry]:
        return self.manager.pending()

    def resume(self, **options: Any) -> list[Resumed]:
        return self.manager.resume(headers=self.headers, **options)


class Aiohttp:
    headers: ClassVar[dict[str, str]] = {}

    def __init__(self, *args: Any, **options: Any) -> None:
        self.make = lambda: RetryMiddleware(*args, **options)
        self.make()

    def request(self, method: str, url: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        async def go() -> Answer:
            async with aiohttp.ClientSession(middlewares=[self.make()]) as session:
                data = _awaited(body) if hasattr(body, "__next__") else body
                response: Any = await session.request(method, url, data=data, headers=headers)
                return Answer(response.status, await response.read(), response.oncemore)

        return asyncio.run(go())

    def pending(self) -> list[Entry]:
        return asyncio.run(self.make().pending())

    def resume(self, **options: Any) -> list[Resumed]:
        async def go() -> list[Resumed]:
            middleware = self.make()
            async with aiohttp.ClientSession(middlewares=[middleware], headers=self.headers) as session:
                return await middleware.resume(session, **options)

        return asyncio.run(go())


def resumed(client: Any) -> tuple[list[Entry], list[Resumed]]:
    """Return the pending entries and the results of resuming them; nothing is pending after that."""
    before = client.pending()
    results = client.resume()
    assert client.pending() == []
    assert client.resume() == []
    return before, results


CLIENTS = {
    "httpx": Httpx,
    "httpx-async": AsyncHttpx,
    "requests": Requests,
    "urllib3": Urllib3,
    "aiohttp": Aiohttp,
}
