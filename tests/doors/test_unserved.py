"""A rule with a typing error in its path guards nothing: the middlewares warn of it when the app starts."""

from __future__ import annotations

import logging
from typing import Any

import flask
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from oncemore import Contract, Guard, Rule
from oncemore.web import asgi, wsgi
from oncemore.web.unserved import starlette_served, unserved

from .live import live

SLIP = (
    "No route of the app serves the rule 'POST /refund', so it guards nothing (did you mean 'POST /refunds'?): "
    "correct its path"
)


def contract() -> Contract:
    return Contract(Rule("POST /refund"), Rule("POST /refunds/{id}"), Rule("POST *", name="all"), Rule("* /files/a"))


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "No route" in record.message]


def starlette(*more: Any) -> Starlette:
    routes = [
        Route("/refunds", print, methods=["POST"]),
        Route("/refunds/{number:int}", print, methods=["POST"]),
        *more,
    ]
    return Starlette(routes=[*routes, Route("/files/{rest:path}", print, methods=["POST"])])


def test_unserved_rule_is_warned_of_when_an_asgi_app_starts(caplog: pytest.LogCaptureFixture) -> None:
    app = starlette()
    app.add_middleware(asgi.IdempotencyMiddleware, guard=Guard("memory://"), contract=contract())
    with caplog.at_level(logging.WARNING), live(app) as client:
        client.get("/")
        assert warned(caplog) == [SLIP]


def test_unserved_rule_is_warned_of_once_by_wsgi(caplog: pytest.LogCaptureFixture) -> None:
    app = flask.Flask(__name__)
    app.post("/refunds")(lambda: "")
    app.post("/refunds/<int:id>", endpoint="one")(lambda id: "")
    app.post("/files/<path:rest>", endpoint="files")(lambda rest: "")
    app.wsgi_app = wsgi.IdempotencyMiddleware(app.wsgi_app, guard=Guard("memory://"), contract=contract())  # type: ignore[method-assign]
    for _ in range(2):
        app.test_client().get("/")
    assert warned(caplog) == [SLIP]


@pytest.mark.parametrize(
    ("rule", "prefix", "is_served"),
    [
        ("POST /refunds", "", True),
        ("PUT /refunds", "", False),
        ("* /refunds", "", True),
        ("POST /v1/refunds", "", False),
        ("POST /v1/refunds", "/v1", True),
        ("POST /refunds/7/parts", "", False),
        ("POST /files/a/b/c", "", True),
        ("POST /static/logo", "", True),
    ],
)
def test_rule_is_served_if_a_route_may_match_it(rule: str, prefix: str, is_served: bool) -> None:
    app = starlette(Mount("/static", StaticFiles(check_dir=False, directory="none")))
    assert (unserved(Contract(Rule(rule)), starlette_served(app), prefix) == []) == is_served


def test_app_of_an_unknown_kind_is_not_judged() -> None:
    assert unserved(contract(), starlette_served(object())) == []
    odd = starlette(object())
    assert unserved(contract(), starlette_served(odd)) == []


def test_route_hidden_by_the_status_lookup_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    for status_path, expected in (("/idempotency", 1), ("/else", 0), (None, 0)):
        caplog.clear()
        app = Starlette(routes=[Route("/idempotency", print)])
        app.add_middleware(asgi.IdempotencyMiddleware, guard=Guard("memory://"), status_path=status_path)
        with live(app) as client:
            client.delete("/")
        assert len([record for record in caplog.records if "status lookup hides" in record.message]) == expected


def test_status_path_none_leaves_the_route_to_the_app() -> None:
    async def own(request: Any) -> PlainTextResponse:
        return PlainTextResponse("mine")

    app = Starlette(routes=[Route("/idempotency", own)])
    app.add_middleware(asgi.IdempotencyMiddleware, guard=Guard("memory://"), status_path=None)
    with live(app) as client:
        assert client.get("/idempotency?operation=POST /x&key=k").text == "mine"
