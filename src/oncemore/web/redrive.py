"""Finishes an operation without its client: calls the app, with its middleware, with the stored request."""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any
from urllib.parse import quote

from .._contract.rule import Rule
from .._ledger.context import CURRENT
from .._ledger.model import Operation
from .._ledger.transactions import Do
from .._runtime.plan import Plan
from ..errors import ConfigurationError
from .request import Request, native_mapping

# The key of the operation to be finished, in a scope or environ.  A client cannot set it, because it can send only text.
REDRIVEN = "oncemore.redriven"

# Headers that are credentials, or belong to one connection.  If the app needs credentials, give them to `Redrive`.
NOT_KEPT = frozenset(
    {
        "api-key",
        "authorization",
        "cf-access-jwt-assertion",
        "connection",
        "cookie",
        "expect",
        "keep-alive",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "x-access-token",
        "x-amz-security-token",
        "x-amzn-oidc-accesstoken",
        "x-amzn-oidc-data",
        "x-api-key",
        "x-auth-request-access-token",
        "x-auth-token",
        "x-csrf-token",
        "x-forwarded-access-token",
        "x-goog-iap-jwt-assertion",
        "x-request-timeout",
        "x-session-token",
    }
)


def find_redriven(native: Any) -> Operation | None:
    """Return the operation that this request continues, or None for a client's own request."""
    found = native_mapping(native).get(REDRIVEN)
    return found if isinstance(found, Operation) else None


def check_resumable(operation: Operation, rule: Rule) -> Operation:
    """Return the operation to be continued.  Raise ConfigurationError if its rule no longer runs in steps."""
    if rule.policy.effect != "steps":
        raise ConfigurationError(
            f"{operation.name} {operation.key!r} is unfinished, and its rule is now {rule.name!r} with effect = "
            f"{rule.policy.effect!r}, which cannot continue it: keep effect = 'steps' until it is finished"
        )
    return operation


def check_passed(native: Any) -> None:
    """Raise if a request that continues an operation would pass unguarded: the app would perform it again each time."""
    operation = find_redriven(native)
    if operation is not None and CURRENT.get() is None:  # else an outer middleware guards it
        raise ConfigurationError(
            f"{operation.name} {operation.key!r} is unfinished, and no rule of this middleware's contract guards its request: "
            "keep its rule until it is finished, and give the completer the app with the middleware that has the rule"
        )


def kept_request(request: Request) -> dict[str, Any]:
    """Return the request as plain values, without credentials, to be stored in its operation's record."""
    headers = [[name, value] for name, value in request.headers if name not in NOT_KEPT]
    method, path, query = request.method, request.path, request.query
    return {"method": method, "path": path, "query": query, "headers": headers, "body": request.body}


class Redrive:
    """Continues unfinished requests for a `Completer`: *app* is the application with its middleware.

    *headers* are added to each request, for instance the completer's own credentials.  *mount* is the prefix at which the
    server has mounted the app (root_path, SCRIPT_NAME), if any.
    """

    def __init__(self, app: Callable[..., Any], headers: Iterable[tuple[str, str]] = (), mount: str = "") -> None:
        self.app = app
        self.headers = [(name.lower(), value) for name, value in headers]
        self.mount = mount.rstrip("/")

    def drive(self, operation: Operation, request: Any) -> Plan[None]:
        raise NotImplementedError

    def _headers(self, request: Mapping[str, Any]) -> list[tuple[str, str]]:
        added = {name for name, _ in self.headers}
        return [*((name, value) for name, value in request["headers"] if name not in added), *self.headers]


class RedriveAsgi(Redrive):
    """Calls an ASGI app on the completer's event loop: use the completer's `arun_once()` or `arun()`."""

    def drive(self, operation: Operation, request: Any) -> Plan[None]:
        yield Do(needs_a_loop, lambda: self._call_app(operation, request))

    async def _call_app(self, operation: Operation, request: Mapping[str, Any]) -> None:
        messages = [{"type": "http.request", "body": request["body"], "more_body": False}]
        answered = asyncio.Event()

        async def receive() -> MutableMapping[str, Any]:
            if messages:
                return messages.pop()
            await answered.wait()  # earlier, the app might stop because its client has left
            return {"type": "http.disconnect"}

        async def send(message: MutableMapping[str, Any]) -> None:
            """Drop the response, because the ledger has it."""
            if message["type"] == "http.response.body" and not message.get("more_body"):
                answered.set()

        await self.app(self._scope(operation, request), receive, send)

    def _scope(self, operation: Operation, request: Mapping[str, Any]) -> dict[str, Any]:
        path = request["path"]
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": request["method"],
            "scheme": "http",
            "path": path,
            "raw_path": quote(path).encode("ascii"),
            "query_string": request["query"].encode("latin-1"),
            "root_path": self.mount,
            "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in self._headers(request)],
            "client": ("127.0.0.1", 0),
            "server": ("127.0.0.1", 0),
            "state": {},
            REDRIVEN: operation,
        }


def needs_a_loop() -> None:
    raise ConfigurationError("An ASGI app is called on an event loop: use the completer's arun_once() or arun()")


class RedriveWsgi(Redrive):
    """Calls a WSGI app on the completer's thread."""

    def drive(self, operation: Operation, request: Any) -> Plan[None]:
        yield Do(lambda: self._call_app(operation, request), None)

    def _call_app(self, operation: Operation, request: Mapping[str, Any]) -> None:
        def start_response(status: str, headers: Any, exc_info: Any = None) -> Callable[[bytes], object]:
            return lambda data: None

        result = self.app(self._environ(operation, request), start_response)
        try:
            for _ in result:
                pass
        finally:
            if hasattr(result, "close"):
                result.close()

    def _environ(self, operation: Operation, request: Mapping[str, Any]) -> dict[str, Any]:
        body = request["body"]
        environ: dict[str, Any] = {
            "REQUEST_METHOD": request["method"],
            "SCRIPT_NAME": native(self.mount),
            "PATH_INFO": native(request["path"].removeprefix(self.mount)),
            "QUERY_STRING": request["query"],
            "SERVER_NAME": "127.0.0.1",
            "SERVER_PORT": "80",
            "SERVER_PROTOCOL": "HTTP/1.1",
            "REMOTE_ADDR": "127.0.0.1",
            "wsgi.version": (1, 0),
            "wsgi.url_scheme": "http",
            "wsgi.input": io.BytesIO(body),
            "wsgi.errors": sys.stderr,
            "wsgi.multithread": True,
            "wsgi.multiprocess": True,
            "wsgi.run_once": False,
            REDRIVEN: operation,
        }
        for name, value in self._headers(request):
            field = name.upper().replace("-", "_")
            environ[field if field in ("CONTENT_TYPE", "CONTENT_LENGTH") else f"HTTP_{field}"] = value
        environ["CONTENT_LENGTH"] = str(len(body))
        return environ


def native(path: str) -> str:
    """Return a path as WSGI carries it: the bytes of its UTF-8, decoded as latin-1."""
    return path.encode().decode("latin-1")
