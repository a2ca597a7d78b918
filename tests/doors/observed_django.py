"""A Django project under ASGI in shadow mode: prints the bodies that its views got, and whether a client had left."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import django
from django.conf import settings
from django.core.asgi import get_asgi_application
from django.http import HttpRequest, JsonResponse
from django.urls import path

from oncemore import Contract, Guard, Rule

begun = asyncio.Event()
told: list[Any] = []


async def size(request: HttpRequest) -> JsonResponse:
    told.append(len(request.read()))
    return JsonResponse({})


async def slow(request: HttpRequest) -> JsonResponse:
    begun.set()
    try:
        await asyncio.wait_for(asyncio.Event().wait(), 5)
    except asyncio.CancelledError:
        told.append("cancelled")
        raise
    return JsonResponse({})


urlpatterns = [path("size", size), path("slow", slow)]


def configure() -> None:
    settings.configure(
        ROOT_URLCONF="__main__",
        ALLOWED_HOSTS=["*"],
        MIDDLEWARE=["oncemore.web.django.IdempotencyMiddleware"],
        ONCEMORE={
            "guard": Guard("memory://", observers=[lambda event: told.append(event.detail)]),
            "contract": Contract(Rule("POST /{name}", max_request=1000)),
            "enforce": False,
        },
    )
    django.setup()


async def ask(app: Any, path: str, body: bytes, version: str = "2") -> None:
    """Send a request over HTTP/2 or HTTP/1.1 without a length; the client leaves when a slow view has begun."""
    headers = [(b"host", b"shop"), (b"idempotency-key", path.encode()), (b"authorization", b"alice")]
    scope = {"type": "http", "http_version": version, "method": "POST", "path": path, "query_string": b""}
    messages: list[dict[str, Any]] = [{"type": "http.request", "body": body}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await begun.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None: ...

    await app({**scope, "asgi": {"version": "3.0"}, "headers": headers}, receive, send)


async def main() -> None:
    app = get_asgi_application()
    await ask(app, "/size", b"x" * 5000)
    for _ in range(2):
        await ask(app, "/size", b"", "1.1")
    await asyncio.wait_for(ask(app, "/slow", b"", "1.1"), 20)


if __name__ == "__main__":
    configure()
    asyncio.run(main())
    print(json.dumps(told))
