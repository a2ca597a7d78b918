"""Fingerprints of requests: equal and different requests, and stored fingerprints after an upgrade."""

from __future__ import annotations

import hashlib
import hmac
import json
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncemore._fingerprint.fingerprint import Fingerprinter
from oncemore.errors import ConfigurationError

JSON = "application/json"
FORM = "application/x-www-form-urlencoded"
MULTIPART = "multipart/form-data; boundary=x"
OLD, NEW = b"an old secret, long enough", b"a new secret, long enough"

requests = st.tuples(
    st.sampled_from(["POST", "PATCH"]),
    st.text(st.characters(), max_size=5),
    st.text(st.characters(), max_size=5),
    st.sampled_from([JSON, FORM, MULTIPART, "text/plain", ""]) | st.text(),
    st.binary() | st.sampled_from([b"{}", b'{"a":1}', b"a=1", b"--x--"]),
)
fingerprinters = st.builds(
    Fingerprinter,
    mode=st.sampled_from(["canonical", "raw"]),
    secrets=st.sampled_from([(), (OLD,), (NEW, OLD), (OLD, NEW)]),
)


def posted(body: str | bytes, *, content_type: str = JSON, query: str = "", **settings: Any) -> str:
    data = body.encode() if isinstance(body, str) else body
    return Fingerprinter(**settings).fingerprint("POST", "/refunds", query, content_type, data)


def digest_of(algorithm: str, said: str) -> str:
    message = f"{algorithm}\n4:POST8:/refunds0:16:application/json\n{said}"
    return f"{algorithm}:{hashlib.sha256(message.encode()).hexdigest()}"


def test_fingerprint_names_its_algorithm_and_never_changes() -> None:
    """Records outlive releases, so this digest must not move."""
    assert posted('{"b": 100.00, "a": [null]}') == digest_of("c1", '{"a":[null],"b":100}')
    assert posted('{"b": NaN}') == digest_of("r1", '{"b": NaN}')
    assert posted('{"b":1}') == "c1:3b0a0c9619a1d9484d2ad3a2262572863dfde2e6547f3ae5589ada92ab603a51"


def test_signed_fingerprint_names_its_secret_without_showing_it() -> None:
    label, digest = posted("{}", secrets=[NEW, OLD]).split(":")
    message = b"c1\n4:POST8:/refunds0:16:application/json\n{}"
    assert digest == hmac.digest(NEW, message, "sha256").hex()
    assert label.startswith("c1.")
    assert label != posted("{}", secrets=[OLD]).split(":")[0]
    assert repr(NEW)[2:-1] not in repr(Fingerprinter(secrets=[NEW]))


@pytest.mark.parametrize(
    "repeat",
    ['{"a":1,"b":{"c":[2]}}', '{ "b" : {"c":[ 2.0 ]} , "a" : 1e0 }', '{"\\u0061":10e-1,"b":{"c":[2]}}'],
)
def test_same_json_is_the_same_request(repeat: str) -> None:
    assert posted(repeat) == posted('{"a":1,"b":{"c":[2]}}')


@pytest.mark.parametrize(
    "other", ['{"a":2}', '{"a":"1"}', '{"a":[1]}', '{"a":1,"b":null}', '{"A":1}', "{}", '[{"a":1}]']
)
def test_one_changed_field_is_another_request(other: str) -> None:
    assert posted(other) != posted('{"a":1}')


@pytest.mark.parametrize(
    "content_type", ["Application/JSON", "application/json; charset=utf-8", " application/json;q=1"]
)
def test_media_type_parameters_and_case_do_not_count(content_type: str) -> None:
    assert posted("{}", content_type=content_type) == posted("{ }")


@pytest.mark.parametrize(
    "media_type", ["application/problem+json", "application/vnd.api+JSON; v=1", "application/ld+json"]
)
def test_every_application_json_suffix_is_json(media_type: str) -> None:
    assert posted("{ }", content_type=media_type) == posted("{}", content_type=media_type)


@pytest.mark.parametrize(
    "media_type", ["text/plain", "", "application/vnd.api+json", "text/json", FORM, "application/jsonp"]
)
def test_another_media_type_is_another_request(media_type: str) -> None:
    assert posted("{}", content_type=media_type) != posted("{}")


