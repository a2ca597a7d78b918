"""Serves an ASGI app that a test has just made, on a real socket, by uvicorn in a thread of this process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn


@contextmanager
def live(app: Any, **options: Any) -> Iterator[httpx.Client]:
    """Serve the app, and yield a client of it."""
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", **options))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        try:
            url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            with httpx.Client(base_url=url, timeout=20, headers={"Authorization": "Bearer alice"}) as client:
                yield client
        finally:
            server.should_exit = True
            thread.join(30)  # if the app hangs, the test has failed already


def keyed(key: str, **headers: str) -> dict[str, str]:
    return {"Idempotency-Key": key, **headers}
