"""A customer's server for webhooks, on a thread of its own: it records requests, and sends the test's answers."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, Self

Answer = bytes | Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Arrived(NamedTuple):
    """One request, as it came over the wire."""

    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def id(self) -> str:
        return self.headers["webhook-id"]

    @property
    def data(self) -> Any:
        return json.loads(self.body)["data"]


def response(status: int = 200, body: bytes = b"", **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} X", f"content-length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


OK = response()


class Hooks:
    """Listens on a free port of the loopback.  *answer* is called with each request, and returns the bytes to send, or a
    function that takes over the connection."""

    def __init__(self, answer: Callable[[Arrived], Answer] | Answer = OK) -> None:
        self.answer: Callable[[Arrived], Answer] = answer if callable(answer) else lambda _: answer  # type: ignore[assignment,return-value]
        self.arrived: list[Arrived] = []
        self.most_at_a_time = 0
        self._at_a_time = 0
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)

    def url(self, path: str = "/") -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    @property
    def ids(self) -> list[str]:
        return [each.id for each in self.arrived]

    @property
    def data(self) -> list[Any]:
        return [each.data for each in self.arrived]

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0, backlog=1000)
        self.port: int = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in self._tasks:
            task.cancel()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._handle(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                headers = {
                    name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:-2])
                }
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                arrived = Arrived(head[0].split(" ")[1], headers, body)
                self.arrived.append(arrived)
                self._at_a_time += 1
                self.most_at_a_time = max(self.most_at_a_time, self._at_a_time)
                try:
                    answer = self.answer(arrived)
                    if not isinstance(answer, bytes):
                        await answer(reader, writer)
                        return
                    writer.write(answer)
                    await writer.drain()
                finally:
                    self._at_a_time -= 1
        except (OSError, asyncio.IncompleteReadError):
            return
        finally:
            writer.close()
