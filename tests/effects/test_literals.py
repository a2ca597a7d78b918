"""Values written into statements: whatever they are, they stay values."""

from __future__ import annotations

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncemore.stores.postgres.literals import inline, parts
from oncemore.stores.postgres.statements import Statement


def test_parameters_are_replaced_out_of_order_and_more_than_once() -> None:
    assert inline(Statement("$2, $1, $2"), [1, True]) == "true, (1), true"
    assert inline(Statement("$10 $1"), [1, 2, 3, 4, 5, 6, 7, 8, 9, None]) == "NULL (1)"


@pytest.mark.parametrize("text", ["-- $1 isn't one\n", "'$1'", "'it''s $1'", '"$1"', "a$b"])
def test_what_only_looks_like_a_parameter_stays(text: str) -> None:
    assert inline(Statement(text), ["x"]) == text


def test_a_statement_is_cut_once() -> None:
    assert parts("SELECT $1") is parts("SELECT $1")


def test_what_has_no_literal_is_refused() -> None:
    with pytest.raises(TypeError, match="object"):
        inline(Statement("$1"), [object()])


@pytest.fixture(scope="module")
def connection(postgres_url: str) -> psycopg.Connection[tuple[object, ...]]:
    return psycopg.connect(postgres_url, autocommit=True)


TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
VALUES = (
    st.tuples(st.just("text"), TEXTS)
    | st.tuples(st.just("bytea"), st.binary())
    | st.tuples(st.just("bigint"), st.integers(-(2**63), 2**63 - 1))
    | st.tuples(st.just("float8"), st.floats(allow_nan=False))
    | st.tuples(st.just("boolean"), st.booleans())
)


@pytest.mark.parametrize("conforming", ["on", "off"])
@given(VALUES)
def test_postgresql_reads_what_was_meant(
    connection: psycopg.Connection[tuple[object, ...]], conforming: str, value: tuple[str, object]
) -> None:
    """Whatever the server's rule for backslashes."""
    kind, meant = value
    script = inline(Statement(f"SET standard_conforming_strings = {conforming}; SELECT $1::{kind}"), [meant])
    cursor = connection.execute(script.encode())
    cursor.nextset()
    assert cursor.fetchone() == (meant,)