@pytest.mark.parametrize("media_type", ["text/plain", "", "text/json", "application/octet-stream", "+json"])
def test_other_bodies_are_compared_byte_by_byte(media_type: str) -> None:
    assert posted("{ }", content_type=media_type) != posted("{}", content_type=media_type)
    assert posted("{ }", content_type=media_type).startswith("r1:")


def test_unordered_form_is_the_same_in_any_order_of_names() -> None:
    """Several fields of one name are a list, and keep their order."""
    one, other, swapped = b"a=1&b[]=x&b[]=y", b"b%5B%5D=x&b[]=y&a=1", b"a=1&b[]=y&b[]=x"
    unordered, ordered = Fingerprinter(mode="unordered"), Fingerprinter()
    prints = [unordered.fingerprint("POST", "/", "", FORM, body) for body in (one, other, swapped)]
    assert prints[0] == prints[1] != prints[2]
    assert prints[0].startswith("f2:")
    assert unordered.matches(prints[0], "POST", "/", "", FORM, other)
    stored = ordered.fingerprint(
        "POST", "/", "", FORM, one
    )  # before the rule was changed: compared by its own algorithm
    assert unordered.matches(stored, "POST", "/", "", FORM, one)
    assert not unordered.matches(stored, "POST", "/", "", FORM, other)


def test_form_is_the_same_however_it_is_percent_encoded() -> None:
    assert posted("a=1+2&b=%c3%a9", content_type=FORM) == posted("a=1%202&b=%C3%A9", content_type=FORM)
    assert posted("a=1&b=2", content_type=FORM) != posted("b=2&a=1", content_type=FORM)


def test_json_sent_as_form_is_compared_byte_by_byte() -> None:
    one, other = (posted(body, content_type=FORM) for body in ('{"a":"1+1"}', '{"a":"1 1"}'))
    assert one != other


@pytest.mark.parametrize("kind", ["form-data", "mixed", "related"])
def test_multipart_is_the_same_with_a_new_boundary(kind: str) -> None:
    body = '--{0}\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n--{0}--\r\n'
    one, other = (posted(body.format(b), content_type=f"multipart/{kind}; boundary={b}") for b in ("abc", "xyz"))
    assert one == other
    assert one.startswith("m1:")
    assert posted(body.format("abc"), content_type=MULTIPART).startswith("r1:")


def test_multipart_stored_byte_by_byte_is_still_compared_so() -> None:
    """Bodies of this type were compared by their bytes before their parts were read."""
    content_type, body = "multipart/mixed; boundary=x", b"--x\r\n\r\n1\r\n--x--\r\n"
    stored = posted(body, content_type=content_type, mode="raw")
    assert stored.startswith("r1:")
    assert Fingerprinter().matches(stored, "POST", "/refunds", "", content_type, body)
    assert not Fingerprinter().matches(stored, "POST", "/refunds", "", content_type, body.replace(b"1", b"2"))


@pytest.mark.parametrize(
    "boundary", ["a", "-", "--", "x y", "a.*(b)", '"a\\"b"', "a" * 71, "é", "", '"a', "a; boundary=b"]
)
def test_boundary_that_is_hostile_makes_no_two_bodies_one(boundary: str) -> None:
    """A body that is not clearly multipart is compared by its bytes."""
    body = "--{0}\r\n\r\n1\r\n--{0}ab\r\n\r\n{1}\r\n--{0}--\r\n"
    sent = [posted(body.format(boundary, n), content_type=f"multipart/mixed; boundary={boundary}") for n in (1, 2)]
    assert sent[0] != sent[1]


HOSTILE = {
    "NaN": b"[NaN]",
    "a member twice": b'{"a":1,"a":2}',
    "a lone surrogate": b'["\\ud800"]',
    "deep": b"[" * 100_000 + b"]" * 100_000,
    "invalid UTF-8": b'"\xff"',
    "a byte order mark": b"\xef\xbb\xbf{}",
    "an endless exponent": b"1e" + b"9" * 1_000_000,
    "nothing": b"",
}


