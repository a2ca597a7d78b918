"""Serves the contract's app in a process of its own: `python serve.py SERVER FRAMEWORK STORE PORT`."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.doors.app import ContractApp
from tests.doors.apps import FRAMEWORKS


def make() -> Any:
    """Return the app.  Its settings are in the environment, because some servers start processes of their own."""
    if parent := os.environ.get("PARENT"):
        threading.Thread(target=end_with, args=(int(parent),), daemon=True).start()
    return FRAMEWORKS[os.environ["FRAMEWORK"]](ContractApp(os.environ["STORE"]))


def end_with(parent: int) -> None:
    """End this process when its parent was killed."""
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


def uvicorn(port: int, **options: Any) -> None:
    import uvicorn

    uvicorn.run(make(), host="127.0.0.1", port=port, log_level="warning", **options)


def uvicorn_in_python(port: int) -> None:
    """Without httptools and uvloop."""
    uvicorn(port, http="h11", loop="asyncio")


def hypercorn(port: int) -> None:
    from hypercorn.asyncio import serve
    from hypercorn.config import Config

    config = Config()
    config.bind = [f"127.0.0.1:{port}"]
    asyncio.run(serve(make(), config))


def granian(port: int) -> None:
    from granian import Granian
    from granian.constants import Interfaces

    os.environ["PARENT"] = str(os.getpid())
    target = f"{Path(__file__).stem}:make"
    Granian(target, "127.0.0.1", port, interface=Interfaces.ASGI, factory=True).serve()


if __name__ == "__main__":
    server, os.environ["FRAMEWORK"], os.environ["STORE"], port = sys.argv[1:]
    servers = {"uvicorn": uvicorn, "uvicorn-h11": uvicorn_in_python, "hypercorn": hypercorn, "granian": granian}
    servers[server](int(port))
