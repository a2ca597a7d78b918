"""The settings of the Django middleware, and the rules on the views of a URL configuration."""

from __future__ import annotations

import asyncio
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from django.http import HttpResponse
from django.urls import include, path, re_path

from oncemore._contract.contract import Contract
from oncemore._contract.rule import Rule
from oncemore._ledger.guard import Guard
from oncemore.errors import ConfigurationError
from oncemore.web import django as django_door
from oncemore.web.django import IdempotencyMiddleware, idempotent, required
from oncemore.web.django.request import body_of
from oncemore.web.django.views import Views
from oncemore.web.door import Door

AUTH = "django.contrib.auth.middleware.AuthenticationMiddleware"
DOOR = "oncemore.web.django.IdempotencyMiddleware"

guard = Guard("memory://")
contract = Contract(Rule("POST /orders", name="orders.create"))


class Somewhere:
    """Stands for a request."""


class AuthenticationMiddleware:
    """Stands for a project's own middleware, which inherits from Django's."""


class Own(AuthenticationMiddleware):
    pass


def who(request: Any) -> str:
    return "somebody"


def door_from_settings() -> Door[Any]:
    return Door(None, **django_door.options_from_settings(Door))


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The project's settings, for this test only."""
    settings = SimpleNamespace(ONCEMORE={"guard": guard}, MIDDLEWARE=[DOOR])
    monkeypatch.setattr(django_door, "settings", settings)
    return settings


def test_objects_may_be_given_by_their_dotted_paths(settings: SimpleNamespace) -> None:
    settings.ONCEMORE = {
        "guard": f"{__name__}.guard",
        "contract": f"{__name__}.contract",
        "principal": f"{__name__}.who",
        "status_path": "/status",
    }
    door = door_from_settings()
    assert (door.guard, door.contract, door.status_path) == (guard, contract, "/status")
    assert door.principal is not None
    assert door.principal(Somewhere()) == "somebody"


def test_status_path_none_switches_the_lookup_off(settings: SimpleNamespace) -> None:
    settings.ONCEMORE = {"guard": guard, "status_path": None, "principal": None}
    door = door_from_settings()
    assert (door.status_path, door.principal) == (None, None)


async def test_async_principal_is_awaited_from_its_thread(settings: SimpleNamespace) -> None:
    async def who(request: Any) -> str:
        return "somebody"

    settings.ONCEMORE["principal"] = who
    principal = door_from_settings().principal
    assert principal is not None
    assert await asyncio.to_thread(principal, Somewhere()) == "somebody"


def test_the_contract_is_a_file_beside_the_project(settings: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "oncemore.toml").write_text('[[rule]]\nmatch = "POST /refunds"\nname = "refunds"\n')
    settings.BASE_DIR = tmp_path
    settings.ONCEMORE["contract"] = "oncemore.toml"
    assert door_from_settings().contract.rule("refunds").match == "POST /refunds"


def test_a_profile_may_be_named_in_place_of_a_contract(settings: SimpleNamespace) -> None:
    settings.ONCEMORE["profile"] = "stripe"
    assert door_from_settings().contract.profile == "stripe"


def test_a_url_is_one_guard_for_all_handlers(settings: SimpleNamespace, tmp_path: Path) -> None:
    settings.ONCEMORE["guard"] = f"sqlite:///{tmp_path}/once.db"
    first, second = (door_from_settings() for _ in range(2))
    assert first.guard is second.guard


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (None, "names no guard"),
        ({}, "names no guard"),
        ({"guard": guard, "contarct": contract}, "did you mean 'contract'"),
        ({"guard": "once.db"}, "guard = 'once.db' cannot be imported"),
        ({"guard": contract}, "neither a Guard nor the URL"),
        ({"guard": guard, "contract": guard}, "neither a Contract nor the path"),
        ({"guard": guard, "principal": "nobody.knows"}, "principal = 'nobody.knows' cannot be imported"),
        ({"guard": guard, "contract": contract, "profile": "ietf"}, "profile"),
    ],
)
def test_wrong_setting_is_refused_with_advice(settings: SimpleNamespace, said: Any, told: str) -> None:
    settings.ONCEMORE = said
    with pytest.raises(ConfigurationError, match=told):
        door_from_settings()


