"""The project's views, each at /sync/... and at /async/...; both forms call the same functions, which use the ORM."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

from asgiref.sync import sync_to_async
from django.db import transaction
from django.http import HttpRequest, HttpResponse, JsonResponse, StreamingHttpResponse
from django.urls import path
from django.views.decorators.csrf import csrf_exempt

from oncemore.errors import TransactionEnded
from oncemore.web.django import current_operation

from .models import Doctor, Refund

bodies: list[Any] = []
told: list[str] = []
meeting = threading.Barrier(2)


class Refused(Exception):
    sqlstate = "40001"
    sqlite_errorcode = 5


def refund(body: dict[str, Any]) -> int:
    assert current_operation().connection.alias == "shop"
    bodies.append(body)
    Refund.objects.using("shop").create(name=f"{body['id']}, run {len(bodies)}")
    transaction.on_commit(lambda: told.append(f"{body['id']}, run {len(bodies)}"), using="shop")
    if bodies.count(body) <= body.get("refused", 0):
        raise Refused
    if body.get("commit"):
        current_operation().connection.cursor().execute("COMMIT")
    if body.get("mark"):
        transaction.set_rollback(True, using="shop")
    return int(body.get("status", 201))


def leave(body: dict[str, Any]) -> int:
    """Take a doctor off call if the other one stays: a write skew."""
    bodies.append(body)
    there = Doctor.objects.using("shop").filter(on_call=True).count()
    if len(bodies) <= 2:
        meeting.wait(10)
    if there > 1:
        Doctor.objects.using("shop").filter(name=body["id"]).update(on_call=False)
    return 200 if there > 1 else 409


ACTS = {"refund": refund, "leave": leave, "stream": refund}


def answer(what: str, body: dict[str, Any], status: int) -> Any:
    if what != "stream":
        return JsonResponse({"run": len(bodies)}, status=status, headers={"x-id": body["id"]})
    op = current_operation()

    def chunks() -> Iterator[str]:
        yield "begun "
        try:
            yield str(op.connection)
        except TransactionEnded as error:
            yield error.detail

    return StreamingHttpResponse(chunks(), status=status)


@csrf_exempt
def view(request: HttpRequest, what: str) -> HttpResponse:
    body = json.loads(request.read())
    return answer(what, body, ACTS[what](body))


@csrf_exempt
async def aview(request: HttpRequest, what: str) -> HttpResponse:
    body = json.loads(request.read())
    return answer(what, body, await sync_to_async(partial(ACTS[what], body))())


def seen(request: HttpRequest) -> HttpResponse:
    refunds = [refund.name for refund in Refund.objects.using("shop").order_by("name")]
    on_call = [doctor.name for doctor in Doctor.objects.using("shop").filter(on_call=True)]
    return JsonResponse({"bodies": bodies, "told": told, "refunds": refunds, "on_call": on_call})


urlpatterns = [
    path("sync/<what>", view),
    path("async/<what>", transaction.non_atomic_requests(aview)),
    path("seen", seen),
]
