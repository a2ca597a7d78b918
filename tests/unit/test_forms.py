"""Forms are compared by their fields, in any spelling and with any boundary."""

from __future__ import annotations

from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncemore._fingerprint.fingerprint import MAX_PARTS, boundary_of, read_multipart, read_urlencoded, respell
from oncemore.errors import InvalidPayload

fields = st.lists(st.tuples(st.text(), st.text()))


def urlencode(pairs: list[tuple[str, str]], *, plus: bool = True, safe: str = "") -> bytes:
    encode = quote_plus if plus else quote
    return "&".join(f"{encode(name, safe=safe)}={encode(value, safe=safe)}" for name, value in pairs).encode()


@given(fields)
def test_form_says_the_same_however_it_is_percent_encoded(pairs: list[tuple[str, str]]) -> None:
    shortest = urlencode(pairs, safe="!*'(),/:@?$[]~")
    longest = "&".join("=".join("".join(f"%{byte:02x}" for byte in part.encode()) for part in pair) for pair in pairs)
    spellings = [shortest, urlencode(pairs), urlencode(pairs, plus=False), longest.encode()]
    assert len({read_urlencoded(spelling) for spelling in spellings}) == 1


@given(fields, fields)
def test_urlencoded_forms_share_spelling_only_if_fields_are_equal(
    a: list[tuple[str, str]], b: list[tuple[str, str]]
) -> None:
    """The order of the fields counts."""
    same = read_urlencoded(urlencode(a)) == read_urlencoded(urlencode(b, plus=False))
    assert same == (a == b)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (b"a=1&b=2", b"b=2&a=1"),
        (b"a=1&b=2", b"a=1%26b=2"),
        (b"a=%2B", b"a=+"),
        (b"a=%25", b"a=%2525"),
        (b"a;b", b"a%3Bb"),
        (b"a", b"a="),
        (b"a=1", b"a=1&"),
    ],
)
def test_separators_are_not_the_same_as_their_escapes(one: bytes, other: bytes) -> None:
    assert read_urlencoded(one) != read_urlencoded(other)


@pytest.mark.parametrize(
    "body", [b'{"a":"1+1"}', b"a b", b"a=%", b"a=%4", b"a=%zz", b"a=\xc3\xa9", b"a=\n", b"%" * 1_000_000]
)
def test_what_is_no_form_is_refused(body: bytes) -> None:
    """JSON that was sent as a form by mistake keeps its plus signs."""
    with pytest.raises(InvalidPayload):
        read_urlencoded(body)


@given(st.text(st.characters()))
def test_respelling_any_query_twice_changes_nothing_more(query: str) -> None:
    assert respell(respell(query)) == respell(query)


Parts = list[tuple[bytes, bytes]]

parts = st.lists(
    st.tuples(st.sampled_from([b"a", b"b"]), st.binary() | st.sampled_from([b"", b"\r\n", b"--x", b"\r\n--"]))
)


def multipart(parts: Parts, boundary: bytes) -> tuple[str, bytes]:
    """The Content-Type and body of a form with these names and contents."""
    lines = [
        b'--%b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n' % (boundary, name, content)
        for name, content in parts
    ]
    return f"multipart/form-data; boundary={boundary.decode()}", b"".join(lines) + b"--%b--\r\n" % boundary


@given(parts)
def test_new_boundary_changes_nothing(parts: Parts) -> None:
    boundaries = [b"----WebKitFormBoundary7MA4YWxkTrZu0gW", b"0123456789abcdef0123456789abcdef"]
    assert len({read_multipart(*multipart(parts, boundary)) for boundary in boundaries}) == 1


@given(parts, parts)
def test_multipart_forms_are_equal_only_with_equal_parts(a: Parts, b: Parts) -> None:
    """The order of the parts counts."""
    same = read_multipart(*multipart(a, b"one-boundary-1")) == read_multipart(*multipart(b, b"another-boundary-2"))
    assert same == (a == b)


def test_headers_of_a_part_count() -> None:
    content_type, body = multipart([(b"a", b"1")], b"x")
    assert read_multipart(content_type, body) != read_multipart(
        content_type, body.replace(b'"a"', b'"a"; filename="a"')
    )


def test_content_cannot_pass_for_a_header_or_a_part() -> None:
    bare = b"--x\r\n\r\n%b\r\n--x--"
    assert read_multipart("multipart/form-data; boundary=x", bare % b"3:abc") == b"0:5:3:abc"


@pytest.mark.parametrize(
    ("body", "parts"),
    [
        (b"--x--", b""),
        (b"--x--\r\n", b""),
        (b"--x-- \t\r\n\r\n", b""),
        (b"--x \r\n\r\n1\r\n--x--", b"0:1:1"),
        (b"--x\r\n\r\n1\r\n--x\t\r\n\r\n2\r\n--x--", b"0:1:10:1:2"),
    ],
)
def test_white_space_around_a_boundary_is_allowed(body: bytes, parts: bytes) -> None:
    assert read_multipart("multipart/form-data; boundary=x", body) == parts


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\r\n--x--",
        b"\r\n\r\nno beginning\r\n--x--",
        b"preamble\r\n--x\r\n\r\n1\r\n--x--",
        b"--x\r\n\r\n1\r\n--x",
        b"--x\r\n\r\n1\r\n--x--epilogue",
        b"--x\r\n\r\n1",
        b"--x\r\n\r\n1\r\n--xy\r\n\r\n2\r\n--x--",
        b"--x\r\nno end of headers\r\n--x--",
        b"--x\r\n--x--",
        b"--x\n\n1\n--x--",
        b"--x" + b"\r\n\r\n\r\n--x" * (MAX_PARTS + 1) + b"--",
    ],
)
def test_what_is_not_clearly_multipart_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidPayload):
        read_multipart("multipart/form-data; boundary=x", body)


def test_as_many_parts_as_allowed_are_read() -> None:
    body = b"--x" + b"\r\n\r\n\r\n--x" * MAX_PARTS + b"--"
    assert read_multipart("multipart/form-data; boundary=x", body) == b"0:0:" * MAX_PARTS


@pytest.mark.parametrize(
    ("content_type", "boundary"),
    [
        ("multipart/form-data; boundary=x", b"x"),
        ('multipart/form-data; BOUNDARY="a b:c"', b"a b:c"),
        ("multipart/form-data;charset=utf-8;boundary=x ; a=b", b"x"),
        ('multipart/form-data; a="; boundary=y"; boundary=x', b"x"),
        ("multipart/form-data; boundary=" + "x" * 70, b"x" * 70),
    ],
)
def test_boundary_is_found(content_type: str, boundary: bytes) -> None:
    assert boundary_of(content_type) == boundary


@pytest.mark.parametrize(
    "content_type",
    [
        "",
        "multipart/form-data",
        "multipart/form-data; boundary=",
        'multipart/form-data; boundary=""',
        "multipart/form-data; boundary=x; boundary=y",
        "multipart/form-data; boundary=é",
        'multipart/form-data; boundary="x "',
        'multipart/form-data; boundary="x\\"y"',
        "multipart/form-data; boundary=" + "x" * 71,
        "multipart/form-data" + "; " * 100_000,
    ],
)
def test_no_proper_boundary_is_refused(content_type: str) -> None:
    with pytest.raises(InvalidPayload, match="boundary"):
        boundary_of(content_type)
