"""The WSGI middleware with apps of all shapes that PEP 3333 allows, under every server, on real sockets."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from .apps_quirks import guarded
from .raw_http import RawConnection, chunked, head
from .served import IN_A_THREAD, asked, client, gunicorn, until, uvicorn

NOT_KEPT = "CONFLICT.idempotency.outcome_not_kept"


SERVERS = ["wsgiref", "werkzeug", "waitress", "gunicorn-sync", "gunicorn-gthread"]
# What a server cannot do itself is not asked of the door under it: two requests at a time, and chunked bodies.
SERVE_TWO = [server for server in SERVERS if server != "gunicorn-sync"]
READ_CHUNKS = [server for server in SERVERS if server != "wsgiref"]


@pytest.fixture(scope="module", params=SERVERS)
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of the app, on each server in turn."""
    store = f"sqlite:///{tmp_path_factory.mktemp('once')}/once.db"
    if request.param in IN_A_THREAD:
        door = guarded(store)
        with IN_A_THREAD[request.param](door) as url:
            yield url
        door.guard.close()
        return
    threads = ("--threads", "8") if request.param.endswith("gthread") else ()
    with gunicorn("tests.doors.apps_quirks:make()", *threads, STORE=store) as server:
        yield server.url


class Caller:
    """Sends the same request repeatedly, under a key of its own."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.key = self.case = uuid.uuid4().hex

    def ask(self, path: str, **options: Any) -> httpx.Response:
        return asked(self.url, self.target(path), self.key, **options)

    def target(self, path: str) -> str:
        return f"{path}{'&' if '?' in path else '?'}case={self.case}"

    @property
    def told(self) -> list[str]:
        """Return the events that the app has noted."""
        return client.get(self.url + self.target("/told")).json()  # type: ignore[no-any-return]

    @property
    def runs(self) -> int:
        return self.told.count("run")


@pytest.fixture
def caller(url: str) -> Caller:
    return Caller(url)


def said(response: httpx.Response) -> str | None:
    return response.headers.get("idempotency-status")


@pytest.mark.parametrize(
    ("path", "status", "body"),
    [
        ("/whole", 201, b"one two"),
        ("/writes", 201, b"one two"),
        ("/writes-pieces", 201, b"one two six"),
        ("/closes", 201, b"one two"),
        ("/empty", 201, b""),
        ("/silent", 201, b""),
        ("/nothing", 204, b""),
        ("/fails", 422, b"failed"),
        ("/file?size=9000", 200, b"x" * 9000),
        ("/buffered/stream", 201, b"one two"),
        ("/buffered/writes-more", 201, b"one two six"),
    ],
)
def test_whole_response_is_kept_in_every_form(caller: Caller, path: str, status: int, body: bytes) -> None:
    first, second = caller.ask(path), caller.ask(path)
    assert (first.status_code, first.content, said(first)) == (status, body, "stored")
    assert (second.status_code, second.content, said(second)) == (status, body, "replayed")
    assert first.headers.get("content-type") == second.headers.get("content-type")
    assert caller.runs == 1


def test_an_app_may_call_start_response_with_its_first_chunk(caller: Caller) -> None:
    """Code in its generator has the current operation."""
    first, second = caller.ask("/late"), caller.ask("/late")
    assert first.content == second.content == b"one " + caller.key[:3].encode()
    assert caller.runs == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/stream", b"one two"),
        ("/writes-more", b"one two six"),
        ("/small/file?size=9000", b"x" * 9000),
    ],
)
def test_stream_or_large_response_is_delivered_and_not_repeated(caller: Caller, path: str, body: bytes) -> None:
    first, second = caller.ask(path), caller.ask(path)
    assert (first.content, said(first)) == (body, "unstored")
    assert (second.status_code, second.json()["error_code"]) == (409, NOT_KEPT)
    assert caller.runs == 1


def test_released_stream_runs_again(caller: Caller) -> None:
    for number in (1, 2):
        assert caller.ask("/released/stream").content == b"one two"
        until(lambda number=number: caller.told == ["run", "closed"] * number)  # type: ignore[misc]


@pytest.mark.parametrize("url", SERVE_TWO, indirect=True)
def test_a_released_stream_keeps_its_lease_while_it_lasts(caller: Caller) -> None:
    with RawConnection(caller.url) as connection:
        connection.send(head("POST", caller.target("/released/trickle"), fields(caller, ("Content-Length", "0"))))
        assert connection.start().status == 201
        time.sleep(0.5)  # longer than the lease
        early = caller.ask("/released/trickle", headers={"X-Request-Timeout": "0"})
        assert early.json()["error_code"] == "CONFLICT.idempotency.in_progress"
    assert caller.runs == 1


@pytest.mark.parametrize("path", ["/raises", "/raises-inside", "/starts-twice", "/never-starts", "/body-first"])
def test_failed_request_runs_again(caller: Caller, path: str) -> None:
    """The server answers as it does without the middleware."""
    assert [caller.ask(path).status_code for _ in range(2)] == [500, 500]
    assert caller.runs == 2
    assert caller.told.count("closed") == (2 if path == "/raises-inside" else 0)


@pytest.mark.parametrize("path", ["/broken-stream", "/fails-late"])
def test_a_stream_that_breaks_off_is_not_repeated(caller: Caller, path: str) -> None:
    """The client has received a part of it, and the server cuts the response off."""
    with RawConnection(caller.url) as connection:
        connection.send(head("POST", caller.target(path), fields(caller, ("Content-Length", "0"))))
        start = connection.start()
        assert (start.status, start.header("idempotency-status")) == (201, "unstored")
        rest = connection._input.read()
    assert b"one " in rest
    assert b"never sent" not in rest
    assert (b"\r\n0\r\n" in rest) is False
    assert caller.ask(path).json()["error_code"] == NOT_KEPT
    assert caller.runs == 1
    if path == "/broken-stream":
        until(lambda: caller.told == ["run", "closed"])


def test_an_iterable_is_closed_once(caller: Caller) -> None:
    caller.ask("/closes")
    until(lambda: caller.told == ["run", "closed"])
    assert said(caller.ask("/closes")) == "replayed"
    assert caller.told == ["run", "closed"]


def test_iterable_whose_close_fails_still_counts_as_performed(caller: Caller) -> None:
    with suppress(httpx.HTTPError):  # the server may take it out on the connection
        caller.ask("/closes-badly")
    assert said(caller.ask("/closes-badly")) == "replayed"
    assert caller.told == ["run", "closed"]


@pytest.mark.parametrize(("rule", "again"), [("/", 409), ("/released/", 201)])
def test_a_client_that_leaves_a_stream_ends_it(caller: Caller, rule: str, again: int) -> None:
    """The app's iterable is closed, and a released one may run again."""
    connection = RawConnection(caller.url)
    connection.send(head("POST", caller.target(rule + "slow-stream"), fields(caller, ("Content-Length", "0"))))
    assert connection.start().status == 201
    connection.reset()
    until(lambda: "closed" in caller.told)
    with client.stream(
        "POST",
        caller.url + caller.target(rule + "slow-stream"),
        headers={"Authorization": "Bearer alice", "Idempotency-Key": caller.key},
    ) as response:
        assert response.status_code == again


