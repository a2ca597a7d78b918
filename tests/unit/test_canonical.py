"""The canonical form of JSON: texts that are equal, texts that differ, and texts that have no canonical form."""

from __future__ import annotations

import json
import random
import struct
import sys
import threading
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncemore._fingerprint.canonical import MAX_DEPTH, read_json
from oncemore.errors import InvalidPayload

MEGABYTE = 1_000_000

numbers = st.integers() | st.decimals(allow_nan=False, allow_infinity=False) | st.integers(10**20, 10**23)
leaves = st.none() | st.booleans() | numbers | st.text()
values = st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)


def canonical_json(data: bytes, max_depth: int = MAX_DEPTH) -> bytes:
    return read_json(data, max_depth=max_depth)[1]


def spell_number(number: int | Decimal, chance: random.Random) -> str:
    """One of the many ways to write *number*."""
    sign, digits, exponent = Decimal(number).as_tuple()
    assert isinstance(exponent, int)
    text, shift = "".join(map(str, digits)), chance.randint(0, 4)
    zeros = "0" * shift
    spellings = [f"{text}{zeros}e{exponent - shift}", f"{text}.{zeros}0E{exponent:+d}"]
    if 0 <= -exponent < 30:
        spellings.append(f"{Decimal(number).copy_abs():f}")
    if isinstance(number, int):
        spellings.append(f"{text}.{zeros}0")
    return ("-" if sign else "") + _without_leading_zeros(chance.choice(spellings))


def _without_leading_zeros(text: str) -> str:
    stripped = text.lstrip("0")
    return stripped if stripped[:1].isdigit() else "0" + stripped


def spell_text(text: str, chance: random.Random) -> str:
    """One of the many ways to write *text*: any character may be escaped, and some must be."""
    return '"' + "".join(_spell_character(character, chance) for character in text) + '"'


def _spell_character(character: str, chance: random.Random) -> str:
    if chance.random() < 0.7:
        return json.dumps(character, ensure_ascii=False)[1:-1]
    units = character.encode("utf-16-be")
    form = chance.choice(["\\u%04x", "\\u%04X"])
    return "".join(form % unit for unit in struct.unpack(f">{len(units) // 2}H", units))


def spell(value: Any, chance: random.Random) -> str:
    """One of the many ways to write *value* as JSON."""
    match value:
        case None | bool():
            text = json.dumps(value)
        case int() | Decimal():
            text = spell_number(value, chance)
        case str():
            text = spell_text(value, chance)
        case list():
            text = "[" + ",".join(spell(item, chance) for item in value) + "]"
        case dict():
            members = [(spell_text(name, chance) + " :", spell(item, chance)) for name, item in value.items()]
            chance.shuffle(members)
            text = "{" + ",".join(name + item for name, item in members) + "}"
    return chance.choice(["", " ", "\n\t"]) + text + chance.choice(["", " ", "\r\n"])


