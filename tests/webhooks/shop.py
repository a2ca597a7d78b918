"""A shop that receives webhooks, in a process of its own: `python -m tests.webhooks.shop KIND PORT FOLDER [CRASH POINT]`.

Each sender of `senders` has a receiver at its name.  A handler books the event in `shop.db`, and fails if the event says so.
"""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn
import waitress

from oncemore import Guard, Inbox, Op
from oncemore.messages.envelope import Envelope
from oncemore.testing.crashes import Crashing
from oncemore.webhooks import Receiver

from .senders import SECRET, SENDERS

LIMIT = 100_000  # bytes of a body
INSERT = "INSERT INTO bookings VALUES (?, ?, ?)"


def values_of(event: Envelope) -> tuple[str, str, str]:
    if event.data.get("fail"):
        raise RuntimeError("cannot be booked")
    return event.source, event.id, event.type


def book(op: Op, event: Envelope) -> None:
    op.connection.execute(INSERT, values_of(event))
    time.sleep(event.data.get("seconds", 0))


async def abook(op: Op, event: Envelope) -> None:
    await op.connection.execute(INSERT, values_of(event))
    await asyncio.sleep(event.data.get("seconds", 0))


def django_book(op: Op, event: Envelope) -> None:
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute(INSERT.replace("?", "%s"), values_of(event))


async def django_abook(op: Op, event: Envelope) -> None:
    from asgiref.sync import sync_to_async

    await sync_to_async(django_book)(op, event)


def receivers(source: Any, handler: Callable[[Op, Envelope], Any], crash: str) -> dict[str, Receiver]:
    guard = Guard(source)
    if crash:
        guard.store = Crashing(guard.store, at=crash)  # type: ignore[assignment]
    inbox = Inbox(guard, attempts=3)
    found = {}
    for name, sender in SENDERS.items():
        receiver = Receiver(inbox, sender.scheme, secrets=[SECRET], source=name, max_request=LIMIT, **sender.options)
        receiver.on("refund.succeeded")(handler)
        found[name] = receiver
    return found


def serve_asgi(app: Any, port: int) -> None:
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


def serve_wsgi(app: Any, port: int) -> None:
    waitress.serve(app, host="127.0.0.1", port=port, threads=16)


def by_path(found: dict[str, Receiver]) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await found[scope["path"].strip("/")](scope, receive, send)

    return app


def with_fastapi(found: dict[str, Receiver]) -> Any:
    from fastapi import FastAPI

    app = FastAPI()
    for name, receiver in found.items():
        app.include_router(receiver.fastapi(f"/{name}"))
    return app


def with_wsgi(found: dict[str, Receiver]) -> Any:
    return lambda environ, start_response: found[environ["PATH_INFO"].strip("/")].wsgi(environ, start_response)


def with_django(handler: Any, folder: Path, crash: str, *, asgi: bool) -> Any:
    import django
    from django.conf import settings
    from django.core.asgi import get_asgi_application
    from django.core.wsgi import get_wsgi_application
    from django.urls import path

    database = {"ENGINE": "django.db.backends.sqlite3", "NAME": folder / "shop.db", "ATOMIC_REQUESTS": True}
    settings.configure(
        ROOT_URLCONF=__name__,
        DATABASES={"default": database},
        ALLOWED_HOSTS=["*"],
        SECRET_KEY="for tests",
        MIDDLEWARE=["django.middleware.csrf.CsrfViewMiddleware"],
    )
    django.setup()
    urlpatterns.extend(
        path(name, receiver.django) for name, receiver in receivers("django:default", handler, crash).items()
    )
    return get_asgi_application() if asgi else get_wsgi_application()


urlpatterns: list[Any] = []
KINDS = ("asgi", "asgi-sync", "fastapi", "wsgi", "wsgi-async", "django", "django-asgi")


def main(kind: str, port: int, folder: Path, crash: str = "") -> None:
    with sqlite3.connect(folder / "shop.db") as shop:
        shop.execute("CREATE TABLE IF NOT EXISTS bookings (source TEXT, event TEXT, type TEXT)")
    url = f"sqlite:///{folder / 'shop.db'}"
    if kind == "django":
        serve_wsgi(with_django(django_book, folder, crash, asgi=False), port)
    elif kind == "django-asgi":
        serve_asgi(with_django(django_abook, folder, crash, asgi=True), port)
    elif kind.startswith("wsgi"):
        serve_wsgi(with_wsgi(receivers(url, abook if kind == "wsgi-async" else book, crash)), port)
    else:
        found = receivers(url, book if kind == "asgi-sync" else abook, crash)
        serve_asgi(with_fastapi(found) if kind == "fastapi" else by_path(found), port)


if __name__ == "__main__":
    # Django looks its URLs up in the module of this name, so this must be the only copy of it.
    sys.modules["tests.webhooks.shop"] = sys.modules["__main__"]
    kind, port, folder, *crash = sys.argv[1:]
    main(kind, int(port), Path(folder), *crash)
