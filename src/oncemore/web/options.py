"""The options that every door takes, for type checkers, and for those who use none: `Door` says what they mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypedDict

from .._contract.contract import Contract
from .._ledger.guard import check_guard
from .._ledger.model import Outcome
from ..errors import ConfigurationError
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


def check_given(guard: object, contract: object, keep_headers: object, status_path: str) -> None:
    """Refuse what would only fail at the first request."""
    check_guard(guard)
    if not isinstance(contract, Contract | None):
        raise ConfigurationError(
            f"contract is a {type(contract).__name__}: make a Contract, as in Contract.load('oncemore.toml')"
        )
    if isinstance(keep_headers, str):
        raise ConfigurationError(f"keep_headers is a text, not a list of names: write [{keep_headers!r}]")
    if not status_path.startswith("/"):
        raise ConfigurationError(f"status_path = {status_path!r} is not a path: write '/{status_path}'")


def check_functions(**functions: object) -> None:
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise ConfigurationError(f"{name} is a {type(function).__name__}: give a function")