def same_json(a: Any, b: Any) -> bool:
    """Equality as JSON knows it: Python says that True is 1."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same_json, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_json(a[name], b[name]) for name in a)
    return bool(a == b)


@given(values, st.randoms(use_true_random=False))
def test_every_spelling_of_a_value_has_one_form(value: Any, chance: random.Random) -> None:
    forms = {canonical_json(spell(value, chance).encode()) for _ in range(3)}
    assert len(forms) == 1


@given(values, values, st.randoms(use_true_random=False))
def test_two_values_share_a_form_only_if_they_are_equal(a: Any, b: Any, chance: random.Random) -> None:
    equal = canonical_json(spell(a, chance).encode()) == canonical_json(spell(b, chance).encode())
    assert equal == same_json(a, b)


def changed(value: Any, chance: random.Random) -> Any:
    """*value* with one leaf, member or element changed."""
    match value:
        case list() if value:
            place = chance.randrange(len(value))
            return [changed(item, chance) if place == at else item for at, item in enumerate(value)]
        case dict() if value:
            name = chance.choice(sorted(value))
            return {**value, name: changed(value[name], chance)}
        case bool():
            return not value
        case int():
            return value + 1
        case Decimal():
            sign, digits, exponent = value.as_tuple()
            assert isinstance(exponent, int)
            return Decimal((sign, (*digits, 1), exponent))  # one more digit: never the same number
        case str():
            return value + "x"
    return [value]


@given(values, st.randoms(use_true_random=False))
def test_any_one_changed_leaf_changes_the_form(value: Any, chance: random.Random) -> None:
    other = changed(value, chance)
    assert canonical_json(spell(value, chance).encode()) != canonical_json(spell(other, chance).encode())


@given(values, st.randoms(use_true_random=False))
def test_canonical_form_is_equal_json_and_idempotent(value: Any, chance: random.Random) -> None:
    form = canonical_json(spell(value, chance).encode())
    assert same_json(json.loads(form, parse_float=Decimal, parse_int=Decimal), value)
    assert canonical_json(form) == form


@given(st.binary() | st.text().map(str.encode) | st.text('[]{}",:0.1eE-+ \\u2dn', max_size=60).map(str.encode))
def test_arbitrary_bytes_have_a_form_or_a_refusal(data: bytes) -> None:
    try:
        form = canonical_json(data)
    except InvalidPayload:
        return
    assert canonical_json(form) == form


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("100.00", "100"),
        ("100.0", "100"),
        ("1e2", "100"),
        ("-0", "0"),
        ("-0.0", "0"),
        ("0e7", "0"),
        ("0.000", "0"),
        ("-0.50", "-0.5"),
        ("9007199254740992", "9007199254740992"),
        ("9007199254740993", "9007199254740993"),
        ("0.1", "0.1"),
        ("0.10000000000000000001", "0.10000000000000000001"),
        ("999999999999999999999", "999999999999999999999"),
        ("1000000000000000000000", "1e+21"),
        ("-1000000000000000000001.0", "-1.000000000000000000001e+21"),
        ("1e400", "1e+400"),
        ("10e399", "1e+400"),
        ("1E999999999", "1e+999999999"),
        ("1e-999999999", "1e-999999999"),
        ("1e999999999999999999", "1e+999999999999999999"),
        ("1e00000000000000000000000000002", "100"),
        ("123e-20", "1.23e-18"),
        ("0.000001", "0.000001"),
        ("0.0000001", "1e-7"),
        ("-0.0000001", "-1e-7"),
    ],
)
def test_number_is_written_by_its_exact_value(text: str, form: str) -> None:
    assert canonical_json(text.encode()) == form.encode()


# The numbers of RFC 8785, appendix B: the bits of a double, and how it is written.
RFC_NUMBERS = {
    "0000000000000000": "0",
    "8000000000000000": "0",
    "0000000000000001": "5e-324",
    "8000000000000001": "-5e-324",
    "7fefffffffffffff": "1.7976931348623157e+308",
    "ffefffffffffffff": "-1.7976931348623157e+308",
    "4340000000000000": "9007199254740992",
    "c340000000000000": "-9007199254740992",
    "4430000000000000": "295147905179352830000",
    "44b52d02c7e14af5": "9.999999999999997e+22",
    "44b52d02c7e14af6": "1e+23",
    "44b52d02c7e14af7": "1.0000000000000001e+23",
    "444b1ae4d6e2ef4e": "999999999999999700000",
    "444b1ae4d6e2ef4f": "999999999999999900000",
    "444b1ae4d6e2ef50": "1e+21",
    "3eb0c6f7a0b5ed8c": "9.999999999999997e-7",
    "3eb0c6f7a0b5ed8d": "0.000001",
    "41b3de4355555553": "333333333.3333332",
    "41b3de4355555554": "333333333.33333325",
    "41b3de4355555555": "333333333.3333333",
    "41b3de4355555556": "333333333.3333334",
    "41b3de4355555557": "333333333.33333343",
    "becbf647612f3696": "-0.0000033333333333333333",
    "43143ff3c1cb0959": "1424953923781206.2",
}


@pytest.mark.parametrize(("bits", "form"), RFC_NUMBERS.items())
def test_double_is_written_as_rfc_8785_writes_it(bits: str, form: str) -> None:
    (double,) = struct.unpack(">d", bytes.fromhex(bits))
    assert canonical_json(repr(double).encode()) == form.encode()


# RFC 8785's test files.  The first number of `values` is 333333333.3333333 there: a double cannot carry it, ours is exact.
RFC_FILES = {
    "arrays": ('[ 56, { "d": true, "10": null, "1": [ ] } ]', '[56,{"1":[],"10":null,"d":true}]'),
    "french": (
        '{"peach": "This sorting order", "péché": "is wrong according to French",'
        ' "pêche": "but canonicalization MUST", "sin": "ignore locale"}',
        '{"peach":"This sorting order","péché":"is wrong according to French",'
        '"pêche":"but canonicalization MUST","sin":"ignore locale"}',
    ),
    "structures": (
        '{"1": {"f": {"f": "hi","F": 5} ,"\\n": 56.0}, "10": { }, "": "empty", "a": { },'
        ' "111": [ {"e": "yes","E": "no" } ], "A": { } }',
        '{"":"empty","1":{"\\n":56,"f":{"F":5,"f":"hi"}},"10":{},"111":[{"E":"no","e":"yes"}],"A":{},"a":{}}',
    ),
    "unicode": ('{"Unnormalized Unicode":"A\\u030a"}', '{"Unnormalized Unicode":"A\u030a"}'),
    "values": (
        '{"numbers": [333333333.33333329, 1E30, 4.50, 2e-3, 0.000000000000000000000000001],'
        ' "string": "\\u20ac$\\u000F\\u000aA\'\\u0042\\u0022\\u005c\\\\\\"\\/", "literals": [null, true, false]}',
        '{"literals":[null,true,false],"numbers":[333333333.33333329,1e+30,4.5,0.002,1e-27],'
        '"string":"€$\\u000f\\nA\'B\\"\\\\\\\\\\"/"}',
    ),
    "weird": (
        '{"\\u20ac": "Euro Sign", "\\r": "Carriage Return", "\\u000a": "Newline", "1": "One", "\\u0080": "Control\\u007f",'
        ' "\\ud83d\\ude02": "Smiley", "\\u00f6": "Latin Small Letter O With Diaeresis",'
        ' "\\ufb33": "Hebrew Letter Dalet With Dagesh", "</script>": "Browser Challenge"}',
        '{"\\n":"Newline","\\r":"Carriage Return","1":"One","</script>":"Browser Challenge","\u0080":"Control\u007f",'
        '"ö":"Latin Small Letter O With Diaeresis","€":"Euro Sign","😂":"Smiley",'
        '"\ufb33":"Hebrew Letter Dalet With Dagesh"}',
    ),
}


@pytest.mark.parametrize(("text", "form"), RFC_FILES.values(), ids=RFC_FILES)
def test_files_of_rfc_8785_have_their_form(text: str, form: str) -> None:
    assert canonical_json(text.encode()) == form.encode()


@given(st.lists(st.text(st.characters(min_codepoint=0xD000, exclude_categories=["Cs"]), min_size=1), unique=True))
def test_members_are_sorted_by_utf_16_units(names: list[str]) -> None:
    form = canonical_json(json.dumps({"outer": [dict.fromkeys(names, 1)]}).encode())
    assert list(json.loads(form)["outer"][0]) == sorted(names, key=lambda name: name.encode("utf-16-be"))


@pytest.mark.parametrize(
    "places", ["top", "deep", "far apart", "by escape", "with quotes", "empty name", "equal values"]
)
def test_member_named_twice_has_no_form(places: str) -> None:
    """Readers disagree on which of the two counts."""
    text = {
        "top": '{"a":1,"a":2}',
        "deep": '[[{"b":{"a":1,"c":[],"a":2}}]]',
        "far apart": '{"a":1,' + ",".join(f'"n{i}":0' for i in range(999)) + ',"a":1}',
        "by escape": '{"a":1,"\\u0061":2}',
        "with quotes": '{"\\u0022":"\\u0022\\u0022","\\"":"\\\\u0022"}',
        "empty name": '{"":1,"":2}',
        "equal values": '{"a":{},"a":{}}',
    }[places]
    with pytest.raises(InvalidPayload, match="twice"):
        canonical_json(text.encode())


def test_quotes_hidden_in_escapes_are_no_second_member() -> None:
    form = canonical_json(b'{"\\u0022":"\\\\u0022 \\\\\\u0022","a\\"":"\\\\"}')
    assert form == b'{"\\"":"\\\\u0022 \\\\\\"","a\\"":"\\\\"}'


REFUSED = {
    "nothing": b"",
    "white space": b" \n",
    "NaN": b"[NaN]",
    "Infinity": b"[Infinity]",
    "minus Infinity": b"-Infinity",
    "lone high surrogate": b'"\\ud800"',
    "lone low surrogate": b'"\\udc00 text"',
    "surrogates the wrong way round": b'"\\udc00\\ud800"',
    "surrogate in UTF-8": b'"\xed\xa0\x80"',
    "invalid UTF-8": b'{"a":"\xff"}',
    "overlong UTF-8": b'"\xc0\xaf"',
    "UTF-16": '{"a":1}'.encode("utf-16"),
    "byte order mark": b"\xef\xbb\xbf{}",
    "raw control character": b'"\x01"',
    "leading zero": b"01",
    "long leading zeros": b"0" * 40,
    "two signs": b"--" + b"1" * 40,
    "plus": b"+1",
    "bare point": b"1.",
    "trailing comma": b"[1,]",
    "two values": b"{} {}",
    "comment": b"{} // {}",
    "single quotes": b"{'a':1}",
    "exponent without end": b"1e" + b"9" * MEGABYTE,
    "exponent of 19 digits": b"1e1000000000000000000",
    "deep arrays": b"[" * 100_000 + b"]" * 100_000,
    "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "deep and cut off": b"[" * MEGABYTE,
    "deep between brackets in strings": b'["]",' * 100_000 + b"1" + b"]" * 100_000,
    "quotes": b'"' * MEGABYTE,
    "an endless string": b'"' + b'\\"' * MEGABYTE,
    "an endless string after a long number": b"1" * 30 + b'"' + b'\\"' * MEGABYTE,
    "backslashes": b"\\" * MEGABYTE,
    "digits, then nothing": b"1" * MEGABYTE + b".",
}


@pytest.mark.parametrize("data", REFUSED.values(), ids=REFUSED)
def test_what_has_no_single_meaning_has_no_form(data: bytes) -> None:
    with pytest.raises(InvalidPayload):
        canonical_json(data)


@pytest.mark.parametrize("sign", [b"", b"-"])
def test_integer_of_a_million_digits_is_exact(sign: bytes) -> None:
    """No digit is lost, and no limit of int() is met."""
    digits = b"1" * MEGABYTE
    form = canonical_json(b'["\\"1", %b%b]' % (sign, digits))
    assert form == b'["\\"1",%b1.%be+999999]' % (sign, digits[1:])
    assert canonical_json(sign + digits) != canonical_json(sign + digits[:-1] + b"2")


def test_digits_in_strings_stay_as_they_are() -> None:
    text = b'{"1111111111111111111111111":"-2222222222222222222222222 \\"3333333333333333333333333"}'
    assert canonical_json(text) == text


@pytest.mark.parametrize("opening", ["[", '{"a":', '["[{\\"",'])
def test_nesting_is_limited_by_the_brackets_outside_strings(opening: str) -> None:
    closing = "}" if opening.startswith("{") else "]"
    at_limit, beyond = (opening * depth + "1" + closing * depth for depth in (MAX_DEPTH, MAX_DEPTH + 1))
    assert canonical_json(at_limit.encode()) == at_limit.encode()
    with pytest.raises(InvalidPayload, match="deeper than"):
        canonical_json(beyond.encode())


def test_many_brackets_side_by_side_are_not_deep() -> None:
    data = b"[" + b",".join([b'{"a":[]}'] * 1000) + b"]"
    assert canonical_json(data, max_depth=3) == data


def test_answer_does_not_depend_on_the_limit_for_integers() -> None:
    """Two processes of one service may be set up differently."""
    data = b"[" + b"7" * 5000 + b"]"
    before, expected = sys.get_int_max_str_digits(), canonical_json(data)
    try:
        sys.set_int_max_str_digits(640)
        assert canonical_json(data) == expected
    finally:
        sys.set_int_max_str_digits(before)


def test_threads_may_share_it() -> None:
    deep, plain, wrong = b"[" * 100_000, b'{"b":[1.50],"a":"\\u0022"}', set()

    def work() -> None:
        for _ in range(5):
            if canonical_json(plain) != b'{"a":"\\"","b":[1.5]}':
                wrong.add("plain")
            try:
                canonical_json(deep)
            except InvalidPayload:
                continue
            wrong.add("deep")

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
