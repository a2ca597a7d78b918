"""A TCP proxy that fails on demand, to test clients on a bad network.

    with FaultProxy(port=5432) as proxy:
        proxy.drop_answers()      # requests arrive, and their answers are lost

A fault applies to open and new connections from the moment the method returns, until the next one; `heal` ends it.
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

RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER of zero seconds: close() sends a reset


class FaultProxy:
    """Listens on 127.0.0.1 and forwards everything to a server, until a fault is chosen."""

    def __init__(self, *, port: int, host: str = "127.0.0.1") -> None:
        self._upstream = (host, port)
        self.port = 0
        self.accepted = 0  # connections so far
        self._fault: Fault = "none"
        self._allowance = 0  # bytes of answers that pass before `cut_answers` resets
        self._writers: set[asyncio.StreamWriter] = set()
        self._listener: asyncio.Server | None = None
        self._switched = asyncio.Condition()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)

    @classmethod
    def before(cls, url: str) -> Self:
        """Return a proxy in front of the server of *url*."""
        parts = urlsplit(url)
        if parts.port is None:
            raise ValueError("the URL must say the port")
        return cls(host=parts.hostname or "127.0.0.1", port=parts.port)

    def url(self, upstream: str) -> str:
        """Return the URL *upstream* with the address of this proxy."""
        parts = urlsplit(upstream)
        login, at, _ = parts.netloc.rpartition("@")
        return urlunsplit(parts._replace(netloc=f"{login}{at}127.0.0.1:{self.port}"))

    def start(self) -> Self:
        """Start to listen, and return the proxy."""
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
        """Forward everything again.  Stalled bytes are delivered; dropped ones are lost."""
        self._do(self._switch("none"))

    def stall(self) -> None:
        """Hold all bytes in both directions until `heal`, as a frozen server or a full network does."""
        self._do(self._switch("stall"))

    def drop_answers(self) -> None:
        """Forward requests and drop their answers, so that the client waits until its timeout."""
        self._do(self._switch("drop_answers"))

    def cut_answers(self, *, after: int = 0) -> None:
        """Forward requests, and reset the connection *after* so many bytes of the answer."""
        self._do(self._switch("cut_answers", allowance=after))

    def refuse(self) -> None:
        """Reset all connections and refuse new ones, as if the server were down."""
        self._do(self._switch("refuse"))

    def cut(self) -> None:
        """Reset all open connections once; new ones work."""
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
            pass  # one side has closed or was reset; the other is closed, too
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