def fields(caller: Caller, *more: tuple[str, str]) -> list[tuple[str | bytes, str | bytes]]:
    usual = [("Host", "localhost"), ("Authorization", "Bearer alice"), ("Idempotency-Key", caller.key)]
    return [*usual, *more]


def test_app_can_read_the_body_again(caller: Caller) -> None:
    """An app that reads without a limit must not wait for more."""
    assert caller.ask("/reads", content=b"x" * 100_000).content == b"100000 of 100000"
    assert Caller(caller.url).ask("/reads").content == b"0 of 0"


def test_chunked_body_is_read_whole_or_refused(caller: Caller, request: pytest.FixtureRequest) -> None:
    """A server that does not read chunked bodies would pass an empty one on, so nothing runs."""
    with RawConnection(caller.url) as connection:
        request_head = head("POST", caller.target("/reads"), fields(caller, ("Transfer-Encoding", "chunked")))
        connection.send(request_head + chunked(b"one ", b"two"))
        answer = connection.response()
    if "wsgiref" in request.node.name:
        assert (answer.status, json.loads(answer.body)["error_code"]) == (400, "VALIDATION.payload")
        assert caller.runs == 0
    else:
        assert (answer.status, answer.body) == (201, b"7 of 7")


@pytest.mark.parametrize("length", ["x", "-1", "+7", "1_0", "7.0"])
def test_malformed_content_length_is_refused(caller: Caller, length: str) -> None:
    """The middleware refuses it if the server lets it pass."""
    with RawConnection(caller.url) as connection:
        connection.send(head("POST", caller.target("/reads"), fields(caller, ("Content-Length", length))))
        assert connection.response().status == 400
    assert caller.runs == 0


def test_disconnect_in_mid_body_runs_nothing(caller: Caller) -> None:
    connection = RawConnection(caller.url)
    connection.send(head("POST", caller.target("/reads"), fields(caller, ("Content-Length", "100"))) + b"only this")
    connection.close()
    time.sleep(0.1)
    assert caller.runs == 0
    assert caller.ask("/reads").status_code == 201  # and the key is free


TOO_LARGE = [(server, {}) for server in SERVERS] + [
    (server, {"Transfer-Encoding": "chunked"}) for server in READ_CHUNKS
]


