"""The fields that a fingerprint compares."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncemore._fingerprint.fingerprint import check_selection, parse_fields, select
from oncemore.errors import ConfigurationError

ORDER = {"id": 7, "note": None, "lines": [{"sku": "a", "at": 1}, {"sku": "b", "at": 2}], "a/b": {"m~n": 1}}


def chosen(value: Any, *, include: list[str] | None = None, exclude: list[str] | None = None) -> Any:
    return select(deepcopy(value), parse_fields("include", include or []), parse_fields("exclude", exclude or []))


@pytest.mark.parametrize(
    ("field", "pointer"),
    [
        ("timestamp", ("timestamp",)),
        ("client id", ("client id",)),
        ("/order/id", ("order", "id")),
        ("/lines/0", ("lines", "0")),
        ("/a~1b/m~0n", ("a/b", "m~n")),
        ("/~01", ("~1",)),
        ("/a.b", ("a.b",)),
        ("/", ("",)),
    ],
)
def test_field_is_a_bare_name_or_a_pointer(field: str, pointer: tuple[str, ...]) -> None:
    assert parse_fields("include", [field]) == (pointer,)


@pytest.mark.parametrize("field", ["", "order.id", "order/id", "#/order", "a~b", "/a~", "/a~2", 7, None])
def test_field_that_selects_nothing_is_refused(field: Any) -> None:
    with pytest.raises(ConfigurationError):
        parse_fields("include", [field])


@pytest.mark.parametrize("fields", ["timestamp", {"timestamp"}, None, 7])
def test_fields_are_a_list(fields: Any) -> None:
    """A bare string would otherwise be read as a list of letters."""
    with pytest.raises(ConfigurationError, match="exclude"):
        parse_fields("exclude", fields)


@pytest.mark.parametrize(("include", "exclude"), [("a", "a"), ("/a/b", "a"), ("/a/0/c", "/a/0")])
def test_including_what_is_excluded_is_refused(include: str, exclude: str) -> None:
    """Every body would be the same."""
    with pytest.raises(ConfigurationError, match="remove it"):
        check_selection(parse_fields("include", [include]), parse_fields("exclude", [exclude]))


def test_excluding_a_part_of_what_is_included_is_allowed() -> None:
    check_selection(parse_fields("include", ["/a"]), parse_fields("exclude", ["/a/b", "/ab"]))
    assert chosen(ORDER, include=["lines"], exclude=["/lines/1"]) == [[["lines"], [{"sku": "a", "at": 1}, None]]]


def test_exclude_takes_members_out() -> None:
    left = chosen(ORDER, exclude=["note", "/lines/0/at", "/a~1b/m~0n"])
    assert left == {"id": 7, "lines": [{"sku": "a"}, {"sku": "b", "at": 2}], "a/b": {}}


def test_excluded_element_leaves_its_place() -> None:
    assert chosen([1, 2, 3], exclude=["/0", "/1"]) == [None, None, 3]


@pytest.mark.parametrize(
    "field", ["missing", "/lines/2", "/lines/-", "/lines/00", "/lines/sku", "/id/x", "/id", "/9" * 9]
)
@pytest.mark.parametrize("value", [{"lines": [1, 2]}, [1], "text", 1, None])
def test_missing_field_is_neither_included_nor_excluded(field: str, value: Any) -> None:
    assert chosen(value, exclude=[field]) == value
    assert chosen(value, include=[field]) == []


def test_null_is_not_the_same_as_absent() -> None:
    assert chosen(ORDER, include=["note"]) != chosen({}, include=["note"])


def test_order_and_number_of_included_fields_does_not_matter() -> None:
    assert chosen(ORDER, include=["note", "id"]) == chosen(ORDER, include=["/id", "note", "id"])


documents = st.dictionaries(
    st.sampled_from("abc"), st.integers() | st.dictionaries(st.sampled_from("abc"), st.integers())
)


@given(documents, documents)
def test_include_compares_only_what_it_names(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert (chosen(one, include=["a"]) == chosen(other, include=["a"])) == (one.get("a") == other.get("a"))


@given(documents, documents)
def test_exclude_compares_all_but_what_it_names(one: dict[str, Any], other: dict[str, Any]) -> None:
    rest_of_one, rest_of_other = ({name: value[name] for name in value if name != "a"} for value in (one, other))
    assert (chosen(one, exclude=["a"]) == chosen(other, exclude=["a"])) == (rest_of_one == rest_of_other)
