"""Bodies of httpx: one that can be sent only once, and one that is read ahead before it is passed on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx

from .bodies import READ_AHEAD


class OnceBody(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A request body that can be sent only once; it knows whether that has begun."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.begun = False

    def __iter__(self) -> Iterator[bytes]:
        self.begun = True
        yield from self._stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        self.begun = True
        async for chunk in self._stream:
            yield chunk


class Body(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A response body.  As an effect it is read ahead; as a stream it passes that on, and then the rest until *ends*."""

    def __init__(self, source: Any, ends: float) -> None:
        self._source = source
        self._ends = ends
        self._chunks: list[bytes] = []
        self._rest: Any = None

    def run(self) -> bytes | None:
        """The whole body, if it is no longer than what is read ahead."""
        size = 0
        self._rest = iter(self._source)
        for chunk in self._rest:
            self._chunks.append(chunk)
            size += len(chunk)
            if size > READ_AHEAD:
                return None
        self._source.close()
        return b"".join(self._chunks)

    async def arun(self) -> bytes | None:
        size = 0
        self._rest = aiter(self._source)
        async for chunk in self._rest:
            self._chunks.append(chunk)
            size += len(chunk)
            if size > READ_AHEAD:
                return None
        await self._source.aclose()
        return b"".join(self._chunks)

    def __iter__(self) -> Iterator[bytes]:
        yield from self._chunks
        for chunk in self._rest or self._source:
            if time.monotonic() > self._ends:
                raise httpx.ReadTimeout("the deadline has passed")
            yield chunk

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self._chunks:
            yield chunk
        rest = self._rest or aiter(self._source)
        while (more := await self._next(rest)) is not None:
            yield more

    async def _next(self, rest: AsyncIterator[bytes]) -> bytes | None:
        try:
            async with asyncio.timeout(self._ends - time.monotonic()):
                return await anext(rest, None)
        except TimeoutError:
            raise httpx.ReadTimeout("the deadline has passed") from None

    def close(self) -> None:
        self._source.close()

    async def aclose(self) -> None:
        await self._source.aclose()
