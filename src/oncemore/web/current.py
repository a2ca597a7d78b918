"""The operation that the current request performs, for code that was not handed it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._ledger.context import CURRENT, current_operation
from .._ledger.model import Operation

__all__ = ["CURRENT", "GUARDED", "current_operation", "is_current", "place_of"]

GUARDED = "oncemore.guarded"  # in the scope or environ of a guarded request: its operation, which its code may see


def is_current(operation: Operation, place: Mapping[str, Any]) -> bool:
    """Whether a door outside this one lets the same request happen: to claim it here would be to wait for oneself."""
    outer = CURRENT.get()
    return outer is not None and outer.operation.id == operation.id and place.get(GUARDED) is outer


def place_of(request: Any) -> Any:
    """What doors may write into: a scope, an environ, or the one that a Django request was made from."""
    return request if isinstance(request, dict) else getattr(request, "scope", None) or getattr(request, "META", {})
