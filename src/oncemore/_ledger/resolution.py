"""What is decided about an operation whose outcome is unknown, by a person or by a resolver function."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ..errors import ConfigurationError
from .model import Outcome
from .values import value_outcome


class Resolution(msgspec.Struct, frozen=True):
    """It happened and this is its outcome (`settled`), it did not happen (`released`), or nobody can tell yet (`unknown`)."""

    verdict: Literal["settled", "released", "unknown"]
    outcome: Outcome | None = None

    def __post_init__(self) -> None:
        if (self.verdict == "settled") != (self.outcome is not None):  # without one, it would be performed again
            raise ConfigurationError(
                "What happened has an outcome, and nothing else has: say Resolution.settled(value)"
            )

    @classmethod
    def settled(cls, outcome: Any) -> Resolution:
        """It happened; *outcome* is an Outcome, or the value that the function returned."""
        return cls("settled", outcome if isinstance(outcome, Outcome) else value_outcome(outcome))

    @classmethod
    def released(cls) -> Resolution:
        """It did not happen, and may be performed."""
        return cls("released")

    @classmethod
    def unknown(cls) -> Resolution:
        """Nobody can tell yet; ask again later."""
        return cls("unknown")
