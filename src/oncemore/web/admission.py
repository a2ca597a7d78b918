"""Whether a principal may make another key: asked when a key was never seen before, and before anything is done."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from .._contract.contract import Contract
from .._contract.rule import Rule
from .._runtime.plan import Call
from ..errors import MissingDriver


class Rates(Protocol):
    """Counts the new keys of each owner: see `rates.py`.

    One that never blocks may say so (`blocking = False`); all others are kept off the event loop.
    """

    def admit(self, rule: Rule, owner: str) -> None:
        """Count one new key of *owner* under the rule; a RateLimited where it is one too many."""


class Admission(Call):
    """The effect of asking."""

    def __init__(self, rates: Rates, rule: Rule, owner: str) -> None:
        super().__init__(rates.admit, rule, owner)
        self.blocking = getattr(rates, "blocking", True)

    async def arun(self) -> Any:
        return await (asyncio.to_thread(self.run) if self.blocking else super().arun())


def default_rates(contract: Contract) -> Rates | None:
    """The usual counter, where a rule has a rate and so needs one."""
    limited = [rule for rule in (*contract.rules, contract.default) if rule.rate is not None]
    if not limited:
        return None
    try:
        from .rates import NewKeys
    except ModuleNotFoundError as error:
        raise MissingDriver(
            f"The rate of {limited[0].name!r} needs a package; install it with: pip install 'oncemore[limits]'"
        ) from error
    return NewKeys()