@pytest.mark.parametrize(
    ("middleware", "warned"),
    [([AUTH, DOOR], False), ([f"{__name__}.Own", DOOR], False), ([DOOR, AUTH], True), ([DOOR], True)],
)
def test_middleware_before_authentication_warns(
    settings: SimpleNamespace, middleware: list[str], warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {AUTH: AuthenticationMiddleware}  # Django's own needs a configured project
    find = django_door.import_string
    monkeypatch.setattr(django_door, "import_string", lambda path: known.get(path) or find(path))
    settings.MIDDLEWARE = middleware
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        IdempotencyMiddleware(lambda request: HttpResponse())
    assert [str(warning.message)[:54] for warning in caught] == [
        "IdempotencyMiddleware is not after AuthenticationMiddl"
    ] * warned


def test_middleware_with_own_principal_needs_no_user(settings: SimpleNamespace) -> None:
    settings.ONCEMORE["principal"] = who
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        IdempotencyMiddleware(lambda request: HttpResponse())


# ── Rules on views ────────────────────────────────────────────────────────────────────────────────────────────────────


def asked(urlconf: Any, path: str, method: str = "POST") -> Any:
    return SimpleNamespace(urlconf=urlconf, method=method, path=path, path_info=path)


def view(request: Any, **params: Any) -> HttpResponse:
    return HttpResponse()


def test_rules_on_views_get_the_paths_of_their_routes() -> None:
    orders = [path("<int:number>/", required(lambda r, number: view(r))), path("<path:rest>", lambda r, rest: view(r))]
    urlconf = (
        path("orders/", include(orders)),
        re_path(r"^files/(?P<name>[^/]+)\.json$", idempotent(ttl="1h", name="files")(lambda r, name: view(r))),
    )
    own = Contract(Rule("POST /orders/{rest:path}", key="optional"))
    views = Views(own)
    found = views.match(asked(urlconf, "/orders/7/"))
    assert found is not None
    assert (found.rule.match, found.params) == ("POST|PUT|PATCH|DELETE /orders/{number}", {"number": "7"})
    assert found.rule.key.required
    assert views.match(asked(urlconf, "/orders/x")) is None  # another view's, for which the contract speaks
    assert views.match(asked(urlconf, "/nothing")) is None
    assert own.rule("files").match.endswith(" /files/{name}.json")
    assert own.rule("files").policy.ttl == 3600


def test_rule_on_view_takes_defaults_from_the_contract() -> None:
    urlconf = (path("orders/", required(lambda request: view(request))),)
    found = Views(Contract(ttl="7d")).match(asked(urlconf, "/orders/"))
    assert found is not None
    assert found.rule.policy.ttl == 7 * 86400


def test_route_that_no_rule_can_name_fails_each_time() -> None:
    urlconf = (path("range/<int:first>-<int:last>/", required(lambda request, **_: view(request))),)
    views = Views(Contract())
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="name it in the decorator"):
            views.match(asked(urlconf, "/range/1-2/"))


def test_a_decorator_may_name_the_requests_itself() -> None:
    mark = idempotent("POST /range/{rest:path}", key="required")
    urlconf = (path("range/<int:first>-<int:last>/", mark(lambda request, **_: view(request))),)
    found = Views(Contract()).match(asked(urlconf, "/range/1-2/"))
    assert found is not None
    assert found.rule.match == "POST /range/{rest:path}"


def test_a_view_at_two_routes_has_one_rule() -> None:
    once = idempotent(name="orders.create")(lambda request: view(request))
    urlconf = (path("v1/orders", once), path("v2/orders", once))
    views = Views(Contract())
    first, second = (views.match(asked(urlconf, f"/v{number}/orders")) for number in (1, 2))
    assert first is not None
    assert second is not None
    assert first.rule is second.rule
    assert first.route != second.route  # but a key is the name of two operations


def test_consumed_body_is_a_clear_error() -> None:
    with pytest.raises(ConfigurationError, match="move it after this one"):
        body_of(SimpleNamespace(_read_started=True), Rule())
    assert body_of(SimpleNamespace(_body=b"x", body=b"x", _read_started=True), Rule()) == b"x"
