"""The Django door: sync and async views under gunicorn, wsgiref and uvicorn; decorators, DRF, Ninja; Django's own ways."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from examples.process import Server

from .raw_http import RawConnection, chunked, head
from .served import gunicorn, until, uvicorn, wsgiref

APP = "tests.doors.apps_django_settings"
NOT_KEPT = "CONFLICT.idempotency.outcome_not_kept"


def start(kind: str, folder: Path) -> Server:
    environment = {
        "DJANGO_SETTINGS_MODULE": APP,
        "STORE": f"sqlite:///{folder}/once.db",
        "DATABASE": str(folder / "django.db"),
    }
    if kind == "gunicorn":
        return gunicorn(f"{APP}:wsgi()", "--threads", "16", **environment)
    if kind == "uvicorn":
        return uvicorn(f"{APP}:asgi", "--factory", **environment)
    return wsgiref(f"{APP}:wsgi", **environment)


@pytest.fixture(scope="module", params=["gunicorn", "wsgiref", "uvicorn"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The project, by each server in turn."""
    with start(request.param, tmp_path_factory.mktemp("django")) as server:
        yield server


class Caller:
    """Sends the same request repeatedly, under a key, a case and a session of its own."""

    def __init__(self, url: str) -> None:
        self.case = self.key = uuid.uuid4().hex
        self.client = httpx.Client(base_url=url, timeout=20, verify=False)
        self.client.headers["Authorization"] = f"Bearer {uuid.uuid4().hex}"

    def ask(self, path: str, key: str | None = "", method: str = "POST", **options: Any) -> httpx.Response:
        headers = {**({} if key is None else {"Idempotency-Key": key or self.key}), **options.pop("headers", {})}
        params = {"case": self.case, **options.pop("params", {})}
        return self.client.request(method, path, headers=headers, params=params, **options)

    def told(self, what: str = "runs") -> int:
        return int(self.client.get("/told", params={"case": self.case}).json()[what])


@pytest.fixture
def caller(server: Server) -> Iterator[Caller]:
    caller = Caller(server.url)
    with caller.client:
        yield caller


@pytest.fixture(params=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> str:
    """The kind of view that is asked: sync or async."""
    return str(request.param)


def said(response: httpx.Response) -> str | None:
    return response.headers.get("idempotency-status")


# ── Responses ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_repeated_request_is_replayed(caller: Caller, kind: str) -> None:
    """Only the first client gets the cookie."""
    first, second = caller.ask(f"/{kind}/create"), caller.ask(f"/{kind}/create")
    assert (first.status_code, second.status_code, caller.told()) == (201, 201, 1)
    assert first.content == second.content
    assert first.json()["key"] == caller.key
    assert (said(first), said(second)) == ("stored", "replayed")
    assert (first.headers["location"], second.headers["location"]) == ("/orders/1", "/orders/1")
    assert ("set-cookie" in first.headers, "set-cookie" in second.headers) == (True, False)
    assert second.headers["content-type"] == "application/json"


def test_headers_of_marked_strings_are_kept_as_text(caller: Caller, kind: str) -> None:
    """A marked text is of no type that a store can write down: the outcome would be lost, and the effect happen again.

    (wsgiref itself refuses it, after that: the first client gets its 500.)
    """
    first, second = caller.ask(f"/{kind}/rendered"), caller.ask(f"/{kind}/rendered")
    assert (first.status_code, said(first)) in [(201, "stored"), (500, None)]
    assert (second.status_code, said(second), second.headers["location"]) == (201, "replayed", "/orders/1")
    assert caller.told() == 1


def test_ten_concurrent_requests_run_once(caller: Caller, kind: str) -> None:
    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda _: caller.ask(f"/{kind}/slow", params={"pause": 0.3}), range(10)))
    assert {answer.status_code for answer in answers} == {201}
    assert (caller.told(), caller.told("effects")) == (1, 1)


