"""The operation that the current request performs, for code that was not handed it."""

from __future__ import annotations

from ..core.current import CURRENT, current_operation

__all__ = ["CURRENT", "current_operation"]
