"""Exceptions are raised again as themselves, however they are made, if `errors` names them."""

from __future__ import annotations

import dataclasses
import datetime
import json
from decimal import Decimal
from typing import Any

import pydantic
import pydantic.dataclasses
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncemore._ledger.values import error_outcome, replayed
from oncemore.errors import OutcomeNotKept, StoreUnavailable


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    id: int
    inner: Any = None


class Declined(Exception):
    """Made from other things than its args."""

    def __init__(self, card: str, *, reason: str) -> None:
        super().__init__(f"{card} was declined: {reason}")
        self.card = card
        self.reason = reason


class Expired(Declined):
    __slots__ = ("date",)


class Busy(OSError):
    def __init__(self, port: int) -> None:
        super().__init__(98, "Address in use", f"port {port}")
        self.port = port


@dataclasses.dataclass(frozen=True)
class Limit(Exception):
    most: int


class Several(Exception):
    """False, like an empty list."""

    def __len__(self) -> int:
        return 0


class Both(KeyError, Declined):
    def __init__(self) -> None:
        Declined.__init__(self, "4242", reason="both")


def expired() -> Expired:
    error = Expired("4242", reason="too old")
    error.date = datetime.date(2020, 1, 1)
    error.add_note("seen twice")
    return error


def unreadable() -> Exception:
    try:
        b"\xff".decode()
    except UnicodeDecodeError as error:
        return error
    raise AssertionError


def bad_json() -> Exception:
    try:
        json.loads("{")
    except json.JSONDecodeError as error:
        return error
    raise AssertionError


ERRORS: list[Exception] = [
    ValueError(),
    ValueError("text", 1, Decimal("2.5"), Frozen(3)),
    KeyError("k"),
    Declined("4242", reason="no money"),
    expired(),
    FileNotFoundError(2, "No such file", "f.txt"),
    OSError("only text"),
    Busy(80),
    ImportError("no", name="module", path="path"),
    Limit(5),
    Both(),
    Several("none"),
    unreadable(),
    bad_json(),
    StoreUnavailable("gone", retry_after=2.5),
]


def raised_again(error: Exception, *errors: type[Exception]) -> BaseException:
    outcome = error_outcome(error, (Frozen,))
    assert outcome.kind == "error", outcome.body
    with pytest.raises(Exception) as caught:
        replayed(outcome, errors or (Exception,), (Frozen,))
    return caught.value


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_error_is_raised_again_as_itself(error: Exception) -> None:
    again = raised_again(error)
    assert type(again) is type(error)
    assert again is not error
    assert (str(again), repr(again), again.args) == (str(error), repr(error), error.args)
    assert vars(again) == vars(error)
    for name in ("errno", "filename", "name", "path", "date", "start", "__notes__", "retry_after"):
        assert getattr(again, name, None) == getattr(error, name, None)


names = st.text(min_size=1).filter(lambda name: not hasattr(ValueError, name))


@given(st.lists(st.integers() | st.text() | st.dates(), max_size=4), st.dictionaries(names, st.uuids()))
def test_error_keeps_its_args_and_attributes(args: list[Any], attributes: dict[str, Any]) -> None:
    error = RuntimeError(*args)
    vars(error).update(attributes)
    again = raised_again(error)
    assert again.args == tuple(args)
    assert vars(again) == attributes


def test_errors_include_subclasses_wherever_they_are_defined() -> None:
    class Local(Declined):
        pass

    class Deeper(Local):
        pass

    assert type(raised_again(Expired("4242", reason="old"), Declined)) is Expired
    assert type(raised_again(Local("4242", reason="local"), Local)) is Local
    assert type(raised_again(Deeper("4242", reason="deeper"), ValueError, Declined)) is Deeper


def test_error_outside_errors_is_not_raised() -> None:
    with pytest.raises(OutcomeNotKept, match="test_replayed_errors:Declined"):
        replayed(error_outcome(Declined("4242", reason="no")), (Expired, KeyError))


def response_error() -> Exception:
    error = ValueError("bad response")
    error.response = object()  # type: ignore[attr-defined]
    return error


def validation_error() -> Exception:
    try:
        pydantic.TypeAdapter(int).validate_python("x")
    except pydantic.ValidationError as error:
        return error
    raise AssertionError


def test_object_in_an_error_must_be_of_a_named_class() -> None:
    outcome = error_outcome(ValueError(Frozen(1)), ())
    assert outcome.kind == "tombstone"
    assert b"test_replayed_errors:Frozen is not among the classes that can be replayed" in outcome.body


@pytest.mark.parametrize(
    "error",
    [ValueError(object()), response_error(), validation_error(), ExceptionGroup("many", [ValueError()])],
    ids=lambda error: type(error).__name__,
)
def test_error_that_cannot_be_made_again_leaves_a_tombstone(error: Exception) -> None:
    outcome = error_outcome(error)
    assert outcome.kind == "tombstone"
    assert outcome.body.startswith(f"{type(error).__module__}:{type(error).__qualname__}: ".encode())