def test_exception_gets_djangos_page_and_runs_again(caller: Caller, kind: str) -> None:
    answers = [caller.ask(f"/{kind}/fail") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [500, 201, 201]
    assert "<h1>Server Error (500)</h1>" in answers[0].text
    assert caller.told() == 2


def test_atomic_requests_commit_before_the_settle(caller: Caller) -> None:
    """With ATOMIC_REQUESTS, the effect of the failed attempt is rolled back."""
    assert [caller.ask("/atomic").status_code for _ in range(3)] == [500, 201, 201]
    assert (caller.told(), caller.told("effects")) == (2, 1)


def test_a_stream_is_passed_on_and_not_repeated(caller: Caller, kind: str) -> None:
    first, second = caller.ask(f"/{kind}/stream"), caller.ask(f"/{kind}/stream")
    assert (first.text, said(first)) == ("0 1 ", "unstored")
    assert second.json()["error_code"] == NOT_KEPT
    assert caller.told() == 1


def test_a_stream_can_be_kept_whole(caller: Caller, kind: str) -> None:
    answers = [caller.ask(f"/{kind}/buffered") for _ in range(2)]
    assert [(answer.text, said(answer)) for answer in answers] == [("0 1 ", "stored"), ("0 1 ", "replayed")]
    large = Caller(str(caller.client.base_url))
    params = {"many": 20, "size": 100_000}
    assert len(large.ask(f"/{kind}/buffered", params=params).content) == 2_000_000
    assert large.ask(f"/{kind}/buffered", params=params).json()["error_code"] == NOT_KEPT


def test_released_stream_keeps_its_lease_then_runs_again(caller: Caller, kind: str) -> None:
    params = {"pause": 250, "many": 4}
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(caller.ask, f"/{kind}/released", params=params)
        until(lambda: caller.told() == 1)
        time.sleep(0.5)  # longer than the lease
        early = caller.ask(f"/{kind}/released", params=params, headers={"X-Request-Timeout": "0"})
        assert early.json()["error_code"] == "CONFLICT.idempotency.in_progress"
        assert first.result().text == "0 1 2 3 "
    until(lambda: caller.ask(f"/{kind}/released", params=params).status_code == 200)
    assert caller.told() == 2


def test_released_stream_without_a_reader_runs_again(caller: Caller, kind: str, server: Server) -> None:
    """Its client left before it began, and its lease must not be renewed for ever."""
    connection = RawConnection(server.url)
    target = f"/{kind}/released?case={caller.case}&before=300&many=2"
    connection.send(head("POST", target, fields(caller, ("Content-Length", "0"))))
    until(lambda: caller.told() == 1)
    connection.reset()
    params, alice = {"before": 300, "many": 2}, {"Authorization": "Bearer alice"}
    assert caller.ask(f"/{kind}/released", params=params, headers=alice).text == "0 1 "
    assert caller.told() == 2


@pytest.mark.parametrize(("size", "kept"), [(1000, True), (5000, False)])
def test_a_file_is_kept_if_it_is_small(caller: Caller, kind: str, size: int, kept: bool) -> None:
    first, second = (caller.ask(f"/{kind}/file", params={"size": size}) for _ in range(2))
    assert (len(first.content), said(first)) == (size, "stored" if kept else "unstored")
    if kept:
        assert (second.content, said(second)) == (first.content, "replayed")
    else:
        assert second.json()["error_code"] == NOT_KEPT
    assert caller.told() == 1


def test_repeating_redirect_is_not_recorded(caller: Caller, kind: str) -> None:
    """A client that follows it sends the same key."""
    for _ in range(2):
        answer = caller.ask(f"/{kind}/redirect", follow_redirects=True)
        assert (answer.status_code, answer.json()["run"]) == (201, 2)
        assert said(answer.history[0]) == "unstored"


# ── Requests ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("how", ["body", "read", "lines"])
def test_view_can_read_the_body_again(caller: Caller, kind: str, how: str) -> None:
    answer = caller.ask(f"/{kind}/body", params={"how": how}, content=b"one\ntwo")
    assert answer.json()["found"] == (["one\n", "two"] if how == "lines" else "one\ntwo")


def test_view_can_read_forms_and_files_again(caller: Caller, kind: str) -> None:
    form = caller.ask(f"/{kind}/body", params={"how": "form"}, data={"a": "1"})
    assert form.json()["found"] == {"a": "1"}
    large = "x" * 60_000  # more than Django reads into memory, which does not count for files
    answer = caller.ask(
        f"/{kind}/body", "another", params={"how": "form"}, data={"a": "1"}, files={"file": ("name", large.encode())}
    )
    assert answer.json()["found"] == {"a": "1", "file": large}


def test_djangos_own_limit_still_holds(caller: Caller, kind: str) -> None:
    answer = caller.ask(f"/{kind}/body", params={"how": "body"}, content=b"x" * 60_000)
    assert answer.status_code in (400, 413)
    assert "problem" not in answer.headers["content-type"]


def test_a_body_over_the_rules_limit_is_refused(caller: Caller, kind: str) -> None:
    answer = caller.ask(f"/{kind}/small", params={"how": "body"}, content=b"x" * 1001)
    assert (answer.status_code, answer.json()["error_code"]) == (413, "VALIDATION.payload_too_large")
    assert caller.told() == 0


def fields(caller: Caller, *more: tuple[str, str]) -> list[tuple[str | bytes, str | bytes]]:
    usual = [("Host", "localhost"), ("Authorization", "Bearer alice"), ("Idempotency-Key", caller.key)]
    return [*usual, *more]


def test_a_body_in_chunks_is_read_or_refused(
    caller: Caller, kind: str, server: Server, request: pytest.FixtureRequest
) -> None:
    """Without the middleware, Django's view would get an empty body under WSGI."""
    with RawConnection(server.url) as connection:
        target = f"/{kind}/body?how=body&case={caller.case}"
        lines = fields(caller, ("Transfer-Encoding", "chunked"))
        connection.send(head("POST", target, lines) + chunked(b"one ", b"two"))
        answer = connection.response()
    if "wsgiref" in request.node.name:
        assert answer.status == 400
        assert caller.told() == 0
    else:
        assert (answer.status, answer.body) == (200, b'{"found": "one two"}')


def test_disconnect_in_mid_body_runs_nothing(caller: Caller, kind: str, server: Server) -> None:
    connection = RawConnection(server.url)
    target = f"/{kind}/body?how=body&case={caller.case}"
    connection.send(head("POST", target, fields(caller, ("Content-Length", "100"))) + b"only this")
    connection.close()
    time.sleep(0.1)
    assert caller.told() == 0


@pytest.mark.parametrize("polite", [True, False])
def test_outcome_is_kept_after_disconnect_during_the_view(
    caller: Caller, kind: str, server: Server, polite: bool
) -> None:
    """Django cancels the task of a client that has left; the middleware's goes on, and does not block the loop."""
    connection = RawConnection(server.url)
    target = f"/{kind}/slow?case={caller.case}&pause=0.5"
    connection.send(head("POST", target, fields(caller, ("Content-Length", "0"))))
    until(lambda: caller.told() == 1)
    if polite:
        connection.close()
    else:
        connection.reset()
    assert caller.told("effects") == 0  # the server answers others while the view is still at work
    answer = caller.ask(f"/{kind}/slow", params={"pause": 0.5}, headers={"Authorization": "Bearer alice"})
    assert (answer.status_code, said(answer)) == (201, "replayed")
    assert (caller.told(), caller.told("effects")) == (1, 1)


def test_conditional_updates_ask_the_view_itself(caller: Caller, kind: str) -> None:
    name = caller.case
    answers = [
        caller.ask(f"/{kind}/thing/{name}", key, method="PUT", headers={"If-Match": tag} if tag else {})
        for name, key, tag in [(name, "a", ""), (name, "a", '"v9"'), (name, "a", '"v0"'), (name, "b", '"v0"')]
    ]
    assert [answer.status_code for answer in answers] == [428, 412, 200, 412]
    gone = caller.ask(f"/{kind}/thing/none", "c", method="PUT", headers={"If-Match": "*"})
    assert (gone.status_code, caller.told()) == (412, 1)


@pytest.mark.parametrize("header", ["If-None-Match", "If-Modified-Since", "If-Unmodified-Since", "Range", "If-Range"])
def test_other_conditional_headers_are_not_sent_with_the_get(caller: Caller, kind: str, header: str) -> None:
    """A cache on the way adds them: the GET would get 304 or a part, and the ETag would not be found."""
    headers = {"If-Match": '"v0"', header: '"v0"'}
    assert caller.ask(f"/{kind}/thing/{caller.case}", "a", method="PUT", headers=headers).status_code == 200


def test_a_key_may_be_in_the_body(caller: Caller, kind: str) -> None:
    answers = [caller.ask(f"/{kind}/by-body", None, json={"id": caller.key}) for _ in range(2)]
    assert [said(answer) for answer in answers] == ["stored", "replayed"]
    assert caller.ask(f"/{kind}/by-body", None, json={}).status_code == 400


# ── Users ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_keys_belong_to_the_user_who_is_logged_in(caller: Caller, kind: str) -> None:
    """Credentials in the headers do not count, and a new session may begin between two attempts."""
    for user, status in [("ann", "stored"), ("bob", "stored"), ("ann", "replayed"), ("bob", "replayed")]:
        caller.client.cookies.clear()
        caller.client.headers["Authorization"] = uuid.uuid4().hex
        caller.client.post("/log-in", params={"user": user})
        assert said(caller.ask(f"/{kind}/create")) == status
        query = {"operation": f"POST /{kind}/create", "key": caller.key}
        assert caller.client.get("/idempotency", params=query).json()["state"] == "settled"
    caller.client.cookies.clear()
    assert caller.client.get("/idempotency", params=query).status_code == 404
    assert caller.told() == 2


def test_csrf_failure_is_not_kept(caller: Caller) -> None:
    """A 403 is not kept, so that the same key passes with the token."""
    refused = caller.ask("/form")
    token = caller.client.get("/token").text
    passed = [caller.ask("/form", headers={"X-CSRFToken": token}) for _ in range(2)]
    assert (refused.status_code, said(refused)) == (403, "unstored")
    assert [(answer.status_code, said(answer)) for answer in passed] == [(200, "stored"), (200, "replayed")]
    assert caller.told() == 1


# ── Rules on views ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("method", "path", "unkeyed"),
    [
        ("POST", "/marked/function/7/", 400),
        ("DELETE", "/marked/function/7/", 400),
        ("POST", "/marked/regex/in/", 400),
        ("POST", "/marked/regex/inbound/", 400),
        ("POST", "/marked/async", 400),
        ("POST", "/marked/optional", 200),
        ("POST", "/marked/by-method", 400),
        ("PUT", "/marked/by-method", 200),
        ("POST", "/marked/by-dispatch", 400),
        ("POST", "/marked/by-class", 400),
        ("POST", "/marked/as-view", 400),
        ("POST", "/marked/rest", 400),
        ("POST", "/marked/rest-function", 400),
        ("POST", "/marked/orders/", 400),
        ("POST", "/marked/orders.json", 400),
        ("POST", "/marked/orders/7/capture/", 400),
        ("DELETE", "/marked/orders/7/", 200),
        ("POST", "/ninja/sync/7", 400),
        ("PUT", "/ninja/sync/7", 200),
        ("POST", "/ninja/async", 400),
    ],
)
def test_rule_on_a_view_applies_to_its_requests(caller: Caller, method: str, path: str, unkeyed: int) -> None:
    answer = caller.ask(path, None, method=method, json={})
    assert (answer.status_code, caller.told()) == (unkeyed, 0 if unkeyed == 400 else 1)
    if unkeyed == 400:
        assert answer.json()["error_code"] == "VALIDATION.idempotency.key_missing"


