"""The key: its header's syntax, its formats, and names that are joined without ambiguity."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncemore._contract.keys import MAX_LENGTH, bounded, check_key, join, key_format, uuid7_time
from oncemore._contract.keysource import parse_key
from oncemore.errors import ConfigurationError, InvalidKey, MissingKey

V4 = "8e03978e-40d5-43e8-bc93-6894a57f9324"
V7 = "018f4a2e-7c3b-7def-8abc-0123456789ab"
VISIBLE = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), min_size=1, max_size=MAX_LENGTH)


def quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


@pytest.mark.parametrize("line", ['"8e03"', "8e03", b'"8e03"', b"8e03", '  "8e03"  ', " 8e03 "])
def test_quoted_and_a_bare_key_are_the_same_key(line):
    assert parse_key([line]) == "8e03"


def test_strict_reader_refuses_a_bare_key():
    assert parse_key(['"8e03"'], strict=True) == "8e03"
    with pytest.raises(InvalidKey, match="double quotes"):
        parse_key(["8e03"], strict=True)


def test_escapes_in_a_quoted_key_are_undone():
    assert parse_key([r'"foo \"bar\" \\ baz"']) == r'foo "bar" \ baz'


@pytest.mark.parametrize(
    "line",
    [
        '"foo',
        r'"foo \ ',
        '"foo \\"',
        r'"a \,"',
        '"a\tb"',
        '"a\nb"',
        '"é"',
        '"a"b',
        '"a", "b"',
        '"a";',
        '"a";A=1',
        '"a";b="',
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_malformed_quoted_key_is_refused(line, strict):
    with pytest.raises(InvalidKey):
        parse_key([line], strict=strict)


@pytest.mark.parametrize("line", ["a\tb", "a\nb", "a\x00b", "a\x7f", "é", b"\xc3\xa9", 'a"b', "a,b", "a, b"])
def test_malformed_bare_key_is_refused(line):
    """Two lines that a server folded into one are still two keys."""
    with pytest.raises(InvalidKey):
        parse_key([line])


PARAMETERS = [";a", "; a=1", ";a=1;b=2.5", ";a=-1.25", ';a="x;\\"y"', ";a=token/x:y", ";*a-b.c_d=*t"]
PARAMETERS += [";a=:aGk=:", ";a=?1", ";a=@1659578233", ';a=%"f%c3%bc"']


@pytest.mark.parametrize("parameters", PARAMETERS)
def test_parameters_after_a_quoted_key_are_ignored(parameters):
    assert parse_key([f'"8e03"{parameters}'], strict=True) == "8e03"


@pytest.mark.parametrize("line", ["", '""', "   ", '"  "', b"", '"";a=1'])
@pytest.mark.parametrize("strict", [True, False])
def test_empty_key_is_refused_and_never_taken_for_none(line, strict):
    with pytest.raises(InvalidKey, match="empty"):
        parse_key([line], strict=strict)


def test_two_header_lines_are_refused_even_when_equal():
    with pytest.raises(InvalidKey, match="once"):
        parse_key(["a", "a"])


def test_no_header_line_is_a_missing_key():
    with pytest.raises(MissingKey, match="when you retry"):
        parse_key([])


@pytest.mark.parametrize("spelt", [str, quoted])
def test_key_of_256_characters_is_refused_and_255_accepted(spelt):
    assert parse_key([spelt("k" * 255)]) == "k" * 255
    with pytest.raises(InvalidKey, match="at most 255"):
        parse_key([spelt("k" * 256)])


def test_length_is_counted_after_unquoting():
    assert parse_key([quoted('"' * 255)]) == '"' * 255


def test_hopelessly_long_key_is_refused_before_it_is_read():
    """The error names its length, though it is neither ASCII nor closed."""
    with pytest.raises(InvalidKey, match="too long"):
        parse_key(['"' + "é" * 1_000_000])


def test_many_parameters_do_not_make_a_key_too_long():
    assert parse_key(['"a"' + ";b=1" * 50], max_length=1) == "a"


@given(VISIBLE.filter(str.strip))
def test_any_visible_text_can_be_a_quoted_key(text):
    assert parse_key([quoted(text)], strict=True) == text


@given(st.one_of(st.text(), st.binary()), st.booleans())
def test_any_header_line_has_a_defined_answer(line, strict):
    with contextlib.suppress(InvalidKey):
        key = parse_key([line], strict=strict)
        assert key.strip()
        assert len(key) <= MAX_LENGTH


# ── Formats ───────────────────────────────────────────────────────────────────────────────────────────────────────────

NOT_UUIDS = [
    V4.replace("-", "", 1),  # some of its hyphens
    f"-{V4.replace('-', '')}",
    "8e03978e40d543e8cc936894a57f9324",
    "8e03978e40d593e8bc936894a57f9324",
    f"{{{V4}}}",
    f"urn:uuid:{V4}",
    V4[:-1],
    V4 + "0",
    "00000000-0000-0000-0000-000000000000",
    "ffffffff-ffff-ffff-ffff-ffffffffffff",
    "8e03978e-40d5-43e8-cc93-6894a57f9324",  # the variant of another standard
    "8e03978e-40d5-93e8-bc93-6894a57f9324",  # no such version
    "8e03978e-40d5-43e8-bc93-6894a57f932g",
    "8e03978e-40d5-43e8-bc93-6894a57f932４",
]


@pytest.mark.parametrize(
    ("format", "key", "fits"),
    [
        ("uuid", V4, True),
        ("uuid", V7, True),
        ("uuid", "c232ab00-9414-11ec-b3c8-9f6bdeced846", True),
        *[("uuid", key.replace("-", ""), True) for key in (V4, V7)],
        ("uuid4", V4.replace("-", ""), True),
        ("uuid4", V7.replace("-", ""), False),
        ("uuid7", V7.replace("-", ""), True),
        ("uuid4", V4, True),
        ("uuid4", V7, False),
        ("uuid7", V7, True),
        ("uuid7", V4, False),
        *[("uuid", key, False) for key in NOT_UUIDS],
        *[("uuid4", key, False) for key in NOT_UUIDS],
    ],
)
def test_uuid_formats_check_version_and_variant(format, key, fits):
    if fits:
        assert check_key(key, format=format) == key
    else:
        with pytest.raises(InvalidKey, match="UUID"):
            check_key(key, format=format)


def test_uuid_key_is_the_same_in_either_case():
    assert check_key(V4.upper(), format="uuid4") == V4
    assert check_key(V4.replace("-", "").upper(), format="uuid4") == V4.replace("-", "")
    assert check_key("ABC") == "ABC", "other keys are opaque"


def test_regex_must_match_the_whole_key():
    assert check_key("ord-12", format=r"regex:ord-\d+") == "ord-12"
    for key in ("ord-12x", "xord-12", "ord-"):
        with pytest.raises(InvalidKey, match="ord-"):
            check_key(key, format=r"regex:ord-\d+")


@pytest.mark.parametrize(
    ("format", "hint"),
    [
        ("regex:(", "regular expression"),
        ("uuid5", "did you mean 'uuid"),
        ("regex", "did you mean 'regex:'"),
        ("", "choose any"),
    ],
)
def test_unusable_format_is_found_before_any_key_comes(format, hint):
    with pytest.raises(ConfigurationError, match=hint):
        key_format(format)


@pytest.mark.parametrize("key", ["a\x00b", "a\nb", "a\u200bb", "\ud800", "a\u2028b"])
def test_key_from_a_body_must_be_printable(key):
    """Stores cannot hold every text that JSON can."""
    with pytest.raises(InvalidKey, match="unprintable"):
        check_key(key)


def test_version_7_uuid_tells_when_it_was_made():
    assert uuid7_time("018f4a2e-7c3b-7def-8abc-0123456789ab") == 0x018F4A2E7C3B / 1000
    assert uuid7_time("018F4A2E-7C3B-7DEF-8ABC-0123456789AB") == 0x018F4A2E7C3B / 1000
    assert uuid7_time("018f4a2e7c3b7def8abc0123456789ab", "uuid7") == 0x018F4A2E7C3B / 1000
    assert uuid7_time("018f4a2e7c3b7def8abc0123456789ab") is None, "it may be a digest that looks like one"


@pytest.mark.parametrize("key", [V4, "", "not a uuid", "018f4a2e-7c3b-7def-cabc-0123456789ab"])
def test_other_keys_do_not_tell_their_age(key):
    assert uuid7_time(key) is None


# ── Names ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

PARTS = st.lists(st.text(st.characters() | st.sampled_from(":%~/ \x00\ud800"), max_size=12), min_size=1, max_size=4)


def test_simple_names_stay_readable():
    assert join("POST /refunds", "principal", "alice@example.org") == "POST /refunds:principal:alice@example.org"


@pytest.mark.parametrize(
    ("one", "other"),
    [(("a:", "b"), ("a", ":b")), (("a", "b"), ("a:b",)), (("a%3A",), ("a:",)), (("",), ("", "")), (("a~",), ("a%7E",))],
)
def test_joined_names_cannot_be_mistaken_for_others(one, other):
    assert join(*one) != join(*other)


@given(PARTS, PARTS)
def test_join_is_injective(one, other):
    assert (join(*one) == join(*other)) == (one == other)


@given(PARTS)
def test_joined_names_can_be_stored(parts):
    name = join(*parts)
    assert len(name) <= MAX_LENGTH
    assert "\x00" not in name
    name.encode()


def test_long_name_is_cut_and_ends_in_its_digest():
    one, other = join("user", "x" * 300), join("user", "x" * 299 + "y")
    assert len(one) == len(other) == MAX_LENGTH
    assert one.startswith("user:xxx")
    assert one != other


def test_short_name_cannot_pass_for_a_long_one():
    """The mark before a digest is escaped if a part contains it."""
    long = join("u", "x" * 300)
    assert join(*long.split(":")) != long


@given(st.integers(65, 300), st.text("ab", max_size=400))
def test_bound_holds_for_every_limit(limit, name):
    assert len(bounded(name, limit)) == min(len(name), limit)
