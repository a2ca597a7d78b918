"""Tests of every middleware with keys: part A of the cases."""

from __future__ import annotations

import uuid

from .caller import Caller, refused, said
from .raw_http import head

INVALID, MISSING = "VALIDATION.idempotency.key_invalid", "VALIDATION.idempotency.key_missing"
V4 = "8e03978e-40d5-43e8-bc93-6894a57f9324"
V7 = "018f4a2e-7c3b-7def-8abc-0123456789ab"
MALFORMED = [
    b'"foo',
    b'"foo \\',
    b'"a \\,"',
    b'"a\tb"',
    b"a\tb",
    b'"a"b',
    b"a, b",
    "ž".encode(),
    b"\xff",
    b'"\xc3\xa9"',
]
NO_UUIDS = {
    "uuid": ["8e03978e", "8e03978e40d543e8bc936894a57f932", "8e03978e-40d5-43e8-7c93-6894a57f9324", f"{V4}0"],
    "uuid4": [V7, "8e03978e-40d5-43e8-7c93-6894a57f9324", "00000000-0000-0000-0000-000000000000"],
    "uuid7": [V4, "018f4a2e-7c3b-7def-4abc-0123456789ab"],
}


def status_of(caller: Caller, *keys: str | bytes, path: str = "/default/create") -> int:
    """Return the status of a request with these lines of the key's header, or 400 if the server closes the connection."""
    fields = caller.fields(*(("Idempotency-Key", key) for key in keys), ("Content-Length", "2"))
    with caller.connection() as connection:
        connection.send(head("POST", caller.target(path), fields) + b"{}")
        try:
            return connection.response().status
        except ConnectionError:
            return 400


class HeaderLineCases:
    """Header lines that some servers refuse or join before the middleware sees them."""

    def test_key_with_line_break_or_zero_never_runs(self, caller: Caller) -> None:
        for key in (b"a\nb", b"a\x00b", b"a\rb"):
            assert status_of(caller, key) == 400, key
        assert caller.runs == 0

    def test_two_key_header_lines_are_refused(self, caller: Caller) -> None:
        for keys in ((b"a", b"b"), (b"a", b"a"), (b'"a"', b'"b"')):
            assert status_of(caller, *keys) == 400, keys
        assert caller.runs == 0


class KeyCases(HeaderLineCases):
    """Part A of the cases."""

    def test_malformed_key_is_refused(self, caller: Caller) -> None:
        for key in MALFORMED:
            assert status_of(caller, key) == 400, key
        assert caller.runs == 0

    def test_empty_key_is_refused(self, caller: Caller) -> None:
        for key in (b"", b'""', b"  ", b'"  "'):
            assert status_of(caller, key) == 400, key
        assert caller.runs == 0

    def test_key_of_wrong_uuid_version_is_refused(self, caller: Caller) -> None:
        for rule, keys in NO_UUIDS.items():
            for key in keys:
                refused(caller.ask(f"/{rule}/create", key=key), 400, INVALID)
        assert caller.runs == 0

    def test_uuid_key_in_upper_case_is_replayed(self, caller: Caller) -> None:
        for rule, key in (("uuid", V4), ("uuid", V7), ("uuid4", V4.replace("-", "")), ("uuid7", V7)):
            assert caller.ask(f"/{rule}/create", key=key).status_code == 201
            assert said(caller.ask(f"/{rule}/create", key=key.upper())) == "replayed"

    def test_a_quoted_key_is_the_same_as_a_bare_one(self, caller: Caller) -> None:
        caller.ask(key="8e03")
        assert said(caller.ask(key='"8e03"')) == "replayed"
        assert caller.runs == 1

    def test_strict_rule_requires_quotes(self, caller: Caller) -> None:
        refused(caller.ask("/strict/create", key="8e03"), 400, INVALID)
        assert caller.runs == 0
        assert caller.ask("/strict/create", key='"8e03"').json()["key"] == "8e03"

    def test_a_structured_field_string_is_unescaped_and_its_parameters_ignored(self, caller: Caller) -> None:
        assert caller.ask(key=r'"foo \"bar\" \\ baz";v=1;x="y"').json()["key"] == r'foo "bar" \ baz'
        assert said(caller.ask(key=r'"foo \"bar\" \\ baz"')) == "replayed"

    def test_key_longer_than_255_characters_is_refused(self, caller: Caller) -> None:
        assert caller.ask(key="k" * 255).status_code == 201
        problem = refused(caller.ask(key="k" * 256), 400, INVALID)
        assert "255" in problem["detail"]
        refused(caller.ask(key="k" * 4000), 400, INVALID)
        assert caller.runs == 1

    def test_a_required_key_that_is_missing_is_refused(self, caller: Caller) -> None:
        problem = refused(caller.ask("/required/create", key=None), 400, MISSING)
        assert "Idempotency-Key" in problem["detail"]
        assert caller.runs == 0

    def test_request_without_its_optional_key_is_untouched(self, caller: Caller) -> None:
        first, second = caller.ask(key=None), caller.ask(key=None)
        assert (said(first), said(second), caller.runs) == (None, None, 2)
        assert first.json()["key"] is None

    def test_safe_method_is_never_claimed(self, caller: Caller) -> None:
        for method in ("GET", "HEAD", "OPTIONS"):
            caller.renew()
            for _ in range(2):
                answer = caller.ask("/required/create", method=method, content=b"")
                assert answer.status_code < 400
                assert said(answer) is None
            assert caller.runs == 2 or method == "OPTIONS"  # which some frameworks answer themselves

    def test_key_header_of_another_name_replaces_the_default(self, caller: Caller) -> None:
        refused(caller.ask("/custom/create"), 400, MISSING)
        named = {"X-Request-Id": uuid.uuid4().hex}
        caller.ask("/custom/create", headers=named, key="one")
        assert said(caller.ask("/custom/create", headers=named, key="two")) == "replayed"
        assert caller.runs == 1

    def test_character_moved_from_principal_to_key_is_another_operation(self, caller: Caller) -> None:
        caller.ask(key="b", headers={"Authorization": f"{caller.authorization}a:"})
        answer = caller.ask(key=":b", headers={"Authorization": f"{caller.authorization}a"})
        assert (said(answer), caller.runs) == ("stored", 2)

    def test_the_key_may_be_a_field_of_the_body(self, caller: Caller) -> None:
        caller.ask("/body/create", key=None, payload={"id": caller.case, "amount": 1})
        answer = caller.ask("/body/create", key=None, payload={"amount": 1, "id": caller.case})
        assert (said(answer), caller.runs) == ("replayed", 1)
        refused(caller.ask("/body/create", payload={"amount": 1}), 400, MISSING)

    def test_the_key_may_be_made_from_a_template(self, caller: Caller) -> None:
        caller.ask("/template/create", key=None, payload={"subject": caller.case})
        answer = caller.ask("/template/create", key="ignored", payload={"subject": caller.case})
        assert (said(answer), caller.runs) == ("replayed", 1)
        refused(caller.ask("/template/create", payload={}), 400, INVALID)

    def test_request_that_is_not_idempotent_is_untouched(self, caller: Caller) -> None:
        answers = [caller.ask("/unguarded/create") for _ in range(2)]
        assert ([said(answer) for answer in answers], caller.runs) == ([None, None], 2)