@pytest.mark.parametrize(
    "path",
    [
        "/marked/function/7/",
        "/marked/regex/outbound/",
        "/marked/async",
        "/marked/optional",
        "/marked/by-method",
        "/marked/rest",
        "/marked/rest-function",
        "/marked/orders/",
        "/marked/orders/7/capture/",
        "/ninja/sync/7",
        "/ninja/async",
    ],
)
def test_a_view_with_a_rule_runs_once_for_each_key(caller: Caller, path: str) -> None:
    """The REST framework and Ninja read the body after the middleware."""
    answers = [caller.ask(path, json={"a": 1}) for _ in range(2)]
    assert [said(answer) for answer in answers] == ["stored", "replayed"], answers[0].text
    assert answers[0].content == answers[1].content
    assert answers[0].json()["run"] == 1
    assert answers[0].json().get("got", {"a": 1}) == {"a": 1}


@pytest.mark.parametrize(("method", "path"), [("POST", "/marked/exempt"), ("PATCH", "/marked/by-method")])
def test_an_exempt_view_is_left_alone(caller: Caller, method: str, path: str) -> None:
    answers = [caller.ask(path, method=method) for _ in range(2)]
    assert [(answer.json()["run"], said(answer)) for answer in answers] == [(1, None), (2, None)]


