"""The options that every door takes, for type checkers: `Door` says what they mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypedDict

from ..core.model import Outcome
from .admission import Rates
from .principal import Principal


class Options(TypedDict, total=False):
    """What may be said to a door besides its guard, its contract and its profile."""

    principal: Principal | None
    tenant: Principal | None
    secrets: Sequence[bytes]
    keep_headers: Sequence[str] | None
    redact: Callable[[Outcome], Outcome] | None
    status_path: str
    problem_base: str
    rates: Rates | None
