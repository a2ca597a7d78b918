"""Every transport, on real sockets, against a server that does what networks do."""

from __future__ import annotations

import io
import json
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from aiohttp import ClientError
from httpx import TransportError
from urllib3.exceptions import HTTPError

from oncemore.client.deadlines import no_sleeping
from oncemore.client.errors import RetriesExhausted
from oncemore.client.httpx import RetryTransport
from oncemore.client.retry import Retry
from oncemore.client.story import RetryEvent
from oncemore.errors import ConfigurationError, InvalidKey

from .server import (
    Act,
    Server,
    answer,
    close,
    effect,
    hang,
    performed,
    problem,
    raw,
    reset,
    response,
    then,
    trickle,
)

QUICK = Retry(base=0.005, cap=0.02, deadline=5.0, budget=None)
BODY = b'{"amount": 100}'
JSON = {"Content-Type": "application/json"}

cut_short = then(effect, raw(response(201, {}, b"half", length=100)))
FAILURES: dict[str, Act] = {
    "500": answer(500),
    "502": answer(502),
    "503": answer(503),
    "504": answer(504),
    "429": answer(429),
    "408": answer(408),
    "reset before the effect": reset,
    "reset after the effect": then(effect, reset),
    "closed without an answer": close,
    "answer cut in its headers": then(effect, raw(b"HTTP/1.1 201 Cre")),
    "answer cut in its body": cut_short,
    "answer reset in its body": then(effect, raw(response(201, {}, b"half", length=100), reset)),
    "no HTTP at all": raw(b"SSH-2.0-OpenSSH_9.6\r\n\r\n"),
    "retryable problem": problem(409, error_code="CONFLICT.idempotency.in_progress", retryable=True),
    "in flight elsewhere": answer(409, retry_after="0"),
    "hinted by Stripe's header": answer(400, stripe_should_retry="true"),
}


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)
def test_keyed_post_is_retried_with_one_effect(library: Any, failure: Act) -> None:
    with Server(failure, failure) as server:
        reply = library(QUICK).request("POST", f"{server.url}/refunds", BODY, JSON)
    assert reply.status == 201
    assert [visit.body for visit in server.visits] == [BODY] * 3
    assert len({visit.key for visit in server.visits}) == 1
    assert list(server.effects.values()) == [1]
    assert reply.story.key == server.visits[0].key
    assert len(reply.story.attempts) == 3


def test_other_4xx_are_final(library: Any) -> None:
    for status in (400, 401, 403, 404, 405, 409, 410, 412, 413, 415, 422, 425):
        with Server(answer(status)) as server:
            assert library(QUICK).request("POST", server.url, BODY).status == status
        assert len(server.visits) == 1, status


FINAL: dict[str, Act] = {
    "replayed": answer(500, idempotency_status="replayed"),
    "replayed by Stripe": answer(500, idempotent_replayed="true"),
    "told not to": answer(503, stripe_should_retry="false"),
    "not retryable": problem(503, retryable=False),
    "mismatch": problem(409, error_code="CONFLICT.idempotency.payload_mismatch", retryable=False),
    "mismatch by its code alone": problem(409, error_code="CONFLICT.idempotency.payload_mismatch"),
    "provider has it": problem(500, error_code="PROVIDER.duplicate"),
}


def test_the_servers_own_word_beats_the_status(library: Any) -> None:
    for name, last_word in FINAL.items():
        with Server(last_word) as server:
            assert library(QUICK).request("POST", server.url, BODY).status >= 400
        assert len(server.visits) == 1, name


@pytest.mark.parametrize("given", [3, "user_facing"])
def test_value_that_is_no_policy_is_refused(given: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"give a Retry, such as Retry\(attempts=3\)"):
        RetryTransport(retry=given)


def test_the_callers_own_key_is_kept(library: Any) -> None:
    with Server(answer(503)) as server:
        library(QUICK).request("POST", server.url, BODY, {"Idempotency-Key": "order-17"})
    assert [visit.key for visit in server.visits] == ["order-17"] * 2


def test_two_calls_are_two_operations(library: Any) -> None:
    client = library(QUICK)
    with Server() as server:
        client.request("POST", server.url, BODY)
        client.request("POST", server.url, BODY)
    assert len({visit.key for visit in server.visits}) == 2


@pytest.mark.parametrize(("method", "keyed"), [("GET", False), ("POST", True), ("PATCH", True), ("DELETE", True)])
def test_unsafe_methods_get_a_key(library: Any, method: str, keyed: bool) -> None:
    with Server() as server:
        library(QUICK).request(method, server.url)
    assert (server.visits[0].key is not None) is keyed