@pytest.mark.parametrize(("url", "headers"), TOO_LARGE, indirect=["url"])
def test_a_body_over_the_limit_is_refused(caller: Caller, headers: dict[str, str]) -> None:
    with RawConnection(caller.url) as connection:
        if headers:
            body = chunked(b"x" * 600, b"x" * 600)
            connection.send(head("POST", caller.target("/small/reads"), fields(caller, *headers.items())) + body)
        else:
            length = ("Content-Length", "1200")
            connection.send(head("POST", caller.target("/small/reads"), fields(caller, length)) + b"x" * 1200)
        assert connection.response().status == 413
    assert caller.runs == 0


def test_two_lines_of_one_key_are_refused(caller: Caller) -> None:
    """A WSGI server joins them into one."""
    with RawConnection(caller.url) as connection:
        lines = [("Idempotency-Key", "other"), ("Content-Length", "0")]
        connection.send(head("POST", caller.target("/whole"), fields(caller, *lines)))
        assert connection.response().status == 400
    assert caller.runs == 0


def test_redirect_308_is_not_recorded(caller: Caller) -> None:
    """A client that follows a 308 sends the same key, and the redirected request was not performed."""
    first = caller.ask("/moves")
    assert (first.status_code, said(first)) == (308, "unstored")
    done = caller.ask("/moves", follow_redirects=True)
    assert (done.content, said(done), len(done.history)) == (b"done", "stored", 1)
    again = caller.ask("/moves", follow_redirects=True)  # without the slash, as before: it is the same request
    assert (again.content, said(again), len(again.history)) == (b"done", "replayed", 0)


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_status_lookup_performs_nothing(caller: Caller, method: str) -> None:
    caller.ask("/whole")
    query = {"operation": "POST /whole", "key": caller.key}
    found = asked(caller.url, "/idempotency", None, method=method, params=query)
    assert found.status_code == 200
    assert found.content == b"" if method == "HEAD" else found.json()["response"]["body"] == "one two"
    stranger = {"Authorization": "Bearer mallory"}
    assert asked(caller.url, "/idempotency", None, method="GET", params=query, headers=stranger).status_code == 404
    assert caller.runs == 1


@pytest.mark.parametrize("workers", [("-w", "3"), ("-w", "2", "--threads", "4", "--preload")])
def test_concurrent_requests_run_once_across_processes(tmp_path: Path, workers: tuple[str, ...]) -> None:
    """This holds even if the guard was used before gunicorn forked its workers."""
    environment = {"STORE": f"sqlite:///{tmp_path}/once.db", "LOG": str(tmp_path / "log")}
    with gunicorn("tests.doors.apps_quirks:make()", *workers, **environment) as server, ThreadPoolExecutor(24) as pool:
        keys = [uuid.uuid4().hex for _ in range(3)] * 8
        answers = list(pool.map(lambda key: asked(server.url, f"/waits?case={key}", key), keys))
    assert {answer.status_code for answer in answers} == {201}
    assert sorted((tmp_path / "log").read_text().splitlines()) == sorted(f"{key} run" for key in keys[:3])
    for key in keys[:3]:
        assert len({answer.content for answer, used in zip(answers, keys, strict=True) if used == key}) == 1


def test_after_a_worker_was_killed_the_outcome_is_unknown(tmp_path: Path) -> None:
    """With `hold`, nothing runs until the operation is resolved."""
    environment = {"STORE": f"sqlite:///{tmp_path}/once.db", "LOG": str(tmp_path / "log")}
    with gunicorn("tests.doors.apps_quirks:make()", **environment) as server:
        with pytest.raises(httpx.HTTPError):
            asked(server.url, "/brief/dies?case=1", "a key")
        time.sleep(0.4)
        answer = asked(server.url, "/brief/dies?case=1", "a key")
    assert (answer.status_code, answer.json()["error_code"]) == (409, "CONFLICT.idempotency.outcome_unknown")
    assert (tmp_path / "log").read_text() == "1 run\n"


def test_worker_killed_for_slowness_leaves_an_unknown_outcome(tmp_path: Path) -> None:
    """Gunicorn interrupts it, and a retry immediately gets `outcome_unknown`."""
    environment = {"STORE": f"sqlite:///{tmp_path}/once.db", "LOG": str(tmp_path / "log")}
    with gunicorn("tests.doors.apps_quirks:make()", "--timeout", "1", **environment) as server:
        assert asked(server.url, "/hangs?case=1", "a key").status_code == 500
        answer = asked(server.url, "/hangs?case=1", "a key")
    assert (answer.status_code, answer.json()["error_code"]) == (409, "CONFLICT.idempotency.outcome_unknown")
    assert (tmp_path / "log").read_text() == "1 run\n"


def test_redirect_307_is_not_recorded_under_asgi() -> None:
    """Starlette's router answers with 307 if a slash is missing."""
    with uvicorn("tests.doors.apps_slash:app") as server:
        answers = [asked(server.url, "/orders", "a", follow_redirects=True) for _ in range(2)]
    assert [(answer.text, said(answer)) for answer in answers] == [("run 1", "stored"), ("run 1", "replayed")]
    assert said(answers[0].history[0]) == "unstored"
