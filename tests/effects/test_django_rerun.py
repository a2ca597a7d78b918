"""What the database refuses, a Django view performs again: with the request as it was, and not as the last run has left it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.contrib.sessions.backends.signed_cookies import SessionStore
from django.db import connections
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test import RequestFactory, override_settings
from django.utils.asyncio import async_unsafe
from django.utils.functional import SimpleLazyObject

from oncemore import Contract, Rule
from oncemore.web.django import IdempotencyMiddleware, current_operation

from .doors import Refused
from .shops import ON_SQLITE, OnDjango

CONTRACT = Contract(Rule("POST /pay", key="required", effect="transaction"))


class Customer:
    """A user as a model has it: what is in the database was read once, and then kept."""

    pk = 7
    is_authenticated = True

    def __init__(self) -> None:
        self.balance = 100


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[OnDjango]:
    shop = ON_SQLITE["django-sqlite"](f"sqlite:///{tmp_path / 'shop.db'}")
    assert isinstance(shop, OnDjango)
    said = {"guard": shop.guard, "contract": CONTRACT, "principal": lambda request: str(request.user.pk)}
    with override_settings(ONCEMORE=said, ROOT_URLCONF=()):
        yield shop
    connections[shop.alias].close()


def asked() -> HttpRequest:
    """A request as Django's own middleware leaves it, of a customer whose session says that it has paid once."""
    request = RequestFactory().post("/pay", "{}", "application/json", headers={"Idempotency-Key": "k"})

    def user() -> Any:
        if not hasattr(request, "_cached_user"):
            request._cached_user = Customer()  # type: ignore[attr-defined]
        return request._cached_user  # type: ignore[attr-defined]

    request.user = SimpleLazyObject(user)
    request.session = SessionStore()
    request.session["payments"] = {"made": 1}
    return request  # type: ignore[no-any-return]


def test_a_balance_is_charged_once_though_the_view_has_run_twice(shop: OnDjango) -> None:
    """CASES 54."""
    runs: list[int] = []

    def view(request: Any) -> HttpResponse:
        request.user.balance -= 10
        request.session["payments"]["made"] += 1
        request.session.modified = True
        runs.append(request.user.balance)
        with current_operation().connection.cursor() as cursor:
            cursor.execute("INSERT INTO refunds VALUES (%s, %s)", [f"run {len(runs)}", str(request.user.balance)])
        if len(runs) == 1:
            raise Refused
        return JsonResponse({"balance": request.user.balance})

    request = asked()
    answer = IdempotencyMiddleware(view)(request)
    assert json.loads(answer.content) == {"balance": 90}
    assert runs == [90, 90]
    assert shop.execute("SELECT id, made_in FROM refunds") == [("run 2", "90")]
    assert request.session["payments"] == {"made": 2}


async def test_an_async_view_that_runs_again_finds_its_user_read(shop: OnDjango, tmp_path: Path) -> None:
    """CASES 54: the door has read the user off the loop, where Django refuses to; so it must for the next run."""
    guard = ON_SQLITE["aiosqlite"](f"sqlite:///{tmp_path / 'other.db'}").guard
    balances: list[int] = []

    async def view(request: Any) -> HttpResponse:
        request.user.balance -= 10
        balances.append(request.user.balance)
        if len(balances) == 1:
            raise Refused
        return JsonResponse({})

    request = RequestFactory().post("/pay", "{}", "application/json", headers={"Idempotency-Key": "k"})
    request.user = SimpleLazyObject(async_unsafe("The user is read from the database")(Customer))
    said = {"guard": guard, "contract": CONTRACT, "principal": lambda request: str(request.user.pk)}
    with override_settings(ONCEMORE=said):
        answer = await IdempotencyMiddleware(view)(request)
    assert (answer.status_code, balances) == (200, [90, 90])


def test_a_door_within_a_door_leaves_the_operation_to_the_outer_one(shop: OnDjango) -> None:
    """The inner one would wait for the outer one, which waits for it."""
    door = IdempotencyMiddleware(IdempotencyMiddleware(lambda request: HttpResponse(current_operation().key)))
    assert [door(asked()).headers["Idempotency-Status"] for _ in range(2)] == ["stored", "replayed"]
