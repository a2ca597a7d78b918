"""Outcomes that are no response, as HTTP shows them: a resolver's value, or that there is nothing to show."""

from __future__ import annotations

from .._ledger.model import Outcome
from .._ledger.values import replayed
from ..errors import OutcomeNotKept
from .problem import JSON, encode_json


def shown_value(outcome: Outcome) -> Outcome:
    """The response that stands for a mere value: a resolver's, or nothing at all; refused where there is none to show."""
    if outcome.kind != "value":
        raise OutcomeNotKept("The operation was performed once, but its response was not kept; look up its result")
    value = replayed(outcome)
    if value is None:
        return Outcome("response", 200)
    try:
        return Outcome("response", 200, (JSON,), encode_json(value))
    except (TypeError, ValueError) as error:
        raise OutcomeNotKept("The operation was performed once, but its result is no JSON; look it up") from error
