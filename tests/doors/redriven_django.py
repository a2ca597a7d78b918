"""A Django project whose only request fails between two steps, and is finished by the completer: prints the effects."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import django
import httpx
from django.conf import settings
from django.core.asgi import get_asgi_application
from django.core.wsgi import get_wsgi_application
from django.http import HttpRequest, JsonResponse
from django.urls import path

from oncemore import Contract, Guard, Rule
from oncemore._ledger.completer import Completer
from oncemore._runtime.backoff import Backoff
from oncemore.web.django import current_operation
from oncemore.web.redrive import RedriveAsgi, RedriveWsgi

GUARD = Guard("memory://")
log: list[str] = []  # what was really done


def pay(request: HttpRequest) -> JsonResponse:
    op = current_operation()
    op.step("reserve", lambda: log.append("reserve"))
    if op.attempt == 1:
        raise RuntimeError("after reserve")
    op.step("charge", lambda: log.append("charge"))
    return JsonResponse({}, status=201)


urlpatterns = [path("orders", pay)]


def configure() -> None:
    settings.configure(
        ROOT_URLCONF="__main__",
        ALLOWED_HOSTS=["*"],
        MIDDLEWARE=["oncemore.web.django.IdempotencyMiddleware"],
        ONCEMORE={
            "guard": GUARD,
            "contract": Contract(Rule("POST /orders", name="orders.pay", key="required", effect="steps")),
        },
    )
    django.setup()


async def asked(kind: str) -> list[Any]:
    headers = {"Idempotency-Key": "k", "Authorization": "Bearer alice"}
    if kind == "asgi":
        app = get_asgi_application()
        redrive: Any = RedriveAsgi(app)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as client:
            answer = await client.post("/orders", headers=headers)
    else:
        wsgi = get_wsgi_application()
        redrive = RedriveWsgi(wsgi)
        with httpx.Client(transport=httpx.WSGITransport(wsgi), base_url="http://shop") as blocking:
            answer = await asyncio.to_thread(blocking.post, "/orders", headers=headers)
    completer = Completer(GUARD, {"orders.pay": redrive}, pace=Backoff(base=0.0, cap=0.0))
    tally = await completer.arun_once()
    return [answer.status_code, tally.completed, log]


if __name__ == "__main__":
    configure()
    print(json.dumps(asyncio.run(asked(sys.argv[1]))))