def test_decorated_view_without_a_route_is_warned_of(caller: Caller, server: Server) -> None:
    """The REST framework's `api_view` drops a rule on the function inside it."""
    caller.ask("/sync/create")
    assert "rest_lost" in server.log
    assert "no route" in server.log
    assert server.log.count("has a rule, but no route") == 1


def test_after_the_server_was_killed_the_outcome_is_unknown(kind: str, tmp_path: Path) -> None:
    with start("uvicorn", tmp_path) as server:
        mine = Caller(server.url)
        with pytest.raises(httpx.HTTPError):
            mine.ask(f"/{kind}/brief")
        server.restart()
        time.sleep(0.4)
        answer = mine.ask(f"/{kind}/brief")
        assert (answer.status_code, answer.json()["error_code"]) == (409, "CONFLICT.idempotency.outcome_unknown")


def test_owner_frozen_past_its_lease_answers_with_successors_outcome(kind: str, tmp_path: Path) -> None:
    """Two servers share a ledger."""
    params = {"pause": "0.3"}
    with start("uvicorn", tmp_path) as first, start("uvicorn", tmp_path) as second, ThreadPoolExecutor(1) as pool:
        mine, other = Caller(first.url), Caller(second.url)
        other.key, other.client.headers = mine.key, mine.client.headers
        params["case"] = other.case
        late = pool.submit(mine.ask, f"/{kind}/frozen", params=params)
        mine.case = other.case
        until(lambda: mine.told() == 1)
        os.kill(first.pid, signal.SIGSTOP)
        time.sleep(0.4)
        answer = other.ask(f"/{kind}/frozen", params=params)
        os.kill(first.pid, signal.SIGCONT)
        assert (answer.text, said(answer)) == (f"done by {second.pid}", "stored")
        assert (late.result().text, said(late.result())) == (answer.text, "replayed")
        assert said(other.ask(f"/{kind}/frozen", params=params)) == "replayed"
