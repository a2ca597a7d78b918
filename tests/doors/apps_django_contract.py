"""The door contract's app in Django: `wsgi` and `asgi`, with sync or async views as the environment asks."""

from __future__ import annotations

import os

from django.conf import settings
from django.core.asgi import get_asgi_application
from django.core.wsgi import get_wsgi_application
from django.http import HttpRequest, HttpResponse, HttpResponseBase, StreamingHttpResponse
from django.urls import re_path

from oncemore._runtime.plan import arun, run

from .app import ContractApp, Reply

app = ContractApp(os.environ["STORE"])


def asked(request: HttpRequest) -> tuple[str, str, str, list[tuple[str, str]], bytes]:
    return (
        str(request.method),
        request.path,
        request.META["QUERY_STRING"],
        list(request.headers.items()),
        request.body,
    )


def rendered(reply: Reply, made: HttpResponseBase) -> HttpResponseBase:
    made.status_code = reply.status
    del made.headers["Content-Type"]
    for name, value in reply.headers:
        if name == "set-cookie":
            made.cookies.load(value)
        else:
            made.headers[name] = f"{made.headers[name]}, {value}" if name in made.headers else value
    return made


def view(request: HttpRequest) -> HttpResponseBase:
    reply = run(app.perform(*asked(request)))
    return rendered(reply, StreamingHttpResponse(reply.chunks()) if reply.streamed else HttpResponse(reply.body))


async def async_view(request: HttpRequest) -> HttpResponseBase:
    reply = await arun(app.perform(*asked(request)))
    return rendered(reply, StreamingHttpResponse(reply.achunks()) if reply.streamed else HttpResponse(reply.body))


settings.configure(
    SECRET_KEY="-",
    ALLOWED_HOSTS=["*"],
    ROOT_URLCONF=__name__,
    MIDDLEWARE=["oncemore.web.django.IdempotencyMiddleware"],
    ONCEMORE={"guard": app.guard, "contract": app.contract},
)
urlpatterns = [re_path("", view if os.environ["VIEWS"] == "sync" else async_view)]
wsgi = get_wsgi_application()
asgi = get_asgi_application()
