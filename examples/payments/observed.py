"""What an operator sees: events as JSON lines and as counters, and the caller's own names for a request, passed on."""

from __future__ import annotations

import json
import logging
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from typing import Any

from oncemore._ledger.events import Event

REQUEST: ContextVar[dict[str, str]] = ContextVar("request")
# The counters of the seeds' observability contract, by the kind of event.
COUNTED = {"settled": "idempotent.created", "replayed": "idempotent.replayed", "lapsed": "idempotent.taken_over"}
PLAIN = set(vars(logging.makeLogRecord({})))  # what every record has; the rest are an event's own fields


def correlation() -> dict[str, str]:
    """The headers by which one request can be followed from service to service."""
    return REQUEST.get({})


class Correlated:
    """ASGI middleware: each request has an X-Request-Id, its own or one made here, and keeps its traceparent."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        known = {name: headers[name] for name in ("x-request-id", "traceparent") if headers.get(name)}
        known.setdefault("x-request-id", secrets.token_hex(8))

        async def answer(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                pair = (b"x-request-id", known["x-request-id"].encode("latin-1"))
                message = {**message, "headers": [*message.get("headers", ()), pair]}
            await send(message)

        token = REQUEST.set(known)
        try:
            await self.app(scope, receive, answer)
        finally:
            REQUEST.reset(token)


class Counters:
    """An observer that counts."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def __call__(self, event: Event) -> None:
        if event.operation.scope.startswith("step|"):  # a part of an operation, which counts as a whole
            return
        if event.kind == "refused" and event.code.startswith("CONFLICT"):
            self.counts["idempotent.conflict"] += 1
        elif event.kind in COUNTED:
            self.counts[COUNTED[event.kind]] += 1


class JsonLines(logging.Formatter):
    """A log record as one line of JSON, with the fields of the event and of the request that it happened in."""

    def format(self, record: logging.LogRecord) -> str:
        said = {name: value for name, value in vars(record).items() if name not in PLAIN and value not in ("", None)}
        line = {"time": self.formatTime(record), "level": record.levelname, "message": record.getMessage()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps({**line, **said, **correlation()}, default=str)


def log_to_stderr() -> None:
    """Have everything that oncemore and this service log go to standard error, a line each."""
    lines = logging.StreamHandler()
    lines.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[lines], force=True)
    for chatty in ("httpx", "httpcore"):  # every call to the provider, at INFO
        logging.getLogger(chatty).setLevel(logging.WARNING)
