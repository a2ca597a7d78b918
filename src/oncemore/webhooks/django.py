"""A receiver as a Django view, for sync and async handlers, under WSGI and ASGI."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from asgiref.sync import async_to_sync
from django.db import connections, transaction  # type: ignore[import-untyped]
from django.http import HttpRequest, HttpResponse  # type: ignore[import-untyped]
from django.views.decorators.csrf import csrf_exempt  # type: ignore[import-untyped]

from .._contract.rule import Rule
from .._runtime.plan import Plan, run
from ..errors import OncemoreError
from ..web.django.request import body_of, request_of
from ..web.django.response import to_django
from ..web.problem import Response

T = TypeVar("T")


def make_view(
    rule: Rule,
    answer: Callable[..., Plan[Response]],
    refusal: Callable[[OncemoreError], Response],
    wrong_method: Response,
) -> Callable[[HttpRequest], HttpResponse]:
    """Return the view: *answer* makes the plan of a response from headers and body."""

    @csrf_exempt  # type: ignore[untyped-decorator]
    def receive_webhook(request: HttpRequest) -> HttpResponse:
        if request.method != "POST":
            return to_django(wrong_method)
        try:
            body = body_of(request, rule)
        except OncemoreError as error:
            return to_django(refusal(error))
        return to_django(run(answer(request_of(request).headers, body, run_async)))

    # The inbox opens and commits the transaction itself, also with ATOMIC_REQUESTS.
    view: Callable[[HttpRequest], HttpResponse] = receive_webhook
    for alias in connections:
        view = transaction.non_atomic_requests(using=alias)(view)
    return view


def run_async(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run an async handler on an event loop, so that what it does by Django's ORM is done on this request's thread."""

    async def wait() -> T:
        return await coroutine

    return async_to_sync(wait)()
