"""If-Match: whether a resource still has the ETag that the caller has read.

The app itself is asked, by a GET of the same URL for the same caller, so that an application needs no code for it.
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
Etag = tuple[int, str]  # the status of the GET, and the ETag, or nothing

# One tag of an If-Match: in quotes, in which a comma is an ordinary character, or bare, as some apps write them.
TAG = re.compile(r'(?:W/)?"[^"]*"|[^\s,]+')

HEADERS_OF_CHANGE = frozenset(name.encode() for name in NOT_OF_A_GET)  # as ASGI names them
VARIABLES_OF_CHANGE = frozenset(  # as WSGI does, and Django's META
    name.replace("-", "_").upper() if name.startswith("content-") else f"HTTP_{name.replace('-', '_').upper()}"
    for name in NOT_OF_A_GET
)


def check_if_match(headers: Headers, current_etag: Plan[Etag]) -> Plan[None]:
    """Raise PreconditionFailed unless the request's If-Match holds for what *current_etag* finds."""
    status, etag = yield from current_etag
    if not matches(value_of(headers, "if-match"), status, etag):
        raise PreconditionFailed("The resource has changed since; read it again, and send its new ETag")


def matches(if_match: str, status: int, etag: str) -> bool:
    """Whether If-Match holds, if a GET of the resource has this status and ETag; `*` stands for any that exists."""
    if not 200 <= status < 300:
        return False
    tags = TAG.findall(if_match)
    return tags == ["*"] or (etag != "" and etag in tags)


def asgi_etag(app: Callable[[Any, Any, Any], Awaitable[None]], scope: MutableMapping[str, Any]) -> Plan[Etag]:
    """Status and ETag of an ASGI app's answer to a GET of the URL in *scope*."""
    return (yield Call(_get_asgi, app, scope))  # type: ignore[no-any-return]


async def _get_asgi(app: Callable[[Any, Any, Any], Awaitable[None]], scope: MutableMapping[str, Any]) -> Etag:
    found: dict[Any, Any] = {}
    body_sent = enough = False

    async def receive() -> Message:
        nonlocal body_sent
        if body_sent:  # the app listens for the client to leave, and it never does
            await asyncio.Event().wait()
        body_sent = True
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        nonlocal enough
        if message["type"] == "http.response.start":
            found.update({name.lower(): value for name, value in message.get("headers", ())}, status=message["status"])
        elif message.get("more_body"):  # it may be large, or never end: do as if the client had left
            enough = True
            raise OSError("Only the ETag was asked for")

    headers = [(name, value) for name, value in scope["headers"] if name not in HEADERS_OF_CHANGE]
    try:
        await app({**scope, "method": "GET", "headers": headers}, receive, send)
    except Exception:
        if not enough:
            raise
    return found.get("status", 500), found.get(b"etag", b"").decode("latin-1")


def wsgi_etag(app: Callable[..., Iterable[bytes]], environ: dict[str, Any]) -> Plan[Etag]:
    """Status and ETag of a WSGI app's answer to a GET of the URL in *environ*."""
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
        for _ in result:  # an app may call start_response as late as with its first chunk
            if found:
                break
    finally:
        if hasattr(result, "close"):
            result.close()
    return found[-1] if found else (0, "")
