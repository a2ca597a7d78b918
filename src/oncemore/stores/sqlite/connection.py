"""Names that moved to `writer`."""

from __future__ import annotations

from .writer import FAULTS, MEMORY, UNWRITTEN, as_store_error, code, disown, is_busy

__all__ = ["FAULTS", "MEMORY", "UNWRITTEN", "as_store_error", "code", "disown", "is_busy"]
