"""Serves the doors' test apps on real sockets: three WSGI servers in a thread of this process, others in their own."""

from __future__ import annotations

import importlib
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import httpx
import psycopg
import pytest
import waitress
from psycopg import sql
from waitress.wasyncore import close_all
from werkzeug.serving import make_server as make_werkzeug

from examples.process import Server
from tests.support.processes import COVERAGE, ForkedServer

ROOT = Path(__file__).parents[2]
App = Callable[..., Any]
UNMEASURED = [part for name in COVERAGE for part in ("-u", name)]  # a server is killed in the end, and could not tell


class Threading(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 128


class Quiet(WSGIRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def under_wsgiref(app: App) -> Iterator[str]:
    with make_server("127.0.0.1", 0, app, Threading, Quiet) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def under_werkzeug(app: App) -> Iterator[str]:
    server = make_werkzeug("127.0.0.1", 0, app, threaded=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def under_waitress(app: App) -> Iterator[str]:
    server: Any = waitress.create_server(app, host="127.0.0.1", port=0, threads=24, channel_timeout=20)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.effective_port}"
    finally:
        with suppress(OSError):  # in its own loop, which ends with nothing to watch, perhaps before this call has ended
            server.trigger.pull_trigger(lambda: close_all(server._map))
        thread.join()
        server.task_dispatcher.shutdown()


IN_A_THREAD: Mapping[str, Callable[[App], Any]] = {
    "wsgiref": under_wsgiref,
    "werkzeug": under_werkzeug,
    "waitress": under_waitress,
}


class Process(Server):
    """A server program in a process of its own; *arguments* follow `python -m`, with `{port}` for its port."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        super().__init__()
        self.arguments = arguments
        self.environment = environment

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        settings = [
            f"{name}={value}" for name, value in {"PYTHONPATH": f"{ROOT}:{ROOT}/src", **self.environment}.items()
        ]
        arguments = [part.format(port=self.port) for part in self.arguments]
        return ["env", *UNMEASURED, *settings, sys.executable, "-m", *arguments]

    def is_ready(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False


class RaisedProcess(ForkedServer, Process):
    """A process whose start is not tested."""


def gunicorn(app: str, *arguments: str, **environment: str) -> Process:
    """Gunicorn, which serves *app* (`module:name`)."""
    bind = ("-b", "127.0.0.1:{port}", "--no-control-socket", "--graceful-timeout", "1")
    return Process("gunicorn", *bind, *arguments, app, **environment)


def uvicorn(app: str, *arguments: str, **environment: str) -> Process:
    """Uvicorn, which serves *app* (`module:name`)."""
    return Process("uvicorn", "--port", "{port}", "--log-level", "warning", *arguments, app, **environment)


@pytest.fixture(scope="class")
def door_schema(postgres_url: str) -> Iterator[str]:
    """The URL of a schema on the tests' PostgreSQL, for a server to keep its ledger in."""
    name = f"t{secrets.token_hex(8)}"
    yield f"{postgres_url}?schema={name}"
    with psycopg.connect(postgres_url, autocommit=True, options="-c lock_timeout=10s") as connection:
        connection.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(name)))


# Made once, and without certificates, whose reading takes longer than a test; each request has its own connection.
client = httpx.Client(timeout=20, verify=False, limits=httpx.Limits(max_keepalive_connections=0))


def asked(url: str, path: str, key: str | None, **options: Any) -> httpx.Response:
    """The response to a POST under *key*."""
    headers = {"Authorization": "Bearer alice", **options.pop("headers", {})}
    if key is not None:
        headers["Idempotency-Key"] = key
    return client.request(options.pop("method", "POST"), url + path, headers=headers, **options)


def until(true: Callable[[], bool]) -> None:
    """Wait until it is *true*."""
    ends = time.monotonic() + 15
    while not true():
        assert time.monotonic() < ends, "it did not come true"
        time.sleep(0.01)


def wsgiref(factory: str, **environment: str) -> Process:
    """wsgiref in a process of its own, with a thread for each request, which serves the app that *factory* makes."""
    return RaisedProcess(__name__, factory, "{port}", **environment)


if __name__ == "__main__":
    module, _, name = sys.argv[1].partition(":")
    app = getattr(importlib.import_module(module), name)()
    make_server("127.0.0.1", int(sys.argv[2]), app, Threading, Quiet).serve_forever()
