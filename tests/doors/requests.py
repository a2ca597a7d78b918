"""Tests of how every middleware recognises the same request and the same caller: part B of the cases."""

from __future__ import annotations

import json
from typing import Any

from .caller import PAYLOAD, Caller, refused, said

MISMATCH = "CONFLICT.idempotency.payload_mismatch"
FORM = "application/x-www-form-urlencoded"

SAME = [
    (b'{"a": 1, "b": 2}', b'{"b":2,"a":1}'),
    (b'{"n": 100.00}', b'{"n": 100}'),
    (b'{"n": 100.0}', b'{"n": 1e2}'),
    (b'{"n": -0}', b'{"n": 0}'),
    ('{"\u20ac": 1, "\U0001f600": 2}'.encode(), b'{"\\ud83d\\ude00": 2, "\\u20ac": 1}'),
]
OTHER = [
    (b'{"n": 9007199254740993}', b'{"n": 9007199254740992}'),
    (b'{"n": 0.1}', b'{"n": 0.10000000000000001}'),
    (b'{"n": 1}', b'{"n": "1"}'),
    (b'{"n": [1, 2]}', b'{"n": [2, 1]}'),
    (b'{"n": true}', b'{"n": 1}'),
]
ODD = {
    "nan": b'{"n": NaN}',
    "infinity": b'{"n": -Infinity}',
    "overflow": b'{"n": 1e400}',
    "repeated member": b'{"n": 1, "n": 2}',
    "lone surrogate": b'{"n": "\\ud800"}',
    "deep list": b"[" * 100_000 + b"]" * 100_000,
    "deep object": b'{"a":' * 100_000,
    "not UTF-8": b'{"n": "\xff\xfe"}',
    "a zero": b'{"n": "\\u0000"}',
    "cut off": b'{"n": ',
    "empty": b"",
    "many digits": b'{"n": ' + b"9" * 5000 + b"}",
    "large exponent": b'{"n": 1e999999999999}',
}


def multipart(boundary: str, *parts: tuple[str, bytes]) -> tuple[dict[str, str], bytes]:
    """The header and the body of a multipart form."""
    body = b"".join(
        b'--%b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n' % (boundary.encode(), name.encode(), data)
        for name, data in parts
    )
    return {"Content-Type": f"multipart/form-data; boundary={boundary}"}, body + b"--%b--\r\n" % boundary.encode()


