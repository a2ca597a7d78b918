"""Where ledgers live: one module per URL scheme."""

from ..core.urls import connect, schema

__all__ = ["connect", "schema"]
