"""Tests of every middleware with responses of all shapes, streams, and clients that leave: part C of the cases."""

from __future__ import annotations

from typing import Any

import pytest

from .app import DATE, KEPT, OWN
from .caller import PAYLOAD, Caller, refused, said
from .raw_http import RawResponse, chunked, head

NOT_KEPT = "CONFLICT.idempotency.outcome_not_kept"
BODY = b'{"amount": 100, "currency": "EUR"}'
SHAPES = {"nothing": 204, "empty": 200, "binary": 200, "redirect": 303, "pieces": 200}


def asked(caller: Caller, path: str, **query: Any) -> RawResponse:
    """The response as it came over the wire."""
    with caller.connection() as connection:
        connection.send(request(caller, path, **query))
        return connection.response()


def request(caller: Caller, path: str, **query: Any) -> bytes:
    """The bytes of a request."""
    fields = caller.fields(("Idempotency-Key", caller.key), ("Content-Length", str(len(BODY))))
    return head("POST", caller.target(path, **query), fields) + BODY


class BodyCases:
    """Part C of the cases: what is kept of a response, streams, limits, and clients that leave."""

    def test_response_of_any_shape_is_replayed_exactly(self, caller: Caller) -> None:
        shapes = {"nothing": 204, "empty": 200, "binary": 200, "redirect": 303, "pieces": 200}
        for act, status in shapes.items():
            caller.renew()
            first, second = (asked(caller, f"/default/{act}") for _ in range(2))
            assert (first.status, second.status, caller.runs) == (status, status, 1), act
            assert (first.body, first.lines("location")) == (second.body, second.lines("location"))
            assert (first.lines("idempotency-status"), second.lines("idempotency-status")) == (["stored"], ["replayed"])
            assert second.header("content-length") == (None if status == 204 else str(len(first.body)))
            assert second.lines("content-type") == first.lines("content-type")

    def test_headers_of_one_connection_or_client_are_not_replayed(self, caller: Caller) -> None:
        first, second = (asked(caller, "/default/headers") for _ in range(2))
        for name in {name for name, _ in KEPT}:
            expected = [value for found, value in KEPT if found == name]
            assert ", ".join(first.lines(name)) == ", ".join(expected)  # in one line, where a framework has no two
            assert first.lines(name) == second.lines(name)
        for name in {name for name, _ in OWN}:
            assert len(first.lines(name)) == len([value for found, value in OWN if found == name])
            assert second.lines(name) == []
        assert DATE[1] not in second.lines("date")

    def test_a_stream_passes_live_and_is_not_repeated(self, caller: Caller) -> None:
        with caller.connection() as connection:
            connection.send(request(caller, "/default/stream"))
            start = connection.start()
            assert start.lines("idempotency-status") == ["unstored"]
            assert start.lines("idempotency-reason") == ["streaming"]
            assert connection.chunk() == b"first"  # and only then is the gate opened for the second
            caller.open()
            assert (connection.chunk(), connection.chunk()) == (b"second", b"")
        refused(caller.ask("/default/stream"), 409, NOT_KEPT)
        assert caller.runs == 1

    def test_stream_is_settled_before_its_first_byte(self, caller: Caller) -> None:
        """A duplicate that comes in the middle of the stream runs nothing."""
        with caller.connection() as connection:
            connection.send(request(caller, "/default/stream"))
            connection.start()
            refused(caller.ask("/default/stream"), 409, NOT_KEPT)
            caller.open()
            assert connection.chunk() == b"first"
        assert caller.runs == 1

    def test_a_stream_can_be_kept_whole(self, caller: Caller) -> None:
        caller.open()
        first, second = (caller.ask("/buffered/stream") for _ in range(2))
        assert (first.content, said(first), said(second)) == (b"firstsecond", "stored", "replayed")
        assert (second.content, caller.runs) == (first.content, 1)

    def test_released_stream_runs_again(self, caller: Caller) -> None:
        caller.open()
        first, second = (caller.ask("/released/stream") for _ in range(2))
        assert (first.content, second.content) == (b"firstsecond", b"firstsecond")
        assert (said(first), said(second), caller.runs) == ("unstored", "unstored", 2)
        assert first.headers["idempotency-reason"] == "streaming"

    def test_stream_of_a_get_is_untouched(self, caller: Caller) -> None:
        with caller.connection() as connection:
            connection.send(
                head("GET", caller.target("/default/stream"), caller.fields(("Idempotency-Key", caller.key)))
            )
            assert connection.start().lines("idempotency-status") == []
            assert connection.chunk() == b"first"
            caller.open()
            assert connection.chunk() == b"second"

    def test_response_over_limit_is_delivered_and_not_repeated(self, caller: Caller) -> None:
        first = caller.ask("/small/big", size=1001)
        assert (len(first.content), said(first)) == (1001, "unstored")
        assert first.headers["idempotency-reason"] == "size"
        problem = refused(caller.ask("/small/big", size=1001), 409, NOT_KEPT)
        assert problem["retryable"] is False
        assert caller.runs == 1

    def test_a_response_at_the_limit_is_kept(self, caller: Caller) -> None:
        assert [said(caller.ask("/small/big", size=1000)) for _ in range(2)] == ["stored", "replayed"]

    @pytest.mark.parametrize("encoding", ["length", "chunked"])
    def test_a_request_over_the_limit_is_refused(self, caller: Caller, encoding: str) -> None:
        """There is no record of it."""
        body = b"x" * 1001
        framing = ("Content-Length", "1001") if encoding == "length" else ("Transfer-Encoding", "chunked")
        fields = caller.fields(("Idempotency-Key", caller.key), framing)
        with caller.connection() as connection:
            connection.send(head("POST", caller.target("/small/create"), fields))
            connection.send(body if encoding == "length" else chunked(body[:600], body[600:]))
            assert connection.response().status == 413
        assert caller.runs == 0
        assert caller.ask("/small/create", content=b"x" * 1000).status_code == 201

    def test_chunked_body_equals_body_with_length(self, caller: Caller) -> None:
        fields = caller.fields(("Idempotency-Key", caller.key), ("Transfer-Encoding", "chunked"))
        with caller.connection() as connection:
            connection.send(head("POST", caller.target("/default/create"), fields) + chunked(BODY[:5], BODY[5:]))
            assert connection.response().lines("idempotency-status") == ["stored"]
        assert asked(caller, "/default/create").lines("idempotency-status") == ["replayed"]
        assert caller.runs == 1

    def test_two_requests_on_one_connection_do_not_mix(self, caller: Caller) -> None:
        with caller.connection() as connection:
            connection.send(request(caller, "/default/create"))
            first = connection.response()
            connection.send(request(caller, "/default/create"))
            assert connection.response().body == first.body
            connection.send(request(caller, "/default/binary"))
            assert connection.response().body == bytes(range(256))

    @pytest.mark.parametrize("framing", [("Content-Length", "100"), ("Transfer-Encoding", "chunked")])
    def test_disconnect_in_mid_body_runs_nothing(self, caller: Caller, framing: tuple[str, str]) -> None:
        fields = caller.fields(("Idempotency-Key", caller.key), framing)
        with caller.connection() as connection:
            connection.send(head("POST", caller.target("/default/create"), fields))
            connection.send(BODY if framing[0] == "Content-Length" else b"%x\r\n%b\r\n" % (len(BODY), BODY))
            connection.reset()
        assert caller.ask(payload=PAYLOAD).json()["run"] == 1
        assert caller.runs == 1

    @pytest.mark.parametrize("how", ["close", "reset"])
    def test_outcome_is_kept_after_disconnect_during_the_app(self, caller: Caller, how: str) -> None:
        with caller.connection() as connection:
            connection.send(request(caller, "/default/slow"))
            caller.until(lambda: caller.runs == 1)
            connection.reset() if how == "reset" else connection.close()
        caller.open()
        answer = caller.ask("/default/slow", content=BODY)
        assert (answer.status_code, said(answer), caller.runs) == (201, "replayed", 1)

    @pytest.mark.parametrize("rule", ["default", "buffered"])
    def test_disconnect_during_stream_does_not_run_it_again(self, caller: Caller, rule: str) -> None:
        with caller.connection() as connection:
            connection.send(request(caller, f"/{rule}/stream"))
            caller.until(lambda: caller.runs == 1)
            connection.reset()
        caller.open()
        answer = caller.ask(f"/{rule}/stream", content=BODY)
        assert answer.status_code == 409 or said(answer) == "replayed"
        assert caller.runs == 1
