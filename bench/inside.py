"""Processor time of a guarded request, without a server or sockets: `python -m bench.inside [store ...]`.

Each figure is the processor time per call of all threads, the least of several rounds.  Other work on the machine makes
calls slower, but hardly changes their processor time.  Each request has its own task, as in a server.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import runpy
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import uvloop

from oncemore import Guard
from oncemore._ledger.model import Operation, Outcome

from .load import post

CALLERS, CALLS, ROUNDS = 32, 640, 60  # many short rounds, so that some are not disturbed
APPS = Path(__file__).parent / "apps" / "web_apps.py"
OUTCOME = Outcome("response", 201, (("content-type", "application/json"),), b'{"id": "rf_9ab12cd34ef"}' * 9)

Call = Callable[[], Awaitable[Any]]
COUNTER = itertools.count()


def app(contender: str, store: str = "") -> Any:
    """Return the app of the web benchmark for *contender*."""
    os.environ.update(CONTENDER=contender, STORE=store)
    return runpy.run_path(str(APPS))["app"]


def request(app: Any, method: str, path: str, key: Callable[[], int]) -> Call:
    """Return a function that calls *app* as a server does, with a body of one message, and discards the response."""

    async def call() -> None:
        number = key()
        head, _, body = post(b"key-%d" % number, number).partition(b"\r\n\r\n")
        lines = [line.split(b": ", 1) for line in head.split(b"\r\n")[1:]]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(name, value) for name, value in lines],
            "client": ("127.0.0.1", 50000),
            "server": ("127.0.0.1", 8000),
            "state": {},
        }

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            assert message.get("status", 200) < 300

        await asyncio.get_running_loop().create_task(app(scope, receive, send))

    return call


def awaited(guard: Guard) -> Call:
    """Return a function that runs a new operation through `Guard.arun`."""

    async def perform(op: object) -> Outcome:
        return OUTCOME

    async def call() -> None:
        await guard.arun(Operation("scope", str(next(COUNTER)), "c1:ff", "refunds.create"), perform)

    return call


async def cost(call: Call, callers: int) -> float:
    """Return microseconds of processor time per call, in a round of *callers* concurrent callers."""

    async def caller() -> None:
        for _ in range(CALLS // callers):
            await call()

    began = time.process_time()
    await asyncio.gather(*(caller() for _ in range(callers)))
    return (time.process_time() - began) / (CALLS // callers * callers) * 1e6


def blocking(guard: Guard) -> float:
    """Return microseconds of processor time per call of `Guard.run`, with one caller."""
    began = time.process_time()
    for _ in range(CALLS):
        guard.run(Operation("scope", str(next(COUNTER)), "c1:ff", "refunds.create"), lambda op: OUTCOME)
    return (time.process_time() - began) / CALLS * 1e6


async def measure(url: str) -> dict[str, float]:
    """Return the least processor time of each kind of call."""
    bare, door, guard = app("bare"), app("oncemore", url), Guard(url)
    new, same = COUNTER.__next__, lambda: -1
    calls: dict[str, Call] = {
        "bare POST": request(bare, "POST", "/refunds", new),
        "new key": request(door, "POST", "/refunds", new),
        "replay": request(door, "POST", "/refunds", same),
        "bare GET": request(bare, "GET", "/look", new),
        "GET": request(door, "GET", "/look", new),
        "Guard.arun": awaited(guard),
    }
    found: dict[str, list[float]] = {name: [] for name in calls} | {"Guard.run": []}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            found[name].append(await cost(call, CALLERS))
        found["Guard.run"].append(blocking(guard))
    await guard.aclose()
    return {name: min(each) for name, each in found.items()}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        urls = {"memory": "memory://", "sqlite": f"sqlite:///{folder}/once.db"}
        for name in sys.argv[1:] or urls:
            figures = uvloop.run(measure(urls.get(name, name)))
            print(f"{name:10}" + "  ".join(f"{kind} {figure:.1f}" for kind, figure in figures.items()), flush=True)


if __name__ == "__main__":
    main()
