"""Resolutions: the decision about an unknown outcome has an outcome if it happened, and none otherwise."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from oncemore import Outcome, Resolution
from oncemore._ledger.values import replayed
from oncemore.errors import ConfigurationError


@pytest.mark.parametrize("value", [None, 0, {"id": "r-1", "amount": Decimal("9.50")}])
def test_it_happened_with_the_value_that_the_function_returned(value: Any) -> None:
    resolution = Resolution.settled(value)
    assert resolution.verdict == "settled"
    assert resolution.outcome is not None
    assert replayed(resolution.outcome) == value


def test_it_happened_with_a_whole_outcome() -> None:
    outcome = Outcome("response", 201, body=b"{}")
    assert Resolution.settled(outcome).outcome is outcome


def test_it_did_not_happen_or_nobody_can_tell() -> None:
    assert (Resolution.released().verdict, Resolution.released().outcome) == ("released", None)
    assert (Resolution.unknown().verdict, Resolution.unknown().outcome) == ("unknown", None)


@pytest.mark.parametrize(("verdict", "outcome"), [("settled", None), ("released", Outcome()), ("unknown", Outcome())])
def test_what_happened_has_an_outcome_and_nothing_else_has(verdict: Any, outcome: Outcome | None) -> None:
    """A settled one without would pass for one that did not happen, and be performed again."""
    with pytest.raises(ConfigurationError, match=r"Resolution\.settled\(value\)"):
        Resolution(verdict, outcome)
