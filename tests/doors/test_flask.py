"""The WSGI middleware around Flask: rules on views, mounts, streams, files, and Flask's error pages, on real sockets."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from typing import Any

import pytest
from flask import Blueprint, Flask, Response, abort, redirect, request, send_file, stream_with_context
from flask.views import MethodView
from werkzeug.middleware.dispatcher import DispatcherMiddleware
from werkzeug.middleware.proxy_fix import ProxyFix

from oncemore._contract.contract import Contract
from oncemore._contract.rule import Rule
from oncemore._ledger.guard import Guard
from oncemore._ledger.model import Outcome
from oncemore._runtime.heartbeat import ThreadTimer
from oncemore.errors import ConfigurationError, StoreUnavailable
from oncemore.web.wsgi import IdempotencyMiddleware, current_operation, idempotent

from .served import asked, under_waitress, under_werkzeug, until

Serve = Callable[..., str]


@pytest.fixture
def app() -> Flask:
    app = Flask(__name__, static_folder=None)
    app.runs = []  # type: ignore[attr-defined]
    return app


@pytest.fixture
def guard() -> Iterator[Guard]:
    guard = Guard("memory://")
    yield guard
    guard.close()


@pytest.fixture(params=[under_waitress, under_werkzeug], ids=["waitress", "werkzeug"])
def serve(request: pytest.FixtureRequest, guard: Guard) -> Iterator[Serve]:
    """Return a function that serves a Flask app behind the middleware, and returns its address."""
    running: list[Any] = []

    def start(app: Any, **options: Any) -> str:
        if isinstance(app, Flask):
            app.wsgi_app = IdempotencyMiddleware(app.wsgi_app, guard=guard, **options)  # type: ignore[method-assign]
        running.append(request.param(app))
        url: str = running[-1].__enter__()
        return url

    yield start
    for server in running:
        server.__exit__(None, None, None)


def codes(*responses: Any) -> list[int]:
    return [response.status_code for response in responses]


def test_a_rule_on_a_view_is_found(app: Flask, serve: Serve) -> None:
    """The rule gets the methods and path of the view."""

    @app.post("/orders/<int:number>")
    @idempotent(key="required", name="orders.create")
    def create(number: int) -> str:
        return f"{number} {current_operation().key} {current_operation().attempt}"

    @app.put("/orders/<int:number>")
    def put(number: int) -> str:
        return "put"

    contract = Contract()
    url = serve(app, contract=contract)
    assert asked(url, "/orders/7", None).json()["error_code"] == "VALIDATION.idempotency.key_missing"
    assert asked(url, "/orders/7", "a").text == asked(url, "/orders/7", "a").text == "7 a 1"
    assert asked(url, "/orders/7", None, method="PUT").text == "put"
    assert contract.rule("orders.create").match == "POST /orders/{number}"


def test_rules_on_blueprints_and_view_classes_are_found(app: Flask, serve: Serve) -> None:
    api = Blueprint("api", __name__, url_prefix="/api")

    @idempotent(key="required")
    class Thing(MethodView):
        def post(self) -> str:
            return "posted"

        @idempotent(key="optional")
        def put(self) -> str:
            return "put"

    api.add_url_rule("/things/<path:rest>", view_func=lambda rest: Thing.as_view("thing")(), methods=["DELETE"])
    api.add_url_rule("/thing", view_func=Thing.as_view("thing"))
    app.register_blueprint(api)
    url = serve(app)
    assert codes(asked(url, "/api/thing", None), asked(url, "/api/thing", "a")) == [400, 200]
    assert codes(asked(url, "/api/thing", None, method="PUT")) == [200]


def test_rules_are_found_below_other_middlewares_and_mounts(app: Flask, serve: Serve, guard: Guard) -> None:
    @app.post("/orders")
    @idempotent(key="required")
    def create() -> str:
        return "created"

    app.wsgi_app = ProxyFix(app.wsgi_app)  # type: ignore[method-assign]
    other = Flask("other", static_folder=None)
    url = serve(IdempotencyMiddleware(DispatcherMiddleware(other, {"/shop": app}), guard=guard))
    assert codes(asked(url, "/shop/orders", None), asked(url, "/shop/orders", "a")) == [400, 200]


def test_mounted_app_matches_rules_with_or_without_prefix(app: Flask, serve: Serve, guard: Guard) -> None:
    """This holds also for a middleware inside the mount; two mounts of one app are two resources."""

    @app.post("/orders")
    @idempotent(key="required", name="orders")
    def create() -> str:
        app.runs.append("order")  # type: ignore[attr-defined]
        return request.script_root

    @app.post("/refunds")
    def refund() -> str:
        return "refunded"

    contract = Contract(Rule("POST /two/refunds", key="required"))
    app.wsgi_app = IdempotencyMiddleware(app.wsgi_app, guard=guard, contract=contract)  # type: ignore[method-assign]
    url = serve(DispatcherMiddleware(Flask("outer", static_folder=None), {"/one": app, "/two": app}))
    assert codes(asked(url, "/one/orders", None), asked(url, "/two/orders", None)) == [400, 400]
    assert codes(asked(url, "/one/refunds", None), asked(url, "/two/refunds", None)) == [200, 400]
    assert asked(url, "/one/orders", "a").text == "/one"
    assert asked(url, "/two/orders", "a").status_code == 409
    assert app.runs == ["order"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("status_path", ["/idempotency", "/shöp/idempotency"])
def test_the_status_url_of_a_mounted_app_leads_to_it(app: Flask, serve: Serve, guard: Guard, status_path: str) -> None:
    """The URL has the prefix exactly once."""
    begun, let_go = threading.Event(), threading.Event()

    @app.post("/orders")
    @idempotent(key="required", in_flight="accepted")
    def create() -> str:
        begun.set()
        let_go.wait(20)
        return "created"

    app.wsgi_app = IdempotencyMiddleware(app.wsgi_app, guard=guard, status_path=status_path)  # type: ignore[method-assign]
    url = serve(DispatcherMiddleware(Flask("outer", static_folder=None), {"/sh\xc3\xb6p": app}))
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(asked, url, "/shöp/orders", "a")
        assert begun.wait(20)
        location = asked(url, "/shöp/orders", "a").headers["location"]
        let_go.set()
        assert first.result().status_code == 200
    assert location.startswith("/sh%C3%B6p/idempotency?")
    assert asked(url, location, None, method="GET").json()["state"] == "settled"


def test_route_that_no_rule_can_name_fails_all_requests(app: Flask, guard: Guard) -> None:
    """To leave the route silently unguarded would be worse."""

    @app.post("/range/<int:first>-<int:last>")
    @idempotent(key="required")
    def create(first: int, last: int) -> str:
        return "created"

    door = IdempotencyMiddleware(app.wsgi_app, guard=guard)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=r"/range/<int:first>-<int:last>.*contract"):
            door({"REQUEST_METHOD": "GET"}, lambda *_: None)


def test_path_with_other_bytes_than_ascii_is_matched(app: Flask, serve: Serve) -> None:
    @app.post("/objednávky/<name>")
    def create(name: str) -> str:
        return name

    url = serve(app, contract=Contract(Rule("POST /objednávky/{name}", key="template:{path.name}")))
    assert asked(url, "/objedn%C3%A1vky/%C5%BEena", None).headers["idempotency-status"] == "stored"
    assert asked(url, "/objedn%C3%A1vky/%C5%BEena", None).text == "žena"
    assert asked(url, "/objedn%C3%A1vky/%FF", None).status_code == 200


def test_a_streamed_view_keeps_its_request_and_its_operation(app: Flask, serve: Serve) -> None:
    closed = threading.Event()

    @app.post("/export")
    def export() -> Response:
        def rows() -> Iterator[str]:
            yield request.path
            yield current_operation().key

        answer = Response(stream_with_context(rows()))
        answer.call_on_close(closed.set)
        return answer

    url = serve(app)
    first, second = asked(url, "/export", "a"), asked(url, "/export", "a")
    assert (first.text, first.headers["idempotency-status"]) == ("/exporta", "unstored")
    assert second.json()["error_code"] == "CONFLICT.idempotency.outcome_not_kept"
    assert closed.wait(5)


@pytest.mark.parametrize(("size", "kept"), [(1000, True), (2_000_000, False)])
def test_a_file_is_kept_if_it_is_small(app: Flask, serve: Serve, size: int, kept: bool) -> None:
    """Its length is known."""

    @app.post("/file")
    def file() -> Response:
        return send_file(BytesIO(b"x" * size), mimetype="text/plain", etag="v1")

    url = serve(app)
    first, second = asked(url, "/file", "a"), asked(url, "/file", "a")
    assert (len(first.content), first.headers["etag"]) == (size, '"v1"')
    assert codes(first, second) == [200, 200 if kept else 409]


def test_failure_gets_flasks_page_and_runs_again(app: Flask, serve: Serve) -> None:

    @app.post("/orders")
    def create() -> str:
        app.runs.append("order")  # type: ignore[attr-defined]
        if len(app.runs) == 1:  # type: ignore[attr-defined]
            raise RuntimeError("The view fails")
        if len(app.runs) == 2:  # type: ignore[attr-defined]
            abort(503)
        return "created"

    @app.errorhandler(503)
    def later(error: object) -> tuple[str, int]:
        return "come back", 503

    url = serve(app)
    answers = [asked(url, "/orders", "a") for _ in range(4)]
    assert codes(*answers) == [500, 503, 200, 200]
    assert [answer.text for answer in answers[1:]] == ["come back", "created", "created"]
    assert [answer.headers.get("idempotency-status") for answer in answers] == [
        "unstored",
        "unstored",
        "stored",
        "replayed",
    ]


def test_flasks_redirect_to_the_slash_is_not_recorded(app: Flask, serve: Serve) -> None:
    """A retry without the slash gets the outcome of the request with the slash."""

    @app.post("/orders/")
    def create() -> str:
        app.runs.append("order")  # type: ignore[attr-defined]
        return "created"

    @app.post("/done")
    def done() -> Any:
        app.runs.append("done")  # type: ignore[attr-defined]
        return redirect("/orders/1", 303)

    url = serve(app)
    for _ in range(2):
        assert asked(url, "/orders", "a", follow_redirects=True).text == "created"
        assert asked(url, "/done", "a").headers["location"] == "/orders/1"
    assert app.runs == ["order", "done"]  # type: ignore[attr-defined]


def test_missing_optional_key_leaves_the_body_intact(app: Flask, serve: Serve) -> None:

    @app.post("/messages")
    def create() -> dict[str, Any]:
        return {"got": request.get_json()}

    contract = Contract(Rule("POST /messages", key={"from": "body", "at": "/id", "required": False}))
    url = serve(app, contract=contract)
    plain = asked(url, "/messages", None, json={"text": "a"})
    assert plain.json() == {"got": {"text": "a"}}
    assert "idempotency-status" not in plain.headers
    keyed = [asked(url, "/messages", None, json={"id": "1"}) for _ in range(2)]
    assert [answer.headers["idempotency-status"] for answer in keyed] == ["stored", "replayed"]


def test_principal_function_names_the_caller(app: Flask, serve: Serve) -> None:

    @app.post("/orders")
    def create() -> str:
        app.runs.append("order")  # type: ignore[attr-defined]
        return str(len(app.runs))  # type: ignore[attr-defined]

    url = serve(app, principal=lambda environ: environ["HTTP_X_USER"])
    texts = [asked(url, "/orders", "a", headers={"X-User": user}).text for user in ("ann", "bob", "ann", "bob")]
    assert texts == ["1", "2", "1", "2"]
    assert asked(url, "/orders", "a").json()["error_code"] == "INTERNAL.principal_failed"


def test_remote_user_owns_the_key(app: Flask, serve: Serve) -> None:
    """The token that proved it and the client's headers do not count."""

    @app.post("/orders")
    def create() -> str:
        app.runs.append("order")  # type: ignore[attr-defined]
        return str(len(app.runs))  # type: ignore[attr-defined]

    url = serve(app)
    door = app.wsgi_app
    app.wsgi_app = lambda environ, start: door({**environ, "REMOTE_USER": environ["HTTP_SSO"]}, start)  # type: ignore[method-assign]
    asks = [("ann", "1"), ("bob", "2"), ("ann", "3"), ("bob", "4")]
    texts = [
        asked(url, "/orders", "a", headers={"SSO": user, "Remote-User": "ann", "Authorization": token}).text
        for user, token in asks
    ]
    assert texts == ["1", "2", "1", "2"]


