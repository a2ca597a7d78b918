"""Retries for httpx: `httpx.Client(transport=RetryTransport(...))`, and the same for its async client."""

from __future__ import annotations

from typing import Any

import httpx

from .._runtime.plan import arun, run
from .continuing import AsyncContinuing, Continuing
from .engine import Engine
from .exchange import Exchange
from .httpx_bounds import bound
from .httpx_wire import HttpxWire, RequestExhausted, RequestTimedOut, RequestUnknown
from .keyring import KeyringPlace
from .keyring.entry import Entry, Resumed
from .retry import Retry
from .verdict import Reply

__all__ = ["AsyncRetryTransport", "RequestExhausted", "RequestTimedOut", "RequestUnknown", "RetryTransport"]


class RetryTransport(Continuing, httpx.BaseTransport):
    """A transport that asks once more, under one key: unsafe requests get one, written down before the first byte.

    *transport* does the sending (an `httpx.HTTPTransport` by default); further options are those of `Engine`.  The last
    answer is returned whatever its status; `response.extensions["oncemore"]` is the story.  A request can bring its own
    policy in `extensions={"retry": Retry(...)}` and its own key in the key's header.
    """

    def __init__(
        self,
        retry: Retry | None = None,
        keyring: KeyringPlace | None = None,
        *,
        transport: httpx.BaseTransport | None = None,
        **options: Any,
    ) -> None:
        self.engine = Engine(retry, keyring, **options)
        self._transport = bound(transport or httpx.HTTPTransport())

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        exchange = self.engine.exchange(HttpxWire(request, self._transport), request.extensions.get("retry"))
        return told(run(self.engine.perform(exchange)), exchange)

    def resume(self, client: httpx.Client | None = None, *, opened: bool = False) -> list[Resumed]:
        """What came of the operations that a dead process left behind, each asked for again under its own key.

        They go through *client*, which adds its credentials; the keyring keeps none.  With *opened*, those are asked for
        again too whose callers were told that the outcome is unknown.
        """

        def send(entry: Entry) -> httpx.Response:
            if client is not None:
                return client.send(_request(client, entry))
            response = self.handle_request(_request(None, entry))
            response.read()
            return response

        return self._resume(send, opened)

    def close(self) -> None:
        self._transport.close()
        self.engine.close()


class AsyncRetryTransport(AsyncContinuing, httpx.AsyncBaseTransport):
    """The same for `httpx.AsyncClient`; `pending`, `resume` and `forget` are awaited."""

    def __init__(
        self,
        retry: Retry | None = None,
        keyring: KeyringPlace | None = None,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        **options: Any,
    ) -> None:
        self.engine = Engine(retry, keyring, **options)
        self._transport = transport or httpx.AsyncHTTPTransport()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        exchange = self.engine.exchange(HttpxWire(request, self._transport), request.extensions.get("retry"))
        return told(await arun(self.engine.perform(exchange)), exchange)

    async def resume(self, client: httpx.AsyncClient | None = None, *, opened: bool = False) -> list[Resumed]:
        """What came of the operations that a dead process left behind, each asked for again under its own key."""

        async def send(entry: Entry) -> httpx.Response:
            if client is not None:
                return await client.send(_request(client, entry))
            response = await self.handle_async_request(_request(None, entry))
            await response.aread()
            return response

        return await self._resume(send, opened)

    async def aclose(self) -> None:
        await self._transport.aclose()
        await self.engine.aclose()


def told(reply: Reply, exchange: Exchange) -> httpx.Response:
    """The response, with its story."""
    response: httpx.Response = reply.response
    response.extensions["oncemore"] = exchange.story
    return response


def _request(client: httpx.Client | httpx.AsyncClient | None, entry: Entry) -> httpx.Request:
    build = httpx.Request if client is None else client.build_request
    request = build(entry.method, entry.url, headers=entry.kept_headers, content=entry.body)
    request.url = httpx.URL(entry.url)  # as it was: a client's own parameters would go before those of the request
    return request
