"""A TCP proxy that fails on demand, for tests of what a client does when the network misbehaves.

    with FaultProxy(port=5432) as proxy:
        proxy.drop_answers()      # what the client sends arrives, and it never hears of it

Each verb holds when it returns, for open and for new connections alike, until the next verb; `heal` ends all faults.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Coroutine
from typing import Any, Literal, Self
from urllib.parse import urlsplit, urlunsplit

from examples.process import free_port

Fault = Literal["none", "stall", "drop_answers", "cut_answers", "refuse"]

RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER of zero seconds: close() sends a reset instead of a goodbye


class FaultProxy:
    """A listener on 127.0.0.1 that passes everything on to a real server, until told to fail."""

    def __init__(self, *, port: int, host: str = "127.0.0.1") -> None:
        self._upstream = (host, port)
        self.port = 0
        self.accepted = 0  # connections so far
        self._fault: Fault = "none"
        self._allowance = 0  # bytes of the answers that still pass before `cut_answers` cuts
        self._writers: set[asyncio.StreamWriter] = set()
        self._listener: asyncio.Server | None = None
        self._switched = asyncio.Condition()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)

    @classmethod
    def before(cls, url: str) -> Self:
        """A proxy in front of the server that *url* names."""
        parts = urlsplit(url)
        if parts.port is None:
            raise ValueError("the URL must say the port")
        return cls(host=parts.hostname or "127.0.0.1", port=parts.port)

    def url(self, upstream: str) -> str:
        """The URL *upstream*, led through this proxy."""
        parts = urlsplit(upstream)
        login, at, _ = parts.netloc.rpartition("@")
        return urlunsplit(parts._replace(netloc=f"{login}{at}127.0.0.1:{self.port}"))

    def start(self) -> Self:
        """The proxy itself, listening."""
        self._thread.start()
        self.port = free_port()
        self._do(self._listen())
        return self

    def stop(self) -> None:
        """Close the listener and every connection."""
        self._do(self._finish())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def heal(self) -> None:
        """Pass everything on again; what was stalled goes through, what was dropped is lost."""
        self._do(self._switch("none"))

    def stall(self) -> None:
        """Let nothing through either way, and keep it for `heal`: a frozen server, a full network."""
        self._do(self._switch("stall"))

    def drop_answers(self) -> None:
        """Pass requests on and lose the answers: the client must wait until its own patience ends."""
        self._do(self._switch("drop_answers"))

    def cut_answers(self, *, after: int = 0) -> None:
        """Pass requests on, and reset the connection at the answer, or within it, *after* so many bytes."""
        self._do(self._switch("cut_answers", allowance=after))

    def refuse(self) -> None:
        """Reset every connection and refuse new ones: the server is down."""
        self._do(self._switch("refuse"))

    def cut(self) -> None:
        """Reset every open connection, once; new ones are welcome."""
        self._do(self._reset())

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=10)

    async def _switch(self, fault: Fault, *, allowance: int = 0) -> None:
        async with self._switched:
            self._fault, self._allowance = fault, allowance
            self._switched.notify_all()
        if fault == "refuse":
            await self._close()
        elif self._listener is None:
            await self._listen()

    async def _listen(self) -> None:
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    async def _close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        self._listener = None
        await self._reset()

    async def _finish(self) -> None:
        await self._close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _reset(self) -> None:
        writers = [reset(writer) for writer in self._writers]
        await asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)

    async def _serve(self, requests: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        self.accepted += 1
        writers = {client}
        self._writers.add(client)
        try:
            answers, server = await asyncio.open_connection(*self._upstream)
            writers.add(server)
            self._writers.add(server)
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pass_requests(requests, server))
                both.create_task(self._pass_answers(answers, client))
        except* OSError:
            pass  # either side is gone, or was cut on purpose: so is the other, now
        finally:
            self._writers -= writers
            for writer in writers:
                reset(writer)

    async def _pass_requests(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(65_536):
            await self._flowing()
            await pass_on(data, target)
        target.write_eof()

    async def _pass_answers(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(65_536):
            await self._flowing()
            if self._fault == "drop_answers":
                continue
            if self._fault == "cut_answers" and len(data) > self._allowance:
                await pass_on(data[: self._allowance], target)
                raise ConnectionResetError
            self._allowance -= len(data)
            await pass_on(data, target)
        target.write_eof()

    async def _flowing(self) -> None:
        async with self._switched:
            await self._switched.wait_for(lambda: self._fault != "stall")


async def pass_on(data: bytes, target: asyncio.StreamWriter) -> None:
    """Write *data* and wait until the other side can take more."""
    target.write(data)
    await target.drain()


def reset(writer: asyncio.StreamWriter) -> asyncio.StreamWriter:
    """Close the connection with a reset, so that the peer gets an error rather than an orderly end."""
    connection = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
    writer.transport.abort()
    return writer
