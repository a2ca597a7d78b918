"""Where ledgers live: one module per URL scheme."""

from .._ledger.connect import connect, schema

__all__ = ["connect", "schema"]
