"""The private parts of Django and Django Ninja that are used: each test fails by name if an upgrade moves one."""

from __future__ import annotations

import json

import django
import pytest
from django.conf import settings
from django.http import RawPostDataException
from django.test import RequestFactory
from django.urls import path

from oncemore.web.django import _compat

if not settings.configured:
    settings.configure(USE_TZ=True, LOGGING_CONFIG=None, SECRET_KEY="of these tests")
    django.setup()


def test_has_body_is_true_once_the_body_was_read() -> None:
    request = RequestFactory().post("/x", "{}", "application/json")
    before = _compat.has_body(request)
    assert (before, request.body, _compat.has_body(request)) == (False, b"{}", True)


def test_is_consumed_is_true_once_the_stream_was_read() -> None:
    request = RequestFactory().post("/x", "{}", "application/json")
    before = _compat.is_consumed(request)
    request.read()
    assert (before, _compat.is_consumed(request)) == (False, True)
    with pytest.raises(RawPostDataException):
        _ = request.body


def test_set_body_lets_a_consumed_request_be_read_again() -> None:
    request = RequestFactory().post("/x", "a=1", "application/x-www-form-urlencoded")
    request.read()
    _compat.set_body(request, b"a=1")
    assert (request.POST["a"], request.body) == ("1", b"a=1")


def test_copy_as_get_leaves_the_original_request_alone() -> None:
    request = RequestFactory().post("/x?q=1", json.dumps({"a": 1}), "application/json", headers={"If-Match": '"1"'})
    request.user = "alice"
    assert request.headers["If-Match"] == '"1"'
    meta = {name: value for name, value in request.META.items() if name != "HTTP_IF_MATCH"}
    inner = _compat.copy_as_get(request, meta)
    assert (inner.method, inner.META["REQUEST_METHOD"], inner.body, inner.user) == ("GET", "GET", b"", "alice")
    assert ("If-Match" in inner.headers, dict(inner.POST), dict(inner.GET)) == (False, {}, {"q": ["1"]})
    assert (request.method, json.loads(request.body)) == ("POST", {"a": 1})


@pytest.mark.parametrize(
    ("route", "written"),
    [
        ("api/orders/<int:id>/", "/api/orders/{id}/"),
        ("files/<path:rest>", "/files/{rest:path}"),
        (r"^api/orders/(?P<id>\d+)/$", "/api/orders/{id}/"),
        (r"^api/v1\.0/orders$", "/api/v1.0/orders"),
    ],
)
def test_path_of_writes_a_route_as_the_contract_does(route: str, written: str) -> None:
    assert _compat.path_of(route) == written


def test_ninja_operations_are_found_behind_the_view() -> None:
    from ninja import NinjaAPI  # it reads Django's settings when it is imported

    api = NinjaAPI(urls_namespace="compat")

    @api.post("/orders")
    def create(request: object) -> str:
        return "made"

    views = [each.callback for each in api.urls[0] if str(each.pattern) == "orders"]
    [operation] = _compat.ninja_operations(views[0])
    assert (operation.methods, operation.view_func) == (["POST"], create)
    assert _compat.ninja_operations(path("x", lambda request: None).callback) == []
