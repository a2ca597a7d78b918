"""A Django view whose transaction the database refuses: it runs once, the client gets 503, and a retry runs it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.handlers.exception import convert_exception_to_response
from django.db import connections
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test import RequestFactory, override_settings

from oncemore import Contract, Rule
from oncemore.web.django import IdempotencyMiddleware, current_operation

from .doors import Refused
from .shops import ON_SQLITE, OnDjango

CONTRACT = Contract(Rule("POST /pay", key="required", effect="transaction", keep="all"))


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[OnDjango]:
    shop = ON_SQLITE["django-sqlite"](f"sqlite:///{tmp_path / 'shop.db'}")
    assert isinstance(shop, OnDjango)
    said = {"guard": shop.guard, "contract": CONTRACT, "principal": lambda request: "alice"}
    with override_settings(ONCEMORE=said, ROOT_URLCONF=()):
        yield shop
    connections[shop.alias].close()


def payment() -> HttpRequest:
    return RequestFactory().post("/pay", "{}", "application/json", headers={"Idempotency-Key": "k"})


class View:
    """Inserts a row; the database refuses the first run."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, request: Any) -> HttpResponse:
        self.runs += 1
        with current_operation().connection.cursor() as cursor:
            cursor.execute("INSERT INTO refunds VALUES (%s, %s)", [f"run {self.runs}", "here"])
        if self.runs == 1:
            raise Refused
        return JsonResponse({"run": self.runs})


@pytest.mark.parametrize("page", [False, True], ids=["raised", "behind an error page"])
def test_refused_view_is_503_and_the_retry_runs(shop: OnDjango, page: bool) -> None:
    """Django's error page is no outcome, although this rule keeps all, because its effects were rolled back."""
    view = View()
    inner = convert_exception_to_response(view) if page else view
    middleware = IdempotencyMiddleware(inner)
    with override_settings(DEBUG_PROPAGATE_EXCEPTIONS=False, DEBUG=True, ALLOWED_HOSTS=["*"]):
        first = middleware(payment())
    assert (first.status_code, first.headers["Retry-After"], view.runs) == (503, "1", 1)
    assert shop.execute("SELECT id FROM refunds") == []
    again = [middleware(payment()) for _ in range(2)]
    assert [each.headers["Idempotency-Status"] for each in again] == ["stored", "replayed"]
    assert shop.execute("SELECT id FROM refunds") == [("run 2",)]


async def test_refused_async_view_is_503_and_the_retry_runs(shop: OnDjango, tmp_path: Path) -> None:
    guard = ON_SQLITE["aiosqlite"](f"sqlite:///{tmp_path / 'other.db'}").guard
    runs: list[int] = []

    async def view(request: Any) -> HttpResponse:
        runs.append(1)
        if len(runs) == 1:
            raise Refused
        return JsonResponse({})

    said = {"guard": guard, "contract": CONTRACT, "principal": lambda request: "alice"}
    with override_settings(ONCEMORE=said):
        answers = [await IdempotencyMiddleware(view)(payment()) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [503, 200]


def test_inner_middleware_leaves_the_transaction_to_the_outer(shop: OnDjango) -> None:
    """The inner middleware would wait for the outer one, which waits for it."""
    middleware = IdempotencyMiddleware(IdempotencyMiddleware(lambda request: HttpResponse(current_operation().key)))
    assert [middleware(payment()).headers["Idempotency-Status"] for _ in range(2)] == ["stored", "replayed"]
