"""If-Match: checks whether a resource still has the ETag that the caller has read.

The middleware sends the app a GET of the same URL for the same caller, so applications need no code for it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from io import BytesIO
from typing import Any

from .._runtime.plan import Call, Plan
from ..errors import PreconditionFailed
from .request import NOT_OF_A_GET, Headers, value_of

Message = MutableMapping[str, Any]
Etag = tuple[int, str]  # the status of the GET, and the ETag: empty if the response has none

# One tag of an If-Match: in quotes, which may contain commas, or without quotes, as some apps write it.
TAG = re.compile(r'(?:W/)?"[^"]*"|[^\s,]+')

HEADERS_OF_CHANGE = frozenset(name.encode() for name in NOT_OF_A_GET)  # their names in an ASGI scope
VARIABLES_OF_CHANGE = frozenset(  # their names in a WSGI environ and in Django's META
    name.replace("-", "_").upper() if name.startswith("content-") else f"HTTP_{name.replace('-', '_').upper()}"
    for name in NOT_OF_A_GET
)


def check_if_match(headers: Headers, current_etag: Plan[Etag]) -> Plan[None]:
    """Raise PreconditionFailed unless the request's If-Match holds for the ETag that *current_etag* finds."""
    status, etag = yield from current_etag
    if not matches(value_of(headers, "if-match"), status, etag):
        raise PreconditionFailed("The resource has changed since; read it again, and send its new ETag")


def matches(if_match: str, status: int, etag: str) -> bool:
    """Whether If-Match holds for a resource whose GET has this status and ETag; `*` matches any existing resource."""
    if not 200 <= status < 300:
        return False
    tags = TAG.findall(if_match)
    return tags == ["*"] or (etag != "" and etag in tags)


def asgi_etag(app: Callable[[Any, Any, Any], Awaitable[None]], scope: MutableMapping[str, Any]) -> Plan[Etag]:
    """Return the status and ETag of an ASGI app's answer to a GET of the URL in *scope*."""
    return (yield Call(_get_asgi, app, scope))  # type: ignore[no-any-return]


async def _get_asgi(app: Callable[[Any, Any, Any], Awaitable[None]], scope: MutableMapping[str, Any]) -> Etag:
    found: dict[Any, Any] = {}
    body_sent = enough = False

    async def receive() -> Message:
        nonlocal body_sent
        if body_sent:  # the app waits for its client to leave, which never happens here
            await asyncio.Event().wait()
        body_sent = True
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        nonlocal enough
        if message["type"] == "http.response.start":
            found.update({name.lower(): value for name, value in message.get("headers", ())}, status=message["status"])
        elif message.get("more_body"):  # the body may be large or endless, so pretend that the client has left
            enough = True
            raise OSError("Only the ETag was requested, so the rest of the response is not read")

    headers = [(name, value) for name, value in scope["headers"] if name not in HEADERS_OF_CHANGE]
    try:
        await app({**scope, "method": "GET", "headers": headers}, receive, send)
    except Exception:
        if not enough:
            raise
    return found.get("status", 500), found.get(b"etag", b"").decode("latin-1")


def wsgi_etag(app: Callable[..., Iterable[bytes]], environ: dict[str, Any]) -> Plan[Etag]:
    """Return the status and ETag of a WSGI app's answer to a GET of the URL in *environ*."""
    return (yield Call(_get_wsgi, app, environ))  # type: ignore[no-any-return]


def _get_wsgi(app: Callable[..., Iterable[bytes]], environ: dict[str, Any]) -> Etag:
    asked = {name: value for name, value in environ.items() if name not in VARIABLES_OF_CHANGE}
    asked.update({"REQUEST_METHOD": "GET", "wsgi.input": BytesIO()})
    found: list[Etag] = []

    def start_response(line: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Callable[[bytes], object]:
        found.append((int(line[:3]), value_of([(name.lower(), value) for name, value in headers], "etag")))
        return lambda data: None

    result = app(asked, start_response)
    try:
        for _ in result:  # an app may call start_response only when its first chunk is requested
            if found:
                break
    finally:
        if hasattr(result, "close"):
            result.close()
    return found[-1] if found else (0, "")