def test_unredactable_response_is_not_kept_and_not_repeated(
    app: Flask, serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    def redact(outcome: Outcome) -> Outcome:
        raise ValueError("No idea what is secret here")

    @app.post("/orders")
    def create() -> str:
        app.runs.append("order")  # type: ignore[attr-defined]
        return "created"

    url = serve(app, redact=redact)
    assert asked(url, "/orders", "a").text == "created"
    assert asked(url, "/orders", "a").json()["error_code"] == "CONFLICT.idempotency.outcome_not_kept"
    assert app.runs == ["order"]  # type: ignore[attr-defined]
    assert "redact" in caplog.text


def test_a_rule_may_run_without_a_ledger_and_says_so(
    app: Flask, serve: Serve, guard: Guard, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:

    def down(*_: object, **__: object) -> Any:
        raise StoreUnavailable("It is down")

    @app.post("/<kind>")
    def create(kind: str) -> str:
        return request.get_data(as_text=True)

    contract = Contract(Rule("POST /money"), Rule("POST /news", store_down="run"))
    url = serve(app, contract=contract)
    monkeypatch.setattr(guard.store, "claim", down)
    closed = asked(url, "/money", "a", content=b"text")
    assert (closed.status_code, closed.headers["retry-after"]) == (503, "1")
    with caplog.at_level(logging.ERROR, "oncemore.web"):
        assert asked(url, "/news", "a", content=b"text").text == "text"
    assert "runs unguarded" in caplog.text


def test_conditional_updates_ask_the_view_itself(app: Flask, serve: Serve) -> None:
    """428 without If-Match; 412 with a stale ETag or for a missing resource; the GET itself changes nothing.

    Updates of one resource run one after the other, so a stale update cannot overwrite a newer one.
    """
    things = {"1": 0}

    @app.route("/things/<name>", methods=["GET", "PUT"])
    @idempotent(if_match=True, key="optional")
    def thing(name: str) -> Any:
        if name not in things:
            abort(404)
        if request.method == "PUT":
            things[name] += 1
        return json.dumps(things[name]), 200, {"ETag": f'"v{things[name]}"'}

    url = serve(app)
    answers = [
        asked(url, f"/things/{name}", key, method="PUT", headers={"If-Match": tag} if tag else {})
        for name, key, tag in [
            ("1", None, ""),
            ("1", None, '"v9"'),
            ("1", None, '"v0"'),
            ("1", "a", ""),
            ("1", "a", '"v9"'),
            ("1", "a", '"v9",'),
            ("1", "a", '"v8", "v0"'),
            ("1", "b", '"v0"'),
            ("1", "b", "*"),
            ("2", "c", "*"),
        ]
    ]
    assert codes(*answers) == [428, 400, 400, 428, 412, 412, 200, 412, 200, 412]
    assert "key_missing" in answers[1].text
    assert things == {"1": 2}


@pytest.mark.parametrize("header", ["If-None-Match", "If-Modified-Since", "If-Unmodified-Since", "Range", "If-Range"])
def test_other_conditional_headers_are_not_sent_with_the_get(app: Flask, serve: Serve, header: str) -> None:
    """A cache on the way adds them: the GET would get 304 or a part, and the ETag would not be found."""

    @app.route("/thing", methods=["GET", "PUT"])
    @idempotent(if_match=True)
    def thing() -> Any:
        return "", 304 if request.method == "GET" and header in request.headers else 200, {"ETag": '"7"'}

    answer = asked(serve(app), "/thing", "k", method="PUT", headers={"If-Match": '"7"', header: '"7"'})
    assert answer.status_code == 200


def test_refusal_of_the_views_own_guard_is_its_failure(app: Flask, serve: Serve) -> None:
    """An error of a guard that the view itself uses is the view's failure, not the middleware's refusal."""

    @app.post("/orders")
    def create() -> str:
        raise StoreUnavailable("The view's own store")

    url = serve(app)
    answer = asked(url, "/orders", "a")
    assert answer.status_code == 500
    assert answer.headers["content-type"].startswith("text/html")


@pytest.mark.parametrize("streamed", [False, True])
def test_late_owner_answers_with_its_successors_outcome(
    app: Flask, serve: Serve, guard: Guard, streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease lapses, because it is not renewed, and its own response is not sent."""
    begun, turn = threading.Event(), threading.Event()
    closed: list[str] = []

    @app.post("/orders")
    @idempotent(lease="200ms", on_unknown="retry", wait="5s")
    def create() -> Response:
        app.runs.append("order")  # type: ignore[attr-defined]
        number = len(app.runs)  # type: ignore[attr-defined]
        if number == 1:
            begun.set()
            turn.wait(10)
        answer = Response(iter([f"run {number}"]) if streamed and number == 1 else f"run {number}")
        answer.call_on_close(lambda: closed.append(f"run {number}"))
        return answer

    monkeypatch.setattr(ThreadTimer, "add", lambda *_: None)
    url = serve(app)
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(asked, url, "/orders", "a")
        assert begun.wait(10)
        other = asked(url, "/orders", "a")
        turn.set()
        assert (other.text, other.headers["idempotency-status"]) == ("run 2", "stored")
        assert (late.result().text, late.result().headers["idempotency-status"]) == ("run 2", "replayed")
    until(lambda: sorted(closed) == ["run 1", "run 2"])


def test_inner_middleware_leaves_the_operation_to_the_outer(app: Flask, serve: Serve, guard: Guard) -> None:
    """With one in an app and one in its mounted app, the inner would wait for the outer, which waits for the inner."""

    @app.post("/payments")
    def pay() -> str:
        return current_operation().key + request.get_data(as_text=True)

    app.wsgi_app = IdempotencyMiddleware(app.wsgi_app, guard=guard)  # type: ignore[method-assign]
    url = serve(app)
    answers = [asked(url, "/payments", "k", content="{}") for _ in range(2)]
    assert [answer.headers["idempotency-status"] for answer in answers] == ["stored", "replayed"]
    assert [answer.text for answer in answers] == ["k{}"] * 2


def test_views_own_request_with_the_same_key_is_in_progress(app: Flask, serve: Serve) -> None:
    """It is not taken for the running request, although it has the same key, and does not run beside it."""

    @app.post("/payments")
    def pay() -> str:
        return str(app.test_client().post("/payments", headers=dict(request.headers)).status_code)

    url = serve(app, contract=Contract(in_flight="conflict"))
    assert asked(url, "/payments", "k").text == "409"
