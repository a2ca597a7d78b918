"""The stores that keep ledgers: one module for each URL scheme."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._ledger.connect import connect, naming_extras, schema
from .._ledger.store import Filter

if TYPE_CHECKING:
    from .tiered import TieredStore

__all__ = ["Filter", "TieredStore", "connect", "schema"]


def __getattr__(name: str) -> Any:
    """Import TieredStore when it is first used, because it needs the drivers of PostgreSQL and Redis."""
    if name == "TieredStore":
        with naming_extras("A tiered store"):
            from .tiered import TieredStore

            return TieredStore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