@pytest.mark.parametrize("secrets", [(), (NEW,)])
@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_json_without_a_single_meaning_is_compared_byte_by_byte(body: bytes, secrets: tuple[bytes, ...]) -> None:
    fingerprinter = Fingerprinter(secrets=secrets, exclude=["a"])
    stored = fingerprinter.fingerprint("POST", "/", "", JSON, body)
    assert stored.startswith("r1")
    assert fingerprinter.matches(stored, "POST", "/", "", JSON, body)
    assert not fingerprinter.matches(stored, "POST", "/", "", JSON, body + b" ")


@pytest.mark.parametrize("body", [b"1e400", b"1e999999999", b"9" * 1_000_000])
def test_numbers_beyond_every_machine_are_still_exact(body: bytes) -> None:
    assert posted(b"[" + body + b"]") == posted(b"[ " + body + b" ]")
    assert posted(b"[" + body + b"]") != posted(b"[" + body + b"1]")


@given(fingerprinters, requests)
def test_any_request_has_a_fingerprint_and_matches_it(fingerprinter: Fingerprinter, request: Any) -> None:
    assert fingerprinter.matches(fingerprinter.fingerprint(*request), *request)


def test_half_a_character_anywhere_has_a_defined_answer() -> None:
    """A path may come decoded, with bytes that are not UTF-8 as lone surrogates."""
    request = ("POST", "/\ud800", "a=\udcff", "text/\udfff", b"{}")
    fingerprinter = Fingerprinter()
    stored = fingerprinter.fingerprint(*request)
    assert fingerprinter.matches(stored, *request)
    assert not fingerprinter.matches(stored, "POST", "/\ud801", *request[2:])
    assert not fingerprinter.matches("r1:\ud800", *request)


@given(fingerprinters, requests, st.integers(0, 4))
def test_each_part_of_a_request_counts(fingerprinter: Fingerprinter, request: Any, at: int) -> None:
    other = [*request]
    other[at] = (b"x" if at == 4 else "x") + request[at]
    assert not fingerprinter.matches(fingerprinter.fingerprint(*request), *other)


@given(st.text(st.characters(), max_size=9), st.integers(0, 9), st.integers(0, 9))
def test_what_moves_from_one_part_to_the_next_counts(text: str, one: int, other: int) -> None:
    def split(at: int) -> str:
        return Fingerprinter().fingerprint(text[:at], text[at:], "", "", b"")

    assert (split(one) == split(other)) == (text[:one] == text[:other])


def test_query_counts_but_not_its_spelling() -> None:
    assert posted("{}", query="a=%7e+b") == posted("{}", query="a=~%20b")
    assert len({posted("{}", query=query) for query in ("", "a=1", "a=1&b=2", "b=2&a=1", "a=1%26b=2")}) == 5


def test_path_and_method_count() -> None:
    make = Fingerprinter().fingerprint
    assert len({make(method, path, "", JSON, b"{}") for method in ("POST", "PUT") for path in ("/t/1", "/t/2")}) == 4


@given(
    st.dictionaries(st.sampled_from("abc"), st.integers(0, 1)),
    st.dictionaries(st.sampled_from("abc"), st.integers(0, 1)),
)
def test_include_and_exclude_decide_what_counts(one: dict[str, int], other: dict[str, int]) -> None:
    def same(**settings: Any) -> bool:
        return posted(json.dumps(one), **settings) == posted(json.dumps(other), **settings)

    assert same() == (one == other)
    assert same(include=["a", "/b"]) == all(one.get(name) == other.get(name) for name in "ab")
    assert same(exclude=["a"]) == all(one.get(name) == other.get(name) for name in "bc")
    assert same(include=["a"], exclude=["b"]) == (one.get("a") == other.get("a"))


@pytest.mark.parametrize("content_type", [FORM, "text/plain"])
def test_fields_are_selected_from_json_alone(content_type: str) -> None:
    one, other = (posted(body, content_type=content_type, exclude=["a"]) for body in ("a=1", "a=2"))
    assert one != other


def test_repeated_member_cannot_hide_behind_exclude() -> None:
    one, other = (posted(body, exclude=["a"]) for body in ('{"a":1,"a":2,"b":0}', '{"a":1,"b":0}'))
    assert one != other