class RequestCases:
    """Part B of the cases."""

    def test_two_principals_may_use_the_same_key(self, caller: Caller) -> None:
        """Each replays its own."""
        other = {"Authorization": "Bearer of another"}
        mine, theirs = caller.ask(), caller.ask(headers=other)
        assert (said(mine), said(theirs)) == ("stored", "stored")
        assert caller.ask().content == mine.content
        assert caller.ask(headers=other).content == theirs.content
        assert mine.content != theirs.content

    def test_nothing_runs_for_an_unknown_caller(self, caller: Caller) -> None:
        refused(caller.ask("/broken-owner/create"), 500, "INTERNAL.principal_failed")
        refused(caller.ask("/no-owner/create"), 401, "AUTH.principal_missing")
        assert caller.runs == 0

    def test_same_key_on_another_route_is_another_operation(self, caller: Caller) -> None:
        asked = [("POST", "/default/create"), ("PATCH", "/default/create"), ("POST", "/default/status")]
        answers = [caller.ask(path, method=method) for method, path in asked]
        assert ([said(answer) for answer in answers], caller.runs) == (["stored"] * 3, 3)
        assert [said(caller.ask(path, method=method)) for method, path in asked] == ["replayed"] * 3

    def test_same_key_on_another_route_conflicts_with_across_routes(self, caller: Caller) -> None:
        caller.ask("/one-route/create")
        refused(caller.ask("/one-route/status"), 409, MISMATCH)
        refused(caller.ask("/one-route/create", method="PATCH"), 409, MISMATCH)
        assert caller.runs == 1

    def test_query_is_part_of_the_fingerprint(self, caller: Caller) -> None:
        caller.ask(currency="EUR")
        refused(caller.ask(currency="USD"), 409, MISMATCH)
        assert caller.runs == 1

    def test_equal_json_in_another_spelling_is_replayed(self, caller: Caller) -> None:
        for one, two in SAME:
            caller.renew().ask(content=one)
            assert said(caller.ask(content=two)) == "replayed", two
            assert caller.runs == 1

    def test_different_json_is_a_mismatch(self, caller: Caller) -> None:
        for one, two in OTHER:
            caller.renew().ask(content=one)
            refused(caller.ask(content=two), 409, MISMATCH)
            assert caller.runs == 1, two

    def test_unreadable_body_is_compared_by_its_bytes(self, caller: Caller) -> None:
        for odd, body in ODD.items():
            assert caller.renew().ask(content=body).status_code == 201, odd
            assert said(caller.ask(content=body)) == "replayed", odd
            refused(caller.ask(content=body + b"!"), 409, MISMATCH)
            assert caller.runs == 1, odd

    def test_key_in_unreadable_body_is_refused(self, caller: Caller) -> None:
        for odd, body in ODD.items():
            answer = caller.ask("/body/create", content=body)
            assert (answer.status_code, answer.headers["content-type"]) == (400, "application/problem+json"), odd
        assert caller.runs == 0

    def test_every_json_media_type_is_json(self, caller: Caller) -> None:
        patch = {"Content-Type": "application/merge-patch+json"}
        caller.ask(headers=patch, content=b'{"a": 1, "b": 2}')
        assert said(caller.ask(headers=patch, content=b'{"b": 2, "a": 1.0}')) == "replayed"

    def test_order_of_a_form_is_part_of_the_fingerprint(self, caller: Caller) -> None:
        form = {"Content-Type": FORM}
        caller.ask(headers=form, content=b"a=1&b=2")
        assert said(caller.ask(headers=form, content=b"a=%31&b=2")) == "replayed"
        refused(caller.ask(headers=form, content=b"b=2&a=1"), 409, MISMATCH)

    def test_multipart_with_new_boundary_is_the_same_request(self, caller: Caller) -> None:
        headers, body = multipart("one", ("file", b"\x00\xff"), ("name", b"x"))
        caller.ask(headers=headers, content=body)
        headers, body = multipart("two", ("file", b"\x00\xff"), ("name", b"x"))
        assert said(caller.ask(headers=headers, content=body)) == "replayed"
        headers, body = multipart("two", ("file", b"\x00\xfe"), ("name", b"x"))
        refused(caller.ask(headers=headers, content=body), 409, MISMATCH)

    def test_excluded_fields_do_not_count(self, caller: Caller) -> None:
        caller.ask("/exclude/create", payload={**PAYLOAD, "timestamp": 1, "metadata": {"try": 1}})
        again = caller.ask("/exclude/create", payload={**PAYLOAD, "timestamp": 2, "description": "again"})
        assert said(again) == "replayed"
        refused(caller.ask("/exclude/create", payload={**PAYLOAD, "amount": 101}), 409, MISMATCH)

    def test_only_included_fields_count(self, caller: Caller) -> None:
        caller.ask("/include/create", payload={"amount": 100, "note": "first"})
        assert said(caller.ask("/include/create", payload={"amount": 100.0, "note": "second"})) == "replayed"
        refused(caller.ask("/include/create", payload={"amount": 101, "note": "first"}), 409, MISMATCH)

    def test_headers_of_the_moment_do_not_count(self, caller: Caller) -> None:
        caller.ask(headers={"traceparent": "00-1", "Date": "Tue, 15 Nov 1994 08:12:31 GMT", "User-Agent": "a/1"})
        assert said(caller.ask(headers={"traceparent": "00-2", "User-Agent": "a/2", "Accept": "*/*"})) == "replayed"
        assert said(caller.ask(headers={"Content-Type": "application/json; charset=utf-8"})) == "replayed"

    def test_one_changed_field_is_a_mismatch(self, caller: Caller) -> None:
        """The stored record is unchanged."""
        for rule, status in (("default", 409), ("mismatch-422", 422), ("mismatch-400", 400)):
            first = caller.renew().ask(f"/{rule}/create")
            problem = refused(caller.ask(f"/{rule}/create", payload={**PAYLOAD, "amount": 101}), status, MISMATCH)
            assert problem["retryable"] is False
            assert caller.ask(f"/{rule}/create").content == first.content
            assert caller.runs == 1

    def test_a_mismatch_is_found_while_the_first_is_running(self, caller: Caller) -> None:
        first = caller.running("/default/slow")
        refused(caller.ask("/default/slow", payload={}), 409, MISMATCH)
        caller.open()
        assert first.result().status_code == 201
        assert caller.runs == 1

    def test_mismatch_is_found_after_a_failure(self, caller: Caller) -> None:
        """The key still names the first request, and no other request may be tried under it."""
        for act in ("status", "raise", "refuse"):
            query: dict[str, Any] = {"status": "503,201"} if act == "status" else {}
            assert caller.renew().ask(f"/default/{act}", **query).status_code >= 500
            refused(caller.ask(f"/default/{act}", payload={}, **query), 409, MISMATCH)
            assert caller.runs == 1, act
            assert caller.ask(f"/default/{act}", **query).status_code == 201

    def test_app_gets_the_request_unchanged(self, caller: Caller) -> None:
        body = json.dumps({"text": "ž" * 5000}).encode()
        echo = caller.ask("/default/echo", content=body, note="a b").json()
        assert (echo["method"], echo["path"], bytes.fromhex(echo["body"])) == ("POST", "/default/echo", body)
        assert ["idempotency-key", caller.key] in echo["headers"]
        assert "note=a+b" in echo["query"]