def test_an_empty_key_is_refused_before_anything_is_sent(library: Any) -> None:
    with Server() as server, pytest.raises(InvalidKey):
        library(QUICK).request("POST", server.url, BODY, {"Idempotency-Key": ""})
    assert not server.visits


def test_key_can_be_quoted(library: Any) -> None:
    with Server() as server:
        library(QUICK, quoted=True, make_key=lambda: "8e03").request("POST", server.url, BODY)
    assert server.visits[0].key == '"8e03"'


@pytest.mark.parametrize("failure", [reset, then(effect, reset), answer(503)], ids=["reset", "late reset", "503"])
def test_a_post_without_a_key_is_not_sent_twice(library: Any, failure: Act) -> None:
    with Server(failure, default=performed()) as server, suppress(OSError, HTTPError, TransportError, ClientError):
        assert library(QUICK, make_key=None).request("POST", server.url, BODY).status == 503
    assert len(server.visits) == 1


def test_post_without_key_is_retried_if_unsent(library: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with no_sleeping(), pytest.raises(RetriesExhausted) as caught:
        library(QUICK, make_key=None).request("POST", f"http://127.0.0.1:{port}", BODY)
    story = caught.value.story
    assert story is not None
    assert len(story.attempts) == 5
    assert story.known == "not_performed"


def large_parts() -> Iterator[bytes]:
    yield from (b"x" * 65536 for _ in range(4))


def test_a_body_that_cannot_be_sent_twice_is_not_retried(library: Any) -> None:
    with Server(answer(503)) as server:
        reply = library(QUICK).request("POST", server.url, large_parts())
    assert reply.status == 503
    assert reply.story.reason == "body"
    assert [len(visit.body) for visit in server.visits] == [4 * 65536]


@pytest.mark.parametrize("size", [10, 3 * 1024 * 1024], ids=["small", "large"])
def test_a_file_is_sent_again_whole_or_not_at_all(library: Any, size: int) -> None:
    with Server(answer(503)) as server:
        reply = library(QUICK).request("POST", server.url, io.BytesIO(b"x" * size))
    assert all(visit.body == b"x" * size for visit in server.visits)
    assert reply.status == 201 if len(server.visits) == 2 else reply.story.reason == "body"


SLOW: dict[str, Act] = {
    "no answer": hang,
    "headers": trickle(response(200, {}, b"x" * 100)),
    "body": raw(response(200, {}, b"", length=100), trickle(b"x" * 100)),
    "chunks": raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", trickle(b"1\r\nx\r\n" * 100)),
}


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("slow", SLOW.values(), ids=SLOW)
def test_the_deadline_cuts_a_hanging_attempt(library: Any, slow: Act, method: str) -> None:
    """A byte every 100 ms keeps every read timeout happy for 10 s and more."""
    begun = time.monotonic()
    with Server(default=slow) as server, pytest.raises(Exception, match=r"time|deadline|Time"):
        library(Retry(deadline=0.5, budget=None)).request(method, server.url)
    assert time.monotonic() - begun < 3


def test_an_attempt_that_hangs_is_cut_and_tried_again(library: Any) -> None:
    with Server(then(effect, hang)) as server:
        reply = library(Retry(attempt_timeout=0.3, base=0.01, budget=None)).request("POST", server.url, BODY)
    assert reply.status == 201
    assert list(server.effects.values()) == [1]
    assert reply.story.attempts[0].verdict.name == "timeout"


@pytest.mark.parametrize("failure", [answer(503), reset], ids=["503", "reset"])
def test_after_a_pause_that_outlasted_the_deadline_nothing_is_sent(library: Any, failure: Act) -> None:
    """The machine was busy, and the pause took longer than it should."""

    def dawdle(event: RetryEvent) -> None:
        time.sleep(0.5 if event.kind == "retrying" else 0)

    client = library(Retry(deadline=0.4, base=0.01, budget=None), observers=[dawdle])
    with Server(failure) as server, pytest.raises(RetriesExhausted) as caught:
        client.request("POST", server.url, b"x")
    assert caught.value.story is not None
    assert caught.value.story.reason == "deadline"
    assert len(server.visits) == len(caught.value.story.attempts) == 1


def test_a_server_that_does_not_read_is_cut(library: Any) -> None:
    """The body does not fit into the socket's buffers, and nobody takes it out of them."""
    with socket.create_server(("127.0.0.1", 0), backlog=5) as deaf:
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        begun = time.monotonic()
        with pytest.raises(RetriesExhausted):
            library(Retry(deadline=0.5, budget=None)).request("POST", url, b"x" * 16 * 1024 * 1024)
    assert time.monotonic() - begun < 3


def test_the_time_left_is_told_to_the_server(library: Any) -> None:
    with Server(answer(503)) as server:
        library(Retry(deadline=5, attempt_timeout=3, base=0.01)).request("POST", server.url, BODY)
    first, second = (float(visit.headers["x-request-timeout"]) for visit in server.visits)
    assert first == second == 3
    with Server() as server:
        library(Retry(deadline=5)).request("POST", server.url, BODY)
    assert 4.9 < float(server.visits[0].headers["x-request-timeout"]) <= 5


@pytest.mark.parametrize("wish", ["1", "Sun, 06 Nov 1994 08:49:38 GMT"])
def test_retry_after_beats_the_backoff(library: Any, wish: str) -> None:
    date = "Sun, 06 Nov 1994 08:49:37 GMT"
    with no_sleeping() as slept, Server(answer(503, retry_after=wish, date=date)) as server:
        library(Retry(base=0.001, budget=None)).request("POST", server.url, BODY)
    assert len(slept) == 1
    assert 1 <= slept[0] <= 1.1


def test_unreadable_retry_after_is_ignored(library: Any) -> None:
    for nonsense in ("-1", "1.5", "+5", "soon", ""):
        with no_sleeping() as slept, Server(answer(503, retry_after=nonsense)) as server:
            library(Retry(base=0.001, cap=0.01, budget=None)).request("POST", server.url, BODY)
        assert slept[0] <= 0.01, nonsense


def test_a_retry_after_beyond_the_deadline_ends_it_now(library: Any) -> None:
    begun = time.monotonic()
    with Server(answer(429, retry_after="60")) as server:
        reply = library(Retry(deadline=10)).request("POST", server.url, BODY)
    assert reply.status == 429
    assert reply.story.reason == "deadline"
    assert len(server.visits) == 1
    assert time.monotonic() - begun < 5


def test_408_is_retried_at_once_only_the_first_time(library: Any) -> None:
    with no_sleeping() as slept, Server(answer(408), answer(408)) as server:
        assert library(Retry(budget=None)).request("POST", server.url, BODY).status == 201
    assert len(slept) == 1  # the first pause was none
    assert slept[0] >= 0.2


def test_the_last_answer_is_returned_with_the_story(library: Any) -> None:
    with no_sleeping() as slept, Server(default=answer(503)) as server:
        reply = library(Retry.playbook(budget=None)).request("POST", server.url, BODY)
    assert reply.status == 503
    assert len(server.visits) == 5
    assert reply.story.reason == "attempts"
    assert reply.story.known == "unknown"
    assert [round(a.delay, 6) for a in reply.story.attempts[1:]] == [round(delay, 6) for delay in slept]
    for delay, (low, high) in zip(slept, [(0.1, 0.2), (0.2, 0.4), (0.4, 0.8), (0.8, 1.6)], strict=True):
        assert low <= delay <= high


@pytest.mark.parametrize("status", [307, 308])
def test_a_redirected_operation_keeps_its_key(library: Any, status: int) -> None:
    with Server(answer(503), answer(status, location="/elsewhere"), answer(503)) as server:
        reply = library(QUICK).request("POST", f"{server.url}/here", BODY, JSON)
    assert reply.status == 201
    assert [visit.path for visit in server.visits] == ["/here", "/here", "/elsewhere", "/elsewhere"]
    assert len({visit.key for visit in server.visits}) == 1
    assert server.visits[-1].body == BODY


def test_a_get_is_tried_again_when_its_document_breaks_off(library: Any) -> None:
    whole = json.dumps({"items": list(range(100))}).encode()
    broken = raw(response(200, JSON, whole[:50], length=len(whole)))
    with Server(broken, default=answer(200, whole)) as server:
        reply = library(QUICK).request("GET", server.url)
    assert reply.body == whole
    assert len(server.visits) == 2


def test_stale_pooled_connection_does_not_fail_the_operation(library: Any) -> None:
    client = library(QUICK)
    with Server(then(performed(), close), default=performed()) as server:
        assert client.request("POST", server.url, BODY).status == 201
        assert client.request("POST", server.url, BODY).status == 201
    assert list(server.effects.values()) == [1, 1]


def test_errors_are_also_those_of_the_library(library: Any) -> None:
    with no_sleeping(), Server(default=reset) as server, pytest.raises(RetriesExhausted) as caught:
        library(QUICK).request("POST", server.url, BODY)
    parents = {kind.__module__.partition(".")[0] for kind in type(caught.value).__mro__}
    assert parents & {"httpx", "requests", "urllib3", "aiohttp"}
    assert caught.value.key == server.visits[0].key
    assert str(caught.value.key) not in str(caught.value)