def test_mode_raw_compares_bytes() -> None:
    assert posted("{}", mode="raw") != posted("{ }", mode="raw")
    assert posted("{}", mode="raw").startswith("r1:")


@given(requests, st.text())
def test_mode_none_compares_nothing(request: Any, stored: str) -> None:
    fingerprinter = Fingerprinter(mode="none")
    assert fingerprinter.fingerprint(*request) == ""
    assert fingerprinter.matches(stored, *request)


@given(fingerprinters, requests)
def test_empty_stored_fingerprint_matches_anything(fingerprinter: Fingerprinter, request: Any) -> None:
    assert fingerprinter.matches("", *request)


@given(
    fingerprinters,
    requests,
    st.text(st.characters(), min_size=1) | st.sampled_from(["c1", "c1:", ":", "c1.:", "r1.x:y"]),
)
def test_foreign_stored_fingerprint_matches_nothing(fingerprinter: Fingerprinter, request: Any, stored: str) -> None:
    assert not fingerprinter.matches(stored, *request)


@pytest.mark.parametrize("algorithm", ["c2", "C1", "", "v1", "x"])
def test_unknown_algorithm_matches_nothing(algorithm: str) -> None:
    """Refusing is safe, running is not."""
    stored = posted("{}").replace("c1", algorithm)
    assert not Fingerprinter().matches(stored, "POST", "/refunds", "", JSON, b"{}")


ROTATION = [(), (OLD,), (OLD, NEW), (NEW, OLD)]


@given(requests, st.integers(0, 3), st.integers(0, 3), st.sampled_from(["canonical", "raw"]))
def test_secrets_may_be_added_and_rotated_at_any_time(request: Any, before: int, after: int, mode: Any) -> None:
    """A later list of secrets verifies the fingerprints of an earlier list, also after a change of mode."""
    earlier, later = sorted((before, after))
    stored = Fingerprinter(secrets=ROTATION[earlier]).fingerprint(*request)
    assert Fingerprinter(secrets=ROTATION[later], mode=mode).matches(stored, *request)


def test_secret_that_was_dropped_verifies_nothing() -> None:
    stored = posted("{}", secrets=[OLD])
    request = ("POST", "/refunds", "", JSON, b"{}")
    assert not Fingerprinter(secrets=[NEW]).matches(stored, *request)
    assert not Fingerprinter().matches(stored, *request)


def test_same_request_under_two_secrets_has_two_digests() -> None:
    assert len({posted("{}", secrets=secrets).split(":")[1] for secrets in ([], [OLD], [NEW])}) == 3


@pytest.mark.parametrize(("depth", "algorithm"), [(100, "c1:"), (101, "r1:")])
def test_body_nested_too_deep_is_compared_by_its_bytes(depth: int, algorithm: str) -> None:
    body = b"[" * depth + b"]" * depth
    stored = posted(body)
    assert stored.startswith(algorithm)
    assert Fingerprinter().matches(stored, "POST", "/refunds", "", JSON, body)


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "loose"},
        {"mode": "raw", "exclude": ["a"]},
        {"mode": "none", "include": ["a"]},
        {"include": "timestamp"},
        {"exclude": ["/a~2"]},
        {"include": ["/a/b"], "exclude": ["a"]},
        {"secrets": OLD},
        {"secrets": None},
        {"secrets": ["text, which has no bytes"]},
        {"secrets": [b""]},
        {"secrets": [NEW, b"too short"]},
    ],
)
def test_wrong_setting_is_refused_when_it_is_made(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        Fingerprinter(**settings)


def test_fingerprinter_does_not_change() -> None:
    """Rules share it."""
    names, secrets = ["a"], [NEW]
    fingerprinter, same = Fingerprinter(exclude=names, secrets=secrets), Fingerprinter(exclude=["a"], secrets=[NEW])
    names.append("b")
    secrets.append(OLD)
    assert fingerprinter == same
    assert hash(fingerprinter) == hash(same)
    with pytest.raises(FrozenInstanceError):
        fingerprinter.mode = "raw"  # type: ignore[misc]
