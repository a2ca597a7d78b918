"""Where ledgers live: one module per URL scheme."""

from .._ledger.connect import connect, schema
from .._ledger.store import Filter

__all__ = ["Filter", "connect", "schema"]
