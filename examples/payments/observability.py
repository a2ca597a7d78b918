"""JSON log lines, counters, and request ids that are passed on to the provider."""

from __future__ import annotations

import json
import logging
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from typing import Any

from oncemore.observe import Event

REQUEST: ContextVar[dict[str, str]] = ContextVar("request")
# The counter for each kind of event.
COUNTED = {"settled": "idempotent.created", "replayed": "idempotent.replayed", "lapsed": "idempotent.taken_over"}
STANDARD_FIELDS = set(vars(logging.makeLogRecord({})))  # the fields of every log record; others come from an event


def correlation() -> dict[str, str]:
    """Return the headers by which this request can be followed from service to service."""
    return REQUEST.get({})


class CorrelationMiddleware:
    """ASGI middleware: keeps the caller's traceparent and X-Request-Id, and makes a new id if there is none."""

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
    """An observer that counts outcomes."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def __call__(self, event: Event) -> None:
        if event.operation.scope.startswith("step|"):  # only the whole operation counts
            return
        if event.kind == "refused" and event.code.startswith("CONFLICT"):
            self.counts["idempotent.conflict"] += 1
        elif event.kind in COUNTED:
            self.counts[COUNTED[event.kind]] += 1


class JsonLines(logging.Formatter):
    """Formats a log record as one line of JSON, with the fields of its event and of its request."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            name: value
            for name, value in vars(record).items()
            if name not in STANDARD_FIELDS and value not in ("", None)
        }
        line = {"time": self.formatTime(record), "level": record.levelname, "message": record.getMessage()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps({**line, **fields, **correlation()}, default=str)


def log_to_stderr() -> None:
    """Log everything to standard error, one line each."""
    lines = logging.StreamHandler()
    lines.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[lines], force=True)
    for name in ("httpx", "httpcore"):  # they log each call to the provider at INFO
        logging.getLogger(name).setLevel(logging.WARNING)
